"""Two models and two optimizers: a generator that learns where a circle is from a discriminator."""

from __future__ import annotations

import torch
from problems import STEPS, own_data, say
from torch import nn
from torch.nn import functional

import peerd


def build() -> list[nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return [generator, discriminator]


def circle(count: int) -> torch.Tensor:
    return torch.tensor([4.0, -4.0]) + functional.normalize(torch.randn(count, 2))


@torch.no_grad()
def test_loss(models: list[nn.Module]) -> float:
    """How far the generator's points are from where the circle is; 32 at first."""
    made = models[0](torch.randn(256, 2, generator=torch.Generator().manual_seed(11)))
    return float(((made.mean(0) - torch.tensor([4.0, -4.0])) ** 2).sum())


def main() -> None:
    models = generator, discriminator = build()
    adam = [torch.optim.Adam(model.parameters(), lr=0.005, betas=(0.5, 0.9)) for model in models]
    own_data()
    with peerd.attach(models, adam) as swarm:
        while swarm.step_count < STEPS and not swarm.alone:
            real, made = circle(64), generator(torch.randn(64, 2))
            wrong = functional.softplus(-discriminator(real)) + functional.softplus(discriminator(made.detach()))
            adam[1].zero_grad()
            wrong.mean().backward()
            adam[1].step()
            loss = functional.softplus(-discriminator(made)).mean()
            adam[0].zero_grad()
            loss.backward()
            adam[0].step()
            swarm.step(loss=loss.item(), samples=64)
            say(swarm, test_loss(models))
    print(f"ends with a test loss of {test_loss(models):.9g}", flush=True)


if __name__ == "__main__":
    main()
