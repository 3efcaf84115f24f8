"""Which float32 copy of a parameter does the optimizer step in its place?

Training in bfloat16 or float16 by hand keeps float32 "master" weights: the optimizer steps those, and the script copies
them into the model. A correction of the model alone would be overwritten by the next step. So the masters are found
among the optimizer's tensors, once, and whatever is read from the model or written to it is read and written there.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch

from peerd.training.model.shards import shard_of

EXACT = (torch.float32, torch.float64)  # what holds a float32 without loss
LOOK = 8  # values that two tensors must share to be compared as wholes


@torch.no_grad()
def masters_of(
    parameters: dict[str, torch.Tensor], everything: Iterable[torch.Tensor], optimizer: Any
) -> dict[str, torch.Tensor]:
    """By name, the master of each of `parameters` that has one: those that are shared, of `everything` in the model.

    A master has its parameter's shape and, rounded, its values; of parameters with equal values, as layer norms begin,
    the masters are told apart by their order, where all others stand in the model's. Else all masters have their
    parameters' shapes, in order. Raises ValueError where nobody can say what the optimizer steps.
    """
    groups = [group["params"] for group in getattr(optimizer, "param_groups", None) or []]
    stepped = [tensor for group in groups for tensor in group]
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
    if found is not None:
        _require_told_apart(without, found, groups)
    elif [one.shape for one in strangers] == [one.shape for one in without.values()]:
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


def _require_told_apart(
    parameters: dict[str, torch.Tensor], found: dict[str, torch.Tensor], groups: list[list[torch.Tensor]]
) -> None:
    """Raises ValueError where two parameters have equal values, and the masters' order does not tell them apart."""
    place = {id(found[name]): place for place, name in enumerate(parameters) if name in found}
    orders = [[place[id(tensor)] for tensor in group if id(tensor) in place] for group in groups]
    in_order = all(a < b for order in orders for a, b in pairwise(order))
    group_of = {place: number for number, order in enumerate(orders) for place in order}
    names = list(parameters)
    for first, second in _alike(list(parameters.values())):
        if not in_order or group_of[first] != group_of[second]:
            raise ValueError(
                f"{names[first]} and {names[second]} have the same values, and the optimizer's groups do not show "
                f"which of its float32 copies is whose: make one optimizer step before peerd.attach, or give it one "
                f"group in the model's order"
            )


def _alike(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Where two of them have one shape and the same values, each with the last such one before it."""
    pairs = []
    seen: dict[tuple[Any, ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        own = shard_of(tensor)
        looks = seen.setdefault((own.shape, own.dtype, *own.reshape(-1)[:LOOK].tolist()), [])
        same = [other for other in looks if torch.equal(shard_of(tensors[other]), own)]
        pairs += [(other, index) for other in same[-1:]]
        looks.append(index)
    return pairs
