"""What of an optimizer must be the same on all members that step by one gradient? Its momentum, and what else it keeps.

Torch's optimizers make their state at the first step. Here it is made at once, as that step would begin with it, so
that it is a part of the flat model from the start and a newcomer takes it over with the model. The learning rates are,
too: who takes over a model in a backward pass makes the same step after it as those who had it, though its own schedule
is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from peerd.training.model.pieces import Piece

RATE_PARTS = 3  # of 24 bits each
RATE_MAX = 1e38  # beyond it the vector would hold what is not finite


class OptimizerState:
    """The state of the optimizer of some parameters, each tensor of it under a name."""

    def __init__(self, optimizer: Any, pieces: Iterable[Piece]) -> None:
        """Raises ValueError: an optimizer whose state peerd does not know."""
        self._parts = getattr(optimizer, "parts", [optimizer])  # of several that act as one
        stepped = ((piece, piece.held if piece.master is None else piece.master) for piece in pieces)
        self._names = {id(tensor): piece.name for piece, tensor in stepped if not piece.is_buffer}
        for part in self._parts:
            _require_known(part)
        of_these = len(self._groups)  # the groups that there are at first
        self._rates = torch.empty(of_these, RATE_PARTS, dtype=torch.float32, device="cpu")
        self._own: list[tuple[Any, dict[str, Any], float, float]] = []  # part, group, its rate, and that of one step
        self._gives_back = False  # after each step

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        """Made where they are missing; the same names in the same order for the same optimizer of the same model."""
        rates = _in_parts([float(group["lr"]) for _, group in self._groups[: len(self._rates)]])
        self._rates[: len(rates)] = rates  # a script may have taken groups away
        found = {"optimizer.lr": self._rates}
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

    @property
    def _groups(self) -> list[tuple[Any, dict[str, Any]]]:
        """Each with the optimizer that it is of: as they are now, for a checkpoint that is loaded replaces them."""
        return [(part, group) for part in self._parts for group in part.param_groups]

    def take_rates(self) -> None:
        """Step once by the learning rates that have been written to their tensor.

        Groups without a schedule keep them. A schedule of torch may multiply what it finds, from its own first step on:
        it finds what it has left.
        """
        self.give_back()
        if not self._gives_back:
            self._gives_back = True
            for part in self._parts:
                part.register_step_post_hook(lambda stepped, *_: self.give_back(stepped))
        for (part, group), taken in zip(self._groups, self._rates.double().sum(1).tolist(), strict=False):
            own = float(group["lr"])
            _put_rate(group, taken)
            if "initial_lr" in group:
                # as it is held: float32, as a tensor's may be, has fewer digits than what was taken
                self._own.append((part, group, own, float(group["lr"])))

    def give_back(self, stepped: Any = None) -> None:
        """To the groups of the optimizer that has stepped, or all: their own rates, where they have no newer ones."""
        for part, group, rate, taken in self._own:
            if stepped in (None, part) and float(group["lr"]) == taken:
                _put_rate(group, rate)
        self._own = [one for one in self._own if stepped not in (None, one[0])]


@torch.no_grad()
def _put_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _in_parts(rates: list[float]) -> torch.Tensor:
    """As float32 values whose sum each is, shape (rates, RATE_PARTS): to the bit, for a rate is a float64."""
    left = torch.tensor(rates, dtype=torch.float64, device="cpu").nan_to_num(nan=0.0).clamp(-RATE_MAX, RATE_MAX)
    parts = []
    for _ in range(RATE_PARTS):
        parts.append(left.float())
        left = left - parts[-1].double()
    return torch.stack(parts, 1)


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
