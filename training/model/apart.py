"""Do two tensors of a model lie in the same memory? Then what is added to one is added to the other, too.

A correction would move such a model twice as far as it should. Tied parameters are one tensor with two names, and no
such case: but `b.weight.data = a.weight.data` makes two of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

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
    mine = torch.zeros(end - first, dtype=torch.bool, device="cpu")
    *others, (start, _, last) = near
    _bytes_of(mine, start - first, last).fill_(True)
    return next((name for begin, name, one in others if bool(_bytes_of(mine, begin - first, one).any())), None)


def distinct(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without those that are views of others, such as slices of one table: what becomes of these becomes of them.

    One that takes the same bytes for another type is none: a mean of the one makes any value of the other.
    """
    by_storage = defaultdict(list)
    for name, held in buffers.items():
        own = shard_of(held)
        if own.numel() and type(own) is torch.Tensor:
            by_storage[own.untyped_storage().data_ptr(), own.dtype].append((name, own))
    views = set()
    for group in by_storage.values():
        size = group[0][1].untyped_storage().nbytes() if len(group) > 1 else 0
        covered = torch.zeros(size, dtype=torch.bool, device="cpu")
        for name, own in sorted(group, key=lambda one: -one[1].nbytes) if len(group) > 1 else ():
            part = _bytes_of(covered, int(own.storage_offset()) * own.itemsize, own)
            if bool(part.all()):
                views.add(name)
            part.fill_(True)
    return {name: held for name, held in buffers.items() if name not in views}


def runs_within(views: Iterable[torch.Tensor], whole: torch.Tensor) -> list[tuple[int, int]]:
    """Which of the values of `whole`, counted row by row, are values of `views`, too: starts and stops, in order."""
    memory = whole.untyped_storage()
    covered = torch.zeros(memory.nbytes() // whole.itemsize, dtype=torch.bool, device="cpu")
    for view in views:
        if view.untyped_storage().data_ptr() == memory.data_ptr() and view.dtype == whole.dtype:
            covered.as_strided(view.shape, view.stride(), int(view.storage_offset())).fill_(True)
    within = covered.as_strided(whole.shape, whole.stride(), int(whole.storage_offset())).reshape(-1).int()
    edges = torch.diff(within, prepend=within.new_zeros(1), append=within.new_zeros(1))
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _bytes_of(memory: torch.Tensor, start: int, tensor: torch.Tensor) -> torch.Tensor:
    """Where a tensor lies in a memory, one value a byte, whose first is at `start`."""
    strides = [step * tensor.itemsize for step in tensor.stride()]
    return memory.as_strided((*tensor.shape, tensor.itemsize), (*strides, 1), start)
