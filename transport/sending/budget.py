"""How much may a node send in a second, over all its connections together? No I/O, no clock.

Pieces go first come, first served, each when those before it are paid for: a token bucket, kept as the moment at which
it is full again (the generic cell rate algorithm, ITU-T I.371). Datagrams and what has left already are counted and
wait for nothing; what comes after them waits longer.

Bulk messages take turns, too. A receiver gives up a connection that is slower than SLOWEST_RATE in the middle of one
(patience.py), so no more are begun than the rate has twice that for. What is limited by something else has no turn: it
travels beside the stream, or its peer takes in nothing.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from peerd.transport.patience import SLOWEST_RATE

BURST_S = 0.05  # what a node that was silent may send at once, in seconds of its rate: a line's queue stays short
PIECE_MIN, PIECE_MAX = 4 << 10, 1 << 20  # bytes
RATE_MIN = 1_000_000  # bits a second: the slowest line that is to work
RATE_MAX = 10**12
_RATE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[kMG])bit(?:/s)?", re.ASCII)
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}


def parse_rate(text: str) -> float:
    """`2Mbit`, `1500kbit/s`, `0.1 Gbit` in bytes a second. Raises ValueError."""
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:80]!r} is no rate such as 2Mbit or 1500kbit")
    bits = float(found["number"]) * _UNITS[found["unit"]]
    if not RATE_MIN <= bits <= RATE_MAX:
        raise ValueError(f"{text[:80]!r} is outside of 1Mbit to 1000Gbit")
    return bits / 8


class Budget:
    """The rate of one node, and whose turn it is."""

    def __init__(self, rate: float) -> None:
        """`rate` in bytes a second."""
        assert rate > 0
        self.rate = rate
        self.piece = round(min(PIECE_MAX, max(PIECE_MIN, rate * BURST_S)))  # bytes that are asked for at once, at most
        self.waited_s = 0.0  # all connections together, turns not counted
        self.turns_max = max(1, int(rate / (2 * SLOWEST_RATE)))
        self._paid_at = float("-inf")  # when all that was taken is paid for
        self._held = 0  # turns
        self._waiting: deque[BulkTurn] = deque()

    def take(self, count: int, now: float) -> float:
        """Seconds until these bytes may go. In any T seconds go rate * (T + BURST_S) bytes and one piece at most."""
        may_go = max(self._paid_at, now - BURST_S)
        self._paid_at = may_go + count / self.rate
        return max(0.0, may_go - now)

    def _take_turn(self, turn: BulkTurn) -> bool:
        if self._held < self.turns_max and not self._waiting:
            self._held += 1
            return True
        if turn not in self._waiting:
            self._waiting.append(turn)
        return False

    def _give_turn(self, turn: BulkTurn) -> None:
        if turn.held:
            self._held -= 1
        elif turn in self._waiting:
            self._waiting.remove(turn)
        while self._waiting and self._held < self.turns_max:
            self._held += 1
            self._waiting.popleft()._comes()


class BulkTurn:
    """A connection's: it sends bulk while it has one."""

    def __init__(self, budget: Budget, wake: Callable[[], object]) -> None:
        """`wake` is called when the turn comes that `take` had to wait for."""
        self.held = False
        self._budget = budget
        self._wake = wake

    def take(self) -> bool:
        """Whether it is held now; else it comes."""
        if not self.held:
            self.held = self._budget._take_turn(self)
        return self.held

    def give(self) -> None:
        """Let the others have it; no more wait for it."""
        self._budget._give_turn(self)
        self.held = False

    def _comes(self) -> None:
        self.held = True
        self._wake()
