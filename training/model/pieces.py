"""Where does each tensor of a model sit in the flat vector?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from peerd.training.model.apart import runs_within
from peerd.training.model.masters import EXACT
from peerd.training.model.shards import is_sharded, shard_of
from peerd.training.model.variances import is_variance


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one tensor sits in the flat vector."""

    name: str
    held: torch.Tensor
    start: int
    stop: int
    is_buffer: bool = False
    variances: tuple[tuple[int, int], ...] = ()  # where in the piece, start and stop
    master: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """What of it is in this process: this rank's shard of a DTensor. It may move, so look again."""
        return shard_of(self.held)

    @property
    def source(self) -> torch.Tensor:
        """What the optimizer steps: the tensor, or its master."""
        return shard_of(self.held if self.master is None else self.master)

    @property
    def is_low_parameter(self) -> bool:
        """Whether it is a parameter of lower precision, which a small correction cannot move."""
        return not self.is_buffer and self.source.dtype not in EXACT


def is_plain(tensor: torch.Tensor) -> bool:
    """Not of quantized, sparse or absent values, nor where some of them are one in memory (an expanded tensor)."""
    if tensor.is_quantized or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return is_sharded(tensor) or not any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def is_computable(tensor: torch.Tensor) -> bool:
    """Plain, and of floats that can be computed with: float8 has no arithmetic."""
    return tensor.is_floating_point() and tensor.itemsize > 1 and is_plain(tensor)


def variances_of(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Where in the flat vector of these pieces running variances are."""
    return [
        (piece.start + start, min(piece.start + stop, piece.stop))  # of a shard there is less than of the whole
        for piece in pieces
        for start, stop in piece.variances
    ]


def variances_in(
    name: str, buffers: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]
) -> tuple[tuple[int, int], ...]:
    """Where in this buffer variances are: it is one, or others that are views of it are."""
    held = buffers[name]
    if is_variance(name) and bool((held >= 0).all()):
        return ((0, held.numel()),)
    if name not in written or len(written) == len(buffers) or is_sharded(held):
        return ()
    views = [shard_of(one) for other, one in buffers.items() if other not in written and is_variance(other)]
    within = [one for one in views if bool((one >= 0).all())]
    return tuple(runs_within(within, shard_of(held))) if within else ()
