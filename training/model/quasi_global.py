"""Momentum along the way that the swarm goes: quasi-global momentum (Lin et al. 2021, arXiv:2102.04761, QG-DSGDm).

A node's own momentum sums up ten of its gradients, and so ten times what is peculiar to its data; each exchange undoes
what that has done to the model, not what it will do. Here the momentum is the mean of how the model really moved,
corrections from others included. A step t of a node, with W x what its exchanges make of x, per parameter:

    m = beta * m_hat + g                                  g with the weight decay in it
    x_after = W (x - lr * m)
    m_hat = beta * m_hat + (1 - beta) * (x - x_after) / lr

Torch's SGD does the first line and x - lr * m; the rest is done as its next step begins, of what has become of the
parameters by then. It costs nothing on the wire, and two tensors more of a parameter's size each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD

_PLAIN = (torch.float32, torch.float64)


@dataclass(slots=True)
class _Kept:
    """Of one parameter."""

    momentum: torch.Tensor  # m_hat
    before: torch.Tensor  # the parameter, as its last step began
    lr: float  # of that step


class QuasiGlobalMomentum:
    """What an optimizer's momentum is, until `remove`."""

    def __init__(self, optimizer: Any) -> None:
        """`optimizer` may be several that act as one. Raises ValueError for one whose momentum cannot be this."""
        parts = getattr(optimizer, "parts", [optimizer])
        for part in parts:
            _require_momentum(part)
        self._kept: dict[torch.Tensor, _Kept] = {}
        self._hooks = [part.register_step_pre_hook(self._before_step) for part in parts]

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
                if parameter.grad is not None:  # else there is no step
                    self._look(parameter, optimizer.state[parameter].get("momentum_buffer"), lr, beta)

    def _look(self, parameter: torch.Tensor, buffer: torch.Tensor | None, lr: float, beta: float) -> None:
        kept = self._kept.get(parameter)
        if kept is None or buffer is None:  # its first step, or the first since its state was cleared
            start = torch.zeros_like(parameter) if buffer is None else buffer.clone()
            self._kept[parameter] = _Kept(start, parameter.detach().clone(), lr)
            return
        if kept.lr > 0:
            kept.momentum.mul_(beta).add_(kept.before.sub_(parameter), alpha=(1 - beta) / kept.lr)
            buffer.copy_(kept.momentum)
        else:
            kept.momentum.copy_(buffer)
        kept.before.copy_(parameter)
        kept.lr = lr


def _require_momentum(part: Any) -> None:
    if type(part) is not SGD:
        raise ValueError(f"quasi-global momentum is of torch's SGD, not of {type(part).__name__}")
    for group in part.param_groups:
        if not group["momentum"] or group["dampening"]:
            raise ValueError("quasi-global momentum needs SGD with a momentum and without dampening, in all groups")
        if low := [p for p in group["params"] if p.dtype not in _PLAIN]:
            name = str(low[0].dtype).removeprefix("torch.")
            raise ValueError(f"quasi-global momentum needs parameters in float32, which {name} loses small steps of")
