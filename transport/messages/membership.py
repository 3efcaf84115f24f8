"""What members say of each other, in datagrams and in whole tables (SWIM, Das et al. 2002)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from peerd.transport.messages.base import Drawn, Host, Message, Name, NameOrNone, Port


class State(IntEnum):
    """What a member is believed to be; a higher rank wins at an equal incarnation (SWIM, Das et al. 2002)."""

    ALIVE = 0
    SUSPECT = 1
    FAILED = 2
    LEFT = 3


@dataclass(frozen=True, slots=True)
class Member:
    """One row of the membership table, as it travels."""

    id: Name
    name: Name
    host: Host
    port: Port
    epoch: int  # counts the starts of this identity: a restart supersedes everything said of the previous life
    incarnation: int  # raised by the subject alone, to refute a suspicion
    state: State
    accuser: NameOrNone  # who suspects or declared it failed; "" otherwise
    meta: bytes  # at most 512 bytes; what the member says of itself
    proof: bytes = b""  # its key and signature, and the accuser's signature (membership/proofs.py); plain swarms: none


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Are you there? `target` is the id expected at the address."""

    KIND: ClassVar[int] = 1
    seq: Drawn
    sender: Name
    target: Name
    news: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class PingRequest(Message):
    """Probe `target` for me (an indirect probe)."""

    KIND: ClassVar[int] = 2
    seq: Drawn
    sender: Name
    target: Name
    host: Host
    port: Port
    news: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """The probe numbered `seq` was answered."""

    KIND: ClassVar[int] = 3
    seq: Drawn
    sender: Name
    news: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Nack(Message):
    """I am here, but the target you asked me to probe has not answered yet (Lifeguard)."""

    KIND: ClassVar[int] = 4
    seq: Drawn
    sender: Name


@dataclass(frozen=True, slots=True)
class MemberTable(Message):
    """One side of a push-pull: everything this node believes."""

    KIND: ClassVar[int] = 5
    sender: Name
    members: tuple[Member, ...]
