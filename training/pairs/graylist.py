"""With whom does a node not exchange for a while? With a peer that is far away from its model, and stays there.

An honest member that has lost touch comes closer with each exchange, however little is taken of it; a liar does not.
How long: training/refusal.py. A core: `now` comes in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from peerd.training.flush import CLOSER
from peerd.training.refusal import Refusal
from peerd.transport.ids import NodeId

FAR_MAX = 8  # exchanges in a row after which a peer is far away and no closer
REMEMBERED_MAX = 1024


@dataclass(slots=True)
class _Record:
    far: int = 0
    distance: float = math.inf  # when it last was closer than before
    refusal: Refusal = field(default_factory=Refusal)


class Graylist:
    """What one node holds against its peers."""

    def __init__(self) -> None:
        self._records: dict[NodeId, _Record] = {}

    def note(self, peer: NodeId, distance: float, now: float, *, far: bool) -> float:
        """An exchange has been; for how many seconds the peer is refused from now on, 0: it is not."""
        record = self._records.get(peer)
        if not far:
            if record is not None:
                record.far, record.distance = 0, math.inf
            return 0.0
        if record is None:
            if len(self._records) >= REMEMBERED_MAX:
                del self._records[min(self._records, key=lambda one: self._records[one].refusal.until)]
            record = self._records[peer] = _Record()
        if distance < CLOSER * record.distance:
            record.far, record.distance = 0, distance
            return 0.0
        record.far += 1
        if record.far < FAR_MAX:
            return 0.0
        record.far, record.distance = 0, math.inf
        return record.refusal.begin(now)

    def refuses(self, peer: NodeId, now: float) -> bool:
        """Whether there is no exchange with it."""
        record = self._records.get(peer)
        return record is not None and record.refusal.left_s(now) > 0

    def refused(self, now: float) -> Iterator[tuple[NodeId, float]]:
        """Who is, and for how many seconds from now."""
        left = ((peer, record.refusal.left_s(now)) for peer, record in list(self._records.items()))
        return ((peer, left_s) for peer, left_s in left if left_s > 0)

    def forgive(self, peer: NodeId) -> bool:
        """Hold nothing against it; whether it was refused, or ever had been."""
        return self._records.pop(peer, None) is not None
