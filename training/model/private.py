"""What does a rollback put back beside the shared model? What is trained or counted on this node alone.

That is private parameters and float buffers, and what else the optimizer steps. A bad batch spoils them with the rest.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from peerd.training.model.pieces import Piece, is_computable
from peerd.training.model.shards import shard_of

Tensors = Mapping[str, torch.Tensor]

_STEPPED = "stepped "  # before what is not the model's: no name of a tensor has a space

_LET_GO = WeakIdKeyDictionary()
"""Tensors that were private in a training of this process that is over: what they are now is newer than a checkpoint's.
"""


class Private:
    """Of one model; it costs nothing where there is nothing."""

    def __init__(
        self, optimizer: Any, names: Collection[str], pieces: Iterable[Piece], parameters: Tensors, buffers: Tensors
    ) -> None:
        """`names` are those of private tensors, `pieces` what is shared; for the others see `follow`."""
        self._optimizer, self._names = optimizer, names
        self._shared = {id(tensor) for piece in pieces for tensor in (piece.held, piece.master)}
        self.follow(parameters, buffers)
        # with the tensor itself, whose id no other gets meanwhile
        self._copies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._none_of = -1  # of so many tensors that are stepped none is private: each step asks
        self._odd = {
            name for name, tensor in self._tensors.items() if not bool(self._counted(name, tensor).isfinite().all())
        }

    def follow(self, parameters: Tensors, buffers: Tensors) -> None:
        """The model has these now, by name."""
        self._parameters, self._buffers = parameters, buffers

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The model's, in one order on all ranks: what of them is in this process, to be written."""
        return [tensor for name, tensor in self._tensors.items() if not name.startswith(_STEPPED)]

    def let_go(self) -> None:
        """The training is over: from now on they are the script's, should it attach again."""
        for tensor in self._own:
            _LET_GO[tensor] = True

    @property
    def newer(self) -> list[torch.Tensor]:
        """Those that a checkpoint, of a training of this process before, would take back."""
        return [one for one in self._own if one in _LET_GO and bool(one.isfinite().all())]

    @property
    def _own(self) -> list[torch.Tensor]:
        named = {**self._parameters, **self._buffers}
        own = [named[name] for name in self._names if name in named]
        return [one for one in own if not is_lazy(one) and is_computable(one)]

    def has_all(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all of these are the model's, and private."""
        own = {id(one) for name, one in self._parameters.items() if name in self._names}
        return all(id(parameter) in own for parameter in parameters)

    @torch.no_grad()
    def keep(self) -> None:
        """They are what to go back to."""
        tensors = self._restorable
        for gone in self._copies.keys() - tensors.keys():
            del self._copies[gone]
        for name, tensor in tensors.items():
            _, copy = self._copies.get(name, (None, None))
            like = tensor.shape, tensor.dtype, tensor.device
            if copy is None or (copy.shape, copy.dtype, copy.device) != like:
                copy = tensor.clone()
            self._copies[name] = tensor, copy.copy_(tensor)

    @torch.no_grad()
    def restore(self) -> None:
        """Be as at the last `keep`."""
        for name, tensor in self._restorable.items():
            _, copy = self._copies.get(name, (None, None))
            if copy is not None and copy.shape == tensor.shape:
                tensor.copy_(copy)

    def peaks(self) -> list[torch.Tensor]:
        """The largest magnitude in each, where it is."""
        if not (tensors := self._restorable):
            return []
        with torch.no_grad():
            return [
                torch.linalg.vector_norm(self._counted(name, tensor), ord=math.inf)
                for name, tensor in tensors.items()
                if tensor.numel()
            ]

    def _counted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What of it must be finite. Buffers, such as masks, may hold infinities."""
        return tensor.nan_to_num(nan=math.nan, posinf=0.0, neginf=0.0) if name in self._buffers else tensor

    @property
    def _restorable(self) -> dict[str, torch.Tensor]:
        """Without those that were not finite when the trainer attached, such as masks."""
        return {name: tensor for name, tensor in self._tensors.items() if name not in self._odd}

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """As they are now: by name, and by themselves what the optimizer has beside the model."""
        groups = getattr(self._optimizer, "param_groups", None) or []
        if (count := sum(len(group["params"]) for group in groups)) == self._none_of:
            return {}
        stepped = [tensor for group in groups for tensor in group["params"]]
        if not self._names and self._shared.issuperset(map(id, stepped)):
            self._none_of = count
            return {}
        trained = {name: one for name, one in self._parameters.items() if one.requires_grad}
        found = {name: one for name, one in {**trained, **self._buffers}.items() if name in self._names}
        known = self._shared | set(map(id, self._parameters.values()))
        found |= {f"{_STEPPED}{id(tensor)}": tensor for tensor in stepped if id(tensor) not in known}
        return {name: shard_of(one) for name, one in found.items() if not is_lazy(one) and is_computable(one)}
