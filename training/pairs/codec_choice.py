"""By which codec is the next exchange over a link? What `auto` means, where both ends know what the other has. A core.

What one bit a value leaves behind is mostly in the few values that move far more than those beside them, and what the
largest values leave is spread over all the others. So every second exchange over a link is by the largest alone, at a
quarter of the bytes, and two of three are where few values are most of what a node's steps change. Where one bit a
value takes many steps, what it tells is old when it comes: then the largest alone go, and the two exchange more often.
What an exchange takes is measured, link by link.
"""

from __future__ import annotations

from collections import Counter

from peerd.training.codecs.concentration import RecentConcentration
from peerd.training.pairs.duration import BY_BYTES, COARSE, SPARSE, StepTime
from peerd.training.pairs.link import PairLink

CYCLE, CYCLE_CONCENTRATED = 2, 3
"""Of so many exchanges over a link one is by COARSE. Of three, pictures need a seventh fewer bytes, and a transformer,
of which no few values stand out, ends a point lower; of four or more, pictures do, too (RESULTS.md)."""
SPARSE_WORTH = 0.3
"""Times the change for an exchange by SPARSE: as many as it takes bytes."""
STEPS_MAX = 10
"""An exchange that takes more of them comes late: both ends have gone on from what it tells."""
QUICKER = 0.7
"""Of what COARSE takes: where SPARSE takes more than this, bytes are not what takes so long."""


class CodecChoice:
    """Of one node, for all its links."""

    def __init__(self, counts: Counter[str], step_time: StepTime) -> None:
        self._step_time = step_time
        self._counts = counts
        self._concentration = RecentConcentration()

    def moved(self, concentration: float) -> None:
        """What this node's own steps have changed since its last exchange is so concentrated; 0: nothing has."""
        self._concentration.add(concentration)

    def ended(self, link: PairLink, ours: str, theirs: str, now: float) -> None:
        """An exchange over it is complete, of two halves by these codecs, which this end had begun."""
        link.took.ended(ours, theirs, now - link.began_at)

    def choose(self, link: PairLink) -> None:
        """An exchange is over: how much change the next one over this link waits for, and by what it is then."""
        slow = self._is_slow(link)
        cycle = CYCLE_CONCENTRATED if self._concentration.is_much else CYCLE
        link.codec = SPARSE if slow or (link.exchanges + 1) % cycle else COARSE
        link.worth = 1.0 if slow or link.codec == COARSE else SPARSE_WORTH
        self._counts["slow_by_one_bit"] += slow

    def answer(self, link: PairLink, theirs: str) -> str:
        """Of our half of one that the other end has begun: by what it has taken of these two, as the coarser half says
        how fast the two models mix."""
        return theirs if theirs in BY_BYTES else link.codec

    def _is_slow(self, link: PairLink) -> bool:
        by_one_bit = link.took.of(COARSE)
        return (
            by_one_bit > STEPS_MAX * self._step_time.seconds
            and link.took.of(SPARSE) < QUICKER * by_one_bit
            and link.took.knows(COARSE)  # else it is tried again
        )
