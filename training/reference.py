"""What does the other end of a link know of my model? The paired references of one link, and its exchanges.

Both ends hold the same two public copies: `mine` (what the peer knows of this model) and `theirs` (what this node
knows of the peer's). An exchange is two halves, one from each end, under one sequence number:

    q_mine = C(x - mine)                      C: any lossy codec; what it drops stays in x - mine (error feedback)
    mine += q_mine;  theirs += q_theirs       the same bits on both ends
    x += gain * (theirs - mine)               the peer adds exactly the negative: the mean of the two is conserved

Neither reference moves until both halves are known, so an exchange that is cut is either repeated (the half under way
is resent, the peer answers again with its half, each is applied once) or dropped on both ends with nothing to undo.
Two halves that cross on the wire are one exchange: neither end needs to yield.

CHOCO-SGD's public copies (Koloskova et al. 2019, arXiv:1902.00340) on AD-PSGD's pairwise exchange (Lian et al. 2018,
arXiv:1710.06952).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from peerd.effects import PeerError, Vector
from peerd.messages import CHUNK_VALUES, Chunks, Delta
from peerd.training import delta
from peerd.training.delta import GAIN_MOST, Gain, Layout, NotFinite
from peerd.training.scratch import Scratch

VALUE_MOST = 1e30
"""No weight is larger; a float32 difference of two such values is still finite."""


class LinkMismatch(Exception):
    """The two ends are not at the same version: start the link anew from a snapshot."""


@dataclass(frozen=True, slots=True)
class Half:
    """What this end puts into an exchange: its codec, that codec's gain, and whether it flushes."""

    codec: str
    gain: Gain
    gain_limit: float  # so that exchanges that overlap do not overshoot together
    finishing: bool


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a half from the peer led to: perhaps a correction for x, perhaps a half to send back."""

    correction: Vector | None  # scratch: the caller gives it back
    reply: Delta | None


class PairedReference:
    """One end of one link. Not thread-safe: one lane owns it."""

    def __init__(self, link: int, start: Vector, layout: Layout, scratch: Scratch) -> None:
        """Both references begin at `start` (shape (total,)), the same bits on both ends."""
        self._scratch = scratch
        self.link = link
        self.version = 0
        self.layout = layout
        self.mine = start.copy()
        self.theirs = start.copy()
        self.under_way: Delta | None = None  # our half of exchange version + 1
        self._outgoing: Vector | None = None  # what that half decodes to
        self.answered: Delta | None = None  # our half of exchange `version`, kept until the next one completes

    def begin(self, values: Vector, half: Half) -> Delta:
        """Start exchange version + 1 from the model `values`. Raises NotFinite; call only when none is under way."""
        assert self.under_way is None, "one exchange at a time"
        return self._encode(values, half, wants_answer=True)

    def receive(self, theirs: Delta, values: Vector, half: Half) -> Outcome:
        """The peer's half arrived. Raises LinkMismatch, NotFinite (our model) or PeerError (its payload)."""
        if theirs.seq == self.version:
            repeat = replace(self.answered, wants_answer=False) if theirs.wants_answer and self.answered else None
            return Outcome(None, repeat)
        if theirs.seq < self.version:
            return Outcome(None, None)  # said again after a reconnect; a later exchange proves that it had arrived
        if theirs.seq == self.version + 2 and self.under_way is not None:
            return Outcome(None, None)  # early: the answer to our half was lost, and both will be said again
        if theirs.seq != self.version + 1:
            raise LinkMismatch(f"the peer is at exchange {theirs.seq}, this end at {self.version}")
        if not 0 < theirs.gain <= GAIN_MOST:
            raise PeerError(f"a gain of {theirs.gain} is outside (0, {GAIN_MOST}]")
        incoming = decode_onto(theirs.codec, self.layout, theirs.chunks, self.theirs, self._scratch)
        try:
            reply = self._encode(values, half, wants_answer=False) if self.under_way is None else None
        except NotFinite:
            self._scratch.give(incoming)
            raise
        return Outcome(self._complete(theirs, incoming), reply)

    def cancel(self) -> None:
        """Drop the half under way: the peer has not applied it."""
        if self._outgoing is not None:
            self._scratch.give(self._outgoing)
        self.under_way = self._outgoing = None

    def distance(self) -> float:
        """||theirs - mine|| over the parameters: how far apart the two models are, as far as both ends know."""
        parameters = self.layout.parameters
        return norm_of_difference(self.theirs[:parameters], self.mine[:parameters])

    def _encode(self, values: Vector, half: Half, *, wants_answer: bool) -> Delta:
        chunks, decoded = encode_difference(half.codec, self.layout, values, self.mine, half.gain, self._scratch)
        self.under_way = Delta(
            self.link,
            self.version + 1,
            half.codec,
            min(half.gain.value, half.gain_limit),
            wants_answer,
            half.finishing,
            chunks,
        )
        self._outgoing = decoded
        return self.under_way

    def _complete(self, theirs: Delta, theirs_next: Vector) -> Vector:
        assert self.under_way is not None, "an exchange has two halves"
        assert self._outgoing is not None, "kept beside the half under way"
        gain = min(theirs.gain, self.under_way.gain)
        for part in parts(len(self.mine)):  # bounded pieces: numpy may hold the GIL for each
            self.mine[part] += self._outgoing[part]
            self.theirs[part] = theirs_next[part]
            theirs_next[part] -= self.mine[part]
            theirs_next[part] *= gain
        self.version += 1
        self.answered = self.under_way
        self.cancel()
        return theirs_next


def encode_difference(
    codec: str, layout: Layout, values: Vector, known: Vector, gain: Gain, scratch: Scratch
) -> tuple[Chunks, Vector]:
    """The chunks for values - known, and what they decode to (scratch); the loss goes into `gain`. Raises NotFinite."""
    difference, decoded = scratch.take(known), scratch.take(known)
    np.subtract(values, known, out=difference)
    try:
        chunks, contraction = delta.encode(codec, layout, difference, decoded=decoded)
    except NotFinite:
        scratch.give(decoded)
        raise
    finally:
        scratch.give(difference)
    gain.observe(contraction)
    return chunks, decoded


def decode_onto(codec: str, layout: Layout, chunks: Chunks, known: Vector, scratch: Scratch) -> Vector:
    """known + what `chunks` hold, in scratch. Raises PeerError, also for a sum that no model reaches."""
    incoming = scratch.take(known)
    try:
        delta.decode(codec, layout, chunks, incoming)
        with np.errstate(over="ignore"):
            for part in parts(len(incoming)):
                incoming[part] += known[part]
                if not np.abs(incoming[part]).max() <= VALUE_MOST:  # its difference could overflow
                    raise PeerError(f"a value beyond {VALUE_MOST:g}")
    except PeerError:
        scratch.give(incoming)
        raise
    return incoming


def parts(count: int) -> Iterator[slice]:
    """Slices of at most CHUNK_VALUES values that cover [0, count)."""
    return (slice(start, min(start + CHUNK_VALUES, count)) for start in range(0, count, CHUNK_VALUES))


def norm_of_difference(a: Vector, b: Vector | None = None) -> float:
    """||a - b||, or ||a||, in pieces that stay in the cache."""
    return math.sqrt(sum(delta.squared_norm(a[part] if b is None else a[part] - b[part]) for part in parts(len(a))))
