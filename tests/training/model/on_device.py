"""What a trainer does with its model between steps, on whatever device that is.

For tests on a simulated GPU, and benchmarks/on_gpu.py on a real one, so nothing here needs pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from flat_values import values_of
from torch import nn

from peerd.trainer.publication import Publication
from peerd.training.model import gradient_parts
from peerd.training.model.flat import FlatModel
from peerd.training.model.gradient_parts import GradientParts
from peerd.training.model.gradients import FlatGradients
from peerd.training.model.transfers import pin, unpin

Array = npt.NDArray[np.float32]


class Motley(nn.Module):
    """Of several types, with buffers, and a convolution's weight that lies channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 2)
        self.first.weight.data = self.first.weight.data.contiguous(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.low = nn.Linear(3, 4, dtype=torch.bfloat16)
        self.low.register_buffer("mean", torch.zeros(3, dtype=torch.bfloat16))
        self.high = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low: torch.Tensor = self.low(self.norm(self.first(x)).mean((2, 3)).bfloat16())
        high: torch.Tensor = self.high(low.double())
        return high


def made(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "motley":
        return Motley()
    one = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return one.bfloat16() if kind == "bfloat16" else one


class Node:
    """What a trainer does with its model between steps, and the memory that a daemon reads."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.flat = FlatModel(model)
        self.memory: Array = np.full((2, self.flat.total), np.nan, np.float32)
        self.copy, self.correction = torch.from_numpy(self.memory[0]), self.memory[1]
        self.publication = Publication()
        self.pinned = self.flat.device.type == "cuda" and pin(self.memory, self.flat.device)

    @torch.no_grad()
    def do(self, what: str, seed: int) -> None:
        if what == "step":
            for parameter in self.model.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)).to(
                        parameter.device, parameter.dtype
                    )
                )
        elif what == "publish":
            self.publication.wait()
            self.publication.begin(self.flat.snapshot(), self.copy, self.flat.device)
        elif what == "add":
            self.publication.wait()
            self.correction[:] = np.random.default_rng(seed).standard_normal(self.flat.total) / 50
            self.flat.add(self.correction)
            self.correction[:] = np.nan  # it is the daemon's again
        elif what == "load":
            self.publication.wait()
            self.flat.load(np.random.default_rng(seed).random(self.flat.total).astype(np.float32))
        elif what == "restore":
            self.flat.restore()

    def seen(self) -> Iterator[torch.Tensor]:
        self.publication.wait()
        yield self.copy.clone()
        yield self.flat.change().cpu()
        yield values_of(self.flat)
        yield from (value.detach().cpu() for value in [*self.model.parameters(), *self.model.buffers()])

    def close(self) -> None:
        self.publication.wait()
        if self.pinned:
            unpin(self.memory, self.flat.device)


class Passes:
    """Backward passes of a model whose gradients come to `out` in parts, as its hooks say."""

    def __init__(self, model: nn.Module, bucket: int) -> None:
        self.model, self.bucket = model, bucket
        self.flat = FlatModel(model)
        self.gradients = FlatGradients(self.flat)
        self.memory: Array = np.full(self.gradients.total, np.nan, np.float32)
        self.out = torch.from_numpy(self.memory)
        self.pinned = self.flat.device.type == "cuda" and pin(self.memory, self.flat.device)
        self.parts = GradientParts(self.flat, self.gradients, self.out)
        self.told: list[tuple[int, Array]] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._came)  # type: ignore[no-untyped-call]

    def _came(self, parameter: torch.Tensor) -> None:
        if (first := self.parts.came(parameter)) is not None:
            self._hear(first)

    def _hear(self, first: int) -> None:
        self.told.append((first, self.memory[first : self.flat.parameters].copy()))

    def backward(self, seed: int) -> Array:
        self.told.clear()
        self.model.zero_grad()
        with patch.object(gradient_parts, "BUCKET_VALUES", self.bucket):
            x = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(seed)).to(self.flat.device)
            self.parts.begin()
            self.model(x).square().mean().backward()
            for first in self.parts.rest():
                self._hear(first)
            self.parts.complete()
        return self.memory.copy()

    def close(self) -> None:
        self.parts.wait()
        if self.pinned:
            unpin(self.memory, self.flat.device)
