"""The smallest loop; LEAVE_BY=exit ends it by sys.exit(0), COMPILE=1 compiles it."""

from __future__ import annotations

import os
import sys

import torch
from problems import STEPS, own_data, own_numbers, say, squares
from torch import nn
from torch.nn import functional

import peerd


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 1))


test_loss = squares


def main() -> None:
    bare = model = build()
    if os.environ.get("COMPILE"):
        model = torch.compile(bare)
        model(torch.zeros(32, 8)).sum().backward()  # compiled before the others train: it takes longer than all of that
        model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    own_data()
    with peerd.attach(model, optimizer) as swarm:
        print(f"starts at step {swarm.step_count} with a test loss of {test_loss(bare):.9g}", flush=True)
        while swarm.step_count < STEPS and not swarm.alone:
            x, y = own_numbers(32)
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.step(loss=loss.item(), samples=len(x))
            say(swarm, test_loss(bare))
        if os.environ.get("LEAVE_BY") == "exit":
            sys.exit(0)
    print(f"ends with a test loss of {test_loss(bare):.9g}", flush=True)


if __name__ == "__main__":
    main()
