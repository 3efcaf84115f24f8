"""Which copy of a parameter does the optimizer step in its place?

Training in bfloat16 or float16 by hand keeps float32 "master" weights (of float32 they are float64): the optimizer
steps those, and the script copies them into the model. A correction of the model alone would be overwritten by the next
step. So the masters are found among the optimizer's tensors, once, and whatever is read from the model or written to it
is read and written there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from peerd.training.model.shards import shard_of

EXACT = (torch.float32, torch.float64)  # what holds a float32 without loss
LOOK = 8  # values that two tensors must share to be compared as wholes


@torch.no_grad()
def masters_of(
    shared: Mapping[str, torch.Tensor], everything: Mapping[str, torch.Tensor], optimizer: Any
) -> dict[str, torch.Tensor]:
    """By name, the master of each of `shared` that has one; `everything` has all of the model's parameters.

    A master has its parameter's shape, a wider type and, rounded, its values. Of parameters with equal values, as layer
    norms begin, private and frozen ones among them, the masters are told apart by their order, where all others stand
    in the model's. Else all masters have their parameters' shapes, in order. A float32 parameter without a copy has no
    master: others may step it. Raises ValueError where nobody can say what the optimizer steps.
    """
    groups = [group["params"] for group in getattr(optimizer, "param_groups", None) or []]
    stepped = [tensor for group in groups for tensor in group]
    ours, in_groups = {id(tensor) for tensor in everything.values()}, {id(tensor) for tensor in stepped}
    strangers = [tensor for tensor in stepped if id(tensor) not in ours and tensor.dtype in EXACT]
    widest = max((stranger.dtype.itemsize for stranger in strangers), default=0)
    unstepped = {
        name: parameter
        for name, parameter in everything.items()
        if id(parameter) not in in_groups and parameter.is_floating_point() and parameter.dtype.itemsize < widest
    }
    wanted = dict.fromkeys(name for name in shared if name in unstepped)
    if not wanted:
        return {}
    found = (
        _by_values(wanted, unstepped, strangers, groups)
        or _by_shapes(wanted, unstepped, strangers)
        or _by_values(wanted, unstepped, strangers, groups, all_have_one=False)
    )
    low = [name for name in wanted if unstepped[name].dtype not in EXACT]
    if low and not found:
        raise ValueError(
            f"the optimizer steps {len(strangers)} tensors that are not the model's, and not {low[0]}: peerd cannot "
            f"tell whose copies they are; make one of each parameter, of its shape, in the model's order"
        )
    return {name: found[name] for name in wanted if name in found}


@torch.no_grad()
def strangers_of(everything: Mapping[str, torch.Tensor], optimizer: Any) -> list[torch.Tensor]:
    """What the optimizer steps that is neither of the model nor the copy of a parameter that it does not step."""
    groups = [group["params"] for group in getattr(optimizer, "param_groups", None) or []]
    stepped = {id(tensor): tensor for group in groups for tensor in group}
    ours = {id(tensor) for tensor in everything.values()}
    strangers = [tensor for tensor in stepped.values() if id(tensor) not in ours]
    may_be = [tensor for tensor in strangers if tensor.dtype in EXACT and _has_values(tensor)]
    shapes = {tensor.shape for tensor in may_be}
    looks: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for parameter in everything.values():
        if id(parameter) not in stepped and _has_values(parameter) and parameter.shape in shapes:
            own = shard_of(parameter)
            looks.setdefault(_look(own, own.dtype), []).append(own)
    low = {own.dtype for alike in looks.values() for own in alike if own.is_floating_point()}
    copies = set()
    for stranger in may_be:
        copy = shard_of(stranger)
        near = [own for dtype in low if dtype.itemsize < copy.itemsize for own in looks.get(_look(copy, dtype), ())]
        if any(torch.equal(copy.to(own.device, own.dtype), own) for own in near):
            copies.add(id(stranger))
    return [tensor for tensor in strangers if id(tensor) not in copies]


def _has_values(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and not tensor.is_meta and tensor.layout == torch.strided and not tensor.is_quantized


def _owners(
    names: Iterable[str], unstepped: Mapping[str, torch.Tensor], wanted: Collection[str], count: int
) -> list[str] | None:
    """Whose so many masters are: of all of these names, of those that are trained, or of those that are shared."""
    every = list(names)
    trained = [name for name in every if unstepped[name].requires_grad]
    shared = [name for name in every if name in wanted]
    return next((owners for owners in (every, trained, shared) if len(owners) == count), None)


def _by_values(
    wanted: Collection[str],
    unstepped: Mapping[str, torch.Tensor],
    strangers: Sequence[torch.Tensor],
    groups: list[list[torch.Tensor]],
    *,
    all_have_one: bool = True,
) -> dict[str, torch.Tensor]:
    """Nothing where one of `wanted` has no copy, be it float32 if `all_have_one`.

    Raises ValueError where copies of equal values may be anybody's.
    """
    found: dict[str, torch.Tensor] = {}
    several = []
    looks: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for dtype in {tensor.dtype for tensor in unstepped.values()}:
        for stranger in strangers:
            if stranger.dtype.itemsize > dtype.itemsize:
                looks.setdefault(_look(shard_of(stranger), dtype), []).append(stranger)
    for alike in _alike(wanted, unstepped):
        own = shard_of(unstepped[alike[0]])
        near = looks.get(_look(own, own.dtype), ())
        copies = [stranger for stranger in near if torch.equal(shard_of(stranger).to(own.device, own.dtype), own)]
        if not copies:
            if all_have_one or own.dtype not in EXACT:
                return {}
            continue
        owners = _owners(alike, unstepped, wanted, len(copies))
        found |= zip(owners or alike, copies, strict=False)
        if owners is None or len(owners) > 1:
            several.append((alike, owners))
    place = {id(found[name]): place for place, name in enumerate(name for name in unstepped if name in found)}
    orders = [[place[id(tensor)] for tensor in group if id(tensor) in place] for group in groups]
    in_order = all(a < b for order in orders for a, b in pairwise(order))
    group_of = {id(tensor): number for number, group in enumerate(groups) for tensor in group}
    for alike, owners in several:
        if owners is None or not in_order or len({group_of[id(found[name])] for name in owners}) > 1:
            same = " and ".join(alike[:2]) + " have the same values, and" if alike[1:] else f"of {alike[0]}"
            raise ValueError(
                f"{same} the optimizer's groups do not show which of its copies is whose: make one optimizer step "
                f"before peerd.attach, or give it one group in the model's order"
            )
    return found


def _by_shapes(
    wanted: Collection[str], unstepped: Mapping[str, torch.Tensor], strangers: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Nothing where the shapes are not those of the copies, one after the other."""
    owners = _owners(unstepped, unstepped, wanted, len(strangers))
    if owners is None or any(unstepped[name].shape != copy.shape for name, copy in zip(owners, strangers, strict=True)):
        return {}
    return dict(zip(owners, strangers, strict=True))


def _look(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    """What two tensors share that are equal in this type."""
    return (tensor.shape, dtype, *tensor.reshape(-1)[:LOOK].to(dtype).tolist())


def _alike(wanted: Collection[str], unstepped: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names of one shape, type and values, in the model's order; where one of them is wanted."""
    shapes = {shard_of(unstepped[name]).shape for name in wanted}
    classes: dict[tuple[Any, ...], list[list[str]]] = {}
    for name, tensor in unstepped.items():
        own = shard_of(tensor)
        if own.shape not in shapes:
            continue
        looks = classes.setdefault(_look(own, own.dtype), [])
        same = [names for names in looks if torch.equal(shard_of(unstepped[names[0]]), own)]
        if same:
            same[0].append(name)
        else:
            looks.append([name])
    return [names for looks in classes.values() for names in looks if any(name in wanted for name in names)]


class StateMasters:
    """Masters in an optimizer's state, under one name for all parameters: as apex and TransformerEngine keep them."""

    def __init__(self, optimizer: Any) -> None:
        parts = getattr(optimizer, "parts", None)  # of several that act as one
        self._parts = parts if isinstance(parts, list) else [optimizer]
        self._name: str | None = None
        self._was_sought = False

    @torch.no_grad()
    def seek(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look once, as soon as there is a state of any of them, all of a type that does not hold a float32."""
        if self._was_sought:
            return
        held = [(shard_of(parameter), entries) for parameter in parameters if (entries := self._entries(parameter))]
        if not any(bool(own.any()) for own, _ in held):  # zeros are the copies of zeros
            return
        self._was_sought = True
        for name in held[0][1]:
            if all(_is_master(entries.get(name), own) for own, entries in held):
                self._name = name

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """As it is now: an optimizer that has forgotten its state makes another."""
        return self._entries(parameter).get(self._name) if self._name is not None else None

    def _entries(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        states = (getattr(part, "state", None) for part in self._parts)  # one that is restored is another object
        found = (state.get(parameter) for state in states if isinstance(state, Mapping))
        return next((entries for entries in found if isinstance(entries, Mapping) and entries), {})


def _is_master(kept: Any, own: torch.Tensor) -> bool:
    if not isinstance(kept, torch.Tensor) or kept.dtype not in EXACT:
        return False
    copy = shard_of(kept)
    return copy.shape == own.shape and torch.equal(copy.to(own.device, own.dtype), own)
