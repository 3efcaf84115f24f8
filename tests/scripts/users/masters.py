"""A bfloat16 model with float32 masters, which are copied back: the optimizer steps them in the model's place.

KEPT=1: it steps the model, and has the masters in its state, as fused optimizers do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from problems import STEPS, own_data, own_numbers, say, squares
from torch import nn
from torch.nn import functional

import peerd


class Low(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 1)).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.bfloat16()).float()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Low()


test_loss = squares


class Fused(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master_param"] = parameter.float()
                    state["momentum_buffer"] = torch.zeros_like(state["master_param"])
                state["momentum_buffer"].mul_(group["momentum"]).add_(parameter.grad.float())
                state["master_param"].sub_(group["lr"] * state["momentum_buffer"])
                parameter.copy_(state["master_param"])


def fused(model: nn.Module) -> None:
    optimizer = Fused(model.parameters(), lr=0.002, momentum=0.9)
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


def by_hand(model: nn.Module) -> None:
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.002, momentum=0.9)
    own_data()
    with peerd.attach(model, optimizer) as swarm:
        while swarm.step_count < STEPS and not swarm.alone:
            x, y = own_numbers(32)
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    master.grad = parameter.grad.float()
                    parameter.grad = None
                optimizer.step()
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
            swarm.step(loss=loss.item(), samples=len(x))
            say(swarm, test_loss(model))


def main() -> None:
    model = build()
    (fused if os.environ.get("KEPT") else by_hand)(model)
    print(f"ends with a test loss of {test_loss(model):.9g}", flush=True)


if __name__ == "__main__":
    main()
