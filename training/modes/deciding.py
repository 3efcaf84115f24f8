"""Is a partner worth an exchange now? Decided twice: on a bound that costs no copy, then on the exact change.

Every mode with a trigger decides so; what a partner is, and what an exchange, is the mode's own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from peerd.effects import StepReport, Vector
from peerd.training.delta import Layout
from peerd.training.reference import norm_of_difference
from peerd.training.trigger import LinkChange, Trigger


class Noted(Protocol):
    """What a mode notes of a partner."""

    anchor: Vector  # x after the last exchange
    anchor_norm: float
    last_exchange: float
    moved: float  # at most ||x at the last publish - anchor||
    exchanges: int
    distance: float  # between the two models, at the last exchange


Partner = TypeVar("Partner", bound=Noted)


class Decider:
    """One node's trigger, with its reasons counted."""

    def __init__(self, layout: Layout, rng: random.Random, trigger: Trigger, counts: Counter[str]) -> None:
        self.began_step = 0  # when this node last began an exchange
        self._layout = layout
        self._rng = rng
        self._trigger = trigger
        self._counts = counts

    def draw(self, idle: Sequence[Partner], report: StepReport, now: float) -> Partner | None:
        """One of those over whose links an exchange may begin, if a fresh copy of the model is worth asking for."""
        if not idle:
            self._counts["trigger_no_idle_link"] += 1
            return None
        partner = self._rng.choice(idle)
        if self._fires(partner, partner.moved + report.change, report, now) is None:
            self._counts["trigger_quiet"] += 1
            return None
        return partner

    def reason(self, partner: Noted, values: Vector, report: StepReport, now: float) -> str | None:
        """Why `partner` should have the fresh copy `values`; the caller counts it when it is really sent."""
        parameters = self._layout.parameters
        partner.moved = norm_of_difference(values[:parameters], partner.anchor[:parameters])
        reason = self._fires(partner, partner.moved, report, now)
        self._counts["trigger_bound_only"] += reason is None
        return reason

    def _fires(self, partner: Noted, change: float, report: StepReport, now: float) -> str | None:
        return self._trigger.fires(
            LinkChange(
                change=change,
                norm=partner.anchor_norm,
                lr_ratio=report.lr_ratio,
                steps=report.step - self.began_step,
                silence_s=now - partner.last_exchange,
                finishing=report.finishing,
            )
        )


def distance_from_mean(partners: Sequence[Noted]) -> float:
    """Root mean square distance of a model from the swarm's mean, over the model's norm, as the partners show it.

    Two independent members at distance d from their mean are sqrt(2) d apart.
    """
    met = [partner for partner in partners if partner.exchanges]
    if not met:
        return 0.0
    squares = sum(partner.distance**2 for partner in met) / len(met) / 2
    norm = max(partner.anchor_norm for partner in met)
    return float(np.sqrt(squares)) / norm if norm > 0 else 0.0
