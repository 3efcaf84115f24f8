"""The Fashion-MNIST task: 28x28 pictures of clothes, from the Debian package dataset-fashion-mnist or PEERD_DATA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD

import peerd
from peerd.training.tasks import arguments, data, schedule, scores, script, shards

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


def main(argv: Sequence[str] | None = None) -> None:
    """Train this rank's shard."""
    options = arguments.parse("fashion_mnist", argv, steps=STEPS, lr=LR, batch=BATCH)
    train = data.fashion("train")
    mine = shards.shard(options.shard, train.labels, options.rank, options.peers, options.seed)
    model, optimizer = build(options.seed, options.lr)
    pace = script.Pace(options.pace)

    with peerd.attach(model, optimizer) as swarm:
        stream = shards.batches(mine, options.batch, options.rank, options.seed, swarm.step_count)
        while swarm.step_count < options.steps:
            pace.wait()
            batch = next(stream)
            schedule.set_lr(optimizer, options.lr, swarm.step_count, options.steps)
            loss = functional.cross_entropy(model(train.inputs[batch]), train.targets[batch])
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it so
            optimizer.step()
            optimizer.zero_grad()
            due = swarm.step_count % EVALUATE_EVERY == 0
            extra = {"accuracy": evaluate(model, EVALUATE_IMAGES)["accuracy"]} if due else {}
            done = (swarm.step_count + 1) / options.steps
            swarm.step(loss=loss.item(), samples=len(batch), progress=done, **extra)

    print(f"fashion-mnist: step {swarm.step_count}, test accuracy {evaluate(model)['accuracy']:.4f}")


if __name__ == "__main__":
    script.run(main)
