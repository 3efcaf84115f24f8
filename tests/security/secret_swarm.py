"""Nodes that hold a swarm's secrets, and connections between them in memory: no membership, no models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.local.node_key import NodeKey
from peerd.security import authority, authority_folder, certificates, wall_clock
from peerd.security.authority import Authority, request_of
from peerd.security.secrets_exchange import SecretsExchange
from peerd.security.shared_secrets import SharedSecrets
from peerd.security.trust import Trust
from peerd.transport.connection import ConnectionLost
from peerd.transport.errors import PeerError
from peerd.transport.messages import Message
from peerd.transport.secure.datagrams import DatagramSeal, SealError

KEYS = [NodeKey.generate() for _ in range(6)]
ROOT = authority.generate(wall_clock.now())
OTHER = authority.generate(wall_clock.now())
ISSUER = Authority(KEYS[1], ROOT.make_issuer(request_of(KEYS[1]), wall_clock.now()), ROOT.certificate)
CHAINS = [ROOT.issue_own(key, wall_clock.now()) for key in KEYS]
"""Node 0 has the authority, node 1 is an issuer, the others issue nothing."""


@contextmanager
def inline_threads() -> Iterator[None]:
    """What a thread does takes no virtual time."""

    async def run_sync(work: Any, *arguments: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return work(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", run_sync)
        yield


@dataclass(eq=False)
class End:
    """One end of a connection."""

    identity: str | None
    out: trio.MemorySendChannel[Message]
    come: trio.MemoryReceiveChannel[Message]
    sent: list[Message]
    remote: str = "10.0.0.1:1"
    host: str = "10.0.0.1"

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        await self.out.send(message)

    async def receive(self) -> Message:
        try:
            return await self.come.receive()
        except trio.EndOfChannel:
            raise ConnectionLost("closed") from None


def ends(here: str | None, there: str | None) -> tuple[Any, Any]:
    """Two ends of a connection between these identities."""
    one, other = trio.open_memory_channel[Message](64), trio.open_memory_channel[Message](64)
    return End(there, one[0], other[1], []), End(here, other[0], one[1], [])


class Node:
    """One node; `start` again after `crash` finds what is on the disk."""

    def __init__(self, folder: Path, index: int) -> None:
        self.index = index
        self.id = KEYS[index].id
        self.folder = folder / str(index)
        self.folder.mkdir(parents=True)
        self.runs = False
        self.news = 0
        self._scope = trio.CancelScope()

    def start(self, nursery: trio.Nursery) -> None:
        """Raises UserError where it knows that it is revoked."""
        issuer, successors = {1: ISSUER}.get(self.index), []
        if self.index == 0:
            self.authority = self.folder.parent / "authority"
            if not self.authority.exists():
                self.authority.mkdir()
                ROOT.key.write(self.authority / "key.pem")
                (self.authority / "certificate.pem").write_text(certificates.pem([ROOT.certificate]))
            issuer = authority_folder.load(self.authority, wall_clock.now())
            successors = authority_folder.successors(self.authority)
        key = KEYS[self.index]
        self.trust = Trust(key, CHAINS[self.index], [ROOT.certificate])
        rng, seal = random.Random(self.index), DatagramSeal()
        self.secrets = SharedSecrets(
            self.folder,
            ("peerd", ""),
            key.id,
            self.trust,
            issuer,
            seal,
            alone=self.index == 0,
            rng=rng,
            successors=successors,
        )
        self.secrets.on_news = self._count
        self.talk = SecretsExchange(self.secrets)
        self.seal = seal
        self.runs, self._scope = True, trio.CancelScope()
        nursery.start_soon(_run, self.secrets, self._scope)

    def crash(self) -> None:
        self.runs = False
        self._scope.cancel()

    def _count(self) -> None:
        self.news += 1

    def is_heard_by(self, other: Node) -> bool:
        """Whether what it seals opens there."""
        sealed = self.seal.seal(b"text", b"")
        try:
            return sealed is not None and other.seal.open(sealed, b"") == b"text"
        except SealError:
            return False


async def _run(secrets: SharedSecrets, scope: trio.CancelScope) -> None:
    with scope:
        await secrets.run()


async def push_pull(dialler: Node, acceptor: Node) -> tuple[list[Message], list[Message]]:
    """What goes before tables; what either end sent. Raises PeerError where the handshake fails."""
    if not set(dialler.trust.authorities) & set(acceptor.trust.authorities):
        raise PeerError("of another authority")
    if dialler.secrets.is_revoked(acceptor.id) or acceptor.secrets.is_revoked(dialler.id):
        raise PeerError("revoked")
    here, there = ends(dialler.id, acceptor.id)

    async def accept() -> None:
        while True:
            try:
                await acceptor.talk.answer(there, await there.receive())
            except ConnectionLost:
                return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        await dialler.talk.exchange(here)
        here.out.close()
    return here.sent, there.sent
