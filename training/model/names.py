"""What are the tensors of a model called, whatever it is wrapped in?

One model is compiled on one node, under DDP on another and plain on a third: it is the same model. So the component
that a known wrapper puts into the names of what it wraps is left out; a user's own submodule `module` keeps its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

Tensor = TypeVar("Tensor", bound=torch.Tensor)

UNNAMED = "(model)"
"""A submodule of this name adds nothing to the names of what is in it: together.py's one model."""

_WRAPS_AS = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): "_checkpoint_wrapped_module",
}
"""By the names of the classes: importing them takes seconds, and who has such a module has loaded them."""
_OBSERVER = "torch.ao.quantization.observer", "ObserverBase"


def walk(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Each module once, in the order of `named_modules`: its prefix as torch has it, its prefix here, and itself."""
    return _walk(model, "", "", set())


def _walk(module: nn.Module, prefix: str, plain: str, seen: set[int]) -> Iterator[tuple[str, str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, plain, module
    wrapped = wraps_as(module)
    for name, child in module._modules.items():
        if child is not None:
            own = "" if name in (UNNAMED, wrapped) else f"{name}."
            yield from _walk(child, f"{prefix}{name}.", plain + own, seen)


def wraps_as(module: nn.Module) -> str | None:
    """The name that a known wrapper gives the module inside; None for any other module."""
    for kind in type(module).__mro__:
        if (found := _WRAPS_AS.get((kind.__module__, kind.__name__))) is not None:
            return found
    return None


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by name, in torch's order; tied ones once."""
    return _once(
        (plain + name, parameter)
        for _, plain, module in walk(model)
        for name, parameter in module._parameters.items()
        if parameter is not None
    )


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All buffers that belong to the model, by name; those that torch would not save either do not.

    One that has two names counts twice, as a copy of the model on another device may have made it two.
    """
    return {
        plain + name: buffer
        for _, plain, module in walk(model)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def ranges_of(model: nn.Module) -> set[str]:
    """The buffers of torch's observers for quantization that say what each has seen: all but a constant."""
    return {
        plain + name
        for _, plain, module in walk(model)
        for name in module._buffers.keys()  # noqa: SIM118, a ScriptModule's is no dict
        if name != "eps" and any((kind.__module__, kind.__name__) == _OBSERVER for kind in type(module).__mro__)
    }


def _once(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def plain_keys(model: nn.Module) -> Callable[[str], str]:
    """What turns a key of the model's `state_dict()` into the name here."""
    prefixes = {prefix: plain for prefix, plain, _ in walk(model)}

    def plain_key(key: str) -> str:
        end = len(key)
        while (end := key.rfind(".", 0, end)) >= 0:
            if (plain := prefixes.get(key[: end + 1])) is not None:
                return plain + key[end + 1 :]
        return key

    return plain_key


def patterns_of(given: Any) -> tuple[str, ...]:
    """One pattern, or several. Raises ValueError for anything else."""
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(pattern, str) for pattern in found):
        raise ValueError(f'exclude={given!r}: give names of tensors, or patterns, as exclude=["head.*"]')
    return found


def matching(patterns: tuple[str, ...], names: list[str]) -> set[str]:
    """Which names are one of `patterns`, or match it as a file name would. Raises ValueError for one that has none."""
    found: set[str] = set()
    for pattern in patterns:
        chosen = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not chosen:
            known = f"{names[0]} is one" if names else "it has none"
            raise ValueError(f"exclude={pattern!r} fits no tensor of the model ({known}): write a name, or a pattern")
        found |= chosen
    return found
