"""What members say of each other, in datagrams and in whole tables (SWIM, Das et al. 2002)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from peerd.transport.messages.base import Message


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
class Ping(Message):
    """Are you there? `target` is the id expected at the address."""

    KIND: ClassVar[int] = 1
    seq: int
    sender: str
    target: str
    news: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class PingRequest(Message):
    """Probe `target` for me (an indirect probe)."""

    KIND: ClassVar[int] = 2
    seq: int
    sender: str
    target: str
    host: str
    port: int
    news: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """The probe numbered `seq` was answered."""

    KIND: ClassVar[int] = 3
    seq: int
    sender: str
    news: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Nack(Message):
    """I am here, but the target you asked me to probe has not answered yet (Lifeguard)."""

    KIND: ClassVar[int] = 4
    seq: int
    sender: str


@dataclass(frozen=True, slots=True)
class MemberTable(Message):
    """One side of a push-pull: everything this node believes."""

    KIND: ClassVar[int] = 5
    sender: str
    members: tuple[Member, ...]
