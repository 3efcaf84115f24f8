"""Accelerate: the prepared optimizer and schedule are wrappers."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from problems import STEPS, own_data, own_numbers, say, squares
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import peerd


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 1))


test_loss = squares


def main() -> None:
    accelerator = Accelerator(cpu=True)
    model = build()
    own_data()
    loader = DataLoader(TensorDataset(*own_numbers(2048)), batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=10)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    with peerd.attach(model, optimizer) as swarm:
        while swarm.step_count < STEPS and not swarm.alone:
            for x, y in loader:
                loss = functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                swarm.step(loss=loss.item(), samples=len(x))
                say(swarm, test_loss(model))
                if swarm.step_count >= STEPS:
                    break
    print(f"ends with a test loss of {test_loss(model):.9g}", flush=True)


if __name__ == "__main__":
    main()
