"""How far may one peer move this node's model? The bounds of a robust merge: a core of numbers, one for each tensor.

Both ends of an exchange scale its correction of a tensor by the same factor, so the mean of the two is conserved:

    factor = min(1, min(limit here, limit there) / (gain ||theirs - mine||))

Each end states its limits beside its half. References move by the full halves: what is held back stays in theirs - mine
and comes with a later exchange. (With limits of each end's own, as in ClippedGossip (He, Karimireddy, Jaggi 2022,
arXiv:2202.01545), an honest pair breaks the mean: so it is only where both runs have ended, for one that is left behind
by the others.)

A limit is an allowance of the peer. It grows with what this node's own steps move the tensor, corrections left out: a
model that is dragged away does not widen it. A step counts as half of a usual one at least: where a node's own data is
learnt, as one class alone soon is, steps hardly move anything, and nobody could bring such a node back. All peers
together have so a multiple of the node's own way, by tensor, whatever they say; a budget for the whole model could be
spent on one bias. No tensor of parameters counts as gone less than a quarter as far as the others, value for value, or
what only some members train would never come to the rest: a head for what these do not see, a layer that they have
frozen, an expert that only decays while it has no data. Nor do others count as less far apart in a tensor than that:
where they agree, who trains it is not far away yet. From a peer whose tensor is further away than FAR times the median
of the others', less is taken the further it is: an honest one that has lost touch still comes closer, ever faster, and
one that is anywhere at all has next to no say. A run that ends makes no more steps, but has to agree: then each peer
may move it by what was usual between it and its peers, and once again when its own run ends, as often as those of most
others: not each time that it says so. Between fewer than four members nobody can say who is the odd one out, and a run
that ends has no bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Sliced, Vector
from peerd.training.flush import FLUSH_REACH
from peerd.training.kernels.passes import Stops, Sums, move_references, ranges_within, scale_by, squares_by
from peerd.training.pairs.block_floats import BlockFloats
from peerd.training.sample import evened, sample_of, stops_of
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId

RATE = 4.0
"""What all peers together may move the model, for each unit of its own way."""
STEP_MIN = 0.5
"""A step counts as at least this share of the mean step at its learning rate."""
FAR = 4.0
"""Times the others' median distance: beyond it a peer counts less."""
FULL = 2.0  # times what a worker of a centre may move it by, which it has at most when it comes late
COMPARED_MIN = 3  # partners of which one can be told from the others
FLUSH_OF_FEW = 1.0
"""FLUSH_REACH where partners meet seldom: the usual is then as far as models have gone."""
USUAL_WEIGHT = 0.25  # of the last distance
PEERS_MAX = 4096  # that have an allowance
_FLOAT32_MAX = np.finfo(np.float32).max
_LIMIT = np.dtype("<f4")  # as it travels

Norms = npt.NDArray[np.float64]
"""One for each tensor, shape (tensors,)."""
Moved = Callable[[slice, Vector], tuple[slice, Sums]]
EachPiece = Callable[[Moved], list[tuple[slice, Sums]]]
"""Calls it with each piece of a vector: where that is, and its values."""


class Tensors:
    """Where the tensors of a flat model are; parameters and buffers share none."""

    def __init__(self, layout: Layout) -> None:
        self.stops = stops_of(layout)
        self.of_parameters = int(np.searchsorted(self.stops, layout.parameters, side="right"))

    def __len__(self) -> int:
        return len(self.stops)

    def norms(self, values: Vector) -> Norms:
        """||values|| of each."""
        return np.sqrt(squares_by(values, None, self.stops))

    def move(self, mine: Sliced, each_outgoing: EachPiece, theirs: Sliced, following: Vector) -> Norms:
        """Move two references (kernels/passes.py): returns how far apart they are then, which is in `following`.

        Of `outgoing` there are pieces that follow each other; a tensor may end within one.
        """

        def moved(where: slice, piece: Vector) -> tuple[slice, Sums]:
            if piece.shape == mine.shape:
                return slice(None), _moved(mine, where, piece, theirs, following, self.stops)
            ranges, stops = ranges_within(self.stops, where)
            return ranges, _moved(mine, where, piece, theirs, following[where], stops)

        found = np.zeros(len(self))
        for ranges, squares in each_outgoing(moved):
            found[ranges] += squares
        return np.sqrt(found)

    def scale(self, values: Vector, factors: Norms) -> None:
        """Multiply each by its factor."""
        scale_by(values, factors, self.stops)

    def whole(self, norms: Norms) -> float:
        """The norm over all parameters."""
        if len(norms) == self.of_parameters == 1:
            return float(norms[0])
        of_parameters = norms[: self.of_parameters]
        return math.sqrt(of_parameters.dot(of_parameters))


def packed(limits: Norms) -> bytes:
    """As a message has them, 4 bytes for each; where there are none it has no bytes."""
    return np.minimum(limits, _FLOAT32_MAX).astype(_LIMIT).tobytes()


def unpacked(said: bytes, count: int) -> Norms:
    """The limits in a message, shape (count,). Raises PeerError."""
    if not said:
        return np.full(count, np.inf)
    if len(said) != 4 * count:
        raise PeerError(f"{len(said)} bytes of limits where {4 * count} are due")
    limits = np.frombuffer(said, _LIMIT).astype(np.float64)
    if not all(0 <= limit < math.inf for limit in limits.tolist()):
        raise PeerError("a limit is negative, or no number")
    return limits


def factors(gain: float, distances: Norms, limits: Norms) -> Norms:
    """What each tensor of theirs - mine is multiplied by, the gain included.

    Of the same limits the same bits on both ends; if only one of them has compiled kernels, the same to 1e-6.
    """
    wanted = (gain * distances).tolist()
    most = limits.tolist()
    return gain * np.array([min(1.0, limit / far) if far > 0 else 1.0 for limit, far in zip(most, wanted, strict=True)])


@dataclass(slots=True, eq=False)
class Allowance:
    """Of one peer."""

    left: Norms
    refilled: Norms  # since the last exchange with it
    seen: Norms  # the node's own way at the last refill
    distances: Norms | None = None  # at the last exchange of the training
    usual: Norms | None = None  # the same, a running mean: two exchanges may follow closely
    granted: bool = False  # what a run that ends allows
    ends: int = 0  # of its own runs, since then
    granted_ends: int = 0  # for so many of them it has been granted that again
    met_at: int = 0  # the number of the exchange, of those with all peers, that `distances` are of
    others: int = 0  # exchanges since its own last one, of a centre's other workers
    compared_at: int = 0  # and of the last one when these were last compared with the others'


class PairAllowances:
    """What each peer may still move one node's model."""

    _flush = FLUSH_REACH

    def __init__(self, layout: Layout) -> None:
        self._tensors = tensors_of(layout)
        self._sample = sample_of(layout)
        self._base: Vector | None = None  # of the model when it was last looked at, and of every correction since
        self._way = np.zeros(len(self._tensors))  # the sum of the lengths of its own moves
        self._last = np.zeros(len(self._tensors))  # the last of them that was one
        self._looked_at: int | None = None  # the step of the last look at which one was known
        self._walked = np.zeros(len(self._tensors))  # as `_way`, with no step counted for more than it was
        self._weighted_steps = 0.0  # made on that way, each weighted by `lr_ratio`
        self._sizes = np.diff(self._tensors.stops, prepend=0)
        self._peers: dict[NodeId, Allowance] = {}
        self._exchanges = 0
        self._ended = False

    def look(self, values: Vector, step: int | None = None, lr_ratio: float = 1.0) -> None:
        """The model as it is now, after `step` steps: what no correction explains are the node's own.

        `lr_ratio` is their learning rate, as a share of the largest. Before the first report no step is known.
        """
        made = 0.0
        if step is not None and self._looked_at is not None:
            made = lr_ratio * max(0, step - self._looked_at)
        if self._weighted_steps:  # a script that comes back may have jumped
            made = min(made, self._weighted_steps)
        self._looked_at = step
        if self._base is None:
            self._base = self._sample.take(values)
            return
        moved = np.sqrt(self._sample.squares(values, self._base))
        least = np.zeros(len(moved))
        if self._weighted_steps:
            least = STEP_MIN * made * self._walked / self._weighted_steps
        if 0 < moved.sum() + least.sum() < np.inf:  # what stood from the start on has no usual step
            self._walked += moved
            self._weighted_steps += made
            self._last = self._evened(np.maximum(moved, least))
            self._way += self._last
            self._sample.refresh(self._base, values)

    def look_anew(self, values: Vector) -> None:
        """The model as it is now; what it has gone since the last look counts for nothing."""
        self._base = None
        self.look(values)

    def _evened(self, norms: Norms) -> Norms:
        """Of the parameters; float buffers stand as they are."""
        cut = self._tensors.of_parameters
        return np.concatenate([evened(norms[:cut], self._sizes[:cut]), norms[cut:]])

    def corrected(self, correction: Vector) -> None:
        """The model is moved by this, and not by its own steps."""
        if self._base is not None:
            self._sample.correct(self._base, correction)

    def limits(self, peer: NodeId, peers: Collection[NodeId]) -> Norms:
        """How far this peer may move each tensor now, as one of these."""
        share = RATE / max(1, len(peers))
        is_new = peer not in self._peers
        one = self._first(peer, share * self._last) if is_new else self._peers[peer]
        if self._ended and not one.granted:
            self._grant(one, peer, peers, anew=is_new)
        grown = share * (self._way - one.seen)
        one.left += grown
        one.refilled += grown
        np.copyto(one.seen, self._way)
        return one.left.copy() if self._ended else one.left * self._say(peer, peers)

    def spent(self, peer: NodeId, moved: Norms, distances: Norms) -> None:
        """An exchange with the peer, `distances` apart, has moved the model by so much."""
        one = self._peers.get(peer)
        if one is None:
            return
        np.maximum(one.left - moved, 0.0, out=one.left)
        if not self._ended:
            np.minimum(one.left, one.refilled, out=one.left)
        one.refilled.fill(0.0)
        if not self._ended or one.usual is None:
            self._note(one, distances)

    def met(self, peer: NodeId, distances: Norms) -> None:
        """The two were so far apart, and came together by other means than halves: who has seen to it bounds that."""
        self._base = None  # the way until the run ends is not looked at here
        self._flush = FLUSH_OF_FEW
        self._note(self._peers.get(peer) or self._first(peer, np.zeros(len(self._tensors))), distances)

    def farness(self, peer: NodeId, peers: Collection[NodeId]) -> float | None:
        """How far away the peer's whole model is, as a share of FAR times the others' median; None: nobody can say.

        For that two others must have been met since it was last asked: after a pause of this node's own, what it knows
        of them is old.
        """
        one = self._peers.get(peer)
        if one is None or one.distances is None:
            return None
        others = sorted(self._tensors.whole(norms) for norms in self._others(peer, peers, since=one.compared_at))
        if len(others) < 2:
            return None
        one.compared_at = self._exchanges
        usual = FAR * others[(len(others) - 1) // 2]
        return self._tensors.whole(one.distances) / usual if usual > 0 else None

    def end_run(self, peers: Collection[NodeId]) -> None:
        """No more steps are made: what is usual is what each peer may move the model until all agree."""
        self._ended = True
        for peer, one in self._peers.items():
            self._grant(one, peer, peers)

    def peer_ended(self, peer: NodeId, peers: Collection[NodeId]) -> None:
        """Its run has ended, too: now the two are to agree. That is so once, and again with most others' next runs: not
        each time that one says that it has begun anew."""
        if not self._ended or (one := self._peers.get(peer)) is None:
            return
        one.ends += 1
        for id in peers:
            if (each := self._peers.get(id)) is None or each.granted_ends >= each.ends:
                continue
            others = sorted(other.ends for of in peers if of != id and (other := self._peers.get(of)) is not None)
            usual = others[(len(others) - 1) // 2] if others else 0
            if each.granted_ends < max(1, usual):
                each.granted_ends += 1
                self._grant(each, id, peers)

    def heard(self, peer: NodeId, limits: Norms) -> None:
        """What the peer says of its own; of no concern here."""

    def begin_run(self) -> None:
        """Steps are made again: what the end of a run allowed is no longer."""
        self._ended = False
        for one in self._peers.values():
            one.granted, one.ends, one.granted_ends = False, 0, 0
            np.minimum(one.left, one.refilled, out=one.left)

    def keep(self, peers: frozenset[NodeId]) -> None:
        """Forget all but these: last words may come after their sender went. At a run's end nobody: who comes back
        would be allowed again what it has had."""
        if self._ended:
            return
        for gone in self._peers.keys() - peers:
            del self._peers[gone]

    def _first(self, peer: NodeId, left: Norms) -> Allowance:
        if len(self._peers) >= PEERS_MAX:
            del self._peers[next(iter(self._peers))]
        one = self._peers[peer] = Allowance(left, left.copy(), self._way.copy())
        return one

    def _say(self, peer: NodeId, peers: Collection[NodeId]) -> Norms:
        distances = self._peers[peer].distances
        others = self._others(peer, peers) if distances is not None else []
        if len(others) < 2 or distances is None:
            return np.ones(len(self._tensors))
        usual = FAR * self._evened(_low_median(others))
        pairs = zip(usual.tolist(), distances.tolist(), strict=True)
        return np.array([most / far if far > most else 1.0 for most, far in pairs])

    def _others(self, peer: NodeId, peers: Collection[NodeId], since: int = 0) -> list[Norms]:
        found = []
        for id in peers:
            one = self._peers.get(id)
            if one is not None and one.distances is not None and id != peer and one.met_at > since:
                found.append(one.distances)
        return found

    def _note(self, one: Allowance, distances: Norms) -> None:
        self._exchanges += 1
        one.met_at, one.distances = self._exchanges, distances
        one.usual = distances if one.usual is None else one.usual + USUAL_WEIGHT * (distances - one.usual)

    def _grant(self, one: Allowance, peer: NodeId, peers: Collection[NodeId], *, anew: bool = True) -> None:
        """What a run that ends allows: the usual; until that of two is known, no more than its own way, if `anew`."""
        known = [other.usual for id, other in self._peers.items() if id in peers and other.usual is not None]
        one.granted = len(known) > 1
        if not (one.granted or anew):
            return
        usual = _low_median(known if one.granted else [self._way, *known])
        np.maximum(one.left, self._flush * usual * self._say(peer, peers), out=one.left)


class CentreAllowances(PairAllowances):
    """What each worker may move a centre variable, which makes no steps of its own to measure by.

    While most workers train that is twice as far as it may move them, and each exchange of another one fills a share of
    it: who comes more often than the others moves it no further.
    """

    _flush = FAR  # what ends a run of it moves it by a worker's whole distance, half of that a second time, and so on

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._said: dict[NodeId, Norms] = {}

    def look(self, values: Vector, step: int | None = None, lr_ratio: float = 1.0) -> None:
        """It does not move by itself."""

    def heard(self, peer: NodeId, limits: Norms) -> None:
        """How far the centre may move this worker; without a bound, once its run has ended."""
        self._said[peer] = limits

    def limits(self, peer: NodeId, peers: Collection[NodeId]) -> Norms:
        """See `PairAllowances`."""
        others = [said for id in peers if id != peer and (said := self._said.get(id)) is not None]
        if len(others) < COMPARED_MIN - 1:
            return np.full(len(self._tensors), np.inf)
        everyone = [*others, self._said[peer]] if peer in self._said else others
        # of all of them: where each was asked of the others alone, and half had ended, all was granted anew each time
        have_ended = sum(not np.isfinite(each).all() for each in everyone) > len(everyone) / 2
        usual = _low_median(others)
        if not (have_ended or np.isfinite(usual).all()):
            usual = np.max([each for each in others if np.isfinite(each).all()], axis=0)
        most = 2 * usual
        one = self._peers.get(peer)
        if one is None:
            others_met = [each for id in peers if (each := self._peers.get(id)) is not None and each.usual is not None]
            is_late = have_ended and len(others_met) > 1
            one = self._first(peer, np.zeros(len(self._tensors)) if is_late else most)
        if have_ended and not self._ended:
            super().end_run(peers)
        elif self._ended and not have_ended:
            super().begin_run()
        if not have_ended:
            one.left = np.minimum(one.left + most * (one.others / len(others)), FULL * most)
            one.others = 0
            return one.left * self._say(peer, peers)
        if not one.granted:
            self._grant(one, peer, peers)
        return one.left.copy()

    def spent(self, peer: NodeId, moved: Norms, distances: Norms) -> None:
        """See `PairAllowances`."""
        if (one := self._peers.get(peer)) is not None:
            np.maximum(one.left - moved, 0.0, out=one.left)
            if not self._ended or one.usual is None:
                self._note(one, distances)
        for id, other in self._peers.items():
            other.others += id != peer

    def end_run(self, peers: Collection[NodeId]) -> None:
        """The workers' runs count, not that of the centre's own node."""

    def begin_run(self) -> None:
        """As `end_run`."""

    def keep(self, peers: frozenset[NodeId]) -> None:
        """See `PairAllowances`."""
        super().keep(peers)
        for gone in self._said.keys() - peers:
            del self._said[gone]


def _moved(mine: Sliced, where: slice, outgoing: Vector, theirs: Sliced, following: Vector, stops: Stops) -> Sums:
    if isinstance(mine, BlockFloats) and mine.move(where, outgoing, theirs, following):
        return squares_by(following, None, stops)
    ours, other = mine[where], theirs[where]
    found = move_references(ours, outgoing, other, following, stops)
    mine[where], theirs[where] = ours, other
    return found


@lru_cache(maxsize=8)
def tensors_of(layout: Layout) -> Tensors:
    """One for all links of a model."""
    return Tensors(layout)


def _low_median(norms: list[Norms]) -> Norms:
    """Of each tensor; of an even number the lower one, as who is far may be half of two."""
    median: Norms = np.sort(np.array(norms), axis=0)[(len(norms) - 1) // 2]
    return median
