"""The control of E10, and nothing to train with: an all-reduce that forgets what its lossy codec dropped.

peerd's own modes cannot: what a codec drops is a part of their next message (error feedback), always.
"""

from __future__ import annotations

from peerd.training.effects import Effect, StepReport
from peerd.training.modes.allreduce import AllReduce


class Forgetful(AllReduce):
    """The mode's core for one node."""

    NAME = "allreduce-forgetful"

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """Before a contribution there is a step."""
        self._lost = None
        return super().on_step(report, now)
