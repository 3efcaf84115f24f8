"""Buffers that nobody trains: a rotary embedding's frequencies and a diffusion's noise schedule."""

from __future__ import annotations

import hashlib

import torch
from problems import STEPS, own_data, own_numbers, say, squares
from torch import nn
from torch.nn import functional

import peerd

NAMES = ("inv_freq", "alphas_cumprod")


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 64, 2) / 64))
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0))
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Constants()


def test_loss(model: nn.Module) -> float:
    was = model.training
    model.eval()
    loss = squares(model)
    model.train(was)
    return loss


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    own_data()
    with peerd.attach(model, optimizer) as swarm:
        while swarm.step_count < STEPS and not swarm.alone:
            x, y = own_numbers(32)
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.step(loss=loss.item(), samples=len(x))
            print("constants", *(bits(getattr(model, name)) for name in NAMES), flush=True)
            say(swarm, test_loss(model))
    print(f"ends with a test loss of {test_loss(model):.9g}", flush=True)


if __name__ == "__main__":
    main()
