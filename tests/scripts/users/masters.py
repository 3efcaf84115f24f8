"""A bfloat16 model that the optimizer does not see: it steps float32 masters, which are copied back."""

from __future__ import annotations

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


def main() -> None:
    model = build()
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
    print(f"ends with a test loss of {test_loss(model):.9g}", flush=True)


if __name__ == "__main__":
    main()
