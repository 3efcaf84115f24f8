"""The control of E9, and nothing to train with: HPSGD without its replica.

Workers go on during an all-reduce, as with hpsgd, but all gradients of a window are taken at the model of its
beginning: each step is taken out before the next one, and a worker's own come in with those of all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from peerd.training.effects import Effect, Resume, StepReport, Vector
from peerd.training.model.quiet import Quiet
from peerd.training.modes.allreduce import AllReduce
from peerd.training.rounds.member import Outcome


class Stale(AllReduce):
    """The mode's core for one node; its `overlap` is hpsgd."""

    NAME = "allreduce-stale"

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.barrier = 1  # the next step waits until this one is out
        self._held = self._values().copy()  # the model without this window's steps
        self._earlier = np.zeros_like(self._held)  # this window's steps but the last, taken out of the model
        self._began = False  # a window, with this step

    @property
    def quiet(self) -> Quiet:
        """Each step is taken out, so each brings a copy."""
        return Quiet(copy_step=0)

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """Take the step out of the model again, unless a window ends with it."""
        self._began = False
        effects = super().on_step(report, now)
        if report.published and not report.finishing and not self._began:
            step = self._values() - self._held
            self._earlier += step
            effects.append(self._apply(-step))
        return [*effects, Resume()]

    def end(self) -> Vector | None:
        """See `Mode`."""
        left = super().end()
        return self._earlier if left is None else left + self._earlier

    def _take(self, now: float, *, early: bool = False) -> list[Outcome]:
        outcomes = super()._take(now, early=early)
        if self._origin is not None:
            self._began = True
            outcomes.append(self._put_back())
            self._held = self._origin.copy()
        return outcomes

    def _end_run(self, now: float) -> list[Effect]:
        return [self._put_back(), *super()._end_run(now)]

    def _put_back(self) -> Effect:
        back, self._earlier = self._earlier, np.zeros_like(self._earlier)
        return self._apply(back)

    def _current(self) -> Vector:
        return super()._current() + self._earlier
