"""By which codec is the next exchange over a link? What `auto` means, where both ends know what the other has. A core.

One bit a value is enough for most. Where it leaves two models apart, a finer codec tells what is left; a node that
waits little for its exchanges has room for several such. Where one bit a value takes many steps, what it tells is old
when it comes: then the largest values alone go, and the two exchange more often. What an exchange takes is measured,
link by link.
"""

from __future__ import annotations

from collections import Counter

from peerd.training.pairs.duration import BY_BYTES, COARSE, FINE, SPARSE, StepTime
from peerd.training.pairs.links import PairLink
from peerd.training.pairs.waiting import Waiting

FINE_WORTH = 3.2
"""Times the change for an exchange by FINE: as many as it takes bytes. Not of a node that has room for those."""
WAITS_LITTLE = 0.1
"""A node that waits for its exchanges for less than this share of its time has."""
FINE_EXCHANGES = 8
"""How many follow by FINE, there: with 4 averaged models are half as much better, with 16 they take a sixth more."""
RATE_MIN = 0.3
"""Of the largest learning rate. Below it models come together by themselves, and more bytes improve nothing."""
STEPS_MAX = 10
"""An exchange that takes more of them comes late: both ends have gone on from what it tells."""
QUICKER = 0.7
"""Of what COARSE takes: where SPARSE takes more than this, bytes are not what takes so long."""


class CodecChoice:
    """Of one node, for all its links."""

    def __init__(self, counts: Counter[str], step_time: StepTime) -> None:
        self.waits = Waiting()
        self._step_time = step_time
        self._counts = counts

    def ended(self, link: PairLink, ours: str, theirs: str, now: float) -> None:
        """An exchange over it is complete, of two halves by these codecs, which this end had begun."""
        self.waits.ended(link.began_at, now)
        link.took.ended(ours, theirs, now - link.began_at)

    def choose(self, link: PairLink, lr_ratio: float, *, left_apart: bool) -> None:
        """An exchange is over, which has perhaps left the two apart: of what follows over this link."""
        fits = not (self._is_slow(link, COARSE) or self._is_slow(link, FINE))
        keeps = self.waits.share < WAITS_LITTLE and lr_ratio > RATE_MIN
        finer = left_apart and fits
        left = FINE_EXCHANGES if finer else max(0, link.fine_left - 1)
        link.fine_left = left if keeps else int(finer)
        link.worth = FINE_WORTH if link.fine_left and not keeps else 1.0
        self._counts["left_apart"] += left_apart
        self._counts["fine_kept"] += finer and keeps
        self._counts["slow_by_one_bit"] += self.of(link) == SPARSE

    def of(self, link: PairLink) -> str:
        """The next exchange that this end begins."""
        quicker = link.took.of(SPARSE) < QUICKER * link.took.of(COARSE)
        if self._is_slow(link, COARSE) and quicker and link.took.knows(COARSE):  # else it is tried again
            return SPARSE
        return FINE if link.fine_left else COARSE

    def answer(self, link: PairLink, theirs: str) -> str:
        """Of our half of one that the other end has begun: by what it has taken, as the coarser half says how fast the
        two models mix."""
        return theirs if theirs in BY_BYTES else self.of(link)

    def _is_slow(self, link: PairLink, codec: str) -> bool:
        return link.took.of(codec) > STEPS_MAX * self._step_time.seconds
