"""When has an answer been missing for so long that what it answers is said again? As TCP decides it (RFC 6298).

A network that loses single messages tells nobody, so the mode has to notice by itself, and long before a link would
have been silent for too long. The estimate is of a whole answer: both ways, what waits in queues, and the other end's
work. One that came after a repeat says nothing (Karn's rule): which of the two was answered is not known.
"""

from __future__ import annotations

from collections import Counter

from peerd.training.trigger import SILENCE_MAX_S
from peerd.transport.ids import NodeId

WAIT_MIN_S = 1.0
"""RFC 6298's, too: a receiver that pauses shortly has not lost anything."""
DEVIATIONS = 4.0
NEW_SHARE = 1 / 8  # of the newest answer in the mean
NEW_DEVIATION_SHARE = 1 / 4


class AnswerTime:
    """The answers that one node has had; of the first it waits for as long as a link may be silent."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0
        self._repeats: Counter[NodeId] = Counter()

    def wait_s(self, peer: NodeId) -> float:
        """How long to wait for this peer; twice as long after each repeat."""
        if self._mean_s is None:
            return SILENCE_MAX_S
        wait_s = max(WAIT_MIN_S, self._mean_s + DEVIATIONS * self._deviation_s)
        return min(SILENCE_MAX_S, wait_s * 2.0 ** min(self._repeats[peer], 16))

    def repeated(self, peer: NodeId) -> None:
        """Something is said again, unanswered."""
        self._repeats[peer] += 1

    def came(self, peer: NodeId, seconds: float) -> None:
        """What was said so long ago is answered."""
        if self._repeats.pop(peer, 0):
            return
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        self._deviation_s += NEW_DEVIATION_SHARE * (abs(seconds - self._mean_s) - self._deviation_s)
        self._mean_s += NEW_SHARE * (seconds - self._mean_s)
