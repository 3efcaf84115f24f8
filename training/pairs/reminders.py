"""Who keeps a node waiting, when is it told again what it has not answered, and when has it been silent for too long?

A half may take long over a thin line, and longer if it is said again meanwhile: so it is said again each time twice as
late, until answers are quick again. A core: what is late is another's business (links.py), and times come in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable

from peerd.training.trigger import SILENCE_MAX_S
from peerd.transport.ids import NodeId

REMINDERS = 10  # a minute apart: a whole model on a thin line takes long, and may still come after them
SILENT_DOUBLINGS_MAX = 6  # of how long an answer is waited for, while none comes at all: it may be the line
PATIENCE_MAX_S = 3600.0
SOON = 0.25  # of the patience with a peer: an answer within it halves that


class Reminders:
    """Of one node to its peers."""

    def __init__(self) -> None:
        self._patience: dict[NodeId, float] = {}  # seconds that each is waited for, where that is longer than usual
        self._waited: Counter[NodeId] = Counter()  # minutes, in vain, for a half that each owes
        self._in_vain = 0  # times that one was given up for that, since an exchange was complete

    def due_at(self, peer: NodeId, said_at: float) -> float:
        """When it is told again what it was last told then."""
        return said_at + self._patience_with(peer)

    def reminded(self, peer: NodeId, due_at: float, *, owes_half: bool) -> None:
        """It is told again what was due then; -inf: it was not told at all, of a link that has just ended."""
        patience = SILENCE_MAX_S
        if due_at > -math.inf:
            patience = self._patience_with(peer)
            self._patience[peer] = min(2 * patience, PATIENCE_MAX_S)
        self._waited[peer] += owes_half * round(patience / SILENCE_MAX_S)

    def answered(self, peer: NodeId, after_s: float) -> None:
        """An exchange with it is complete, which began so many seconds ago."""
        del self._waited[peer]
        self._in_vain = 0
        if (patience := self._patience.get(peer)) is not None and after_s < SOON * patience:
            self._patience[peer] = patience / 2
            if patience / 2 <= SILENCE_MAX_S:
                del self._patience[peer]

    def begins(self, peer: NodeId) -> None:
        """A link with it does: who opens one after the other is to be missed all the same."""
        self._patience.pop(peer, None)

    def given_up(self, peer: NodeId) -> None:
        """It has been silent for so long that its place is another's."""
        self._in_vain += 1
        del self._waited[peer]

    def silent(self, peers: Iterable[NodeId]) -> list[NodeId]:
        """Those of them that have not answered for so long that they are no partners, the longest first."""
        if not self._waited:
            return []
        limit = REMINDERS << min(self._in_vain, SILENT_DOUBLINGS_MAX)
        return sorted((peer for peer in peers if self._waited[peer] >= limit), key=lambda id: (-self._waited[id], id))

    def keep(self, peers: Collection[NodeId]) -> None:
        """These have been there all the time; of others nothing is known any more."""
        self._patience = {peer: patience for peer, patience in self._patience.items() if peer in peers}
        for peer in self._waited.keys() - peers:
            del self._waited[peer]

    def _patience_with(self, peer: NodeId) -> float:
        return self._patience.get(peer, SILENCE_MAX_S)
