"""Shards of the parameters: pushes, weights, sums on their way, and who serves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar

from peerd.transport.messages.base import COUNT, Chunks, Drawn, MemberName, Message, Name, NameOrNone, Within

WeightsClock = Annotated[int, Within(-1, COUNT.high)]  # -1: of a model that came from no server


@dataclass(frozen=True, slots=True)
class Applied:
    """The last push of a worker's life that went into some weights, as it travels."""

    worker: MemberName
    life: Drawn
    seq: int


@dataclass(frozen=True, slots=True)
class ShardPush(Message):
    """A worker's update of one shard, `seq` of its life, made from the weights at `clock`, encoded with `codec`.

    A gradient is of the parameters; float buffers come as differences beside it. One that was not finite has no clock.
    """

    KIND: ClassVar[int] = 80
    key_fields: ClassVar[tuple[str, ...]] = ("shard", "seq")
    shard: int
    seq: int
    life: Drawn  # of the worker: a restarted one counts from 1 again
    oldest: int  # those before it will not come (again)
    clock: WeightsClock
    codec: Name
    wants_answer: bool  # False: the worker has gone on already, and says it again to a new server
    finishing: bool  # this worker's trainer has ended: nobody need wait for its next push
    rate: float  # of a gradient; DIFFERENCE: it is by how much a step moved the model
    chunks: Chunks


class Pass(IntEnum):
    """For how long a server need not wait for a worker that has its answer."""

    NONE = 0
    ROUND = 1  # this round: the worker is one ahead elsewhere
    UNTIL_PUSHED = 2  # its next push: it waits for another shard's server


@dataclass(frozen=True, slots=True)
class ShardPull(Message):
    """Send me the shard's weights, unless push `seq` has come and must wait for others; or close rounds without me."""

    KIND: ClassVar[int] = 81
    shard: int
    seq: int
    life: Drawn
    passes: Pass
    knows: bool  # who serves the shard, and by which tree


@dataclass(frozen=True, slots=True)
class Weights(Message):
    """A shard's weights at `clock`, in float32, and behind them what its optimizer remembers, if it has one."""

    KIND: ClassVar[int] = 82
    key_fields: ClassVar[tuple[str, ...]] = ("shard", "term", "clock", "answers", "final")
    shard: int
    term: int
    server: NameOrNone
    clock: WeightsClock
    answers: tuple[Applied, ...]  # whom it is for, the receiver or those below it, with the last push of each that came
    final: bool  # every member's run has ended
    applied: tuple[Applied, ...]
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Prepare(Message):
    """I want to serve this shard from now on: stop, if you do, and tell me what you have that is newer than `clock`."""

    KIND: ClassVar[int] = 83
    shard: int
    term: int
    clock: WeightsClock


@dataclass(frozen=True, slots=True)
class Promise(Message):
    """The answer to a ballot: the sender's newest weights; no chunks if the proposer's are as new."""

    KIND: ClassVar[int] = 84
    key_fields: ClassVar[tuple[str, ...]] = ("shard", "term", "clock")
    shard: int
    term: int  # of the ballot
    life: Drawn  # of the sender's worker
    clock: WeightsClock
    applied: tuple[Applied, ...]
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class ShardLeader(Message):
    """This member serves the shard, or prepares to."""

    KIND: ClassVar[int] = 85
    shard: int
    term: int
    server: NameOrNone
    serving: bool
    arity: int  # of the tree by which pushes come,
    tree: tuple[Applied, ...]  # and who is in it, by rank, with the last push of each in the weights; empty: none


@dataclass(frozen=True, slots=True)
class ShardSum(Message):
    """The sum of these pushes, all made from the weights at `clock`; the sender's number `seq` in this tree."""

    KIND: ClassVar[int] = 87
    key_fields: ClassVar[tuple[str, ...]] = ("shard", "term", "clock", "seq")
    shard: int
    term: int
    server: NameOrNone
    seq: int
    clock: WeightsClock
    codec: Name
    finishing: bool  # the trainers of all these workers have ended
    parts: tuple[Applied, ...]
    rate: float  # the mean of theirs
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class SumTaken(Message):
    """Your sums up to this one have come."""

    KIND: ClassVar[int] = 88
    shard: int
    term: int
    server: NameOrNone
    seq: int


@dataclass(frozen=True, slots=True)
class Finished(Message):
    """My trainer has ended, and every push of it has come: wait for no other."""

    KIND: ClassVar[int] = 86
