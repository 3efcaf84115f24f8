"""The Fashion-MNIST task: 28x28 pictures of clothes, from the Debian package dataset-fashion-mnist or PEERD_DATA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import SGD

import peerd
from peerd.training.tasks import arguments, data, scores, script
from peerd.training.tasks.arguments import Arguments
from peerd.training.tasks.run import Run

STEPS, LR, BATCH = 3000, 0.05, 64  # 4 peers averaged every 25 steps: .867-.878 with dirichlet:0.3
EVALUATE_EVERY = 25  # steps
EVALUATE_IMAGES = 1000  # of the 10,000, while training: 10 ms instead of 100
PIXEL_MEAN, PIXEL_DEVIATION = 0.2860, 0.3530  # of the 60,000 training images, pixels in 0..1


class FashionNet(nn.Module):
    """784-256-10: 203,530 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:  # (n, 28, 28) of 0..255 -> (n, 10)
        """The logits of each kind of clothing."""
        logits: torch.Tensor = self.layers((pixels.float() / 255 - PIXEL_MEAN) / PIXEL_DEVIATION)
        return logits


def build(seed: int, lr: float = LR) -> tuple[FashionNet, SGD]:
    """The same initial weights on every rank, and their optimizer."""
    with torch.random.fork_rng(devices=[]):  # leave the caller's random state alone
        torch.manual_seed(seed)
        model = FashionNet()
    return model, SGD(model.parameters(), lr=lr, momentum=0.9)


def evaluate(model: nn.Module, limit: int | None = None) -> dict[str, float]:
    """`loss` and `accuracy` on the test images: the first `limit`, or all 10,000."""
    return scores.score(model, data.fashion("test").first(limit))


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """The task's command line."""
    return arguments.parse("fashion_mnist", argv, steps=STEPS, lr=LR, batch=BATCH)


def prepare(options: Arguments) -> Run:
    """This rank's training."""
    train = data.fashion("train")
    return Run(build, train, train.labels, options)


def main(argv: Sequence[str] | None = None) -> None:
    """Train this rank's partition."""
    options = parse(argv)
    run = prepare(options)
    pace = script.Pace(options.pace)

    with peerd.attach(run.model, run.optimizer) as swarm:
        for step in swarm.steps(options.steps):
            pace.wait()
            loss, samples = run.step(step)
            due = step % EVALUATE_EVERY == 0
            extra = {"accuracy": evaluate(run.model, EVALUATE_IMAGES)["accuracy"]} if due else {}
            done = (step + 1) / options.steps
            swarm.step(loss=loss, samples=samples, progress=done, **extra)

    print(f"fashion-mnist: step {swarm.step_count}, test accuracy {evaluate(run.model)['accuracy']:.4f}")


if __name__ == "__main__":
    script.run(main)
