"""How long does an exchange over a link take, by each codec, and how long a step? Cores: `now` comes in.

By which codec an exchange is quick depends on the line, on what else travels over it, on the partner and on both
processors. So nothing is reckoned from bytes: each codec's time is measured.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from peerd.training.codecs import CODECS
from peerd.training.codecs.vector import PIECE_VALUES
from peerd.training.mode import LinkedMode

COARSE, SPARSE = LinkedMode.CODEC, "top_k_3"
"""Between which `auto` goes back and forth."""
BY_BYTES = (COARSE, SPARSE)
TIMES = 4.0
"""The first takes at most so many times as long as the second, as it has no more times its bytes."""
KEPT = 0.7  # of what was, at each exchange: some three count
ODD = 4.0  # times what it was: one that took longer than that counts as so long (a partner was away)
OLD = 32
"""Exchanges since then: what was measured says nothing any more."""
STEPS = 8  # reports of which the usual step counts


def counts_as(codec: str) -> str:
    """Which of the two an exchange by this one is taken for: SPARSE, if it has fewer bytes than COARSE."""
    own, coarse = (CODECS[name].body_limit(PIECE_VALUES) for name in (codec, COARSE))
    return SPARSE if own < coarse else COARSE


class StepTime:
    """Of one node's steps, as its trainer tells of them."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=STEPS)
        self._last: tuple[int, float] | None = None

    def heard(self, step: int, now: float) -> None:
        """This one has just been made; some before it may not have been told of."""
        if self._last is not None and step > self._last[0]:
            self._times.append((now - self._last[1]) / (step - self._last[0]))
        self._last = step, now

    @property
    def seconds(self) -> float:
        """The usual one; infinite before any is known: then nothing takes many steps."""
        return median(self._times) if self._times else math.inf


class Durations:
    """Of the exchanges of one link, by codec."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._measured_at: dict[str, int] = {}  # the number of the exchange
        self._exchanges = 0

    def ended(self, ours: str, theirs: str, seconds: float) -> None:
        """An exchange of two halves by these codecs is over, which this end had begun so many seconds ago.

        The dearer of them has taken so long; what is none of ours says nothing.
        """
        if ours not in BY_BYTES or theirs not in BY_BYTES:
            return
        codec = min(ours, theirs, key=BY_BYTES.index)
        before = self._known(codec) or seconds
        self._exchanges += 1
        age = self._exchanges - self._measured_at[codec] if seconds < before else 1
        kept = KEPT**age  # one that is hardly tried, as it was slow, would else be slow long after its line is quick
        self._seconds[codec] = kept * before + (1 - kept) * min(seconds, ODD * before)
        self._measured_at[codec] = self._exchanges

    def of(self, codec: str) -> float:
        """Seconds, by what is known of it and of the cheaper one; 0 if that is nothing.

        What was slow once may be so no more: that shows in what the cheaper codec takes, which is used meanwhile.
        """
        seconds = self._known(codec)
        at_most = TIMES * self._known(SPARSE) if codec == COARSE else 0.0
        return min(seconds, at_most) if seconds and at_most else seconds or at_most

    def knows(self, codec: str) -> bool:
        """Whether there was an exchange by it of late."""
        return codec in self._seconds and self._exchanges - self._measured_at[codec] < OLD

    def _known(self, codec: str) -> float:
        return self._seconds[codec] if self.knows(codec) else 0.0
