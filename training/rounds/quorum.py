"""How long do the others wait for a member that is slower than most? Until it gives what it has.

A round of `quorum` begins as one of `blocking`, when all have come to it. But a member that is later than most by GRACE
does not make its steps first: its contribution is what its last copy has of them, be that nothing, and what it learns
meanwhile counts from there. It says that it came early, and a round to which all came so does not begin. So all hold
the same agreed model, rounds follow each other at the pace of most, and each member's data counts for as many steps as
it makes. It is the quorum and grace window of decoupled DiLoCo (arXiv:2604.21428), without its synchroniser: each order
of a round says how long its members had waited, and each member acts on that.

What most of the others take for a step, from one round's end until they come to the next, each member measures on its
own clock.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low

from peerd.transport.ids import NodeId
from peerd.transport.messages import RoundBegin

GRACE = 1.5
"""Times what most of the others take. Members that are alike are rarely so much later than each other; where all are
slower at once, it grows with each round until they come by their own steps again."""
ROUNDS = 5  # of which the usual one counts: one pause of most says little


class Quorum:
    """What one member knows of the pace of the others."""

    def __init__(self, every: int) -> None:
        """`every`: steps before the first round."""
        self._every = every
        self.due_at = math.inf
        """When to come to the next round without having made its steps."""
        self._took: deque[float] = deque(maxlen=ROUNDS)  # most others for a step, from a round's end until they came
        self._committed_at: float | None = None
        self._reached_at: float | None = None

    def reached(self, now: float) -> None:
        """This member's contribution to the next round is there."""
        self._reached_at, self.due_at = now, math.inf

    def committed(self, begin: RoundBegin, me: NodeId, now: float, every: int) -> None:
        """A round has ended; so many steps are to be made before the next."""
        waited = dict(zip(begin.roster, begin.waited, strict=False))
        others = [waited[id] for id in waited if id != me]
        if others and self._committed_at is not None and self._reached_at is not None:
            began_at = self._reached_at + waited.get(me, 0.0)
            self._took.append(max(0.0, began_at - median_low(others) - self._committed_at) / self._every)
        self._committed_at, self._reached_at, self._every = now, None, every
        usual = median_low(self._took) if self._took else 0.0
        self.due_at = now + GRACE * every * usual if usual > 0 else math.inf
