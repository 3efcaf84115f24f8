"""Do two tensors of a model lie in the same memory? Then what is added to one is added to the other, too.

A correction would move such a model twice as far as it should. Tied parameters are one tensor with two names, and no
such case: but `b.weight.data = a.weight.data` makes two of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from peerd.training.model.shards import shard_of


def overlapping(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """The names of two tensors that share a value in memory; views of one storage may lie side by side."""
    spans = []
    for name, held in tensors.items():
        own = shard_of(held)
        if own.numel() and type(own) is torch.Tensor:  # others may have no memory of their own
            reach = sum((size - 1) * step for size, step in zip(own.shape, own.stride(), strict=True))
            start = own.data_ptr()
            spans.append((start, start + (reach + 1) * own.itemsize, name, own))
    near: list[tuple[int, str, torch.Tensor]] = []  # whose spans touch those of the ones before
    end = 0
    for start, stop, name, own in sorted(spans, key=lambda span: span[:2]):
        near = [*near, (start, name, own)] if start < end else [(start, name, own)]
        end = max(end, stop)
        if len(near) > 1 and (other := _owner(near, end)) is not None:
            return other, name
    return None


def _owner(near: list[tuple[int, str, torch.Tensor]], end: int) -> str | None:
    """Of whom the last one has a value, byte for byte."""
    first = near[0][0]
    mine = torch.zeros(end - first, dtype=torch.bool)

    def bytes_of(start: int, tensor: torch.Tensor) -> torch.Tensor:
        strides = [step * tensor.itemsize for step in tensor.stride()]
        return mine.as_strided((*tensor.shape, tensor.itemsize), (*strides, 1), start - first)

    *others, (start, _, last) = near
    bytes_of(start, last).fill_(True)
    return next((name for begin, name, tensor in others if bool(bytes_of(begin, tensor).any())), None)
