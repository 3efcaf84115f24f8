"""Real daemons and scripts: the servers' AdamW makes torch's steps of the mean gradient, at the scripts' rates."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import script_nodes
import torch
from script_nodes import Swarm
from torch import nn

import peerd

STEPS = 25
NAMES = "ab"
CLOSE = 1e-5  # of float32 models after so many steps


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def backward(model: nn.Module, rank: int, step: int) -> None:
    random = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 6, generator=random)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
    loss.backward()  # type: ignore[no-untyped-call]


def rate(step: int) -> float:
    return 0.02 / (1 + 0.1 * step)


def of_torch() -> dict[str, torch.Tensor]:
    """One optimizer for the mean of both gradients; each step begins from the mean of both models' statistics."""
    models = [build() for _ in NAMES]
    first = models[0]
    optimizer = torch.optim.AdamW(first.parameters(), lr=1.0, weight_decay=0.05)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(step)
        for rank, model in enumerate(models):
            backward(model, rank, step)
        for parameter, other in zip(first.parameters(), models[1].parameters(), strict=True):
            assert parameter.grad is not None
            assert other.grad is not None
            parameter.grad = (parameter.grad + other.grad) / 2
            other.grad = None
        optimizer.step()
        optimizer.zero_grad()
        state = first.state_dict()
        for name, value in models[1].state_dict().items():
            if "running" in name:
                state[name] = (state[name] + value) / 2
        for model in models:
            model.load_state_dict(state)
    return first.state_dict()


def test_hardsync_of_gradients_is_one_optimizers_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[int, dict[str, torch.Tensor]] = {}
    made = [build() for _ in NAMES]

    def script(rank: int) -> None:
        model = made[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with peerd.attach(model, optimizer) as swarm:
            for step in range(STEPS):
                optimizer.param_groups[0]["lr"] = rate(step)
                optimizer.zero_grad()
                backward(model, rank, step)
                optimizer.step()
                swarm.step()
        found[rank] = {name: value.clone() for name, value in model.state_dict().items()}

    async def scenario(swarm: Swarm) -> None:
        for rank, name in enumerate(NAMES):
            await swarm.start(name, partial(script, rank), wait_for=len(NAMES))
        await swarm.ended(NAMES)

    script_nodes.run(
        tmp_path, scenario, mode="hardsync", codec="float32", servers=2,
        server_optimizer="adamw:weight_decay=0.05", robust=False,
    )  # fmt: skip
    wanted = of_torch()
    for rank in range(len(NAMES)):
        for name, value in wanted.items():
            scale = float(value.double().norm()) or 1.0
            assert float((found[rank][name].double() - value.double()).norm()) <= CLOSE * scale, (rank, name)
    told = [line for line in capsys.readouterr().err.splitlines() if "servers" in line]
    who = "the servers make the steps, by adamw:weight_decay=0.05 (--server-optimizer): of this script's SGD"
    assert told == [f"peerd: {who} only the learning rate counts"] * len(NAMES)
