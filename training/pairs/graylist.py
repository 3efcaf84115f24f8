"""With whom does a node not exchange for a while? With a peer that is far away from its model, and stays there, or that
leaves exchanges unanswered.

An honest member that has lost touch comes closer with each exchange, however little is taken of it; a liar does not.
Of one that goes further away it is known the sooner, the further it is: over slow lines it is met seldom, and has much
to spend each time. How long: training/refusal.py. A core: `now` comes in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from peerd.training.flush import CLOSER
from peerd.training.refusal import Refusal
from peerd.transport.ids import NodeId

FAR_MAX = 8  # exchanges in a row after which a peer is far away and no closer
WEIGHT_MAX = 4.0  # exchanges that one counts as, at most, of a peer that has gone further away
REMEMBERED_MAX = 1024


@dataclass(slots=True)
class _Record:
    far: float = 0.0
    closest: float = math.inf  # when it last was closer than before
    last: float = math.inf
    refusal: Refusal = field(default_factory=Refusal)

    def begin(self) -> None:
        """Nothing is held against it."""
        self.far, self.closest, self.last = 0.0, math.inf, math.inf

    def moved(self, distance: float, farness: float) -> float:
        """It is so far away now; returns what is held against it."""
        if self.last == math.inf:
            self.far, self.closest = 1.0, distance
        elif distance < CLOSER * self.closest:
            self.far, self.closest = 0.0, distance
        elif distance >= CLOSER * self.last:  # who comes back after a leap has nothing more held against it
            self.far += min(farness, WEIGHT_MAX) if distance > self.last else 1.0
        self.last = distance
        return self.far


class Graylist:
    """What one node holds against its peers."""

    def __init__(self) -> None:
        self._records: dict[NodeId, _Record] = {}

    def note(self, peer: NodeId, distance: float, now: float, farness: float) -> float:
        """An exchange has been; for how many seconds the peer is refused from now on, 0: it is not.

        `farness`: its distance, as a share of what is far away.
        """
        record = self._records.get(peer)
        if farness <= 1:
            if record is not None:
                record.begin()
            return 0.0
        record = self._remembered(peer)
        if record.moved(distance, farness) < FAR_MAX:
            return 0.0
        record.begin()
        return record.refusal.begin(now)

    def refuse(self, peer: NodeId, now: float) -> None:
        """It has kept us waiting for long."""
        record = self._remembered(peer)
        record.begin()
        record.refusal.begin(now)

    def _remembered(self, peer: NodeId) -> _Record:
        if peer not in self._records and len(self._records) >= REMEMBERED_MAX:
            del self._records[min(self._records, key=lambda one: self._records[one].refusal.until)]
        return self._records.setdefault(peer, _Record())

    def refuses(self, peer: NodeId, now: float) -> bool:
        """Whether there is no exchange with it."""
        record = self._records.get(peer)
        return record is not None and record.refusal.left_s(now) > 0

    def refused(self, now: float) -> Iterator[tuple[NodeId, float]]:
        """Who is, and for how many seconds from now."""
        left = ((peer, record.refusal.left_s(now)) for peer, record in list(self._records.items()))
        return ((peer, left_s) for peer, left_s in left if left_s > 0)

    def forgive(self, peer: NodeId) -> None:
        """Hold nothing against it, though it never was refused."""
        self._records.pop(peer, None)
