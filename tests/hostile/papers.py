"""What a member of a sealed swarm has to show: a key, a certificate of the user's authority, the keys of datagrams.

The wire's own handshake and records are used, over a socket that blocks; the rest of a message is the attacker's.
"""

from __future__ import annotations

import socket
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from peerd.local.node_key import NodeKey
from peerd.local.signing import NodeSigning
from peerd.membership import proofs
from peerd.protocol import plan as plans
from peerd.security import authority_folder, wall_clock
from peerd.security.trust import Trust
from peerd.transport.ids import NodeId
from peerd.transport.messages import Chunk, Keys, Member, Plan
from peerd.transport.secure.credentials import Credentials
from peerd.transport.secure.datagrams import DatagramSeal
from peerd.transport.secure.handshake import shake_hands
from peerd.transport.stream import ByteStream, Sealed

T = TypeVar("T")


class Papers:
    """Those of one insider, whom the authority of a machine's user has let in."""

    def __init__(self, users: Path) -> None:
        """`users` is the folder of that authority."""
        self.key = NodeKey.generate()
        now = wall_clock.now()
        here = authority_folder.at(users, now)
        self.credentials: Credentials = Trust(self.key, here.issue_own(self.key, now), [here.certificate])
        self.signing = NodeSigning(self.key, "peerd", "")
        self.seal = DatagramSeal()

    @property
    def id(self) -> NodeId:
        return self.key.id

    def signed(self, me: Member) -> Member:
        """A record as the member itself says it."""
        return proofs.claimed(me, self.signing)

    def accuses(self, subject: Member, **fields: Any) -> Member:
        """A record by which this one says of another that it is dead."""
        record = replace(subject, accuser=self.id, **fields)
        return proofs.Proofs(self.signing, {}).accused(record, record.state, self.id)

    def plan(self, number: int, text: str) -> Plan:
        """One that this one has signed."""
        return plans.proposal(Plan(number - 1), self.id, text, signing=self.signing)

    def install(self, keys: Keys) -> None:
        """Seal datagrams as the members do."""
        if keys.generations:
            each = [generation.key for generation in keys.generations]
            self.seal.install(each, each[0])


class Blocking:
    """A `ByteStream` that never says that it would block: what is asynchronous over it never waits."""

    name = "tcp"
    checked = True
    midway = False

    def __init__(self, sock: socket.socket) -> None:
        self.host = "127.0.0.1"
        self.sock = sock
        self.bytes_sent = self.bytes_received = 0

    def send_some(self, pieces: Sequence[Chunk]) -> int:
        return self.sock.sendmsg(pieces)

    def receive_some(self, buffer: memoryview) -> int:
        return self.sock.recv_into(buffer)

    async def wait_sendable(self) -> None:
        raise AssertionError("it blocks")

    async def wait_receivable(self, due: int = 1) -> None:
        raise AssertionError("it blocks")

    def close(self) -> None:
        self.sock.close()


def sealed(stream: ByteStream, credentials: Credentials, *, dialled: bool) -> Sealed:
    """Raises OSError or PeerError."""
    return at_once(shake_hands(stream, "the victim", credentials, dialled=dialled))


def at_once(task: Coroutine[Any, Any, T]) -> T:
    """The result of what never waits."""
    try:
        task.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waits")
