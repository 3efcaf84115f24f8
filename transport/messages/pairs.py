"""Exchanges of two: links with a pair of references (gossip, elastic averaging), and pairs drawn anew (NoLoCo)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from peerd.transport.messages.base import COUNT, Chunks, Drawn, Message, Name, NameOrNone, Within


@dataclass(frozen=True, slots=True)
class LinkOpen(Message):
    """Start a paired-reference link named `link`: answer with a LinkSnapshot, or with LinkClosed to decline.

    Or with LinkEqual, if `digest` is that of the vector that the answer would hold: mine would be the same.
    """

    KIND: ClassVar[int] = 48
    link: Drawn
    digest: bytes = b""  # 16 bytes of SHA-256; empty: of nothing


@dataclass(frozen=True, slots=True)
class LinkEqual(Message):
    """Both references of `link` start, at version 0, from the vector of the digest that asked for it."""

    KIND: ClassVar[int] = 55
    link: Drawn


@dataclass(frozen=True, slots=True)
class LinkSnapshot(Message):
    """The vector that both references of `link` start from, at version 0."""

    KIND: ClassVar[int] = 49
    key_fields: ClassVar[tuple[str, ...]] = ("link",)
    link: Drawn
    codec: Name
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Delta(Message):
    """One half of exchange `seq` of `link`: the sender's model less its reference, encoded with `codec`."""

    KIND: ClassVar[int] = 50
    key_fields: ClassVar[tuple[str, ...]] = ("link", "seq")
    link: Drawn
    seq: Drawn
    codec: Name
    gain: float  # what the sender's measured contraction allows; both ends use the smaller of the two
    wants_answer: bool
    finishing: bool  # the sender's trainer has ended: it is flushing
    limits: bytes  # float32, how far the exchange may move each tensor of the sender; none: it keeps to no bound
    samples: float  # a step of the sender's trainer, of late; 0: it does not say
    steps_s: float  # and so many steps a second
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class LinkClose(Message):
    """I want to drop `link`, which I hold at `version`; say LinkClosed when nothing is under way."""

    KIND: ClassVar[int] = 51
    link: Drawn
    version: int


@dataclass(frozen=True, slots=True)
class LinkClosed(Message):
    """I do not hold `link` (any more), of which I applied `version` exchanges, and no other will follow."""

    KIND: ClassVar[int] = 52
    link: Drawn
    version: Annotated[int, Within(-1, COUNT.high)] = -1  # I know nothing of it


@dataclass(frozen=True, slots=True)
class DeltaTaken(Message):
    """I have applied exchange `seq` of `link`: you need not keep your half for me."""

    KIND: ClassVar[int] = 53
    link: Drawn
    seq: Drawn


@dataclass(frozen=True, slots=True)
class LinkSketch(Message):
    """A few numbers of the sender's model (training/sketch.py), which has applied exchange `seq` of `link`."""

    KIND: ClassVar[int] = 54
    supersedes: ClassVar[bool] = True
    link: Drawn
    number: Drawn  # of the sender's sketches over this link: an older one that comes late, or again, says nothing
    seq: Drawn
    finishing: bool  # the sender's trainer has ended
    asks: bool  # and yours? No exchange: how long an answer takes says nothing of those (mode_core.py)
    sums: bytes


@dataclass(frozen=True, slots=True)
class CentreIs(Message):
    """Elastic averaging: whom the sender takes for the centre; `age` counts its exchanges, if that is the sender."""

    KIND: ClassVar[int] = 96
    node: NameOrNone
    age: int


@dataclass(frozen=True, slots=True)
class PairInvite(Message):
    """NoLoCo: I have made my local steps; will you be my partner in exchange `seq`?"""

    KIND: ClassVar[int] = 97
    seq: Drawn


@dataclass(frozen=True, slots=True)
class PairAnswer(Message):
    """I wait for your half of exchange `seq`, or have had it; or will have no part in it."""

    KIND: ClassVar[int] = 98
    supersedes: ClassVar[bool] = True  # of refusals: who asks again has given the last exchange up
    seq: Drawn
    accepts: bool

    @property
    def said(self) -> Hashable:
        """One refusal makes way for the next."""
        return (type(self), self.seq) if self.accepts else (type(self),)


@dataclass(frozen=True, slots=True)
class PairHalf(Message):
    """The sender's contribution to exchange `seq`, a whole model; the one who invited asks for the other's."""

    KIND: ClassVar[int] = 99
    key_fields: ClassVar[tuple[str, ...]] = ("seq",)
    seq: Drawn
    codec: Name
    wants_answer: bool
    chunks: Chunks
