"""What suits a swarm's rounds? Their codec, and how many steps lie between two, by what members say and rounds cost.

How this works. Each member says how concentrated its own progress is. Where that is much, a sparse codec sends what
counts for a sixth of the bytes of one bit a value, and rounds may come twice as often. Where it is little, all values
are needed, and what one bit a value loses stays in the member's own model, where it is of more use than beside it.

A round should take no longer than the steps before it. The leader measures both, and orders as many steps before the
next round as make it so: more over a thin line, or between members that are far away.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median, median_low

from peerd.training.codecs.concentration import RecentConcentration
from peerd.training.mode_settings import QUORUM, WEIGHTS, ModeSettings

SPARSE, DENSE = "top_k_2bit", "sign"
"""What rounds go by where nobody says otherwise."""
EVERY_MIN = {SPARSE: 2, DENSE: 4}
EVERY_MAX = 64
EVERY_AT_FIRST = 2  # before there has been a round
COST_MAX = 1.0
"""Of a round beside the steps before it. Where nodes see different classes a quarter of that ends points lower."""
ROUNDS = 8  # of which the usual counts


def is_left_to_leader(settings: ModeSettings) -> bool:
    """Whether the steps between two rounds are: where nobody has said how many, and members wait for most."""
    return settings.overlap == QUORUM and not settings.every and settings.exchange == WEIGHTS


class Choice:
    """What one leader has measured."""

    def __init__(self, every: int) -> None:
        """`every`: what its predecessor ordered last; 0: nobody has."""
        self._concentration = RecentConcentration()
        self._costs: deque[float] = deque(maxlen=ROUNDS)  # seconds, from the order of a round to its commit
        self._steps: deque[float] = deque(maxlen=ROUNDS)  # seconds, of one step
        self._every = every
        self._begun_at: float | None = None
        self._committed_at: float | None = None

    def codec(self, concentrations: Iterable[float]) -> str:
        """Of the round that begins now, by what its members say; who has not moved says nothing."""
        moved = [share for share in concentrations if 0 < share <= 1]
        if moved:
            self._concentration.add(median_low(moved))
        return SPARSE if self._concentration.is_much else DENSE

    def every(self, codec: str) -> int:
        """Steps from this round to the next."""
        wanted: float = self._every
        if self._costs and self._steps:
            wanted = median(self._costs) / (COST_MAX * max(1e-9, median(self._steps)))
        self._every = max(EVERY_MIN.get(codec, EVERY_AT_FIRST), math.ceil(min(wanted, EVERY_MAX)))
        return self._every

    def begins(self, now: float, *, usual: bool) -> None:
        """A round is ordered: the steps before it have been made. `usual`: it costs what most do."""
        if self._committed_at is not None:
            self._steps.append((now - self._committed_at) / max(1, self._every))
        self._begun_at, self._committed_at = now if usual else None, None

    def committed(self, latency_s: float, now: float) -> None:
        """It has come to its end; words that began and ended it were on their way for so long."""
        if self._begun_at is not None:
            self._costs.append(now - self._begun_at + 2 * latency_s)
        self._begun_at, self._committed_at = None, now
