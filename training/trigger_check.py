"""Is a partner worth an exchange now? Decided twice: on a bound that costs no copy, then on the exact change.

The partner is drawn ahead. What its bound still allows goes to the trainer, as the numbers of `Quiet`: a step beyond
them brings its copy with it, and on that the exact change decides. Every mode with a trigger decides so; what a partner
is, and what an exchange, is the mode's own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from peerd.training.codecs.vector import Layout
from peerd.training.effects import StepReport, Vector
from peerd.training.flush import Progress
from peerd.training.model.quiet import Quiet
from peerd.training.sample import sample_of
from peerd.training.trigger import LinkChange, Trigger, fires
from peerd.transport.ids import NodeId

REST = 1
"""Steps after a copy that bring none: a model that moves as a random walk is else copied more often for nothing, as
its bound is far above its real change."""


class PartnerState(Protocol):
    """What a mode notes of a partner."""

    anchor: Vector  # what is kept of x after the last exchange (sample.py)
    anchor_norm: float
    last_exchange: float
    moved: float  # at most ||x at the last publish - anchor||
    exchanges: int
    distance: float  # between the two models, at the last exchange
    peer: NodeId
    declined_at: float  # when it was overdue, and the trigger had no reason
    last_reason: str
    peer_finishing: bool
    flushed: bool  # it has what this node held when its run ended
    progress: Progress  # since then
    worth: float  # how many times the trigger's change an exchange waits for, by the bytes that it takes


P = TypeVar("P", bound=PartnerState)


class TriggerPolicy(Generic[P]):
    """One node's trigger, with its reasons counted, and the partner whose turn it is."""

    def __init__(self, layout: Layout, rng: random.Random, trigger: Trigger, counts: Counter[str]) -> None:
        self.began_step = 0  # when this node last began an exchange
        self.partner: P | None = None
        """Drawn for the next exchange; None: no link is free for an exchange."""
        self._rest_until = 0  # this step
        self._sample = sample_of(layout)
        self._rng = rng
        self._trigger = trigger
        self._counts = counts

    def draw(self, idle: Sequence[P]) -> None:
        """Have one of those over whose links an exchange may begin: the one drawn before, as long as that may be."""
        for partner in idle:
            if partner is self.partner:
                break
        else:
            self.partner = self._rng.choice(idle) if idle else None

    def quiet(self, report: StepReport) -> Quiet:
        """Which steps bring a copy for the partner drawn."""
        if self.partner is None:
            return Quiet()
        change, steps = self._trigger.quiet(self._link_change(self.partner, self.partner.moved, report, 0.0))
        return Quiet(change, self._rest_until, max(report.step + steps, self._rest_until + 1))

    def due(self, report: StepReport, now: float) -> P | None:
        """The partner drawn, if by its bound it may be worth the copy that has just come. Its turn is over."""
        partner, self.partner = self.partner, None
        if partner is None:
            self._counts["trigger_no_idle_link"] += 1
            return None
        self._rest_until = report.step + REST
        if self._fires(partner, partner.moved, report, now) is None:
            self._counts["trigger_quiet"] += 1
            return None
        return partner

    def reason(self, partner: P, values: Vector, report: StepReport, now: float) -> str | None:
        """Why `partner` should have the fresh copy `values`; the caller counts it when it is really sent."""
        measured = self._sample.distance(values, partner.anchor)
        # of a sample it is an estimate, and never beyond the bound
        partner.moved = measured if self._sample.is_whole else min(measured, partner.moved)
        reason = self._fires(partner, partner.moved, report, now)
        self._counts["trigger_bound_only"] += reason is None
        return reason

    def _fires(self, partner: P, change: float, report: StepReport, now: float) -> str | None:
        return fires(self._trigger, self._link_change(partner, change, report, now - partner.last_exchange))

    def _link_change(self, partner: P, change: float, report: StepReport, silence_s: float) -> LinkChange:
        return LinkChange(
            change=change,
            norm=partner.anchor_norm,
            worth=partner.worth,
            lr_ratio=report.lr_ratio,
            steps=report.step - self.began_step,
            silence_s=silence_s,
            finishing=report.finishing,
        )


def distance_from_mean(partners: Sequence[PartnerState]) -> float:
    """Root mean square distance of a model from the swarm's mean, over the model's norm, as the partners show it.

    Two independent members at distance d from their mean are sqrt(2) d apart.
    """
    met = [partner for partner in partners if partner.exchanges]
    if not met:
        return 0.0
    squares = sum(partner.distance**2 for partner in met) / len(met) / 2
    norm = max(partner.anchor_norm for partner in met)
    return float(np.sqrt(squares)) / norm if norm > 0 else 0.0
