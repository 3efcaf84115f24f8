"""Who keeps attempts from their end? Found by who was in those that failed, never by what anybody says.

How this works. If one member is to blame, it was in every attempt that failed: whoever was in all of them may be it.
The next attempt is without one half of these, drawn at random, the one after it without the other half. So an honest
member has been in a round after these two, whatever the reason was; and while there is a culprit one of the two fails,
after which half as many may be it. The last one is tried again until MISSES_MAX attempts have failed, and from then on
is set aside: it has another try when as much time has passed as TRIES_APART patiences, so that it costs the others a
tenth of theirs. One that was merely slow is in rounds again with its next try.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from peerd.transport.ids import NodeId

MISSES_MAX = 3  # in turn, whose reason may be a moment's; a slow member is late for the first, whose pace none knew
TRIES_APART = 10  # patiences, of which a try that fails takes one

Members = frozenset[NodeId]


class Culprits:
    """What one leader makes of the attempts that it began."""

    def __init__(self, me: NodeId, rng: random.Random) -> None:
        self._me = me
        self._rng = rng
        self._possible: Members = frozenset()  # in all attempts that have failed, until another reason contradicts
        self._next: list[Members] = []  # without whom the next attempts are
        self._misses = 0.0  # attempts that failed, less what has been forgiven
        self._at = 0.0

    def failed(self, roster: Iterable[NodeId], patience_s: float, now: float) -> None:
        """An attempt of these was stuck, or fell apart again and again."""
        in_it = frozenset(roster) - {self._me}
        self._possible = self._possible & in_it or in_it
        self._misses = min(MISSES_MAX, self._missed(patience_s, now) + 1)
        self._at = now
        self._divide()

    def committed(self) -> None:
        """An attempt has ended well."""
        del self._next[:1]

    def found(self, patience_s: float, now: float) -> Members:
        """Who can be told from the others and has no try yet."""
        alone = len(self._possible) == 1 and self._missed(patience_s, now) > MISSES_MAX - 1
        return self._possible if alone else frozenset()

    def aside(self, patience_s: float, now: float) -> Members:
        """Without whom the next attempt should be."""
        if now - self._at > TRIES_APART * patience_s:
            self._next = []  # without these nobody has come to a round for so long
        elif not self._next and self._missed(patience_s, now) > MISSES_MAX - 1:
            self._divide()
        return self._next[0] if self._next else self.found(patience_s, now)

    def _missed(self, patience_s: float, now: float) -> float:
        return max(0.0, self._misses - (now - self._at) / (TRIES_APART * patience_s))

    def _divide(self) -> None:
        mixed = sorted(self._possible)
        self._rng.shuffle(mixed)
        middle = len(mixed) // 2
        self._next = [frozenset(mixed[:middle]), frozenset(mixed[middle:])] if middle else []
