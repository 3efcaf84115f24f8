"""When are gradients exchanged? At the end of each backward pass, before the script clips, unscales or steps by them.

The first gradient of a pass asks autograd for a call at its end, as torch's DistributedDataParallel does; what is there
of a large gradient before is told of meanwhile (training/model/gradient_parts.py). The exchange
is linear in what has accumulated, so several passes before one step are right with an exchange each, and cheaper with
one: `no_sync`. A script that makes gradients in a way of its own gets its exchange as the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Variable
from torch.optim import Optimizer

from peerd.trainer.optimizers import Several
from peerd.training.model.flat import FlatModel


class GradientHooks:
    """On the parameters and the optimizers of one model, until `remove`."""

    def __init__(
        self,
        flat: FlatModel,
        optimizer: Any,
        exchange: Callable[[], bool],
        begin: Callable[[], None],
        came: Callable[[torch.Tensor], None],
    ) -> None:
        """`exchange` puts the mean in place of the gradients; whether it is finite.

        Before, a pass is said to `begin`, and of each parameter that its gradient `came`.
        """
        self._begin = begin
        self._came = came
        self._exchange = exchange
        self._flat = flat
        parts = optimizer.parts if isinstance(optimizer, Several) else [optimizer]
        self._parts = [part for part in parts if isinstance(part, Optimizer)]  # not what only looks like one
        self._pass: int | None = None  # the backward pass whose end is asked for
        self._paused = 0
        self._finite = True
        self._stepped = set(map(id, self._parts))  # optimizers that have stepped since the last exchange
        self._step_hooks: list[Any] = []
        self._hooked: dict[int, tuple[torch.Tensor, Any]] = {}  # by id, which is the parameter's while kept
        self._had_gradient: set[int] = set()  # parameters, since the last exchange
        self._has_exchanged = self._has_stepped = False  # for the step that is counted next
        self._is_removed = False
        self.idle = 0
        """Steps since one of these optimizers made one; of what only looks like one nobody knows."""
        try:
            for part in self._parts:
                self._step_hooks.append(part.register_step_pre_hook(self._on_step))
            self._follow()
        except BaseException:  # the script may catch it, and train on
            self.remove()
            raise

    def after_step(self) -> None:
        """A step was made: where no gradient was exchanged for it, all parameters may have been replaced."""
        if not self._has_exchanged:
            self._follow()
        self.idle = 0 if self._has_stepped else self.idle + bool(self._parts)
        self._has_exchanged = self._has_stepped = False

    def _follow(self) -> None:
        """Be on what has taken the place of a parameter, and no longer on that one."""
        self._flat.look_again()
        parameters = {id(parameter): parameter for parameter in self._parameters}
        for gone in self._hooked.keys() - parameters.keys():
            _, hook = self._hooked.pop(gone)
            hook.remove()
            self._had_gradient.discard(gone)  # another may get this id
        for key, parameter in parameters.items():
            if key not in self._hooked and parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self._hooked[key] = parameter, hook

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [piece.held for piece in self._flat.pieces if not piece.is_buffer]

    def remove(self) -> None:
        """No further exchange."""
        for hook in [*self._step_hooks, *(hook for _, hook in self._hooked.values())]:
            hook.remove()
        self._step_hooks.clear()
        self._hooked.clear()
        self._is_removed = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulate here alone meanwhile."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._had_gradient.add(id(parameter))
        if self._paused:
            return
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self._pass = number
            Variable._execution_engine.queue_callback(self._at_end)
            self._begin()
        self._came(parameter)

    def _at_end(self) -> None:
        self._pass = None
        if self._is_removed:
            return
        if not self._had_gradient.issuperset(map(id, self._parameters)):  # unused, or replaced by another
            self._follow()
        self._had_gradient.clear()
        self._has_exchanged = True
        self._finite = self._exchange()
        self._stepped.clear()

    def _on_step(self, part: Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any] | None:
        """A closure makes the gradients within the step: what is to come after them comes after each call of it."""
        self._has_stepped = True
        within = torch._C._current_graph_task_id() >= 0  # a callback at its end is, too, after the exchange
        if within and (self._pass is not None or id(part) in self._stepped) and not self._is_private(part):
            raise SystemExit(
                "peerd: an optimizer steps within the backward pass, by a gradient that was not exchanged: step after "
                "it, or exchange weights"
            )
        closure = named.get("closure", given[1] if len(given) > 1 else None)
        if not callable(closure):
            self._before_update(part)
            return None

        def then() -> Any:
            loss = closure()
            self._before_update(part)
            return loss

        return ((given[0], then, *given[2:]), named) if len(given) > 1 else (given, {**named, "closure": then})

    def _is_private(self, part: Optimizer) -> bool:
        """Whether it steps nothing whose gradient is exchanged."""
        return self._flat.private.has_all(parameter for group in part.param_groups for parameter in group["params"])

    def _before_update(self, part: Optimizer) -> None:
        """No scaler has left this step out: what is not finite would spoil the model."""
        if id(part) in self._stepped and not self._is_private(part):
            self._at_end()
        self._stepped.add(id(part))
        if not self._finite:
            for parameter in self._parameters:
                parameter.grad = None
