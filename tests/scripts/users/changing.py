"""A model that changes after attach: a buffer is made anew in each forward pass, a layer by a copy of itself.

The layer that becomes trainable and the one that is added learn beside the model: what it answers is the shared part's.
"""

from __future__ import annotations

import copy

import torch
from problems import STEPS, own_data, own_numbers, say, squares
from torch import nn
from torch.nn import functional

import peerd

CHANGES_AT = 60


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("power", torch.zeros(8))
        self.first = nn.Linear(8, 32)
        self.last = nn.Linear(32, 1)
        self.frozen = nn.Linear(8, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.power = 0.95 * self.power + 0.05 * x.square().mean(0)
        return self.last(self.first(x * (1 + self.power).rsqrt()))


def build() -> nn.Module:
    torch.manual_seed(0)
    return Changing()


def test_loss(model: nn.Module) -> float:
    model.eval()
    loss = squares(model)
    model.train()
    return loss


def stepping(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.002, momentum=0.9)


def main() -> None:
    model = build()
    optimizer = stepping(model)
    own_data()
    with peerd.attach(model, optimizer) as swarm:
        while swarm.step_count < STEPS and not swarm.alone:
            if swarm.step_count == CHANGES_AT:
                model.first = copy.deepcopy(model.first)
                model.frozen.requires_grad_(True)
                model.added = nn.Linear(4, 1)
                optimizer = stepping(model)
            x, y = own_numbers(32)
            loss = functional.mse_loss(model(x), y)
            if hasattr(model, "added"):
                loss = loss + functional.mse_loss(model.added(model.frozen(x)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.step(loss=loss.item(), samples=len(x))
            say(swarm, test_loss(model))
    print(f"ends with a test loss of {test_loss(model):.9g}", flush=True)


if __name__ == "__main__":
    main()
