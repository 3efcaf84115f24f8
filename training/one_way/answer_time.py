"""When has an answer been missing for so long that what it answers is said again? As TCP decides it (RFC 6298).

A network that loses single messages tells nobody, so the mode has to notice by itself, and long before a link would
have been silent for too long. The estimate is of a whole answer: both ways, what waits in queues, and the other end's
work. One that came after a repeat says nothing (Karn's rule): which of the two was answered is not known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from peerd.training.trigger import SILENCE_MAX_S
from peerd.transport.ids import NodeId

WAIT_MIN_S = 1.0
"""RFC 6298's, too: a receiver that pauses shortly has not lost anything."""
DEVIATIONS = 4.0
LOST_MAX = 3
"""Repeats in a row that chance alone explains, where answers are quick: of half of all exchanges lost, one in 16 loses
its message and these. Where they are slow, what is late may wait in a queue that each repeat makes longer."""
SURE_AFTER = 8
"""Answers: the first of them may have been lost, and told when the other end had something else to say."""
NEW_SHARE = 1 / 8  # of the newest answer in the mean
NEW_DEVIATION_SHARE = 1 / 4


class AnswerTime:
    """The answers that one node has had.

    For the first it waits as long as a link may be silent, for it may be a whole model on a slow line; at the end of a
    run it hurries, as its partners wait for it: by the quickest answer, while there are few.
    """

    def __init__(self) -> None:
        self.hurries = False
        self._measured = 0  # answers
        self._least_s = math.inf
        self._mean_s: float | None = None
        self._deviation_s = 0.0
        self._repeats: Counter[NodeId] = Counter()

    def wait_s(self, peer: NodeId) -> float:
        """How long to wait for this peer; twice as long at each repeat, but for the first of quick answers."""
        by_chance = 0
        if self.hurries and self._measured < SURE_AFTER:
            wait_s = max(WAIT_MIN_S, 2 * self._least_s) if self._measured else WAIT_MIN_S
        else:
            if self._mean_s is None:
                return SILENCE_MAX_S
            estimate_s = self._mean_s + DEVIATIONS * self._deviation_s
            wait_s, by_chance = max(WAIT_MIN_S, estimate_s), LOST_MAX if estimate_s <= WAIT_MIN_S else 0
        doublings = min(max(0, self._repeats[peer] - by_chance), 16)
        return min(SILENCE_MAX_S, wait_s * 2.0**doublings)

    def repeated(self, peer: NodeId) -> None:
        """Something is said again, unanswered."""
        self._repeats[peer] += 1

    def keep(self, peers: Collection[NodeId]) -> None:
        """Forget how often all but these were told again."""
        for gone in self._repeats.keys() - peers:
            del self._repeats[gone]

    def came(self, peer: NodeId, seconds: float) -> None:
        """What was said so long ago is answered."""
        if self._repeats.pop(peer, 0):
            return
        self._measured += 1
        self._least_s = min(self._least_s, seconds)
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        self._deviation_s += NEW_DEVIATION_SHARE * (abs(seconds - self._mean_s) - self._deviation_s)
        self._mean_s += NEW_SHARE * (seconds - self._mean_s)
