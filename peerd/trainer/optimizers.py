"""What is a training's optimizer to peerd? One of torch's, the one within a wrapper, or several that act as one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim import ASGD, SGD, Adadelta, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.utils.weak import WeakIdKeyDictionary

from peerd.trainer.figures import one_number

WRAPPERS_MAX = 8  # one around the other; none is deeper that does not contain itself
KEEP_NOTHING = {"LightningOptimizer", "_FabricOptimizer", "AcceleratedOptimizer"}
"""Wrappers that are optimizers of torch's by their classes: what they load, the one within does not know."""
CAPTURABLE: set[type[Optimizer]] = {ASGD, Adadelta, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop}
"""Torch's that can step in a CUDA graph. The first step finds zeros, but for what follows."""
NOT_ASKED: set[type[Optimizer]] = {SGD, getattr(torch.optim, "Muon", SGD)}
"""Those that can without being told `capturable`."""
ONES = {"mu", "mu_product"}
RATES = {"eta", "step_size"}  # the learning rate as it is then


Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


def as_one(given: Any) -> Optimizer:
    """The optimizer to read learning rates from and to keep the state of; a list or a map is several that act as one.

    Raises ValueError with half a sentence on what to give instead.
    """
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, list | tuple):
        if not given:
            raise ValueError("the list of optimizers is empty: give those that update the model")
        parts = [part for each in map(as_one, given) for part in getattr(each, "parts", [each])]
        return parts[0] if len(parts) == 1 else cast(Optimizer, Several(parts))
    inner = given
    for _ in range(WRAPPERS_MAX):
        if isinstance(inner, Optimizer) and KEEP_NOTHING.isdisjoint(base.__name__ for base in type(inner).__mro__):
            return inner
        looks_like_one = all(hasattr(inner, name) for name in ("param_groups", "state_dict", "load_state_dict"))
        if looks_like_one and not isinstance(inner, Optimizer):
            return cast(Optimizer, inner)
        inner = getattr(inner, "optimizer", None)  # as Accelerate's, Lightning's and learning rate schedulers have it
    raise ValueError(f"{type(given).__name__} is no optimizer: give the one that updates the model")


def learning_rates(optimizer: Optimizer, key: str = "lr") -> list[float]:
    """Those that its groups have, all finite and >= 0; some optimizers have none, or None. Never raises."""
    found = [_number(group.get(key)) for group in optimizer.param_groups]
    return [rate for rate in found if rate is not None and math.isfinite(rate) and rate >= 0]


_READ = WeakIdKeyDictionary()
"""Tensors on GPUs: a version, and what they held then. Who reads one waits for all that its GPU has yet to do."""


def _number(value: Any) -> float | None:
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu" or value.is_inference():
        return one_number(value)
    read: tuple[int, float | None] | None = _READ.get(value)  # type: ignore[no-untyped-call]
    if read is None or read[0] != value._version:
        read = _READ[value] = value._version, one_number(value)
    return read[1]


def kind(optimizer: Any) -> str:
    """Its class's name: the state of another kind does not fit."""
    return "+".join(map(kind, optimizer.parts)) if isinstance(optimizer, Several) else type(optimizer).__name__


def states_max(optimizer: Any, group: Mapping[str, Any]) -> int:
    """How many tensors it may keep of a parameter of this group; of torch's none keeps more than is said here."""
    if type(optimizer) is SGD:
        return 1 if group["momentum"] else 0
    return 3 if type(optimizer) in (Adam, AdamW) and not group["amsgrad"] else 4


@torch.no_grad()
def forget(optimizer: Any) -> None:
    """Let its state go, as if it had not stepped yet; one that has no such thing keeps what it has."""
    for part in optimizer.parts if isinstance(optimizer, Several) else ():
        forget(part)
    if (state := getattr(optimizer, "state", None)) is None:
        return
    if _may_be_in_graph(optimizer, state):
        # a CUDA graph that steps has their addresses: let go, they would be other tensors', and it would write there
        rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, entries in state.items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    # as the first step would begin, but for SGD's dampening, which spares only one that finds nothing
                    begins = rates.get(parameter, 0.0) if key in RATES else float(key in ONES)
                    (torch.view_as_real(value) if value.is_complex() else value).fill_(begins)
                    # another object, by which quasi_global.py sees that it begins anew
                    entries[key] = value.detach()
        return
    state.clear()


def _may_be_in_graph(optimizer: Any, state: Mapping[Any, Any]) -> bool:
    """Whether torch lets a CUDA graph step it: those that are said to be capturable, and who is not asked."""
    if type(optimizer) in NOT_ASKED:
        return any(isinstance(one, torch.Tensor) and one.is_cuda for each in state.values() for one in each.values())
    return type(optimizer) in CAPTURABLE and any(group["capturable"] for group in optimizer.param_groups)


@torch.no_grad()
def load(optimizer: Any, whole: dict[str, Any]) -> None:
    """Load a state into the optimizer's own tensors, where there are some: a CUDA graph may have their addresses.

    Raises what its `load_state_dict` does.
    """
    before = {
        (place, key): value
        for place, entries in _entries_of(optimizer)
        for key, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    optimizer.load_state_dict(whole)
    for place, entries in _entries_of(optimizer):
        for key, value in entries.items():
            held = before.get((place, key))
            if held is not None and type(value) is type(held) and _is_like(value, held):
                entries[key] = held.copy_(value)


def _entries_of(optimizer: Any) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """What it keeps of each parameter, and the settings of each group, with what tells whose they are."""
    for number, part in enumerate(optimizer.parts if isinstance(optimizer, Several) else [optimizer]):
        state = getattr(part, "state", None)
        for parameter, entries in state.items() if isinstance(state, Mapping) else ():
            if isinstance(entries, dict):
                yield (number, 0, id(parameter)), entries
        for at, group in enumerate(part.param_groups):
            yield (number, 1, at), group


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


class Several:
    """Some optimizers, seen as one that is never stepped: groups and parameters are counted through all of them."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all."""
        return [group for part in self.parts for group in part.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """As of one optimizer that has the groups of all."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for part in self.parts:
            own = part.state_dict()
            state |= {first + index: entries for index, entries in own["state"].items()}
            groups += [
                {**group, "params": [first + index for index in group["params"]]} for group in own["param_groups"]
            ]
            first += _count(part)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, whole: dict[str, Any]) -> None:
        """What `state_dict` gave. Raises ValueError, before anything is loaded, when it does not fit."""
        sizes = [len(group["params"]) for group in whole["param_groups"]]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("loaded state dict has other parameter groups")
        first = group_at = 0
        for part in self.parts:
            groups = whole["param_groups"][group_at : group_at + len(part.param_groups)]
            count = _count(part)
            part.load_state_dict(
                {
                    "state": {
                        i - first: entries for i, entries in whole["state"].items() if first <= i < first + count
                    },
                    "param_groups": [{**g, "params": [i - first for i in g["params"]]} for g in groups],
                }
            )
            first += count
            group_at += len(groups)


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
