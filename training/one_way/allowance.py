"""How far may pushes move this model, and what becomes of the rest? It waits, weight and model together.

A push moves a model z by m / (w + m) (y - z), and m is the sender's word: a large one puts y in the place of z. So each
peer has an allowance, a length, which this node's own steps fill: LIMIT of its own path since, up to what it walks
between a round of its exchanges. Steps that other peers' pushes caused fill it too, shared among all, so that who is
slow or has finished follows the many and nobody alone; all together get less than the step was, or liars would fill
each other's for ever. From whom is further away than FAR times the others' median, or than FAR times one's own way of
late where fewer than two others were seen, less is taken the further it is. A push takes as much of its mass (m y, m)
as its allowance covers; the rest waits at the receiver, and is taken later. So the sum of all masses stays as it is:
what a limit holds back is late, not lost.

No step fills an allowance once a run has ended. Models come together then: at once each peer may move this one by
FLUSH_REACH times the usual distance, or a full allowance if that is more, and time fills allowances as fast as the
run's own steps did, by STILL_LIMIT full ones at most, for what a slow member learns after the others have ended.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median_low

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.effects import Vector
from peerd.training.flush import FLUSH_REACH
from peerd.transport.ids import NodeId

LIMIT = 2.0
"""Times one's own path: partners that train alike come together at once, and one who lags behind is not cut off."""
FAR = 4.0
"""Times the usual distance: from beyond it less is taken the further it is."""
STILL_LIMIT = 16.0
"""Full allowances, in all, that each peer has after a run. All of them at once are a liar's way to ruin a short run.

With 4, what a slow member learns after the others have ended is hardly taken; with 64, noise is (RESULTS.md)."""
REACH_MIN = 1 / 64
"""Of the model's norm: the least reach, of a node that has made no step yet. A bfloat16 snapshot differs by less."""
BUFFERS_MAX = 1 / 4
"""Of the float buffers' norm, in one push: they have no steps to measure by."""
WEIGHT_SHARE = 4
"""Times the members: more weight than this nobody takes, whatever is offered."""
PEERS_MAX = 4096  # whose allowances are known after a run
STRIDE_WEIGHT = 0.2  # of the last stride in the running mean
GONE: NodeId = ""  # in place of all peers that are no more


@dataclass(slots=True, eq=False)
class Waiting:
    """Mass of one peer that has come and is not merged yet."""

    weight: float
    model: Vector

    def join(self, weight: float, model: Vector) -> None:
        """More of it: the models' mean, by weight."""
        whole = self.weight + weight
        if whole > 0:
            self.model *= self.weight / whole
            self.model += (weight / whole) * model
        self.weight = whole


class Allowances:
    """What each peer may still move this model by."""

    def __init__(self, exchanges: int) -> None:
        """`exchanges`: how many of its own a peer may be silent for, and still be let in at once."""
        self._exchanges = exchanges
        self._left: dict[NodeId, float] = {}
        self._distances: dict[NodeId, float] = {}  # from this model, when last seen
        self._stride = 0.0  # own path between two own exchanges, on average
        self._path = 0.0  # since the last
        self._told = 0.0  # of the distance from the last copy
        self._had_company = False  # somebody has been there, be it long ago
        self._way = 0.0  # own path in this run
        self._began_at: float | None = None  # this run
        self._stood_at: float | None = None  # until when time has filled the allowances, of a run that has ended
        self._pace = 0.0  # own path a second, in the run that has ended
        self._to_fill = 0.0  # by time, after it
        self._granted = 0.0  # what a full allowance is at least, after it

    def trains(self, now: float) -> None:
        """This node has begun a run, or goes on with it: a step is over, and the first one's way is of before."""
        if self._began_at is None or self._stood_at is not None:
            self._began_at, self._stood_at = now, None
            self._way = self._granted = 0.0

    def walked(self, change: float, *, published: bool) -> None:
        """A step, after which the model is `change` from its last copy."""
        step = max(0.0, change - self._told) if math.isfinite(change) else 0.0
        self._told = 0.0 if published else max(self._told, change)
        self._path += step
        self._way += step
        for peer in self._left:
            self._left[peer] += LIMIT * step

    def exchanged(self) -> None:
        """This node has begun an exchange."""
        self._stride += STRIDE_WEIGHT * (self._path - self._stride) if self._stride else self._path
        self._path = 0.0

    def ended(self, norm: float, now: float) -> None:
        """This node's run has ended: no step fills an allowance from now on."""
        lasted = now - self._began_at if self._began_at is not None else 0.0
        self._stood_at = now
        self._pace = self._way / lasted if lasted > 0 else 0.0
        full = self._full(norm)
        self._to_fill = (STILL_LIMIT - 1) * full
        known = self._distances.values()
        together = FLUSH_REACH * median_low(known) if len(known) > 1 else math.inf
        self._granted = min(together, STILL_LIMIT * full)
        self._left = dict.fromkeys(self._left, self._full(norm))

    def stood(self, now: float) -> None:
        """Time has gone by since the end of the run."""
        assert self._stood_at is not None, "it has ended"
        filled = min(self._to_fill, LIMIT * self._pace * (now - self._stood_at))
        self._stood_at = now
        self._to_fill -= filled
        for peer in self._left:
            self._left[peer] += filled

    def of(self, peer: NodeId, norm: float, distance: float = 0.0) -> float:
        """How far a push may move a model of this norm, that is so far away from what is pushed."""
        full = self._full(norm)
        most = full if self._stood_at is None else STILL_LIMIT * full
        left = self._left[peer] = min(self._left.get(peer, full), most)
        others = [each for other, each in self._distances.items() if other != peer]
        self._distances[peer] = distance
        usual = median_low(others) if len(others) > 1 else self._reach(norm)
        return left * FAR * usual / distance if distance > FAR * usual else left

    def moved(self, peer: NodeId, by: float) -> None:
        """A push of this peer has moved the model."""
        self._left[peer] = max(0.0, self._left.get(peer, 0.0) - by)
        others = self._left.keys() - {peer}
        for other in others:
            self._left[other] += by / (1 + len(others))

    def shares(
        self, peer: NodeId, distance: float, apart: Vector, values: Vector, cut: int, share: float
    ) -> tuple[float, float]:
        """How much of `apart`, at most `share`, this peer may move `values` by: its parameters, and its float buffers.

        The buffers begin at `cut`, and `distance` is the length of what is before it. What is beyond that is left out,
        and the peer's allowance pays for the rest.
        """
        length = norm_of_difference(apart[cut:])
        limit = self.of(peer, norm_of_difference(values[:cut]), distance)
        part = min(share, limit / distance) if distance > 0 else share
        self.moved(peer, part * distance)
        most = BUFFERS_MAX * norm_of_difference(values[cut:])
        return part, min(part, most / length) if length > 0 else part

    def keep(self, peers: Collection[NodeId]) -> None:
        """Forget all but these, and what waits of all who are no more: last words may come after their sender went.
        After a run's end what they had left is kept: who comes back would be allowed again what it has had."""
        # what was gone before the first came is no way between two exchanges; later it is, or who was alone for a while
        # would take three times as many steps to come back
        if peers and not self._had_company:
            self._had_company, self._path = True, 0.0
        gone = [peer for peer in self._left if peer not in peers and peer != GONE]
        for peer in gone:
            self._distances.pop(peer, None)
        for peer in gone if self._stood_at is None else gone[: max(0, len(self._left) - PEERS_MAX)]:
            del self._left[peer]

    def _full(self, norm: float) -> float:
        return max(LIMIT * (self._path + self._exchanges * self._stride), REACH_MIN * norm, self._granted)

    def _reach(self, norm: float) -> float:
        """How far others may be, as this node's own steps have it."""
        return max(self._path, self._stride, REACH_MIN * norm)


def part_within(weight: float, part: float, distance: float, limit: float) -> float:
    """The most of `part` whose step part / (weight + part) * distance is at most `limit`."""
    if distance <= limit or part * distance <= limit * (weight + part):
        return part
    return min(part, weight * limit / (distance - limit))
