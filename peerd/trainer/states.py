"""How is a model's state asked for, and given back, where its class does both in a way of its own?

People write `def state_dict(self)`, without torch's options, and a `load_state_dict` that returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn

from peerd.training.model.shards import is_sharded
from peerd.transport.errors import cause


def require_state(model: nn.Module) -> None:
    """Raises ValueError: it has none, so no checkpoint can be made of it."""
    try:
        state = model.state_dict()
    except Exception as error:
        why = next(iter(cause(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"the model's state_dict fails ({why}): let it take what torch's takes, state_dict(self, *args, **named)"
        ) from None
    if not isinstance(state, Mapping):
        raise ValueError(f"the model's state_dict gives a {type(state).__name__}: let it give tensors by name")


def tensors_held(model: nn.Module) -> dict[str, Any]:
    """Its state, with parameters and buffers as the objects that the model holds."""
    if _takes(model.state_dict, keep_vars=True):
        return dict(model.state_dict(keep_vars=True))
    held = {_place(tensor): tensor for tensor in [*model.parameters(), *model.buffers()] if not is_sharded(tensor)}
    return {
        name: held.get(_place(value), value) if isinstance(value, torch.Tensor) and not is_sharded(value) else value
        for name, value in model.state_dict().items()
    }


def load(model: nn.Module, state: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Load what there is of it; returns which names it lacks, and which ones the model has not, as far as it tells.

    `there` is the model's state, for one that takes nothing but all of it. Raises what the model raises.
    """
    if _takes(model.load_state_dict, state, strict=False):
        told = model.load_state_dict(state, strict=False)
    else:
        told = model.load_state_dict({**there, **state})
    return (list(told[0]), list(told[1])) if isinstance(told, tuple) and len(told) == 2 else ([], [])


def _takes(method: Callable[..., Any], *given: Any, **named: Any) -> bool:
    try:
        signature(method).bind(*given, **named)
    except TypeError:
        return False
    return True


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a parameter and its detached self have in common, and no other tensor that has values."""
    where = tensor.data_ptr() if tensor.layout == torch.strided and tensor.numel() else id(tensor)
    return where, tensor.dtype, tensor.shape, tensor.stride() if tensor.layout == torch.strided else ()
