"""What does the other end of a link know of my model? The paired references of one link, and its exchanges.

Both ends hold the same two public copies: `mine` (what the peer knows of this model) and `theirs` (what this node
knows of the peer's). An exchange is two halves, one from each end, under one sequence number:

    q_mine = C(x - mine)                      C: any lossy codec; what it drops stays in x - mine (error feedback)
    mine += q_mine;  theirs += q_theirs       the same bits on both ends
    x += gain * (theirs - mine)               the peer adds exactly the negative: the mean of the two is conserved

The end whose steps are of more samples adds less (batch_sizes.py): the mean by what the two are worth is conserved.
Both ends scale what they add to a tensor down to the lower of the limits that come with the halves (robust.py); where
both runs have ended and that is next to nothing, each to its own (`goes_alone`).

Neither reference moves until both halves are known, so an exchange that is cut is either repeated (the half under way
is resent, the peer answers again with its half, each is applied once) or dropped on both ends with nothing to undo.
Two halves that cross on the wire are one exchange: neither end needs to yield.

An end that has applied an exchange may be alone with that: the answer, or the half that crossed, may be lost. Until it
knows better it is not `settled`, and keeps its half. When a link ends before, what could still be needed outlives it
as an `Unfinished`: the half, and for an end that waits for the other's, one vector in place of two references.

CHOCO-SGD's public copies (Koloskova et al. 2019, arXiv:1902.00340) on AD-PSGD's pairwise exchange (Lian et al. 2018,
arXiv:1710.06952).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from peerd.training.batch_sizes import Work, share_of_pair
from peerd.training.codecs import vector
from peerd.training.codecs.difference import decode_onto
from peerd.training.codecs.vector import GAIN_MAX, VALUE_MAX, Gain, Layout, NotFinite
from peerd.training.effects import Sliced, Vector
from peerd.training.pairs.robust import Norms, factors, tensors_of, unpacked
from peerd.training.scratch import Scratch
from peerd.transport.errors import PeerError
from peerd.transport.messages import Delta, DeltaTaken, LinkClosed

KEPT_MAX = 1 << 14  # values: of a larger model our half is decoded again, as keeping it would take another copy

PROGRESS_MIN = 1 / 32  # of the way that an exchange goes without bounds: with less, at a run's end, both stand
NOTHING_SAID = Work()

Result = TypeVar("Result")


class LinkMismatch(Exception):
    """The two ends are not at the same version: start the link anew from a snapshot."""


@dataclass(frozen=True, slots=True)
class ExchangeHalf:
    """What this end puts into an exchange: its codec, that codec's gain, and whether it flushes."""

    codec: str
    gain: Gain
    gain_limit: float  # so that exchanges that overlap do not overshoot together
    finishing: bool
    limits: bytes = b""  # how far each tensor may be moved (robust.py)
    value_max: float = VALUE_MAX  # what no weight of the peer's can be beyond
    work: Work = NOTHING_SAID


@dataclass(frozen=True, slots=True, eq=False)
class Exchanged:
    """An exchange of which both halves are here."""

    correction: Vector  # of x; scratch: the caller gives it back
    distances: Norms  # ||theirs - mine||, of each tensor
    moved: Norms  # of each, by the correction
    limits: Norms  # what the peer said of its own


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a half from the peer led to: perhaps a half to send back, perhaps an exchange that is complete."""

    reply: Delta | DeltaTaken | None
    exchanged: Exchanged | None = None


def share_of(ours: Delta, theirs: Delta) -> float:
    """What part of the way that an exchange of these halves allows our end goes. At a run's end both go all of it: who
    comes less far would use up what it allows the other (robust.py)."""
    if ours.finishing or theirs.finishing:
        return 1.0
    return share_of_pair(Work(ours.samples, ours.steps_s), Work(theirs.samples, theirs.steps_s))


def goes_alone(ours: Delta, theirs: Delta, distances: Norms) -> bool:
    """Whether each end goes as far as it may itself: both runs have ended, and what both allow is next to nothing.

    So one that its partners have left behind comes to them, where the mean of the two would hold it away.
    """
    if not (ours.finishing and theirs.finishing):
        return False
    gain = min(ours.gain, theirs.gain)
    moved, least = _within_both(ours, theirs, distances) * distances, PROGRESS_MIN * gain * distances
    return bool(moved.dot(moved) < least.dot(least))


def _within_both(ours: Delta, theirs: Delta, distances: Norms) -> Norms:
    limits = [unpacked(half.limits, len(distances)) for half in (ours, theirs)]
    return factors(min(ours.gain, theirs.gain), distances, np.minimum(*limits))


def _scale(ours: Delta, theirs: Delta, distances: Norms) -> Norms:
    """What each tensor of theirs - mine is multiplied by at our end, for our correction. Norms: shape (tensors,)."""
    if goes_alone(ours, theirs, distances):
        scale = factors(min(ours.gain, theirs.gain), distances, unpacked(ours.limits, len(distances)))
    else:
        scale = _within_both(ours, theirs, distances)
    return share_of(ours, theirs) * scale


class PairedReference:
    """One end of one link. Not thread-safe: one thread owns it."""

    def __init__(self, link: int, start: Sliced, layout: Layout, scratch: Scratch) -> None:
        """Both references begin at `start` (shape (total,)), the same bits on both ends; it is this one's own now."""
        self._scratch = scratch
        self._tensors = tensors_of(layout)
        self.distances: Norms = np.zeros(len(self._tensors))
        self.link = link
        self.version = 0
        self.layout = layout
        self.mine = start
        self.theirs = start.copy()
        self.under_way: Delta | None = None  # our half of exchange version + 1
        self._outgoing: Vector | None = None  # what that one decodes to, of a small model
        self.answered: Delta | None = None  # our half of exchange `version`, kept until the next one completes
        self.confirmed = True  # the peer is known to have applied exchange `version`, too
        self._torn = False  # an error came while both references moved: they are nobody's any more

    @property
    def settled(self) -> bool:
        """Whether the two ends are known to have applied the same exchanges, and none is under way."""
        return self.confirmed and self.under_way is None

    def begin(self, values: Vector, half: ExchangeHalf) -> Delta:
        """Start exchange version + 1 from the model `values`. Raises NotFinite; call only when none is under way."""
        assert self.under_way is None, "one exchange at a time"
        return self._encode(values, half, wants_answer=True)

    def receive(self, theirs: Delta, values: Vector, half: ExchangeHalf) -> Outcome:
        """The peer's half arrived. Raises LinkMismatch, NotFinite (our model) or PeerError (its payload)."""
        if self._torn:
            raise LinkMismatch("an error broke the last exchange off half way")
        if theirs.seq == self.version:
            if not theirs.wants_answer:  # said by one who has applied it, and wonders whether we have
                self.confirmed = True
                return Outcome(DeltaTaken(self.link, self.version))
            return Outcome(replace(self.answered, wants_answer=False) if self.answered else None)
        if theirs.seq < self.version:
            return Outcome(None)  # said again after a reconnect; a later exchange proves that it had arrived
        if theirs.seq == self.version + 2 and self.under_way is not None:
            return Outcome(self.under_way)  # early: the answer to our half was lost, so we ask for it again
        if theirs.seq != self.version + 1:
            raise LinkMismatch(f"the peer is at exchange {theirs.seq}, this end at {self.version}")
        if not 0 < theirs.gain <= GAIN_MAX:
            raise PeerError(f"a gain of {theirs.gain} is outside (0, {GAIN_MAX}]")
        limits = unpacked(theirs.limits, len(self._tensors))
        incoming = decode_onto(
            theirs.codec, self.layout, theirs.chunks, self.theirs, self._scratch, half.value_max, corrects=True
        )
        self.confirmed = True  # who goes on to the next has applied the last
        try:
            reply = self._encode(values, half, wants_answer=False) if self.under_way is None else None
        except NotFinite:
            self._scratch.give(incoming)
            raise
        exchanged = self._complete(theirs, incoming, limits)
        return Outcome(reply or DeltaTaken(self.link, self.version), exchanged)

    def taken(self, seq: int) -> None:
        """The peer has applied exchange `seq`."""
        self.confirmed |= seq == self.version

    def end(self) -> Unfinished | None:
        """What outlives the link, if anything must; the references are not to be used any more."""
        if self.settled or self._torn:
            self.cancel()
            return None
        apart: Sliced | None = None
        if self.under_way is not None:
            apart = self.theirs
            self._each_piece(self.under_way, partial(_take_away, apart, self.mine))
        answered = None if self.confirmed else self.answered
        unfinished = Unfinished(self.link, self.version, answered, self.under_way, apart, self.layout, self._scratch)
        self.cancel()
        return unfinished

    def cancel(self) -> None:
        """Drop the half under way: the peer has not applied it."""
        self.under_way = self._outgoing = None

    def distance(self) -> float:
        """||theirs - mine|| over the parameters: how far apart the two models are, as far as both ends know."""
        return self._tensors.whole(self.distances)

    def _encode(self, values: Vector, half: ExchangeHalf, *, wants_answer: bool) -> Delta:
        outgoing = np.empty(self.mine.shape, self.mine.dtype) if self.mine.shape[0] <= KEPT_MAX else None
        chunks, contraction = vector.encode(half.codec, self.layout, values, known=self.mine, decoded=outgoing)
        self._outgoing = outgoing
        half.gain.observe(contraction)
        self.under_way = Delta(
            self.link,
            self.version + 1,
            half.codec,
            min(half.gain.value, half.gain_limit),
            wants_answer,
            half.finishing,
            half.limits,
            half.work.samples,
            half.work.steps,
            chunks,
        )
        return self.under_way

    def _each_piece(self, ours: Delta, work: Callable[[slice, Vector], Result]) -> list[Result]:
        """`work` of each piece of what our half decodes to: where it is, and its values."""
        if self._outgoing is not None:
            return [work(slice(0, len(self._outgoing)), self._outgoing)]
        return vector.each_decoded(ours.codec, self.layout, ours.chunks, self.mine.dtype, work)

    def _complete(self, theirs: Delta, theirs_next: Vector, limits: Norms) -> Exchanged:
        """Move both references, and make `theirs_next` the correction."""
        assert self.under_way is not None, "an exchange has two halves"
        self._torn = True
        each_piece = partial(self._each_piece, self.under_way)
        self.distances = self._tensors.move(self.mine, each_piece, self.theirs, theirs_next)
        self._torn = False
        scale = _scale(self.under_way, theirs, self.distances)
        self._tensors.scale(theirs_next, scale)
        self.version += 1
        self.answered = self.under_way
        self.confirmed = not theirs.wants_answer  # who answers has applied it; who began waits for our half
        self.cancel()
        return Exchanged(theirs_next, self.distances, scale * self.distances, limits)


class Unfinished:
    """One end of a link that ended here while its last exchange could be applied on one end only.

    It is like the reference that it was, but begins and answers nothing: it says again what the peer may lack (`said`),
    takes the half that it waits for itself, and ends when both ends are known to have applied the same exchanges.
    """

    def __init__(
        self,
        link: int,
        version: int,
        answered: Delta | None,
        under_way: Delta | None,
        apart: Sliced | None,
        layout: Layout,
        scratch: Scratch,
    ) -> None:
        """`apart` is theirs - mine as it will be with our half under way, shape (total,); None where there is none."""
        self.link = link
        self.version = version
        self.answered = answered  # our half of exchange `version`, if the peer may lack it
        self.under_way = under_way
        self.layout = layout
        self._apart = apart
        self._scratch = scratch

    @property
    def settled(self) -> bool:
        """As of a reference."""
        return self.answered is None and self.under_way is None

    @property
    def models(self) -> float:
        """How much memory it takes, in whole models of float32."""
        whole = 4 * self.layout.total
        apart = 0 if self._apart is None else self._apart.nbytes
        halves = (self.answered, self.under_way)
        return (apart + sum(sum(map(len, half.chunks)) for half in halves if half)) / whole

    def said(self) -> list[Delta | LinkClosed]:
        """What the peer may lack, and what it owes us; once it owes us nothing, that no exchange will follow."""
        said: list[Delta | LinkClosed] = []
        if self.answered is not None:
            said.append(replace(self.answered, wants_answer=False))
        said.append(LinkClosed(self.link, self.version) if self.under_way is None else self.under_way)
        return said

    @property
    def may_still_move(self) -> bytes:
        """How far the half that it waits for may move each tensor, as ours has it."""
        return self.under_way.limits if self.under_way is not None else b""

    def receive(self, theirs: Delta, value_max: float) -> Exchanged | None:
        """The peer's half arrived; returns the exchange if it is the one awaited. Raises PeerError."""
        if theirs.seq == self.version:
            self.taken(self.version if not theirs.wants_answer else -1)
        if theirs.seq != self.version + 1:
            return None
        if self.under_way is None or self._apart is None:
            self.answered = None  # who goes on to the next has applied the last
            return None
        if not 0 < theirs.gain <= GAIN_MAX:
            raise PeerError(f"a gain of {theirs.gain} is outside (0, {GAIN_MAX}]")
        tensors = tensors_of(self.layout)
        limits = unpacked(theirs.limits, len(tensors))
        correction = decode_onto(
            theirs.codec, self.layout, theirs.chunks, self._apart, self._scratch, value_max, corrects=True
        )
        distances = tensors.norms(correction)
        scale = _scale(self.under_way, theirs, distances)
        tensors.scale(correction, scale)
        self.version += 1
        self.answered = self.under_way if theirs.wants_answer else None
        self.cancel()
        return Exchanged(correction, distances, scale * distances, limits)

    def taken(self, seq: int) -> None:
        """The peer has applied exchange `seq`."""
        if seq == self.version:
            self.answered = None

    def cancel(self) -> None:
        """Drop the half under way: the peer has not applied it, and never will."""
        self.under_way = self._apart = None


def _take_away(apart: Sliced, mine: Sliced, where: slice, ours: Vector) -> None:
    apart[where] = apart[where] - (mine[where] + ours)
