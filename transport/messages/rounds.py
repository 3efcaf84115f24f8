"""Rounds of an all-reduce: where members are, what their leader orders, and the pieces."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

from peerd.transport.messages.base import Chunks, Drawn, Message, Name, NameOrNone, Visible


class RoundPhase(IntEnum):
    """How far a member is with the round that comes after the last one it applied."""

    IDLE = 0  # it has no contribution yet
    READY = 1  # it has one, and takes part in no attempt
    RUNNING = 2  # an attempt is under way
    HELD = 3  # it holds the attempt's result, which is not yet committed


@dataclass(frozen=True, slots=True)
class RoundReport(Message):
    """Where a member is; what the leader of the rounds decides on. From the leader itself: tell me where you are."""

    KIND: ClassVar[int] = 64
    supersedes: ClassVar[bool] = True  # an older one that has not left yet is worth nothing
    life: Drawn  # drawn at random by each life of a member
    phase: RoundPhase
    round: int  # number of the last round that it applied
    agreed: int  # the attempt that this was
    attempt: int  # the highest attempt that it has begun
    progress: int  # pieces of this attempt that it has
    finished: bool  # its trainer has ended
    given: bool  # and its last model has been in a round
    settled: bool  # and it has applied the final round
    blames: NameOrNone = ""  # who sent pieces that cannot be
    lengths: tuple[float, ...] = ()  # of the contribution, since the last agreed model: parameters, float buffers
    waits_s: float = field(default=0.0, compare=False)  # for how long it has had a contribution that is in no result
    step: int = 0  # where gradients are exchanged: of its trainer, and these two of its gradient
    weight: float = 0.0  # in the mean; 0: it is of another model
    nonfinite: bool = False  # not finite
    start: bytes = b""  # before its first round: the digest of the model that its progress counts from
    limit: float = 0.0  # of the mean of the last round that it applied, as the commit said
    early: bool = False  # it has come without having made its steps, so that nobody waits for it
    is_void: bool = False  # what it gave to the attempt is not its gradient: no mean may come of it
    concentration: float = 0.0  # of its own progress: which share of its energy the largest 2 % of the values have
    samples: float = 0.0  # a step of its trainer's, of late; 0: it does not say
    steps: float = 0.0  # behind its contribution
    unreached: tuple[Name, ...] = field(default=(), compare=False)  # members to whom it can make no connection


@dataclass(frozen=True, slots=True)
class RoundBegin(Message):
    """Begin an attempt of a round, all of `roster` together, ranked in this order."""

    KIND: ClassVar[int] = 65
    round: int
    attempt: int
    codec: Name
    topology: Visible
    whole: bool  # contribute the model; else its difference from the last agreed one, or from the equal start
    final: bool  # the last round of a run
    roster: tuple[Name, ...]
    lives: tuple[Drawn, ...]  # of the roster's members: a later life is not meant
    lengths: tuple[float, ...] = ()  # as they reported them; empty: they hold no model in common
    weights: tuple[float, ...] = ()  # of the roster's gradients, which are summed; empty: models are
    nonfinite: bool = False  # no mean comes of these gradients: a member's is not finite
    source: NameOrNone = ""  # whose whole model all take over; "": they take their mean
    basis: int = 0  # the attempt that the source agreed in last: who did so, too, has its model
    step: int = 0  # of the source's trainer
    waited: tuple[float, ...] = ()  # seconds, of the roster's members: for how long each one's contribution was there
    every: int = 0  # steps from this round to the next; 0: as all were told
    shares: tuple[float, ...] = ()  # of the roster's progress in their mean, the largest 1; empty: all count alike


NO_MEAN = -1.0


@dataclass(frozen=True, slots=True)
class RoundPieces(Message):
    """Partial sums, or sums, of parts of the vector: one chunk each."""

    KIND: ClassVar[int] = 66
    key_fields: ClassVar[tuple[str, ...]] = ("attempt", "seqs")
    round: int
    attempt: int
    seqs: tuple[int, ...]
    chunks: Chunks

    @property
    def stage(self) -> int:
        """Of an attempt before its sender's last one all have the result, or nobody wants it."""
        return self.attempt


@dataclass(frozen=True, slots=True)
class PiecesTaken(Message):
    """These pieces have arrived: send me others."""

    KIND: ClassVar[int] = 67
    round: int
    attempt: int
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundCommit(Message):
    """All members hold the result of this attempt: apply it."""

    KIND: ClassVar[int] = 68
    round: int
    attempt: int
    limit: float = 0.0  # the longest that a mean of gradients may be, by what members say of theirs; 0: of any length,
    # NO_MEAN: there is none, for some are not finite


@dataclass(frozen=True, slots=True)
class LeaderPassed(Message):
    """`leader` has kept the sender waiting for rounds, in vain, so often; less than before: its last life said that."""

    KIND: ClassVar[int] = 69
    supersedes: ClassVar[bool] = True
    leader: Name
    times: int
    unreached: bool = False  # as no connection to it can be made, by the sender or by who told it so

    @property
    def said(self) -> Hashable:
        """Of one leader the last word counts."""
        return (type(self), self.leader)


@dataclass(frozen=True, slots=True)
class RoundsWithout(Message):
    """From the leader: rounds go on without the receiver.

    For the rest of its life, as what it contributed is far longer than what the others did, or cannot be summed; or
    for a while, as no round with it has come to its end.
    """

    KIND: ClassVar[int] = 70
    life: Drawn  # of the receiver
    again: bool  # it is tried again
