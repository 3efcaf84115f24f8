"""Which float32 copy of a parameter does the optimizer step in its place?

Training in bfloat16 or float16 by hand keeps float32 "master" weights: the optimizer steps those, and the script copies
them into the model. A correction of the model alone would be overwritten by the next step. So the masters are found
among the optimizer's tensors, once, and whatever is read from the model or written to it is read and written there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from peerd.training.model.shards import shard_of

EXACT = (torch.float32, torch.float64)  # what holds a float32 without loss


@torch.no_grad()
def masters_of(
    parameters: dict[str, torch.Tensor], everything: Iterable[torch.Tensor], optimizer: Any
) -> dict[str, torch.Tensor]:
    """By name, the master of each of `parameters` that has one: those that are shared, of `everything` in the model.

    A master has its parameter's shape and, rounded, its values; else all of them have their parameters' shapes, in
    order. Raises ValueError where neither is so: then nobody can say what the optimizer steps.
    """
    groups = getattr(optimizer, "param_groups", None) or []
    stepped = [tensor for group in groups for tensor in group["params"]]
    ours, in_groups = {id(tensor) for tensor in everything}, {id(tensor) for tensor in stepped}
    strangers = [tensor for tensor in stepped if id(tensor) not in ours and tensor.dtype in EXACT]
    without = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.dtype not in EXACT and id(parameter) not in in_groups
    }
    if not strangers or not without:
        return {}
    found = _by_values(without, strangers)
    if found is None and [one.shape for one in strangers] == [one.shape for one in without.values()]:
        found = dict(zip(without, strangers, strict=True))
    if found is None:
        name = next(iter(without))
        raise ValueError(
            f"the optimizer steps {len(strangers)} float32 tensors that are not the model's, and not {name}: peerd "
            f"cannot tell whose copies they are; make one of each parameter, of its shape, in the model's order"
        )
    return found


def _by_values(parameters: dict[str, torch.Tensor], strangers: list[torch.Tensor]) -> dict[str, torch.Tensor] | None:
    left, found = list(strangers), {}
    for name, parameter in parameters.items():
        own = shard_of(parameter)
        for index, stranger in enumerate(left):
            copy = shard_of(stranger)
            if copy.shape == own.shape and torch.equal(copy.to(own.device, own.dtype), own):
                found[name] = left.pop(index)
                break
        else:
            return None
    return found
