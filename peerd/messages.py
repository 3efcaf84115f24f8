"""What peers say to each other: one frozen dataclass a message, and the table of them.

A message knows nothing of bytes: `peerd.transport.wire` turns it into frames and back. Bulk data sits in a last
field named `chunks`, which travels outside the msgpack header and is never copied on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

Chunk = bytes | bytearray | memoryview
Chunks = tuple[Chunk, ...]

CHUNK_VALUES = 1 << 20
"""Values a chunk encodes: 4 MiB of float32, so that no chunk exceeds 4 MiB raw or on the wire."""


class State(IntEnum):
    """What a member is believed to be; a higher rank wins at an equal incarnation (SWIM, Das et al. 2002)."""

    ALIVE = 0
    SUSPECT = 1
    FAILED = 2
    LEFT = 3


@dataclass(frozen=True, slots=True)
class Member:
    """One row of the membership table, as it travels."""

    id: str
    name: str
    host: str
    port: int
    epoch: int  # counts the starts of this identity: a restart supersedes everything said of the previous life
    incarnation: int  # raised by the subject alone, to refute a suspicion
    state: State
    accuser: str  # who suspects or declared it failed; "" otherwise
    meta: bytes  # at most 512 bytes; what the member says of itself


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there? `target` is the id expected at the address."""

    KIND: ClassVar[int] = 1
    seq: int
    sender: str
    target: str
    news: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class PingRequest:
    """Probe `target` for me (an indirect probe)."""

    KIND: ClassVar[int] = 2
    seq: int
    sender: str
    target: str
    host: str
    port: int
    news: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Ack:
    """The probe numbered `seq` was answered."""

    KIND: ClassVar[int] = 3
    seq: int
    sender: str
    news: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Nack:
    """I am here, but the target you asked me to probe has not answered yet (Lifeguard)."""

    KIND: ClassVar[int] = 4
    seq: int
    sender: str


@dataclass(frozen=True, slots=True)
class MemberTable:
    """One side of a push-pull: everything this node believes."""

    KIND: ClassVar[int] = 5
    sender: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of every connection that is to last, from the dialler."""

    KIND: ClassVar[int] = 16
    protocol: int
    swarm: str
    run: str
    node: str
    name: str
    epoch: int
    host: str
    port: int
    mode: str
    model: str  # hex hash of names, shapes and dtypes; "" while no trainer is attached
    tensors: tuple[str, ...]  # the first tensors as "name dtype shape", so that a refusal can name the one that differs


@dataclass(frozen=True, slots=True)
class Welcome:
    """The acceptor's answer: who it is."""

    KIND: ClassVar[int] = 17
    node: str
    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The acceptor's other answer: the field that differs, with the value on its side and on the dialler's."""

    KIND: ClassVar[int] = 18
    field: str
    here: str
    there: str


@dataclass(frozen=True, slots=True)
class BulkOffer:
    """The dialler, after its greeting: large chunks could go past this connection; this is where I am."""

    KIND: ClassVar[int] = 19
    version: str  # of what would carry them; another one may not understand the address
    lane: int  # the dialler's number for it, which opens what is sent there
    address: tuple[bytes, ...]  # in parts


@dataclass(frozen=True, slots=True)
class BulkAnswer:
    """The acceptor's answer: why not, or where it is. Then the dialler's, empty: the lane was tried and is good."""

    KIND: ClassVar[int] = 20
    refusal: str
    lane: int
    address: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Send me your current model: I am about to train."""

    KIND: ClassVar[int] = 32


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """A whole model, encoded with `codec`."""

    KIND: ClassVar[int] = 33
    step: int
    codec: str
    chunks: Chunks


@dataclass(frozen=True, slots=True, order=True)
class Plan:
    """How a swarm combines models (plan.py); on a connection: what the messages after it were meant under."""

    KIND: ClassVar[int] = 34
    number: int = 0  # 0: as each node was started
    author: str = ""
    done: bool = True  # False: one exact average of all models comes first
    text: str = ""  # the mode, and its settings as key=value, with blanks between; "": as each node was started

    @property
    def once(self) -> bool:
        """Whether what goes on now is that average."""
        return not self.done


AS_STARTED = Plan()


@dataclass(frozen=True, slots=True)
class SpeedRequest:
    """In place of a greeting: send me a SpeedSample, I measure the line (transport/speed.py)."""

    KIND: ClassVar[int] = 35


@dataclass(frozen=True, slots=True)
class SpeedSample:
    """Bytes that mean nothing; above 31, for what is urgent has no chunks."""

    KIND: ClassVar[int] = 36
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class LinkOpen:
    """Start a paired-reference link named `link`: answer with a LinkSnapshot, or with LinkClosed to decline."""

    KIND: ClassVar[int] = 48
    link: int


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    """The vector that both references of `link` start from, at version 0."""

    KIND: ClassVar[int] = 49
    link: int
    codec: str
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Delta:
    """One half of exchange `seq` of `link`: the sender's model less its reference, encoded with `codec`."""

    KIND: ClassVar[int] = 50
    link: int
    seq: int
    codec: str
    gain: float  # what the sender's measured contraction allows; both ends use the smaller of the two
    wants_answer: bool
    finishing: bool  # the sender's trainer has ended: it is flushing
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class LinkClose:
    """I want to drop `link`, which I hold at `version`; say LinkClosed when nothing is under way."""

    KIND: ClassVar[int] = 51
    link: int
    version: int


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """I do not hold `link` (any more): drop it too."""

    KIND: ClassVar[int] = 52
    link: int


class RoundPhase(IntEnum):
    """How far a member is with the round that comes after the last one it applied."""

    IDLE = 0  # it has no contribution yet
    READY = 1  # it has one, and takes part in no attempt
    RUNNING = 2  # an attempt is under way
    HELD = 3  # it holds the attempt's result, which is not yet committed


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Where a member is; what the leader of the rounds decides on. From the leader itself: tell me where you are."""

    KIND: ClassVar[int] = 64
    supersedes: ClassVar[bool] = True  # an older one that has not left yet is worth nothing
    life: int  # drawn at random by each life of a member
    phase: RoundPhase
    round: int  # number of the last round that it applied
    agreed: int  # the attempt that this was
    attempt: int  # the highest attempt that it has begun
    progress: int  # pieces of this attempt that it has
    finished: bool  # its trainer has ended
    given: bool  # and its last model has been in a round
    settled: bool  # and it has applied the final round


@dataclass(frozen=True, slots=True)
class RoundBegin:
    """Begin an attempt of a round, all of `roster` together, ranked in this order."""

    KIND: ClassVar[int] = 65
    round: int
    attempt: int
    codec: str
    topology: str
    whole: bool  # contribute the model; else its difference from the last agreed one
    final: bool  # the last round of a run
    roster: tuple[str, ...]
    lives: tuple[int, ...]  # of the roster's members: a later life is not meant


@dataclass(frozen=True, slots=True)
class RoundPieces:
    """Partial sums, or sums, of parts of the vector: one chunk each."""

    KIND: ClassVar[int] = 66
    round: int
    attempt: int
    seqs: tuple[int, ...]
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class PiecesTaken:
    """These pieces have arrived: send me others."""

    KIND: ClassVar[int] = 67
    round: int
    attempt: int
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundCommit:
    """All members hold the result of this attempt: apply it."""

    KIND: ClassVar[int] = 68
    round: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Push:
    """The sender's model less what the receiver knows of it (nothing, at seq 1): number `seq` of the one-way `link`."""

    KIND: ClassVar[int] = 56
    wants_answer: ClassVar[bool] = True
    link: int
    seq: int
    codec: str
    gain: float  # what the sender's measured contraction allows
    weight: float  # push-sum: all the weight that ever went over this link; 0 in other modes
    finishing: bool  # the sender's trainer has ended: it is flushing
    back: bool  # push-sum: it only gives back, and is not answered in kind
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Pushed:
    """All of `link` up to number `taken` is in my model."""

    KIND: ClassVar[int] = 57
    link: int
    seq: int  # counts these answers: a later one is not the repetition of one that still waits
    taken: int
    distance: float  # ||what I know of your model - mine||
    finishing: bool  # my trainer has ended


@dataclass(frozen=True, slots=True)
class PushForgotten:
    """I do not hold `link` (any more), of which I took all up to `seq`: start a new one."""

    KIND: ClassVar[int] = 58
    link: int
    seq: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Push me your model; I have taken number `seq` of your `link` (0 and 0: none)."""

    KIND: ClassVar[int] = 59
    wants_answer: ClassVar[bool] = True
    link: int
    seq: int
    back: bool  # the sender asks because it was asked, and does not want to be asked for this


@dataclass(frozen=True, slots=True)
class Applied:
    """The last push of a worker's life that went into some weights, as it travels."""

    worker: str
    life: int
    seq: int


@dataclass(frozen=True, slots=True)
class ShardPush:
    """A worker's update of one shard, `seq` of its life, made from the weights at `clock`, encoded with `codec`."""

    KIND: ClassVar[int] = 80
    shard: int
    seq: int
    life: int  # of the worker: a restarted one counts from 1 again
    oldest: int  # those before it will not come (again)
    clock: int
    codec: str
    wants_answer: bool  # False: the worker has gone on already, and says it again to a new server
    finishing: bool  # this worker's trainer has ended: nobody need wait for its next push
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class ShardPull:
    """Send me the shard's weights, unless push `seq` has come and must wait for others."""

    KIND: ClassVar[int] = 81
    shard: int
    seq: int
    life: int
    passes: bool  # another shard's server keeps me waiting: close this round without me
    knows: bool  # who serves the shard, and by which tree


@dataclass(frozen=True, slots=True)
class Weights:
    """A shard's weights at `clock`, in float32."""

    KIND: ClassVar[int] = 82
    shard: int
    term: int
    server: str
    clock: int
    answers: tuple[Applied, ...]  # whom it is for, the receiver or those below it, with the last push of each that came
    final: bool  # every member's run has ended
    applied: tuple[Applied, ...]
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Claim:
    """I want to serve this shard from now on: stop, if you do, and tell me what you have that is newer than `clock`."""

    KIND: ClassVar[int] = 83
    shard: int
    term: int
    clock: int


@dataclass(frozen=True, slots=True)
class Replica:
    """The answer to a claim: the sender's newest weights; no chunks if the claimant's are as new."""

    KIND: ClassVar[int] = 84
    shard: int
    term: int  # of the claim
    life: int  # of the sender's worker
    clock: int
    applied: tuple[Applied, ...]
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Serves:
    """This member serves the shard, or claims it."""

    KIND: ClassVar[int] = 85
    shard: int
    term: int
    server: str
    serving: bool
    arity: int  # of the tree by which pushes come,
    tree: tuple[Applied, ...]  # and who is in it, by rank, with the last push of each in the weights; empty: none


@dataclass(frozen=True, slots=True)
class ShardSum:
    """The sum of these pushes, all made from the weights at `clock`; the sender's number `seq` in this tree."""

    KIND: ClassVar[int] = 87
    shard: int
    term: int
    server: str
    seq: int
    clock: int
    codec: str
    finishing: bool  # the trainers of all these workers have ended
    parts: tuple[Applied, ...]
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class SumTaken:
    """Your sums up to this one have come."""

    KIND: ClassVar[int] = 88
    shard: int
    term: int
    server: str
    seq: int


@dataclass(frozen=True, slots=True)
class Finished:
    """My trainer has ended, and every push of it has come: wait for no other."""

    KIND: ClassVar[int] = 86


@dataclass(frozen=True, slots=True)
class CentreIs:
    """Elastic averaging: whom the sender takes for the centre; `age` counts its exchanges, if that is the sender."""

    KIND: ClassVar[int] = 96
    node: str
    age: int


@dataclass(frozen=True, slots=True)
class PairInvite:
    """NoLoCo: I have made my local steps; will you be my partner in exchange `seq`?"""

    KIND: ClassVar[int] = 97
    seq: int


@dataclass(frozen=True, slots=True)
class PairAnswer:
    """I wait for your half of exchange `seq`, or will have no part in it."""

    KIND: ClassVar[int] = 98
    seq: int
    accepts: bool


@dataclass(frozen=True, slots=True)
class PairHalf:
    """The sender's contribution to exchange `seq`, a whole model; the one who invited asks for the other's."""

    KIND: ClassVar[int] = 99
    seq: int
    codec: str
    wants_answer: bool
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Connected:
    """Never sent: the shell says that messages to this peer flow (again); what was under way may be lost."""


Message = (
    Ping | PingRequest | Ack | Nack | MemberTable | Hello | Welcome | Refuse | BulkOffer | BulkAnswer
    | ModelRequest | ModelSnapshot | Plan | SpeedRequest | SpeedSample
    | LinkOpen | LinkSnapshot | Delta | LinkClose | LinkClosed
    | Push | Pushed | PushForgotten | Pull
    | RoundReport | RoundBegin | RoundPieces | PiecesTaken | RoundCommit
    | ShardPush | ShardPull | Weights | Claim | Replica | Serves | ShardSum | SumTaken | Finished
    | CentreIs | PairInvite | PairAnswer | PairHalf
)  # fmt: skip

MESSAGES: dict[int, type[Message]] = {
    message.KIND: message
    for message in (
        Ping, PingRequest, Ack, Nack, MemberTable, Hello, Welcome, Refuse, BulkOffer, BulkAnswer,
        ModelRequest, ModelSnapshot, Plan, SpeedRequest, SpeedSample,
        LinkOpen, LinkSnapshot, Delta, LinkClose, LinkClosed,
        Push, Pushed, PushForgotten, Pull,
        RoundReport, RoundBegin, RoundPieces, PiecesTaken, RoundCommit,
        ShardPush, ShardPull, Weights, Claim, Replica, Serves, ShardSum, SumTaken, Finished,
        CentreIs, PairInvite, PairAnswer, PairHalf,
    )
}  # fmt: skip
