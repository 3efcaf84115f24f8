"""What is an experiment? A claim, criteria that are written down before the run, cells, and what came of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from peerd.reproduce.statistics import Estimate

Result = dict[str, Any]
"""What one cell measured: numbers, texts and lists of them, as JSON has them."""


class Size(StrEnum):
    """How much of an experiment is run."""

    TINY = "tiny"  # seconds, for tests: the figures mean nothing
    QUICK = "quick"  # some seconds to two minutes: few seeds and short trainings
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: a scenario, a seed, and a tag by which its result is found and shown."""

    tag: str
    seed: int
    settings: Mapping[str, Any]  # of JSON's types


@dataclass(frozen=True, slots=True)
class Criterion:
    """What the figure `key` must be; said before the run."""

    key: str
    text: str
    least: float = -math.inf
    most: float = math.inf

    @property
    def bound(self) -> str:
        """In words."""
        parts = [("at least", self.least, -math.inf), ("at most", self.most, math.inf)]
        return ", ".join(f"{word} {value:g}" for word, value, none in parts if value != none)


@dataclass(frozen=True, slots=True)
class NotRun:
    """A figure that could not be measured, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of a plot: with `low` and `high` they have error bars."""

    label: str
    across: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    line: bool = True


def points(label: str, across: Sequence[float], estimates: Sequence[Estimate], *, line: bool = True) -> Curve:
    """Means with their intervals."""
    means, low, high = ([getattr(each, name) for each in estimates] for name in ("mean", "low", "high"))
    return Curve(label, across, means, low, high, line)


@dataclass(frozen=True, slots=True)
class Plot:
    """What is drawn."""

    title: str
    across: str
    curves: Sequence[Curve]
    log_across: bool = False
    log_values: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    """What a study came to."""

    seen: str  # one sentence, for somebody who never read the paper
    figures: Mapping[str, Estimate | NotRun]  # by the criteria's keys
    plots: Sequence[Plot]
    rows: Sequence[Mapping[str, Any]] = ()  # a table, the controls in it
    notes: Sequence[str] = ()


class Verdict(StrEnum):
    """Of an experiment."""

    REPRODUCED = "REPRODUCED"
    PARTLY = "PARTLY"
    NOT_REPRODUCED = "NOT REPRODUCED"
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True, slots=True)
class Judged:
    """A criterion beside its figure; None: it was not run. `sure`: all of the interval is on the same side."""

    criterion: Criterion
    figure: Estimate | NotRun
    met: bool | None
    sure: bool


Run = Callable[[Sequence[Cell]], list[Result]]
"""Measures cells, or finds what they measured before; the results are in the cells' order."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One row of the table; a file each, registered in `EXPERIMENTS`."""

    name: str
    title: str
    paper: str
    claim: str  # one sentence, for somebody who never read the paper
    criteria: Sequence[Criterion]
    measure: Callable[[Cell], Result]
    study: Callable[[Size, Run], Findings]
    alone: bool = False  # its cells measure time: one at once
    notes: Sequence[str] = field(default=())  # which inputs are unverified, what differs from the paper


def judge(criterion: Criterion, figure: Estimate | NotRun) -> Judged:
    """By the mean; NaN meets nothing."""
    if isinstance(figure, NotRun):
        return Judged(criterion, figure, None, sure=False)
    met = criterion.least <= figure.mean <= criterion.most
    if met:
        sure = criterion.least <= figure.low and figure.high <= criterion.most
    else:
        sure = figure.high < criterion.least or figure.low > criterion.most
    return Judged(criterion, figure, met, sure)


def verdict(judged: Sequence[Judged]) -> Verdict:
    """All criteria met, some, or none; a criterion that was not run is none that was met."""
    if all(each.met is None for each in judged):
        return Verdict.NOT_RUN
    if all(each.met for each in judged):
        return Verdict.REPRODUCED
    return Verdict.PARTLY if any(each.met for each in judged) else Verdict.NOT_REPRODUCED
