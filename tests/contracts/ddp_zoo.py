"""Models and training steps that must come out the same under peerd's gradients and under torch's own DDP.

As a script it is one rank of DDP over gloo: ddp_zoo.py RANK WORLD STEPS FILE-OF-THE-GROUP OUT.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

ACCUMULATED = 4
CLIPPED = 0.05
OVERFLOWS_AT, OVERFLOWS_ON = 7, 1  # the step and the rank
SCALED_STEPS = 20


class Branches(nn.Module):
    """One branch is never used, one by rank 0 alone and every other step, and the base is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.used, self.sometimes, self.never = nn.Linear(6, 1), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, sometimes: bool) -> torch.Tensor:
        x = self.base(x)
        out: torch.Tensor = self.used(x) + self.sometimes(x) if sometimes else self.used(x)
        return out


def perceptron(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 1))


class Zoo:
    """All models with their optimizers, from one seed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.models: dict[str, nn.Module] = {
            "sgd": perceptron(), "adamw": perceptron(), "clipped": perceptron(), "accumulated": perceptron(),
            "normed": perceptron(nn.BatchNorm1d(8)), "branches": Branches(), "scaled": perceptron(),
        }  # fmt: skip
        adaptive = {"adamw", "clipped", "scaled"}
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            name: torch.optim.AdamW(trained(model), lr=0.01)
            if name in adaptive
            else torch.optim.SGD(trained(model), lr=0.05, momentum=0.9, nesterov=name == "normed")
            for name, model in self.models.items()
        }
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=20)
        self.skipped = 0

    def state(self) -> dict[str, torch.Tensor]:
        """All values of all models."""
        return {
            f"{name}.{key}": value.clone()
            for name, model in self.models.items()
            for key, value in model.state_dict().items()
        }


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batch(rank: int, step: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank's own."""
    random = torch.Generator().manual_seed(1_000_003 * rank + 101 * step + part)
    x = torch.randn(16, 6, generator=random)
    return x, x.sum(1, keepdim=True).sin() + 0.1 * rank


def train(
    zoo: Zoo,
    models: dict[str, Any],
    rank: int,
    step: int,
    no_sync: Callable[[], AbstractContextManager[None]],
) -> None:
    """One step of each of `models`, which are what is called: the zoo's or what wraps them."""
    mean = nn.functional.mse_loss
    if "accumulated" in models:
        for part in range(1, ACCUMULATED):
            x, y = batch(rank, step, part)
            with no_sync():
                (mean(models["accumulated"](x), y) / ACCUMULATED).backward()  # type: ignore[no-untyped-call]
    x, y = batch(rank, step)
    loss = torch.zeros(())
    for name, model in models.items():
        if name == "branches":
            loss = loss + mean(model(x, rank == 0 and step % 2 == 1), y)
        elif name != "scaled":
            loss = loss + mean(model(x), y) / (ACCUMULATED if name == "accumulated" else 1)
    loss.backward()  # type: ignore[no-untyped-call]
    if "clipped" in models:
        nn.utils.clip_grad_norm_(zoo.models["clipped"].parameters(), CLIPPED)
    for name in models.keys() - {"scaled"}:
        zoo.optimizers[name].step()
        zoo.optimizers[name].zero_grad()
    if "scaled" not in models or step >= SCALED_STEPS:
        return
    loss = mean(models["scaled"](x), y)
    if (step, rank) == (OVERFLOWS_AT, OVERFLOWS_ON):
        loss = loss * 1e38
    before = zoo.scaler.get_scale()
    zoo.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    zoo.scaler.unscale_(zoo.optimizers["scaled"])
    nn.utils.clip_grad_norm_(zoo.models["scaled"].parameters(), 1.0)
    zoo.scaler.step(zoo.optimizers["scaled"])
    zoo.scaler.update()
    zoo.skipped += zoo.scaler.get_scale() < before
    zoo.optimizers["scaled"].zero_grad()


def as_ddp(rank: int, world: int, steps: int, group: Path, out: Path) -> None:
    """Train as one rank of DDP; rank 0 writes the state."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=world)
    zoo = Zoo()
    models = {
        name: DistributedDataParallel(model, find_unused_parameters=name == "branches")
        for name, model in zoo.models.items()
    }

    @contextmanager
    def no_sync() -> Iterator[None]:
        with models["accumulated"].no_sync():
            yield

    for step in range(steps):
        train(zoo, models, rank, step, no_sync)
    if rank == 0:
        save_file(zoo.state(), out)
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # torch's threads, taken apart at the interpreter's end, aborted one process in a hundred


if __name__ == "__main__":
    as_ddp(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
