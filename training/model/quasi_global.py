"""Momentum along the way that the swarm goes: quasi-global momentum (Lin et al. 2021, arXiv:2102.04761, QG-DSGDm).

A node's own momentum sums up about 1 / (1 - beta) of its gradients, and so what is peculiar to its data; each exchange
undoes what that has done to the model, not what it will do. Here the momentum is the mean of how the model really
moved, corrections from others included. A step of node i, with w_ij what its exchanges take of node j's model:

    m = beta * m_hat + g                                  g with the weight decay in it
    x_after = sum_j w_ij (x_j - lr_j * m_j)
    m_hat = beta * m_hat + (1 - beta) * (x - x_after) / lr = beta * m_hat + (1 - beta) * (m - correction / lr)

Torch's SGD makes m and the step; m_hat takes its place before the next one, when the corrections have come. One thing
is not the paper's: where the rate has risen since, it divides the correction. Else what was corrected at a tiny rate
would come again, as many times as large. It costs nothing on the wire, and two tensors more of a parameter's size each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD

_PLAIN = (torch.float32, torch.float64)


@dataclass(slots=True)
class _Kept:
    """Of one parameter between two steps; both tensors have its shape."""

    momentum: torch.Tensor  # m_hat, without the corrections since `known`
    known: torch.Tensor  # the parameter, when they were last looked at
    lr: float  # of its last step


class QuasiGlobalMomentum:
    """Puts quasi-global momentum in place of SGD's own, until `remove`."""

    def __init__(self, optimizer: Any) -> None:
        """`optimizer` may be several that act as one. Raises ValueError for one whose momentum cannot be this."""
        parts = getattr(optimizer, "parts", [optimizer])
        for part in parts:
            _require_momentum(part)
        self._kept: dict[torch.Tensor, _Kept] = {}
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
            for parameter in group["params"]:
                buffer = optimizer.state[parameter].get("momentum_buffer") if parameter in optimizer.state else None
                if buffer is None:  # it has not stepped since its state was cleared: an older model is back
                    self._kept.pop(parameter, None)
                elif (kept := self._kept.get(parameter)) is None:  # a resumed run: its last corrections are not known
                    self._kept[parameter] = _Kept(buffer.clone(), parameter.detach().clone(), lr)
                else:
                    if (rate := max(kept.lr, lr)) > 0:
                        kept.momentum.add_(kept.known.sub_(parameter), alpha=(1 - beta) / rate)
                    kept.known.copy_(parameter)
                    buffer.copy_(kept.momentum)

    @torch.no_grad()
    def _after_step(self, optimizer: SGD, _: object, __: object) -> None:
        for group in optimizer.param_groups:
            lr, beta = float(group["lr"]), float(group["momentum"])
            for parameter in group["params"]:
                if parameter.grad is None:  # it has not stepped
                    continue
                buffer = optimizer.state[parameter]["momentum_buffer"]
                kept = self._kept.get(parameter)
                if kept is None:  # the first step of all
                    kept = self._kept[parameter] = _Kept(torch.zeros_like(buffer), parameter.detach().clone(), lr)
                kept.momentum.mul_(beta).add_(buffer, alpha=1 - beta)
                kept.known.copy_(parameter)
                kept.lr = lr


def _require_momentum(part: Any) -> None:
    if type(part) is not SGD:
        raise ValueError(f"quasi_global_momentum needs torch.optim.SGD, not {type(part).__name__}: leave it out")
    for group in part.param_groups:
        if not group["momentum"] or group["dampening"]:
            raise ValueError("quasi_global_momentum needs SGD with a momentum above 0, and dampening 0, in every group")
        if odd := [p for p in group["params"] if p.dtype not in _PLAIN]:
            name = str(odd[0].dtype).removeprefix("torch.")
            raise ValueError(f"quasi_global_momentum needs float32 or float64 parameters; one of these is {name}")
