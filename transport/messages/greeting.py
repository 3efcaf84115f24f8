"""What the two ends of a new connection say before anything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from peerd.transport.messages.base import Chunks, Drawn, Host, MemberName, Message, Name, NameOrNone, Port, Visible


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The first message of every connection that is to last, from the dialler."""

    KIND: ClassVar[int] = 16
    protocol: int
    swarm: NameOrNone
    run: NameOrNone
    node: MemberName
    name: Name
    epoch: int
    host: Host
    port: Port
    mode: Visible
    model: NameOrNone  # hex hash of names, shapes and dtypes; "" while no trainer is attached
    tensors: tuple[str, ...]  # the first tensors as "name dtype shape", so that a refusal can name the one that differs


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The acceptor's answer: who it is."""

    KIND: ClassVar[int] = 17
    node: MemberName
    name: Name
    epoch: int


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """The acceptor's other answer: the field that differs, with the value on its side and on the dialler's."""

    KIND: ClassVar[int] = 18
    field: Name
    here: str
    there: str


NO_TLS = Refuse("encryption", "off", "on")
"""Said by a node whose connections are not sealed to one that begins with TLS."""


@dataclass(frozen=True, slots=True)
class BulkOffer(Message):
    """The dialler, after its greeting: large chunks could go past this connection; this is where I am."""

    KIND: ClassVar[int] = 19
    version: str  # of what would carry them; another one may not understand the address
    channel: Drawn  # the dialler's number for it, which opens what is sent there
    address: tuple[bytes, ...]  # in parts


@dataclass(frozen=True, slots=True)
class BulkAnswer(Message):
    """The acceptor's answer: why not, or where it is. Then the dialler's, empty: the channel was tried and is good."""

    KIND: ClassVar[int] = 20
    refusal: str
    channel: Drawn
    address: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Challenge(Message):
    """In place of a greeting: prove that you hold the key of `node`, the asker's too (peerd/daemon/twin_proof.py)."""

    KIND: ClassVar[int] = 21
    node: Name
    nonce: bytes  # 32, random
    life: bytes  # 16, random, of the asker's process
    epoch: int


@dataclass(frozen=True, slots=True)
class Proof(Message):
    """The acceptor's answer, after which it closes: who it is, signed together with what was asked."""

    KIND: ClassVar[int] = 22
    life: bytes
    epoch: int
    host: Host
    port: Port
    signature: bytes  # 64, Ed25519


@dataclass(frozen=True, slots=True)
class SpeedRequest(Message):
    """In place of a greeting: send me a SpeedSample, I measure the line (transport/speed.py)."""

    KIND: ClassVar[int] = 35


@dataclass(frozen=True, slots=True)
class SpeedSample(Message):
    """Bytes that mean nothing; above 31, for what is urgent has no chunks."""

    KIND: ClassVar[int] = 36
    key_fields: ClassVar[tuple[str, ...]] = ("KIND",)
    chunks: Chunks
