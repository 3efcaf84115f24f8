"""What does this process hold of a tensor? Of a DTensor, as `fully_shard` makes of parameters, a shard; of others all.

torch.distributed is imported only where there is a DTensor, so a script of one process does not pay for it.
"""

from __future__ import annotations

from typing import Any, cast

import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements")


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, in the same memory."""
    held = tensor.detach()
    return cast(Any, held).to_local() if is_sharded(tensor) else held


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it; of a DTensor every rank has to ask at once."""
    held = tensor.detach()
    return cast(Any, held).full_tensor() if is_sharded(tensor) else held


def put_together(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """All of what each rank gives its part of, sharded as another tensor is. Every rank has to call it at once."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    held = cast(Any, like)
    mesh, placements = held.device_mesh, held.placements
    part = part.view(shard_of(like).shape)
    return whole(DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()))


def taken_apart(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`values`, which every rank has whole, sharded as another tensor of this shape is. Nothing is sent."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import DTensor, Replicate

    held = cast(Any, like)
    everywhere = [Replicate()] * len(held.placements)
    replicated = DTensor.from_local(values.to(like.device), held.device_mesh, everywhere, run_check=False)
    return replicated.redistribute(placements=held.placements)


def copies(tensor: torch.Tensor, ranks: int) -> int:
    """How many of so many ranks hold the same part of it."""
    if is_sharded(tensor):
        held = cast(Any, tensor)
        for size, placement in zip(held.device_mesh.shape, held.placements, strict=True):
            ranks //= 1 if placement.is_replicate() else size
    return ranks
