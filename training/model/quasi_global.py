"""Momentum along the way that the swarm goes: quasi-global momentum (Lin et al. 2021, arXiv:2102.04761, QG-DSGDm).

A node's own momentum sums up about 1 / (1 - beta) of its gradients, and so what is peculiar to its data; each exchange
undoes what that has done to the model, not what it will do. Here the momentum is the mean of how the model really
moved, corrections from others included. A step of node i, with w_ij what its exchanges take of node j's model:

    m = beta * m_hat + g                                  g with the weight decay in it
    x_after = sum_j w_ij (x_j - lr_j * m_j)
    m_hat = beta * m_hat + (1 - beta) * (x - x_after) / lr = beta * m_hat + (1 - beta) * (m - correction / lr)

Torch's SGD makes m and the step; m_hat takes its place before the next one, when the corrections have come. It costs
nothing on the wire, and two tensors more of a parameter's size each. Three things are not the paper's, whose nodes
exchange at each step, at one rate:

- A correction that undoes what more than 1 / (3 (1 - beta)) steps have done (and more than one) counts as that of so
  many. All of it is followed by up to nine times as much, and nodes that exchange each tenth step would fly apart.
- Where the rate rises, m_hat keeps what it moves, not what it is: what was corrected at a tiny rate would come again as
  many times as large.
- For the same reason a rate below a hundredth of the largest counts as that for corrections.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD
from torch.utils.weak import WeakTensorKeyDictionary

RATE_MIN = 0.01  # of the largest
_PLAIN = (torch.float32, torch.float64)


@dataclass(slots=True)
class _Kept:
    """Of one parameter between two steps; the first three tensors have its shape."""

    buffer: torch.Tensor  # torch's momentum: another one was loaded, or begun
    momentum: torch.Tensor  # m_hat, without the corrections since `known`
    known: torch.Tensor  # the parameter, when they were last looked at
    lr: float  # of its last step
    uncorrected: torch.Tensor  # steps since the last correction, 0-dimensional: on a GPU nobody waits for it


class QuasiGlobalMomentum:
    """Puts quasi-global momentum in place of SGD's own, until `remove`."""

    def __init__(self, optimizer: Any) -> None:
        """`optimizer` may be several that act as one. Raises ValueError for one whose momentum cannot be this."""
        parts = getattr(optimizer, "parts", [optimizer])
        for part in parts:
            _require_momentum(part)
        self._kept: MutableMapping[torch.Tensor, _Kept] = WeakTensorKeyDictionary()
        self._lr_max = 0.0
        self._hooks = [
            hook
            for part in parts
            for hook in (
                part.register_step_pre_hook(self._before_step),
                part.register_step_post_hook(self._after_step),
            )
        ]

    def remove(self) -> None:
        """From now on the momentum is the optimizer's own."""
        for hook in self._hooks:
            hook.remove()
        self._kept.clear()

    @torch.no_grad()
    def _before_step(self, optimizer: SGD, _: object, __: object) -> None:
        for group in optimizer.param_groups:
            lr, beta = float(group["lr"]), float(group["momentum"])
            self._lr_max = max(self._lr_max, lr)
            for parameter in group["params"]:
                kept = self._kept.get(parameter)
                buffer = _buffer_of(optimizer, parameter)
                if kept is not None and kept.buffer is buffer:
                    self._correct(kept, parameter, lr, beta)
                elif buffer is None:  # it was cleared: an older model is back
                    self._kept.pop(parameter, None)
                else:
                    self._kept[parameter] = _begun(parameter, buffer, buffer.clone(), lr)

    def _correct(self, kept: _Kept, parameter: torch.Tensor, lr: float, beta: float) -> None:
        correction = kept.known.neg_().add_(parameter)
        kept.uncorrected += 1
        came = (correction != 0).any()
        if (rate := max(kept.lr, RATE_MIN * self._lr_max)) > torch.finfo(torch.float32).tiny:
            share = (max(1.0, 1 / (3 * (1 - beta))) / kept.uncorrected).clamp(max=1)
            kept.momentum -= correction * (came * share * ((1 - beta) / rate))
        kept.uncorrected *= ~came
        if lr > kept.lr:
            kept.momentum *= kept.lr / lr
        kept.known.copy_(parameter)
        kept.buffer.copy_(kept.momentum)

    @torch.no_grad()
    def _after_step(self, optimizer: SGD, _: object, __: object) -> None:
        for group in optimizer.param_groups:
            lr, beta = float(group["lr"]), float(group["momentum"])
            for parameter in group["params"]:
                buffer = _buffer_of(optimizer, parameter)
                if parameter.grad is None or buffer is None:  # it has not stepped
                    continue
                kept = self._kept.get(parameter)
                if kept is None:  # the first step of all
                    kept = self._kept[parameter] = _begun(parameter, buffer, torch.zeros_like(buffer), lr)
                kept.momentum.mul_(beta).add_(buffer, alpha=1 - beta)
                kept.known.copy_(parameter)
                kept.lr = lr


def _buffer_of(optimizer: SGD, parameter: torch.Tensor) -> torch.Tensor | None:
    """Torch's momentum of this parameter, if it has one. That of sparse gradients is sparse, and stays torch's."""
    buffer = optimizer.state[parameter].get("momentum_buffer") if parameter in optimizer.state else None
    return None if buffer is None or buffer.layout != torch.strided else buffer


def _begun(parameter: torch.Tensor, buffer: torch.Tensor, momentum: torch.Tensor, lr: float) -> _Kept:
    """As if it had always stepped so: what was corrected before is not known."""
    return _Kept(buffer, momentum, parameter.detach().clone(), lr, buffer.new_zeros(()))


def _require_momentum(part: Any) -> None:
    if type(part) is not SGD:
        raise ValueError(f"quasi_global_momentum needs torch.optim.SGD, not {type(part).__name__}: leave it out")
    for group in part.param_groups:
        if not group["momentum"] or group["dampening"]:
            raise ValueError("quasi_global_momentum needs SGD with a momentum above 0, and dampening 0, in every group")
        if odd := [p for p in group["params"] if p.dtype not in _PLAIN]:
            name = str(odd[0].dtype).removeprefix("torch.")
            raise ValueError(f"quasi_global_momentum needs float32 or float64 parameters; one of these is {name}")
