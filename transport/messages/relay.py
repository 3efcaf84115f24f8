"""What a node that nobody can dial, and a member that lends it a port, say to each other (peerd/relay/)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from peerd.transport.messages.base import Host, Message, Port


@dataclass(frozen=True, slots=True)
class RelayRequest(Message):
    """In place of a greeting: lend me a port of yours, at which others reach me, while this connection lives."""

    KIND: ClassVar[int] = 41
    port: Port  # that I had before; 0: any


@dataclass(frozen=True, slots=True)
class RelayGranted(Message):
    """The answer: others reach you there."""

    KIND: ClassVar[int] = 42
    host: Host
    port: Port
    key: bytes  # 16, random: what your datagrams to that port, and mine to you, begin with


@dataclass(frozen=True, slots=True)
class RelayCall(Message):
    """Somebody has dialled that port: dial it, too, and begin with this number; what follows is between you two."""

    KIND: ClassVar[int] = 43
    number: bytes  # 16, random
