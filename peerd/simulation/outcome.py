"""What is known of a run: looks at the swarm while it went, its figures, and when a target was reached."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from peerd.training.plain_numbers import number
from peerd.transport.errors import UserError


@dataclass(frozen=True, slots=True)
class Sample:
    """The swarm at one moment."""

    at: float  # virtual seconds
    loss: float  # of the last batches, the nodes' mean
    distance: float  # root mean square of the models from their mean, over its norm
    bytes_sent: int  # by all nodes, on all lines
    up: int
    alive: float  # in the mean view of a few nodes
    suspect: float
    failed: float
    busy: float  # share of the uplinks' time since the last look
    steps: float = 0.0  # the nodes' mean
    accuracy: float = math.nan  # of the averaged model on a part of the validation examples; nan: nobody looked
    validation_loss: float = math.nan


COLUMNS = {  # of a series, by the names of `Sample`
    "seconds": "at",
    "bytes_sent": "bytes_sent",
    "steps": "steps",
    "loss": "loss",
    "accuracy": "accuracy",
    "validation_loss": "validation_loss",
    "consensus_distance": "distance",
}


def columns(series: Sequence[Sample]) -> dict[str, list[float | None]]:
    """A list for each of COLUMNS; what is not known is None."""
    return {name: [_known(getattr(look, of)) for look in series] for name, of in COLUMNS.items()}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Target:
    """A value of the averaged model on validation examples, and which side of it is good."""

    metric: str
    value: float

    def reached(self, value: float) -> bool:
        """Whether this is as good."""
        return value >= self.value if self.metric == "accuracy" else value <= self.value

    def of(self, look: Sample) -> float:
        """Where the swarm is."""
        return look.accuracy if self.metric == "accuracy" else look.validation_loss

    def crossing(self, series: Sequence[Sample]) -> tuple[float, float] | None:
        """Virtual seconds and bytes of all nodes when it was first reached; None: it never was.

        Between the look before and the look at which it is reached, both are interpolated on a straight line.
        """
        return self.crossed((self.of(look), look.at, look.bytes_sent) for look in series)

    def crossed(self, looks: Iterable[tuple[float | None, float, float]]) -> tuple[float, float] | None:
        """The same, of looks that are a value, seconds and bytes; None and nan are no value."""
        before: tuple[float, float, float] | None = None
        for value, at, sent in looks:
            if value is None or math.isnan(value):
                continue
            if self.reached(value):
                if before is None:
                    return at, float(sent)
                part = (self.value - before[0]) / (value - before[0])
                return before[1] + part * (at - before[1]), before[2] + part * (sent - before[2])
            before = value, at, sent
        return None


def parse_target(text: str) -> Target:
    """`accuracy:0.85` or `loss:2.2`, both of the averaged model on validation examples. Raises UserError."""
    metric, _, rest = text.partition(":")
    try:
        value = number(rest)
    except ValueError:
        value = math.nan
    if metric not in ("accuracy", "loss") or not 0 < value < math.inf or (metric == "accuracy" and value > 1):
        raise UserError(f"--target {text}: wanted accuracy:SHARE with a share above 0, or loss:VALUE above 0")
    return Target(metric, value)


@dataclass(slots=True)
class Outcome:
    """What a run leaves."""

    result: dict[str, Any]
    """Figures, ready for JSON; docs/simulation.md names them."""
    series: list[Sample] = field(default_factory=list)
    """Looks, in the order of time."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How often an update was so many steps (of the node, or of a server's clock) old."""
    target: Target | None = None
    """Of the scenario."""

    def time_to(self, target: str | None = None) -> float | None:
        """Virtual seconds to `target`, the scenario's by default; None: never reached. Raises UserError."""
        crossing = self._crossing(target)
        return None if crossing is None else crossing[0]

    def bytes_to(self, target: str | None = None) -> float | None:
        """Bytes that all nodes had sent by then; None: never reached. Raises UserError."""
        crossing = self._crossing(target)
        return None if crossing is None else crossing[1]

    def _crossing(self, text: str | None) -> tuple[float, float] | None:
        target = self.target if text is None else parse_target(text)
        if target is None:
            raise UserError("name a target, such as accuracy:0.85: the scenario has none")
        return target.crossing(self.series)


def staleness_figures(staleness: Counter[int]) -> dict[str, Any]:
    """`mean`, `p99`, `most` and `counts`, by staleness; empty where nothing was counted."""
    total = staleness.total()
    if not total:
        return {}
    steps = sorted(staleness)
    upto = np.cumsum([staleness[step] for step in steps])
    return {
        "mean": sum(step * staleness[step] for step in steps) / total,
        "p99": steps[int(np.searchsorted(upto, 0.99 * total))],
        "most": steps[-1],
        "counts": {str(step): staleness[step] for step in steps},
    }
