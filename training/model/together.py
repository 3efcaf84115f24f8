"""How do several models go as one? And one model under the names that no wrapper changes?

A GAN's two models are one to the swarm: they are published, corrected and saved together. Names get each model's own
prefix, its key or its place in the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from peerd.training.model.names import UNNAMED, plain_keys, walk

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


def one_model(models: Models) -> nn.Module:
    """One module for all that peerd does with it: names, states, modules. Raises ValueError for what is no model."""
    if isinstance(models, nn.Module):
        wrapped = any(prefix != plain for prefix, plain, _ in walk(models))
        return Together({UNNAMED: models}) if wrapped else models
    named = _named(models)
    for name, model in named.items():
        if not isinstance(model, nn.Module):
            raise ValueError(f"model {name} is a {type(model).__name__}, not a torch.nn.Module")
    return Together(named)


def _named(several: Any) -> dict[str, Any]:
    if not isinstance(several, Iterable):
        what = several.__name__ if isinstance(several, type) else type(several).__name__
        raise ValueError(f"{what} is no model: give a torch.nn.Module, or several in a list or by name")
    named = dict(several) if isinstance(several, Mapping) else {str(at): one for at, one in enumerate(several)}
    if not named:
        raise ValueError("there is no model: the list is empty")
    for name in named:
        if not isinstance(name, str) or (not name.replace("-", "_").isidentifier() and not name.isdecimal()):
            raise ValueError(f"model {name!r}: a key is a word")
    return named


class Together(nn.Module):
    """Models by name; its states have plain names."""

    def __init__(self, named: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(named)  # add_module refuses names that a module has attributes of

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """As torch's, under the plain names."""
        plain = plain_keys(self)
        return {plain(key): value for key, value in super().state_dict(*arguments, **options).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
        """What `state_dict` gave."""
        plain, left = plain_keys(self), dict(state_dict)
        keys = [(key, plain(key)) for key in super().state_dict()]
        own = {key: left.pop(name) for key, name in keys if name in left}
        return super().load_state_dict({**own, **left}, *arguments, **options)

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch's, under the plain names."""
        plain = plain_keys(self)
        return ((plain(key), parameter) for key, parameter in super().named_parameters(*arguments, **options))

    def named_buffers(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As torch's, under the plain names."""
        plain = plain_keys(self)
        return ((plain(key), buffer) for key, buffer in super().named_buffers(*arguments, **options))
