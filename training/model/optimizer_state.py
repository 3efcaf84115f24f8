"""What of an optimizer must be the same on all members that step by one gradient? Its momentum, and what else it keeps.

Torch's optimizers make their state at the first step. Here it is made at once, as that step would begin with it, so
that it is a part of the flat model from the start and a newcomer takes it over with the model. The learning rates are,
too: who takes over a model in a backward pass makes the same step after it as those who had it, by a schedule that it
has not come to yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from peerd.training.model.pieces import Piece

RATE_PARTS = 3  # of 24 bits each


class OptimizerState:
    """The state of the optimizer of some parameters, each tensor of it under a name."""

    def __init__(self, optimizer: Any, pieces: Iterable[Piece]) -> None:
        """Raises ValueError: an optimizer whose state peerd does not know."""
        self._parts = getattr(optimizer, "parts", [optimizer])  # of several that act as one
        stepped = ((piece, piece.held if piece.master is None else piece.master) for piece in pieces)
        self._names = {id(tensor): piece.name for piece, tensor in stepped if not piece.is_buffer}
        for part in self._parts:
            _require_known(part)
        self._rates: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        """Made where they are missing; the same names in the same order for the same optimizer of the same model."""
        found = {}
        for key, group in self._groups():
            rate = self._rates.setdefault(key, torch.empty(RATE_PARTS))
            rate.copy_(_in_parts(float(group["lr"])))
            found[key] = rate
        for part in self._parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    name = self._names.get(id(parameter))
                    if name is None:
                        continue
                    state = part.state[parameter]
                    for key, make in _kept(part, group, parameter):
                        if not isinstance(state.get(key), torch.Tensor):
                            state[key] = make()
                        found[f"optimizer.{name}.{key}"] = state[key]
        return found

    def take_rates(self) -> None:
        """Step by the learning rates that have been written to their tensors."""
        for name, group in self._groups():
            rate = float(self._rates[name].double().sum())
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, group in enumerate(group for part in self._parts for group in part.param_groups):
            yield f"optimizer.lr.{number}", group


def _in_parts(rate: float) -> torch.Tensor:
    """As float32 values whose sum it is, to the bit, for a rate is a float64."""
    parts = torch.zeros(RATE_PARTS)
    for index in range(RATE_PARTS):
        parts[index] = rate
        rate -= float(parts[index])
    return parts


def _require_known(part: Any) -> None:
    name = type(part).__name__
    if type(part) not in (SGD, Adam, AdamW):
        raise ValueError(
            f"gradients are exchanged with torch's SGD, Adam or AdamW, not with {name}: start with weights"
        )
    if any(group.get("dampening", 0) for group in part.param_groups):
        raise ValueError("gradients are not exchanged with SGD's dampening, whose first step is another: leave it out")


def _kept(
    part: Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Each name, and what makes that with which the first step would begin."""
    zeros = partial(torch.zeros_like, parameter, memory_format=torch.preserve_format)
    if isinstance(part, SGD):
        if group["momentum"]:
            yield "momentum_buffer", zeros
        return
    on_device = group["capturable"] or group["fused"]
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not group["fused"] else torch.float32
    yield "step", partial(torch.zeros, (), dtype=dtype, device=parameter.device if on_device else "cpu")
    for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
        yield key, zeros
