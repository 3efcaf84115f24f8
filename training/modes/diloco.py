"""Many local steps, then one outer step: DiLoCo (Douillard et al. 2023, arXiv:2311.08105).

The rounds are all-reduce's. The outer gradient is the last agreed model less the mean of the contributions, and goes
through Nesterov momentum; all members hold the same agreed model and momentum, so the outer step is theirs alone.
The first round of a swarm, and one with a member that was away or is new, averages whole models instead and begins the
momentum anew: only then do all have the same again. A round comes every 50 steps unless `every` is set above 1.
"""

from __future__ import annotations

import numpy as np

from peerd.effects import Vector
from peerd.training.modes.allreduce import AllReduce

OUTER_LR = 0.7  # the paper's
OUTER_MOMENTUM = 0.9


class DiLoCo(AllReduce):
    """The mode's core for one node."""

    EVERY = 50
    DIFFERENCES = True
    _momentum: Vector | None = None

    def _agree(self, mean: Vector, *, whole: bool) -> Vector:
        """The outer step."""
        if whole or self._agreed is None:
            self._momentum = None
            return super()._agree(mean, whole=whole)
        gradient = np.negative(mean)
        if self._momentum is None:
            self._momentum = np.zeros_like(mean)
        self._momentum *= OUTER_MOMENTUM
        self._momentum += gradient
        agreed: Vector = self._agreed - OUTER_LR * (gradient + OUTER_MOMENTUM * self._momentum)
        return agreed
