"""Adafactor as transformers has it: it sets its own learning rate, and says None for it."""

from __future__ import annotations

import torch
from problems import STEPS, own_data, own_numbers, say, squares
from torch import nn
from torch.nn import functional
from transformers import Adafactor

import peerd


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 1))


test_loss = squares


def main() -> None:
    model = build()
    optimizer = Adafactor(model.parameters())
    assert optimizer.param_groups[0]["lr"] is None
    own_data()
    with peerd.attach(model, optimizer) as swarm:
        while swarm.step_count < STEPS and not swarm.alone:
            x, y = own_numbers(32)
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.step(loss=loss.item(), samples=len(x))
            say(swarm, test_loss(model))
    print(f"ends with a test loss of {test_loss(model):.9g}", flush=True)


if __name__ == "__main__":
    main()
