"""On sealed connections nobody speaks in another's name, and a stranger is heard by the enrolment alone."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from certificates import Authority, TestCredentials

from peerd.daemon.acceptor import Acceptor
from peerd.daemon.membership_service import MembershipService
from peerd.daemon.peers import Peers
from peerd.settings import Settings
from peerd.training.codecs.vector import Layout
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import PeerError
from peerd.transport.hello import answer, greet
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import Hello, LinkOpen, MemberTable, Message, Welcome
from peerd.transport.secure.credentials import STRANGER
from peerd.transport.tcp import TcpTransport

pytestmark = pytest.mark.trio(limit_s=30)

LOOPBACK = ("127.0.0.1", 0)
OURS = Authority()
Enrol = Callable[[Connection], Awaitable[None]]


def hello(node: NodeId) -> Hello:
    return Hello(1, "swarm", "", node, node, 1, "127.0.0.1", 1, "gossip", "", ())


class Here:
    """A node with an acceptor; it is trainer service and membership, too."""

    layout = Layout(100, 100)
    plans = SimpleNamespace(settings=Settings())

    def __init__(self, nursery: trio.Nursery, enrol: Enrol | None) -> None:
        self.nursery = nursery
        self.credentials, self.other = TestCredentials(OURS), TestCredentials(OURS)
        self.heard: list[Message] = []
        self.membership = SimpleNamespace(members={}, table=lambda: MemberTable(self.credentials.id, ()))
        self.transport = TcpTransport(nursery, credentials=self.credentials)
        nothing: Any = None
        us: Any = self
        self.peers = Peers(self.transport, lambda: hello(self.credentials.id), lambda _: None, nothing, nothing)
        tables = MembershipService(us, nothing, self.transport, self.peers, nothing, nothing, nothing, nothing, nothing)
        tables.membership = us.membership
        me: Any = SimpleNamespace(id=self.credentials.id, name="here", epoch=1)
        my_hello = lambda: hello(self.credentials.id)  # noqa: E731
        reception: Any = SimpleNamespace(enrol=enrol) if enrol else None
        self.runner = SimpleNamespace(on_message=self.hear)
        self.acceptor = Acceptor(me, my_hello, self.peers, us, tables, {}, reception)
        self.address: Address = LOOPBACK

    def on_message(self, sender: NodeId, message: Message) -> None:
        self.heard.append(message)

    async def hear(self, sender: NodeId, message: Message, plan: object) -> None:
        self.on_message(sender, message)

    async def dial(self, credentials: TestCredentials) -> Connection:
        return await TcpTransport(self.nursery, credentials=credentials).dial(self.address)


@asynccontextmanager
async def here(enrol: Enrol | None = None) -> AsyncIterator[Here]:
    async with trio.open_nursery() as nursery:
        node = Here(nursery, enrol)
        node.address = await nursery.start(node.transport.listen, LOOPBACK, node.acceptor.accept)
        yield node
        nursery.cancel_scope.cancel()


async def test_a_greeting_in_anothers_name_is_a_broken_rule(caplog: pytest.LogCaptureFixture) -> None:
    async with here() as node:
        connection = await node.dial(node.other)
        with pytest.raises(ConnectionLost):
            await greet(connection, hello("victim"))
        await greet(await node.dial(node.other), hello(node.other.id))
    assert node.peers.offences.counts["strikes"] == 1
    assert f"it says that it is victim, and its certificate that it is {node.other.id}" in caplog.text


async def test_a_welcome_in_anothers_name_is_a_broken_rule() -> None:
    async def welcome(connection: Connection) -> None:
        await connection.shake_hands()
        await answer(connection, lambda _: None, Welcome("victim", "far", 1))
        await trio.sleep_forever()

    near, far = TestCredentials(OURS), TestCredentials(OURS)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(TcpTransport(nursery, credentials=far).listen, LOOPBACK, welcome)
        connection = await TcpTransport(nursery, credentials=near).dial(address)
        with pytest.raises(PeerError, match="it says that it is victim"):
            await greet(connection, hello(near.id))
        nursery.cancel_scope.cancel()


async def test_a_table_in_anothers_name_is_a_broken_rule() -> None:
    async with here() as node:
        connection = await node.dial(node.other)
        await greet(connection, hello(node.other.id))
        await connection.send(MemberTable(node.other.id, ()))
        assert await connection.receive() == MemberTable(node.credentials.id, ())
        await connection.send(MemberTable("victim", ()))
        with pytest.raises(ConnectionLost):
            await connection.receive()
    assert node.peers.offences.counts["strikes"] == 1


async def test_nothing_is_said_to_another_than_was_dialled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with here() as node:
        me = TestCredentials(OURS)
        nothing: Any = None
        transport = TcpTransport(node.nursery, credentials=me)
        peers = Peers(transport, lambda: hello(me.id), lambda _: node.address, nothing, nothing)
        await node.nursery.start(peers.run)
        peers.send(node.other.id, LinkOpen(1))
        while "another node answers" not in caplog.text:
            await trio.sleep(0.01)
        assert node.acceptor._nodes == {}, "not even a greeting"
        peers.forget(node.other.id)
        peers.send(node.credentials.id, LinkOpen(2))
        while not node.heard:
            await trio.sleep(0.01)
    assert node.heard == [LinkOpen(2)]


async def test_a_stranger_is_heard_by_the_enrolment() -> None:
    async def enrol(connection: Connection) -> None:
        assert connection.identity == STRANGER
        assert await connection.receive() == LinkOpen(1)
        await connection.send(LinkOpen(2))

    async with here(enrol) as node:
        connection = await node.dial(TestCredentials(OURS, certified=False))
        await connection.send(LinkOpen(1))
        assert await connection.receive() == LinkOpen(2)
        with pytest.raises(ConnectionLost):
            await connection.receive()
    assert node.heard == []
