"""What a peer may do on a connection that it dialled, and what becomes of one that breaks the rules."""

from __future__ import annotations

import gc
import itertools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from peerd.daemon.acceptor import NEWS_S, Acceptor
from peerd.daemon.peers import Peers
from peerd.node.strikes import STRIKES_MAX
from peerd.process.seldom import SAID_EVERY_S
from peerd.settings import Settings
from peerd.training.codecs import vector
from peerd.training.codecs.vector import Layout
from peerd.training.refusal import REFUSED_S
from peerd.transport.admission import GREETED_MAX, GREETED_PER_PEER_MAX, UNPROVED_IDLE_S
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import Blameless, PeerError, UserError
from peerd.transport.framing import FrameReader, frames
from peerd.transport.hello import Refused, greet
from peerd.transport.ids import NodeId
from peerd.transport.memory import MemoryNetwork
from peerd.transport.messages import (
    BulkAnswer,
    BulkOffer,
    Hello,
    LinkOpen,
    Member,
    MemberTable,
    Message,
    ModelRequest,
    ModelSnapshot,
    Plan,
    State,
)
from peerd.transport.patience import PATIENCE_S
from peerd.transport.stream import StreamConnection

pytestmark = pytest.mark.trio(clock="autojump")

LAYOUT = Layout(2_000_000, 2_000_000)
ERRORS = [
    OverflowError("2^64"),
    AssertionError(),
    UserError("no such topology"),
    MemoryError(),
    PeerError("a bad gain"),
]


def hello(id: NodeId) -> Hello:
    return Hello(1, "swarm", "", id, id, 1, "here", 1, "gossip", "", ())


def row(id: NodeId) -> Member:
    return Member(id, id, id, 1, 1, 0, State.ALIVE, "", b"")


class There:
    """One node's acceptor, with what it hears, and the network that leads there."""

    def __init__(self, nursery: trio.Nursery, *members: NodeId) -> None:
        self.nursery = nursery
        self.network = MemoryNetwork(nursery)
        self.heard: list[tuple[NodeId, Message]] = []
        self.error: Exception | None = None  # raised by whoever handles a message
        self.layout: Layout | None = LAYOUT
        self.plans: Any = SimpleNamespace(settings=Settings())
        self.membership = SimpleNamespace(members={id: row(id) for id in members})
        lost: Any = None
        self.peers = Peers(self.network.transport("me"), lambda: hello("me"), lambda _: None, lost, lost)
        us: Any = self  # it is trainer service and membership service, too
        self.runner = SimpleNamespace(on_message=self.hear)
        self.acceptor = Acceptor(row("me"), lambda: hello("me"), self.peers, us, us, {})

    def on_message(self, sender: NodeId, message: Message) -> None:
        if self.error is not None:
            raise self.error
        self.heard.append((sender, message))

    async def hear(self, sender: NodeId, message: Message, plan: object) -> None:
        self.on_message(sender, message)

    async def answer(self, connection: Connection, first: MemberTable) -> None:
        await connection.send(first)

    def name_of(self, id: NodeId) -> str:
        return f"the {id} one"

    async def learn(self, id: NodeId, after_s: float) -> None:
        """The news of a member comes."""
        await trio.sleep(after_s)
        self.membership.members[id] = row(id)

    async def dial(self, id: NodeId, host: str = "") -> StreamConnection:
        """A connection of this node, which has greeted. Raises ConnectionLost."""
        connection = await self.network.transport(host or id).dial(("me", 1))
        assert isinstance(connection, StreamConnection)
        await greet(connection, hello(id))
        return connection


@asynccontextmanager
async def setting(*members: NodeId) -> AsyncIterator[There]:
    async with trio.open_nursery() as nursery:
        there = There(nursery, *members)
        await nursery.start(there.network.transport("me").listen, ("me", 1), there.acceptor.accept)
        yield there
        nursery.cancel_scope.cancel()


async def is_closed(connection: Connection) -> bool:
    with trio.move_on_after(1):
        try:
            await connection.receive()
        except ConnectionLost:
            return True
    return False


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_an_error_by_what_a_peer_sent_drops_that_peer_alone(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with setting("bad", "good") as there:
        good, bad, other_of_bad = await there.dial("good"), await there.dial("bad"), await there.dial("bad")
        there.error = error
        await bad.send(LinkOpen(1))
        assert await is_closed(bad)
        assert await is_closed(other_of_bad)
        there.error = None
        await good.send(LinkOpen(2))
        await trio.sleep(1)
        assert there.heard == [("good", LinkOpen(2))]
    unforeseen = not isinstance(error, PeerError)
    assert there.peers.offences.counts == {"strikes": 1, "peers_refused": 0, "unforeseen_errors": unforeseen}
    told = [record for record in caplog.records if record.exc_info]
    assert len(told) == unforeseen, "with its traceback"
    assert [line.partition(" (")[0] for line in caplog.messages] == ["dropped the bad one"]


async def test_a_chunk_for_which_there_is_no_memory_ends_its_connection_and_blames_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> Any:
        raise MemoryError

    async with setting("large", "good") as there:
        large, good = await there.dial("large"), await there.dial("good")
        monkeypatch.setattr(FrameReader, "_read_chunk", no_memory)
        await large.send(ModelSnapshot(1, "float32", (bytes(1 << 20),)))
        assert await is_closed(large)
        monkeypatch.undo()
        await good.send(LinkOpen(2))
        await trio.sleep(1)
        assert there.heard == [("good", LinkOpen(2))]
    assert there.peers.offences.counts == {"strikes": 0, "peers_refused": 0, "unforeseen_errors": 0}
    told = [line.partition(")")[2] for line in caplog.messages]
    assert told == [": this node has no memory for what it sends"]


@pytest.mark.parametrize("identity", ["good", None, ""])
async def test_strangers_have_no_member_refused_that_shares_their_host(identity: str | None) -> None:
    async with setting("good") as there:
        serve = there.acceptor.accept

        async def accept(connection: Connection) -> None:
            assert isinstance(connection, StreamConnection)
            connection.identity, connection.host = identity, "10.0.0.7"
            await serve(connection)

        await there.nursery.start(there.network.transport("me").listen, ("me", 2), accept)
        for _ in range(STRIKES_MAX):
            there.peers.offences.strike("", "10.0.0.7", PeerError("garbage"))
        connection = await there.network.transport("10.0.0.7").dial(("me", 2))
        if identity:
            assert (await greet(connection, hello("good"))).node == "me"
        else:
            with pytest.raises(ConnectionLost):
                await greet(connection, hello("good"))


@asynccontextmanager
async def addresses_without_end(there: There, prove: bool) -> AsyncIterator[Callable[[NodeId], Awaitable[Any]]]:
    """What dials as this node, from another host each time."""
    numbers = itertools.count(1)
    serve = there.acceptor.accept
    id = ""

    async def accept(connection: Connection) -> None:
        assert isinstance(connection, StreamConnection)
        connection.identity, connection.host = id if prove else None, f"10.0.0.{next(numbers)}"
        await serve(connection)

    async def dial(who: NodeId) -> StreamConnection:
        nonlocal id
        id = who
        connection = await there.network.transport("theirs").dial(("me", 2))
        assert isinstance(connection, StreamConnection)
        await greet(connection, hello(who))
        return connection

    await there.nursery.start(there.network.transport("me").listen, ("me", 2), accept)
    yield dial


async def test_a_member_of_many_addresses_keeps_nobody_out() -> None:
    """Each of its connections is of use; four of them are as many as one node needs, wherever they come from."""
    async with setting("many", "good") as there, addresses_without_end(there, prove=True) as dial:
        held = []
        for _ in range(GREETED_MAX + 2):
            held.append(await dial("many"))
            await held[-1].send(MemberTable("many", ()))
            await held[-1].receive()
        good = await dial("good")
        await good.send(MemberTable("good", ()))
        assert await good.receive() == MemberTable("good", ())
        assert not any([await is_closed(connection) for connection in (good, *held[-GREETED_PER_PEER_MAX:])])
        assert all([await is_closed(connection) for connection in held[:-GREETED_PER_PEER_MAX]])


@pytest.mark.parametrize("prove", [True, False])
async def test_who_has_proved_its_id_is_refused_at_any_address(prove: bool) -> None:
    """An id that is believed alone would have an honest node refused."""
    async with setting("bad") as there, addresses_without_end(there, prove) as dial:
        there.error = PeerError("a bad gain")
        for _ in range(STRIKES_MAX):
            bad = await dial("bad")
            await bad.send(LinkOpen(1))
            assert await is_closed(bad)
        assert bool(there.peers.offences.refused_s("bad", "10.0.0.99")) == prove
        with pytest.raises(ConnectionLost) if prove else nullcontext():
            await dial("bad")


async def test_a_host_that_is_refused_is_said_once_a_minute_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    async with setting() as there:

        async def refused(**said: Any) -> None:
            for _ in range(20):
                connection = await there.network.transport("one").dial(("me", 1))
                with pytest.raises(Refused):
                    await greet(connection, replace(hello("x"), **said))

        await refused(swarm="theirs")
        await refused(run="theirs")
        await trio.sleep(SAID_EVERY_S)
        await refused(swarm="theirs")
    told = [record.message.partition(": its ")[2].partition(" is ")[0] for record in caplog.records]
    assert told == ["swarm", "run", "swarm"]


async def test_who_does_it_again_and_again_is_refused_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async with setting("bad", "good") as there:
        there.error = OverflowError()
        for _ in range(STRIKES_MAX):
            bad = await there.dial("bad")
            await bad.send(LinkOpen(1))
            assert await is_closed(bad)
        with pytest.raises(ConnectionLost):
            await there.dial("bad")
        there.error = None
        await there.dial("good")
        await trio.sleep(REFUSED_S)
        await there.dial("bad")
    assert there.peers.offences.counts["unforeseen_errors"] == STRIKES_MAX
    assert sum(bool(record.exc_info) for record in caplog.records) == 1, "a log cannot be filled"
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "bad has broken the rules again and again: refused for 10 min"
    ]


@pytest.mark.parametrize("blame", [PeerError, Blameless])
async def test_a_stranger_fills_no_log(blame: type[PeerError], caplog: pytest.LogCaptureFixture) -> None:
    async with setting("good") as there:
        serve = there.acceptor.accept

        async def shake_hands() -> None:
            raise blame("its handshake is not TLS")

        async def accept(connection: Connection) -> None:
            assert isinstance(connection, StreamConnection)
            connection.host, connection.shake_hands = "10.0.0.7", shake_hands  # type: ignore[method-assign]
            await serve(connection)

        await there.nursery.start(there.network.transport("me").listen, ("me", 2), accept)
        for _ in range(10 * STRIKES_MAX):
            await is_closed(await there.network.transport("10.0.0.7").dial(("me", 2)))
    messages = [record.message for record in caplog.records]
    if blame is Blameless:
        assert [text.partition(": ")[2] for text in messages] == ["its handshake is not TLS"], "and nobody is refused"
        return
    assert len(messages) == STRIKES_MAX + 1
    assert sum("refused for 10 min" in text for text in messages) == 1


async def test_a_node_that_has_no_model_yet_forgives_what_its_last_life_was_sent() -> None:
    async with setting("good") as there:
        there.layout = None
        for _ in range(STRIKES_MAX):
            good = await there.dial("good")
            await good.send(ModelSnapshot(1, "float32", (bytes(1 << 20),)))
            assert await is_closed(good)
        await there.dial("good")


async def test_a_second_connection_to_send_on_takes_the_place_of_the_first() -> None:
    async with setting("a") as there:
        first, second, table = await there.dial("a"), await there.dial("a"), await there.dial("a")
        await first.send(LinkOpen(1))
        await trio.sleep(1)
        await table.send(MemberTable("a", ()))
        await table.receive()
        await second.send(LinkOpen(2))
        assert await is_closed(first)
        assert not await is_closed(second)
        assert there.heard == [("a", LinkOpen(1)), ("a", LinkOpen(2))]


async def test_who_proves_nothing_is_not_waited_for() -> None:
    async with setting("member") as there:
        member, silent, stranger = await there.dial("member"), await there.dial("member"), await there.dial("stranger")
        for connection in (member, stranger):
            await connection.send(LinkOpen(1))
        await trio.sleep(2.1 * UNPROVED_IDLE_S)
        assert await is_closed(silent)
        assert await is_closed(stranger)
        assert not await is_closed(member)
        await member.send(LinkOpen(2))
        await trio.sleep(10 * UNPROVED_IDLE_S)
        assert there.heard[-1] == ("member", LinkOpen(2))


async def test_silent_connections_do_not_keep_others_out() -> None:
    async with setting("member") as there:
        member = await there.dial("member")
        await member.send(LinkOpen(1))
        for number in range(GREETED_MAX + 9):
            await there.dial(f"silent-{number}")
        late = await there.dial("late")
        assert not await is_closed(late)
        assert not await is_closed(member)


def half_message(size: int) -> bytes:
    """All of a bulk message but its last chunk."""
    chunks = [bytes(1 << 20)] * (size >> 20)
    return b"".join(bytes(piece) for piece in list(frames(ModelSnapshot(1, "float32", tuple(chunks))))[:-2])


async def test_half_messages_are_bounded_in_all_and_a_member_goes_on() -> None:
    limit = vector.payload_limit(LAYOUT)
    async with setting("member") as there:
        member = await there.dial("member")
        await member.send(LinkOpen(1))
        await trio.sleep(1)
        assert limit < there.peers.bulk_max < math.inf, "nor is what goes out without end"
        bad = [await there.dial(f"bad-{number}") for number in range(9)]
        half = half_message(limit // 2)
        for connection in bad:
            rest = memoryview(half)
            while rest:
                try:
                    rest = rest[connection._stream.send_some([rest]) :]
                except BlockingIOError:
                    await trio.sleep(0.01)
            await trio.sleep(0.1)
        closed = [await is_closed(connection) for connection in bad]
        allowed = 3 * limit // (limit // 2 >> 20 << 20)
        assert closed == [True] * (9 - allowed) + [False] * allowed, "the oldest are given up"
        await member.send(ModelSnapshot(1, "float32", (bytes(1 << 20),)))
        await trio.sleep(1)
        assert there.heard[-1][0] == "member"
    assert there.peers.offences.counts["strikes"] == 0, "an honest one may be among them"


async def test_a_message_that_never_ends_is_given_up() -> None:
    async with setting("slow") as there:
        slow = await there.dial("slow")
        head, *rest = frames(ModelSnapshot(1, "float32", (bytes(1),) * 999))
        slow._stream.send_some([head])

        async def drip() -> None:
            for byte in b"".join(map(bytes, rest)):
                slow._stream.send_some([bytes([byte])])
                await trio.sleep(0.2)  # no frame is late

        began = trio.current_time()
        with pytest.raises(ConnectionLost):
            await drip()
        assert PATIENCE_S / 2 < trio.current_time() - began < 2 * PATIENCE_S


def readers() -> int:
    return sum(type(each) is FrameReader for each in gc.get_objects())


async def test_half_a_message_goes_with_its_connection() -> None:
    """A cycle would keep it until Python looks for those: 100 of them were 112 MiB."""
    async with setting("half") as there:
        gc.collect()
        before = readers()
        gc.disable()
        try:
            for _ in range(5):
                connection = await there.dial("half")
                connection._stream.send_some([half_message(1 << 20)[:1000]])
                await trio.sleep(0.1)
                connection.drop(ConnectionLost("gone"))
                await trio.sleep(1)
            kept = readers() - before
        finally:
            gc.enable()
        assert kept <= 2, "but for this end of the last one, and the listener's own name for it"


async def offered(connection: StreamConnection) -> str:
    await connection.send(BulkOffer("UCX 1.20", 1, (b"address",)))
    answer = await connection.receive_any()
    assert isinstance(answer, BulkAnswer)
    return answer.refusal


async def test_addresses_of_other_carriers_are_taken_from_members_alone() -> None:
    async with setting("member") as there:
        member, newcomer, stranger = [await there.dial(id) for id in ("member", "newcomer", "stranger")]
        began = trio.current_time()
        assert await offered(member) == "it has nothing beside the stream"
        assert trio.current_time() == began, "nobody waits"
        there.nursery.start_soon(there.learn, "newcomer", NEWS_S / 2)
        assert await offered(newcomer) == "it has nothing beside the stream"
        assert await offered(stranger) == "it says: this node is not in its table of members"


@pytest.mark.parametrize("message", [LinkOpen(1), ModelRequest(), Plan(1, "a"), MemberTable("a", ())], ids=repr)
@pytest.mark.parametrize("node", ["me", "other"])
async def test_in_ones_own_name_there_are_only_tables(message: Message, node: str) -> None:
    allowed = node == "other" or isinstance(message, MemberTable)
    async with setting("other") as there:
        connection = await there.dial(node, host="elsewhere")
        await connection.send(message)
        assert await is_closed(connection) == (not allowed)
        assert there.heard == [] or allowed
