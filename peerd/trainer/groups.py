"""What of an optimizer's settings comes back from a checkpoint, and what is as the script has it now?

A learning rate that a schedule has lowered goes on after a crash; one that was changed in the script is not undone. To
tell them apart, a checkpoint also has the settings as the script had made them when it attached.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

Group = dict[str, Any]

NAMED_MAX = 3  # settings in one line
SHOWN_MAX = 40  # characters of one
_NONE = object()

_MADE = WeakIdKeyDictionary()
"""By optimizer: its groups at its first attach, and whether it has trained with a swarm since."""


def remember(optimizer: Any) -> None:
    """It attaches: its settings are all of the script's own making, unless it has trained, or has loaded its own."""
    for part in _parts(optimizer):
        if part not in _MADE:
            at_first = [] if getattr(part, "state", None) else list(map(plain, part.param_groups))
            with suppress(TypeError):  # one with __slots__, to which nothing can point weakly, is as if nobody was told
                _MADE[part] = at_first, False


def let_go(optimizer: Any) -> None:
    """Its training with a swarm is over: what it has is the script's, should it attach again."""
    for part in _parts(optimizer):
        if part in _MADE:
            _MADE[part] = _MADE[part][0], True


def made(optimizer: Any) -> list[Group]:
    """What the script had made of each group, as JSON has it; {} of one that nobody was told of."""
    return [at_first for at_first, _, _ in _known(optimizer)]


def has_schedule(optimizer: Any) -> bool:
    """Whether a scheduler of torch's was made for it before it attached, and it has not trained with a swarm since.

    One that loaded its own state before may have a scheduler that did, too, and is not meant.
    """
    return any("initial_lr" in at_first and not has_trained for at_first, _, has_trained in _known(optimizer))


def merged(kept: Sequence[Group], then: Iterable[Group], optimizer: Any) -> tuple[list[Group], str]:
    """The groups to load, and which settings of the script are not the checkpoint's; "" where none differs.

    The checkpoint has `kept` of them, and `then` the script had made these; where one is {}, all that was kept is back.
    """
    groups, phrases = [], []
    for group, before, (first, now, has_trained) in zip(kept, chain(then, repeat({})), _known(optimizer), strict=False):
        own = plain(now)
        told = bool(before and first)
        scripts = {key for key in own if has_trained or (told and not _is_same(before.get(key, _NONE), own[key]))}
        gone = {key for key in group.keys() - now.keys() if has_trained or key in before}
        if "lr" in scripts:
            gone |= group.keys() - now.keys()  # notes of a schedule, of the rate that it began with
        here = {key: untensored(value) for key, value in now.items() if key != "params"}
        back = {key: value for key, value in group.items() if key not in {*scripts, *gone, "param_names"}}
        groups.append(_as_before({**here, **back}, now))
        phrases += [
            f"{key} {_shown(own[key])} of the script, in place of the checkpoint's {_shown(group[key])}"
            for key in own
            if key in scripts and key in group and not _is_same(group[key], own[key])
        ]
    phrases = list(dict.fromkeys(phrases))  # most groups differ in the same way
    more = [f"{len(phrases) - NAMED_MAX} more"] if len(phrases) > NAMED_MAX else []
    return [*groups, *kept[len(groups) :]], "; ".join(phrases[:NAMED_MAX] + more)


def untensored(value: Any) -> Any:
    """A learning rate may be a tensor, or numpy's; JSON has numbers, which hold every float exactly."""
    one = isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return value.item() if one else value


def _as_before(group: Group, had: Group) -> Group:
    """With tensors where the optimizer has tensors of one value."""
    return {
        key: torch.full_like(old, value)
        if isinstance(old := had.get(key), torch.Tensor) and isinstance(value, int | float)
        else value
        for key, value in group.items()
    }


def _parts(optimizer: Any) -> list[Any]:
    parts: list[Any] = getattr(optimizer, "parts", [optimizer])  # of several that act as one
    return parts


def _known(optimizer: Any) -> Iterator[tuple[Group, Group, bool]]:
    """Of each group what it was at first, what it is, and whether its optimizer has trained."""
    for part in _parts(optimizer):
        # not `get`, which raises where nothing can point weakly
        at_first, has_trained = (part in _MADE and _MADE[part]) or ([], False)
        for first, group in zip(chain(at_first, repeat({})), part.param_groups, strict=False):
            yield first, group, has_trained


def plain(group: Group) -> Group:
    """The settings that JSON can hold, as it gives them back."""
    found = {}
    for key, value in group.items():
        if key not in ("params", "param_names"):
            try:
                found[key] = json.loads(json.dumps(untensored(value)))
            except (TypeError, ValueError):
                continue
    return found


def _is_same(one: Any, other: Any) -> bool:
    """Whether nobody has changed it: float32 has fewer digits, as a tensor's may be."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(map(_is_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _shown(value: Any) -> str:
    text = str(tuple(value) if isinstance(value, list) else value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."
