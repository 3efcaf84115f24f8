"""What has a checkpoint of the script beside its model and optimizer? What `attach(keep=...)` names.

Objects with `state_dict` and `load_state_dict` (a scheduler, averaged weights, a loader that knows where it is), and
dictionaries. Their states are plain data and tensors. JSON has no tuples, and no numbers as keys, so what it does not
give back as it was is an object with one entry there, by whose name it is made again. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakIdKeyDictionary

from peerd.training.model.shards import is_sharded
from peerd.transport.errors import cause

HELD_HERE = 2  # references to what only a list holds: its own, and that of who counts
PLAIN_BYTES_MAX = 4 << 20  # of all states as JSON; a manifest over its limit would be read by nobody
_SEQUENCES: dict[str, type] = {kind.__name__: kind for kind in (tuple, set, frozenset)}
_MAPS: dict[str, type] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set)}

_CAME = WeakIdKeyDictionary()
"""Objects that were kept before: what this process has made of them since is newer than any checkpoint."""
_CAME_AND_STAY: list[Any] = []  # those to which nothing can point weakly, as dictionaries


class Kept:
    """The objects, by the names that the script gives them."""

    def __init__(self, objects: Mapping[str, Any], tell: Callable[[str], None] = lambda _: None) -> None:
        """`tell` gets lines for the user. Raises ValueError: one of them cannot be kept."""
        if not isinstance(objects, Mapping) or not all(isinstance(name, str) for name in objects):
            raise ValueError('keep is no dictionary of names and objects: keep={"scheduler": scheduler}')
        self._objects = dict(objects)
        self._tell = tell
        self._told: set[str] = set()  # of which it was said that a checkpoint is without them
        for name, held in self._objects.items():
            if not isinstance(held, dict) and not _has_methods(held):
                raise ValueError(
                    f"keep: {name} is a {type(held).__name__}: neither a dictionary, nor with state_dict and "
                    "load_state_dict"
                )
            if isinstance(held, nn.Module) and _has_shards(held):
                raise ValueError(f"keep: {name} has tensors in shards, which only a model that is attached may have")
        self._states(_refuse)

    @property
    def has_schedule(self) -> bool:
        """Whether one of them is a scheduler of learning rates."""
        return any(True for held in self._objects.values() for _ in _schedules(held))

    def capture(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Their states as they are now: plain data by name, and the tensors, not copied, by names of theirs.

        Whatever cannot be kept any more is left out, and named once.
        """
        return self._states(self._leave_out)

    def _states(self, cannot: Callable[[str, Exception], None]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        plain: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        room = PLAIN_BYTES_MAX
        for name, held in self._objects.items():
            try:
                tree, inside = _state_of(name, held)
                size = len(json.dumps(tree))
                if size > room:
                    raise ValueError(f"all states together are over {PLAIN_BYTES_MAX} bytes, tensors and arrays aside")
                if taken := tensors.keys() & inside.keys():
                    raise ValueError(f"another one has a tensor of the name {min(taken)}")
            except Exception as error:  # of the object's own code, too
                cannot(name, error)
                continue
            plain[name] = tree
            tensors |= inside
            room -= size
        return plain, tensors

    def _leave_out(self, name: str, error: Exception) -> None:
        if name not in self._told:
            self._told.add(name)
            self._tell(f"checkpoints are written without {name}: {_why(error)}")

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Give back what the checkpoint of `step` has of them, but to those that this process has trained with."""
        given = []
        for name, held in self._objects.items():
            if _is_known(held):
                continue
            if name not in plain:
                self._tell(f"the checkpoint of step {step} has no {name}: it begins as the script made it")
                continue
            try:
                state = _made_again(plain[name], tensors)
                _load(held, _on_devices_of(held.state_dict() if _has_methods(held) else held, state))
                given.append(name)
            except Exception as error:
                self._tell(
                    f"{name} of the checkpoint of step {step} does not fit, and may be there in part: {_why(error)}"
                )
        if given:
            self._tell(f"from the checkpoint of step {step} also: {', '.join(given)}")

    def none_found(self, step: int) -> None:
        """No checkpoint was there to restore, though the model is of `step`: a newcomer's, or that of who died soon."""
        if anew := [name for name, held in self._objects.items() if not _is_known(held)]:
            as_made = "it begins as the script made it" if len(anew) == 1 else "they begin as the script made them"
            self._tell(f"this node has no checkpoint with {', '.join(anew)}: {as_made}, with the model of step {step}")

    def came(self) -> None:
        """Training begins: from here on they are ahead of checkpoints."""
        for at in reversed(range(len(_CAME_AND_STAY))):
            if sys.getrefcount(_CAME_AND_STAY[at]) <= HELD_HERE:  # nobody can give it again
                del _CAME_AND_STAY[at]
        for held in self._objects.values():
            if not _is_known(held):
                try:
                    _CAME[held] = True
                except TypeError:
                    _CAME_AND_STAY.append(held)


def _load(held: Any, state: Any) -> None:
    """Raises what its own code raises."""
    if not _has_methods(held):
        held.clear()
        held.update(state)
        return
    # a schedule is of the rates that it was made with: one that was changed in the script (groups.py) goes on so
    rates = [(each, each.base_lrs) for each in _schedules(held) if hasattr(each, "base_lrs")]
    held.load_state_dict(state)
    for each, made_with in rates:
        each.base_lrs = made_with


def _schedules(held: Any) -> Iterator[LRScheduler]:
    """It, if it is one, or the one that it wraps, as Accelerate does; and those that it is made of."""
    held = held if isinstance(held, LRScheduler) else getattr(held, "scheduler", None)
    if isinstance(held, LRScheduler):
        yield held
        for each in getattr(held, "_schedulers", ()):
            yield from _schedules(each)


def _has_methods(held: Any) -> bool:
    return all(callable(getattr(held, method, None)) for method in ("state_dict", "load_state_dict"))


def _has_shards(held: nn.Module) -> bool:
    """Then its state is all ranks' to ask for, and checkpoints are one's to write."""
    hides_them = any(type(module).__name__ == "FullyShardedDataParallel" for module in held.modules())
    return hides_them or any(map(is_sharded, held.parameters()))


def _is_known(held: Any) -> bool:
    return held in _CAME or any(held is one for one in _CAME_AND_STAY)


def _state_of(name: str, held: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Raises ValueError, and what its own code raises."""
    tensors: dict[str, torch.Tensor] = {}
    state = held.state_dict() if _has_methods(held) else held
    return _packed(state, f"kept.{name}", tensors), tensors


def _packed(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """As JSON holds it; tensors and arrays go to `tensors`, by where they are."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_packed(each, f"{where}.{at}", tensors) for at, each in enumerate(value)]
    if isinstance(value, torch.Tensor):
        return {"tensor": [_named(_plain(value, where), where, tensors), value.device.type]}
    if isinstance(value, np.ndarray | np.generic) and _is_told(value):
        values = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {"array": [value.dtype.str, shape, _named(values, where, tensors)]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is deque:
        return {"deque": [_packed(list(value), where, tensors), value.maxlen]}
    if kind in _SEQUENCES.values():
        return {kind.__name__: _packed(list(value), where, tensors)}
    if isinstance(value, dict):
        pairs = [
            [_packed(key, where, tensors), _packed(each, f"{where}.{key}", tensors)] for key, each in value.items()
        ]
        factory: Any = getattr(value, "default_factory", None)
        if factory in _FACTORIES.values():
            return {"defaultdict": [factory.__name__, pairs]}
        return {kind.__name__ if kind in _MAPS.values() else "dict": pairs}
    raise ValueError(f"{where.removeprefix('kept.')} is a {kind.__name__}, which no checkpoint can hold")


def _made_again(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `_packed` was given. Raises ValueError, LookupError or TypeError: it was made by nobody here."""
    if isinstance(tree, list):
        return [_made_again(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, inside),) = tree.items()
    match kind:
        case "tensor":
            name, device = [inside, "cpu"] if isinstance(inside, str) else inside  # earlier versions told no device
            return _copied_to(device, tensors[name])
        case "array":
            dtype, shape, name = inside
            array = np.ndarray(shape or (), np.dtype(dtype), tensors[name].numpy().tobytes()).copy()
            return array[()] if shape is None else array
        case "bytes":
            return base64.b64decode(inside)
        case "deque":
            return deque(_made_again(inside[0], tensors), inside[1])
        case "defaultdict":
            return defaultdict(_FACTORIES[inside[0]], _made_again(inside[1], tensors))
        case _ if kind in _SEQUENCES:
            return _SEQUENCES[kind](_made_again(inside, tensors))
        case _:
            return _MAPS[kind](dict(_made_again(inside, tensors)))


def _copied_to(device: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself would hold the file, deleted since, for as long as the script has it."""
    with suppress(Exception):  # there is no such device here, or it has no room
        return tensor.to(torch.device(device), copy=True)
    return tensor.clone()


def _on_devices_of(now: Any, state: Any) -> Any:
    """`state`, with each tensor on the device of the one in its place `now`; where there is none it stays.

    As torch.load has it: whoever takes them as they are goes on with them on the GPU.
    """
    if isinstance(state, torch.Tensor):
        return state.to(now.device) if isinstance(now, torch.Tensor) and not now.is_meta else state
    if isinstance(state, dict) and isinstance(now, Mapping):
        for key in state:
            if key in now:
                state[key] = _on_devices_of(now[key], state[key])
    elif isinstance(state, list | deque) and type(now) is type(state):
        for at, (held, each) in enumerate(zip(now, state, strict=False)):
            state[at] = _on_devices_of(held, each)
    elif type(state) is tuple and isinstance(now, tuple):
        return tuple(map(_on_devices_of, now, state)) if len(now) == len(state) else state
    return state


def _named(tensor: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> str:
    where = where.encode(errors="replace").decode()
    while where in tensors:  # the keys 1 and "1" of one dictionary
        where += "_"
    tensors[where] = tensor
    return where


def _plain(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Raises ValueError: no file can have it."""
    odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta
    # a class that dispatches holds its values in a way of its own: shards, or tensors within
    odd = odd or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if odd or not _is_savable(tensor.dtype):
        raise ValueError(f"{where.removeprefix('kept.')} is a tensor that no checkpoint can hold ({tensor.dtype})")
    return tensor.detach()


def _is_told(array: np.ndarray[Any, Any] | np.generic) -> bool:
    """Whether its type's name and its bytes are all of it: no objects, fields, mask, or another package's numbers."""
    dtype = array.dtype
    return not dtype.hasobject and np.dtype(dtype.str) == dtype and not isinstance(array, np.ma.MaskedArray)


@lru_cache(maxsize=64)
def _is_savable(dtype: torch.dtype) -> bool:
    try:
        return bool(save({"x": torch.empty(0, dtype=dtype, device="cpu")}))
    except Exception:  # of the library, which has a list of its own
        return False


def _refuse(name: str, error: Exception) -> None:
    raise ValueError(f"keep: {name} cannot be kept: {_why(error)}") from None


def _why(error: Exception) -> str:
    return next(iter(cause(error).splitlines()), "") or type(error).__name__


NOTHING = Kept({})
