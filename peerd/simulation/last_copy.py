"""What does a node know of its model between two copies? The last one, every correction since, and who moved it.

Own steps and what others made of the model are kept apart, each by the weight that the model had then, so that a run
can say how far exchanges have moved the mean of a swarm.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from peerd.simulation.problems import Learner
from peerd.training.effects import Vector


class LearnersModel:
    """The learner's last copy and all corrections since: what production shares between trainer and daemon."""

    def __init__(self, learner: Learner, weight: Callable[[], float]) -> None:
        """`weight`: that of the model in what the swarm keeps, of modes that do."""
        self.step = 0
        self.kept = learner.publish()
        self.put_in = self.kept.astype(np.float64)  # to the swarm's sum: the start, and own steps by their weight
        self._weight = weight
        self.gradient: Vector = np.empty(0, self.kept.dtype)
        self._learner = learner
        self._lent = np.empty_like(self.kept)

    def values(self) -> Vector:
        """See `Model`."""
        np.copyto(self._lent, self.kept)
        return self._lent

    def look(self) -> Vector:
        """See `Model`."""
        values = self.kept.view()
        values.flags.writeable = False
        return values

    def spares(self) -> list[Vector]:
        """See `Model`; nothing is shared."""
        return []

    def add(self, correction: Vector) -> None:
        """See `Model`."""
        self.kept += correction

    def published(self, copy: int, step: int, *, apart: bool) -> None:
        """See `Model`; there is one copy."""
        self.keep(self._learner.publish(), step)

    def keep(self, values: Vector, step: int) -> None:
        """`values` has every correction, and own steps that the last copy had not."""
        self.put_in += self._weight() * (values - self.kept)
        self.kept, self.step = values, step

    def received(self) -> Vector:
        """What others have put into w x, and taken out of it."""
        return self._weight() * self.kept - self.put_in

    def load(self, values: Vector, step: int) -> int:
        """See `Model`."""
        self._learner.load(values)
        self.kept, self.step = self._learner.publish(), step
        return 0
