"""One exact average of all models, and nothing else: what a plan that is `once` begins with.

It is the round with which a run of all-reduce ends. Each trainer stops at its next step; a node whose trainer does not
train contributes the model that it holds. When all who live have contributed, or the leader's patience with one is at
its end, the whole models are summed in float32, and each becomes their mean, to the bit. The trainers stand still until
another mode comes, so nothing is averaged twice and nothing moves meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Effect, StepReport, Vector
from peerd.training.mode_settings import AUTO, ModeSettings
from peerd.training.modes.allreduce import AllReduce
from peerd.training.rounds.attempt import EXACT_CODEC
from peerd.training.rounds.member import Committed
from peerd.transport.ids import NodeId


class Average(AllReduce):
    """The mode's core for one node; Proceed(settled=True) says that its model is the average."""

    def __init__(
        self, me: NodeId, layout: Layout, rng: random.Random, settings: ModeSettings, values: Callable[[], Vector]
    ) -> None:
        exact = replace(settings, codec=EXACT_CODEC, overlap="blocking", every=1, min_peers=1, topology=AUTO)
        super().__init__(me, layout, rng, exact, values)

    @property
    def stands(self) -> bool:
        """Whether this member's model is its part: only others are waited for."""
        return self._rounds.finished

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """The trainer stands at the barrier, or does not train."""
        self._unapplied = None
        stands = report.stands or report.finishing
        return self._end_run(now) if stands and not self._rounds.finished else []

    def _on_committed(self, committed: Committed, now: float) -> list[Effect]:
        """Without those whom the leader did not wait for the round is not a run's last, but this mean is as exact."""
        return super()._on_committed(replace(committed, begin=replace(committed.begin, final=True)), now)
