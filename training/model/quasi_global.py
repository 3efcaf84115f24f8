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

import math
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
        self._parts = getattr(optimizer, "parts", [optimizer])
        for part in self._parts:
            _require_momentum(part)
        self._kept: MutableMapping[torch.Tensor, _Kept] = WeakTensorKeyDictionary()
        self._lr_max = 0.0
        self._rates: list[float] = []  # of the groups in this step: on a GPU each look at one waits
        self.idle = 0
        """Steps that the script has counted since the optimizer made one that was seen here."""
        self.begin()

    def begin(self) -> None:
        """Again, after `remove`."""
        self.idle = 0
        self._hooks = [
            hook
            for part in self._parts
            for hook in (
                part.register_step_pre_hook(self._before_step),
                part.register_step_post_hook(self._after_step),
            )
        ]

    def remove(self) -> object:
        """From now on the momentum is the optimizer's own. Returns what was kept, whose memory is its holder's."""
        for hook in self._hooks:
            hook.remove()
        kept = list(self._kept.values())
        self._kept.clear()
        return kept

    def after_step(self) -> int:
        """The script counts one; returns `idle`."""
        self.idle += 1
        return self.idle

    @torch.no_grad()
    def _before_step(self, optimizer: SGD, _: object, __: object) -> None:
        """Raises RuntimeError: the step goes into a CUDA graph, whose replays call nothing of this."""
        if _is_captured(optimizer):
            raise RuntimeError(
                "quasi_global_momentum: this step goes into a CUDA graph, whose replays would not begin anew after a "
                "rollback: step outside of it, or leave quasi_global_momentum out"
            )
        self.idle = 0
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        for group, lr in zip(optimizer.param_groups, self._rates, strict=True):
            beta = float(group["momentum"])
            self._lr_max = max(self._lr_max, lr)
            going: dict[torch.Tensor, _Kept] = {}
            for parameter in group["params"]:
                kept = self._kept.get(parameter)
                buffer = _buffer_of(optimizer, parameter)
                if kept is not None and kept.buffer is buffer:
                    going[parameter] = kept
                elif buffer is None:  # it was cleared: an older model is back
                    self._kept.pop(parameter, None)
                else:
                    self._kept[parameter] = _begun(parameter, buffer, buffer.clone(), lr)
            if going:
                self._correct(list(going), list(going.values()), lr, beta)

    def _correct(self, parameters: list[torch.Tensor], kept: list[_Kept], lr: float, beta: float) -> None:
        """Operations on all parameters at once: on a GPU one on a single parameter is done before it is launched."""
        momenta, uncorrected = [one.momentum for one in kept], [one.uncorrected for one in kept]
        corrections = [one.known for one in kept]
        torch._foreach_neg_(corrections)
        torch._foreach_add_(corrections, parameters)
        torch._foreach_add_(uncorrected, 1)
        came = torch._foreach_sign(torch._foreach_norm(corrections, ord=math.inf))  # 0 or 1
        shares = torch._foreach_reciprocal(uncorrected)
        torch._foreach_mul_(shares, max(1.0, 1 / (3 * (1 - beta))))
        torch._foreach_clamp_max_(shares, 1)
        torch._foreach_mul_(shares, came)
        torch._foreach_mul_(shares, [-(1 - beta) / self._rate_of(one) for one in kept])
        torch._foreach_mul_(corrections, shares)
        torch._foreach_add_(momenta, corrections)
        torch._foreach_mul_(uncorrected, torch._foreach_add(torch._foreach_neg(came), 1))
        if any(lr > one.lr for one in kept):
            torch._foreach_mul_(momenta, [min(1.0, one.lr / lr) for one in kept])
        torch._foreach_copy_(corrections, parameters)
        torch._foreach_copy_([one.buffer for one in kept], momenta)

    def _rate_of(self, kept: _Kept) -> float:
        """At which what was corrected counts; infinite where that is too small to tell."""
        rate = max(kept.lr, RATE_MIN * self._lr_max)
        return rate if rate > torch.finfo(torch.float32).tiny else math.inf

    @torch.no_grad()
    def _after_step(self, optimizer: SGD, _: object, __: object) -> None:
        for group, lr in zip(optimizer.param_groups, self._rates, strict=False):
            beta = float(group["momentum"])
            stepped: dict[torch.Tensor, _Kept] = {}
            for parameter in group["params"]:
                buffer = _buffer_of(optimizer, parameter)
                if parameter.grad is None or buffer is None:  # it has not stepped
                    continue
                kept = self._kept.get(parameter)
                if kept is None:  # the first step of all
                    kept = self._kept[parameter] = _begun(parameter, buffer, torch.zeros_like(buffer), lr)
                kept.lr = lr
                stepped[parameter] = kept
            if stepped:
                momenta = [kept.momentum for kept in stepped.values()]
                torch._foreach_mul_(momenta, beta)
                torch._foreach_add_(momenta, [kept.buffer for kept in stepped.values()], alpha=1 - beta)
                torch._foreach_copy_([kept.known for kept in stepped.values()], list(stepped))


def _is_captured(optimizer: SGD) -> bool:
    on_gpu = any(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"][:1])
    return on_gpu and torch.cuda.is_current_stream_capturing()


def _buffer_of(optimizer: SGD, parameter: torch.Tensor) -> torch.Tensor | None:
    """Torch's momentum of this parameter, if it has one: of values, for that of sparse gradients stays torch's."""
    buffer = optimizer.state[parameter].get("momentum_buffer") if parameter in optimizer.state else None
    return None if buffer is None or buffer.layout != torch.strided or not buffer.numel() else buffer


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
