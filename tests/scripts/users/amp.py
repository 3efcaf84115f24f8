"""Mixed precision as PyTorch's recipes have it; SCALER=off is the one for bfloat16, SCALER=on scales the loss."""

from __future__ import annotations

import os

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
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=os.environ.get("SCALER") == "on")
    own_data()
    with peerd.attach(model, optimizer) as swarm:
        while swarm.step_count < STEPS and not swarm.alone:
            x, y = own_numbers(32)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            swarm.step(loss=loss.item(), samples=len(x))
            say(swarm, test_loss(model))
    print(f"ends with a test loss of {test_loss(model):.9g}", flush=True)


if __name__ == "__main__":
    main()
