"""When is a model's change worth a look? A look is a full pass over the model; between two of them it is predicted.

The change since the last copy grows at most about as fast as it did so far: a random walk slows down, a straight way
keeps its speed, and a learning rate that rises is known. So the next look is due when, at the speed so far, the change
would reach the limit. The speed may have been measured on steps that are not typical: so a look is also due when the
steps since the copy have doubled, and after LOOK_EVERY times what a look takes, which finds a model that is no longer
finite. A straight way costs two looks an exchange, a random walk about the logarithm of its steps.
"""

from __future__ import annotations

import math

LOOK_EVERY = 1000
"""A look takes at most a thousandth of the time, where nothing is near."""
STEPS_UNSEEN = 8
"""Twice as many after a copy there is a look, though the speed before it foretold none: it may have stood still."""


class ChangeWatch:
    """The looks of one trainer. Steps since the copy count from 0; time is the caller's."""

    def __init__(self) -> None:
        self.change = 0.0
        """||x - x at the last copy|| at the last look."""
        self._steps = 0  # since the last copy
        self._looked_at_step = 0
        self._looked_at = -math.inf
        self._cost_s = 0.0  # of a look, the smallest so far: others had the processor's attention to share
        self._way = self._way_at_look = 0.0  # the sum of the learning rates since the copy
        self._speed: float | None = None  # change for each unit of it

    def step(self, limit: float, lr: float, now: float) -> bool:
        """One more step was made, at learning rate `lr`: whether the change is due for a look, with this limit."""
        self._steps += 1
        self._way += lr
        if now - self._looked_at >= LOOK_EVERY * self._cost_s:
            return True
        if limit == math.inf:
            return False
        if self._speed is None or self._steps >= 2 * max(self._looked_at_step, STEPS_UNSEEN):
            return True
        return self.change + self._speed * (self._way - self._way_at_look) >= limit

    def looked(self, change: float, began: float, ended: float) -> None:
        """A look found this change; it took from `began` to `ended`, in seconds."""
        self.change = change
        self._looked_at, self._looked_at_step, self._way_at_look = ended, self._steps, self._way
        if not math.isfinite(change):
            self._looked_at = -math.inf  # what was spoilt is looked at again after the next step
        cost_s = ended - began
        self._cost_s = min(self._cost_s, cost_s) if self._cost_s else cost_s
        if self._way > 0 and math.isfinite(change):
            self._speed = change / self._way

    def copied(self) -> None:
        """A copy was published: the change counts from here."""
        self.change = 0.0
        self._steps = self._looked_at_step = 0
        self._way = self._way_at_look = 0.0
