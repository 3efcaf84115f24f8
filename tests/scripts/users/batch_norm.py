"""A small convolutional network with BatchNorm."""

from __future__ import annotations

import torch
from problems import STEPS, images, own_data, quarters, say
from torch import nn
from torch.nn import functional

import peerd


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 4),
    )


test_loss = quarters


def main() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    own_data()
    with peerd.attach(model, optimizer) as swarm:
        while swarm.step_count < STEPS and not swarm.alone:
            x, y = images(32)
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.step(loss=loss.item(), samples=len(x))
            assert all(bool((b > 0).all()) for name, b in model.named_buffers() if name.endswith("running_var"))
            say(swarm, test_loss(model))
    print(f"ends with a test loss of {test_loss(model):.9g}", flush=True)


if __name__ == "__main__":
    main()
