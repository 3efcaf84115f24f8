"""What every carrier promises: `Transport` and `Connection` over one table, `Datagrams` over another.

The first holds whatever `--transport` takes (`CARRIERS`), and what no user chooses.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import trio
import trio.testing
from certificates import Authority, TestCredentials
from connection_ends import close_at_once, nobody, receive_a
from ucx_here import needs_ucx, upgrade

from peerd.carriers import CARRIERS, CarrierSettings
from peerd.transport.connection import Connection, ConnectionLost, Datagrams, Transport
from peerd.transport.errors import PeerError, UserError
from peerd.transport.framing import HANDSHAKE_PAYLOAD_LIMIT
from peerd.transport.ids import Address
from peerd.transport.memory import MemoryNetwork
from peerd.transport.messages import (
    MESSAGES,
    Ack,
    Applied,
    AuthorityShown,
    BulkAnswer,
    BulkOffer,
    CentreIs,
    Challenge,
    Delta,
    DeltaTaken,
    Enrolled,
    EnrolmentRefused,
    EnrolmentRequest,
    Finished,
    Hello,
    KeyGeneration,
    Keys,
    LeaderPassed,
    LinkClose,
    LinkClosed,
    LinkEqual,
    LinkOpen,
    LinkSketch,
    LinkSnapshot,
    Member,
    MemberTable,
    Message,
    ModelEqual,
    ModelPromise,
    ModelRequest,
    ModelSketch,
    ModelSnapshot,
    Nack,
    PairAnswer,
    PairHalf,
    PairInvite,
    Pass,
    PiecesTaken,
    Ping,
    PingRequest,
    Plan,
    Prepare,
    Promise,
    Proof,
    Pull,
    Push,
    Pushed,
    PushForgotten,
    Refuse,
    RelayCall,
    RelayGranted,
    RelayRequest,
    RenewalRequest,
    Revocation,
    RevocationList,
    RoundBegin,
    RoundCommit,
    RoundPhase,
    RoundPieces,
    RoundReport,
    RoundsWithout,
    SecretsHeld,
    ShardLeader,
    ShardPull,
    ShardPush,
    ShardSum,
    SketchRequest,
    SpeedRequest,
    SpeedSample,
    State,
    Successor,
    Successors,
    SumTaken,
    Weights,
    Welcome,
)
from peerd.transport.rdma import ucx
from peerd.transport.rdma.fabric import UcxFabric
from peerd.transport.same_host import SameHost
from peerd.transport.tcp import TcpTransport
from peerd.transport.udp import bind_udp

pytestmark = pytest.mark.trio(limit_s=30)

MEMBER = Member("id", "name", "10.0.0.1", 7946, 1, 2, State.SUSPECT, "accuser", b"\0meta")
HELLO = Hello(1, "swarm", "run", "id", "name", 3, "10.0.0.1", 7946, "gossip", "ab12", ("w f32 2x2",))
PING = Ping(1, "me", "you", (MEMBER,))
SAMPLES = [
    PING, PingRequest(2, "me", "you", "10.0.0.1", 7946, (MEMBER, MEMBER)), Ack(3, "me", ()), Nack(2**63 - 1, "me"),
    MemberTable("me", (MEMBER,) * 99), HELLO, Welcome("id", "naive", 4), Refuse("run", "a", "b"),
    ModelRequest(bytes(16)), SpeedRequest(), SpeedSample((b"any",)),
    ModelSnapshot(5, "float32", (b"abcd", b"", bytes(40_000))), LinkOpen(6, bytes(16)), LinkSnapshot(6, "int8", ()),
    LinkEqual(6), ModelEqual(7), ModelPromise(bytes(32)), SketchRequest(bytes(16)), ModelSketch(bytes(16), bytes(488)),
    Delta(6, 7, "sign", 0.25, True, False, b"\x00" * 8, 16.0, 20.0, (b"x" * 100,)),
    LinkClose(6, 7), LinkClosed(6, 7), DeltaTaken(6, 7), LinkSketch(6, 7, 8, True, False, bytes(488)),
    Push(1, 2, "sign", 0.5, 0.25, True, False, (b"p" * 99,)), Pushed(1, 2, 0.125, False), PushForgotten(1, 2),
    Pull(1, 0, True),
    BulkOffer("1.22", 5, (b"there",)), BulkAnswer("no", 0, ()), Plan(1, "id", False, "gossip"),
    AuthorityShown(bytes(400), (bytes(300),)), EnrolmentRequest(bytes(8), bytes(200), bytes(32)),
    Enrolled((bytes(400), bytes(300)), bytes(500)), EnrolmentRefused("used-up"),
    RenewalRequest(bytes(200), (bytes(400),), bytes(400)),
    SecretsHeld(bytes(32), bytes(32), bytes(32)), Successors((Successor(*(bytes(400),) * 4),)),
    RevocationList((Revocation("id", 5, bytes(400), bytes(64)),)),
    Keys((KeyGeneration(1, bytes(32), 0, b"", bytes(64)),)),
    RelayRequest(7950), RelayGranted("203.0.113.5", 7950, bytes(16)), RelayCall(bytes(16)),
    Challenge("id", bytes(32), bytes(16), 3), Proof(bytes(16), 4, "10.0.0.1", 7946, bytes(64)),
    RoundReport(2**61, RoundPhase.HELD, 1, 2, 3, 4, True, False, True),
    RoundBegin(1, 2**40, "float32", "tree:2", True, False, ("a", "b"), (1, 2**61)),
    RoundPieces(1, 2, (3, 4), (b"r" * 9, b"s")), PiecesTaken(1, 2, (3, 4)), RoundCommit(1, 2),
    LeaderPassed("a", 2, True), RoundsWithout(2**61, True),
    ShardPush(0, 1, 2**61, 1, 4, "int8", True, False, -1.0, (b"s" * 7,)),
    ShardPull(0, 1, 2, Pass.ROUND, False), Prepare(0, 1, 4), Promise(0, 1, 5, 2, (), ()), SumTaken(0, 1, "a", 2),
    Weights(0, 1, "a", 2, (Applied("w", 1, 3),), False, (Applied("w", 1, 2),), (b"w" * 8,)),
    ShardLeader(0, 1, "a", True, 2, (Applied("a", 1, 2), Applied("b", 3, 0))),
    ShardSum(0, 1, "a", 2, 4, "float32", False, (Applied("w", 1, 2),), 0.1, (b"s" * 7,)),
    Finished(), CentreIs("a", 3), PairInvite(1), PairAnswer(1, False),
    PairHalf(1, "bfloat16", True, (b"h" * 4,)),
]  # fmt: skip
MIB = 1 << 20


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(sample) for sample in SAMPLES} == set(MESSAGES.values())


@dataclass
class Ends:
    """What a test needs of a carrier: a transport at each end, and where to listen."""

    near: Transport
    far: Transport
    bind: tuple[str, int]
    upgraded: str = (
        ""  # what the carrier of an upgraded connection begins with; "" where there is nothing to upgrade to
    )


UPGRADED = {"tcp": "shm", "rdma": "ucx", "auto": "shm"}  # to what connections within one host are


async def of_peerd(nursery: trio.Nursery, name: str) -> Ends:
    near, far = (CARRIERS[name](CarrierSettings(rdma_allow_fallback=True)) for _ in range(2))
    bind = await far.resolve(("127.0.0.1", 0))
    for each in (near, far):
        await each.start(nursery)
    return Ends(near.transport(nursery), far.transport(nursery), bind, UPGRADED.get(name, ""))


async def memory(nursery: trio.Nursery) -> Ends:
    network = MemoryNetwork(nursery)
    return Ends(network.transport("a"), network.transport("b"), ("b", 0))


async def tcp_alone(nursery: trio.Nursery) -> Ends:
    return Ends(TcpTransport(nursery), TcpTransport(nursery), ("127.0.0.1", 0))


async def sealed(nursery: trio.Nursery) -> Ends:
    authority = Authority()
    near, far = (TcpTransport(nursery, SameHost(), credentials=TestCredentials(authority)) for _ in range(2))
    return Ends(near, far, ("127.0.0.1", 0), "shm")


async def sealed_alone(nursery: trio.Nursery) -> Ends:
    authority = Authority()
    near, far = (TcpTransport(nursery, credentials=TestCredentials(authority)) for _ in range(2))
    return Ends(near, far, ("127.0.0.1", 0))


async def over_ucx(nursery: trio.Nursery, transports: str, sealed: bool = False) -> Ends:
    fabrics = [UcxFabric(ucx.load(), transports, without_rdma=True) for _ in range(2)]
    for fabric in fabrics:
        await nursery.start(fabric.run)
    authority = Authority()
    own = [TestCredentials(authority) if sealed else None for _ in fabrics]
    near, far = (TcpTransport(nursery, fabric, credentials=of) for fabric, of in zip(fabrics, own, strict=True))
    return Ends(near, far, ("127.0.0.1", 0), "ucx")


MakeEnds = Callable[[trio.Nursery], Awaitable[Ends]]
ENDS: dict[str, MakeEnds] = {
    **{name: partial(of_peerd, name=name) for name in CARRIERS},
    "memory": memory,
    "tcp-alone": tcp_alone,
    "tcp-sealed": sealed,
    "tcp-sealed-alone": sealed_alone,
    "rdma-over-tcp": partial(over_ucx, transports="tcp"),
    "rdma-over-tcp-sealed": partial(over_ucx, transports="tcp", sealed=True),
    "rdma-over-shm": partial(over_ucx, transports="posix,sysv,cma"),
}
carriers = pytest.mark.parametrize(
    "carrier",
    [pytest.param(make, id=name, marks=needs_ucx if "rdma" in name else ()) for name, make in ENDS.items()],
)


@asynccontextmanager
async def listening(
    carrier: MakeEnds,
) -> AsyncIterator[tuple[Ends, Address, trio.MemoryReceiveChannel[Connection]]]:
    """Yield a carrier, the address at its far end, and a channel of the connections accepted there."""
    async with trio.open_nursery() as nursery:
        made = await carrier(nursery)
        give, taken = trio.open_memory_channel[Connection](99)

        async def accepted(connection: Connection) -> None:
            await connection.shake_hands()
            await give.send(connection)
            await trio.sleep_forever()

        address = await nursery.start(made.far.listen, made.bind, accepted)
        yield made, address, taken
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def linked(carrier: MakeEnds, payload_limit: int = 64 * MIB) -> AsyncIterator[tuple[Connection, Connection]]:
    """Yield the two ends of a connection."""
    async with listening(carrier) as (made, address, taken):
        near = await made.near.dial(address)
        far = await taken.receive()
        near.payload_limit = far.payload_limit = payload_limit
        far.admit()
        await upgrade(near, far)
        assert near.carrier.startswith(made.upgraded)
        assert far.carrier.startswith(made.upgraded)
        yield near, far


def bulk(size: int, step: int = 0) -> ModelSnapshot:
    return ModelSnapshot(step, "float32", tuple(bytes(4 * MIB) for _ in range(size // (4 * MIB))))


async def started(connection: Connection) -> None:
    """Wait until the connection has begun to send."""
    while not connection.bytes_sent:
        await trio.sleep(0.001)


# --------------------------------------------------------------------------------------------------- messages


@carriers
async def test_every_message_arrives_as_it_was_sent_in_both_directions(carrier: MakeEnds) -> None:
    async with linked(carrier) as (near, far):
        for one, other in ((near, far), (far, near)):
            for sample in SAMPLES:
                if isinstance(sample, BulkOffer | BulkAnswer):
                    continue  # the connection's own
                await one.send(sample)
                assert await other.receive() == sample


@carriers
async def test_messages_of_a_queue_arrive_in_order(carrier: MakeEnds) -> None:
    async with linked(carrier) as (near, far):
        sent = []
        for number in range(300):
            size = 5000 if number % 7 == 0 else 0
            sent.append(
                Delta(1, number, "c", 0.5, True, False, b"", 0.0, 0.0, (bytes(size),)) if size else LinkClosed(number)
            )

        async def send_all() -> None:
            for message in sent:
                await near.send(message)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            assert [await far.receive() for _ in sent] == sent


@carriers
async def test_many_links_at_once(carrier: MakeEnds) -> None:
    async with listening(carrier) as (made, address, taken):
        connections = []
        for number in range(20):
            near = await made.near.dial(address)
            far = await taken.receive()
            far.admit()
            connections.append((near, far))
            await near.send(LinkOpen(number))
        for number, (near, far) in enumerate(connections):
            await far.send(LinkClosed(number))
            assert await far.receive() == LinkOpen(number)
            assert await near.receive() == LinkClosed(number)


@carriers
async def test_bulk_arrives_whole(carrier: MakeEnds) -> None:
    async with linked(carrier) as (near, far):
        message = ModelSnapshot(1, "c", tuple(bytes([number]) * (4 * MIB) for number in range(5)))
        before = near.bytes_sent
        await near.send(message)
        found = await receive_a(ModelSnapshot, far)
        assert found == message
        assert all(isinstance(chunk, memoryview | bytearray) for chunk in found.chunks)
        frames = 32 * 6 + 40
        seals = 0 if near.identity is None else 20 * (5 + 6)  # one for each chunk, and one for each frame
        assert 20 * MIB < near.bytes_sent - before <= 20 * MIB + frames + seals
        assert far.bytes_received == near.bytes_sent


@carriers
async def test_membership_overtakes_bulk_and_the_rest_does_not(carrier: MakeEnds) -> None:
    async with linked(carrier) as (near, far):
        for message in (bulk(20 * MIB), LinkClosed(1)):
            await near.send(message)
        await started(near)
        await near.send(PING)
        kinds = [type(await far.receive()) for _ in range(3)]
        assert kinds == [Ping, ModelSnapshot, LinkClosed]


# ---------------------------------------------------------------------------------------------------- limits


@pytest.mark.cases(4)
@carriers
async def test_a_stopped_reader_stops_the_sender(carrier: MakeEnds) -> None:
    async with linked(carrier) as (near, far):
        sent = []

        async def send_all() -> None:
            for step in range(9):
                await near.send(bulk(20 * MIB, step))
                sent.append(step)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            await started(near)
            with trio.fail_after(60):
                while len(sent) < 2:
                    await trio.sleep(0.01)
            await trio.sleep(0.3)
            assert sent == [0, 1], "one message is being sent, one waits"
            assert near.bytes_sent < 20 * MIB
            for step in range(9):
                assert (await receive_a(ModelSnapshot, far)).step == step


@carriers
async def test_small_messages_stop_the_sender_too(carrier: MakeEnds) -> None:
    async with linked(carrier) as (near, far):
        sent = 0

        async def send_all() -> None:
            nonlocal sent
            await near.send(bulk(20 * MIB))
            for number in range(200):
                await near.send(LinkClosed(number))
                sent += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            await started(near)
            with trio.fail_after(60):
                while sent < 64:
                    await trio.sleep(0.01)
            await trio.sleep(0.2)
            assert sent == 64
            await far.receive()
            assert [(await receive_a(LinkClosed, far)).link for _ in range(200)] == list(range(200))


@carriers
async def test_a_new_link_takes_little_and_the_limit_can_be_raised(carrier: MakeEnds) -> None:
    async with linked(carrier, payload_limit=HANDSHAKE_PAYLOAD_LIMIT) as (near, far):
        fits = ModelSnapshot(1, "c", (bytes(HANDSHAKE_PAYLOAD_LIMIT),))
        await near.send(fits)
        assert await far.receive() == fits
        far.payload_limit = 4 * MIB
        await near.send(bulk(4 * MIB))
        await far.receive()
        await near.send(ModelSnapshot(1, "c", (bytes(4 * MIB), b"x")))
        with pytest.raises(PeerError, match=f"{4 * MIB + 1} bytes in one message"):
            await far.receive()
        with pytest.raises(ConnectionLost, match="broke the rules"):
            await far.receive()
        with pytest.raises(ConnectionLost):
            await near.receive()


# ------------------------------------------------------------------------------------------------------- ends


@carriers
async def test_what_was_sent_before_closing_arrives(carrier: MakeEnds) -> None:
    async with linked(carrier) as (near, far):
        for number in range(50):
            await near.send(LinkClosed(number))
        await near.aclose()
        assert [(await receive_a(LinkClosed, far)).link for _ in range(50)] == list(range(50))
        with pytest.raises(ConnectionLost, match=r"closed by the peer$"):
            await far.receive()


@carriers
async def test_a_peer_that_closes_in_the_middle_is_lost(carrier: MakeEnds) -> None:
    async with linked(carrier) as (near, far):
        await near.send(bulk(20 * MIB))
        await started(near)
        await close_at_once(near)
        with pytest.raises(ConnectionLost, match="closed by the peer in the middle of a message"):
            await far.receive()


@carriers
async def test_closing_wakes_those_who_wait(carrier: MakeEnds) -> None:
    async with linked(carrier) as (near, _):
        lost = []

        async def waiting() -> None:
            if near.carrier == "shm":  # who waits for room there looks again and again
                await trio.sleep(0.05)
            else:
                await trio.testing.wait_all_tasks_blocked(0.05)

        async def lose(use: Callable[..., Awaitable[object]], *args: object) -> None:
            with pytest.raises(ConnectionLost, match="closed here"):
                await use(*args)
            lost.append(use)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose, near.receive)
            for _ in range(2):
                await near.send(bulk(20 * MIB))
            nursery.start_soon(lose, near.send, bulk(20 * MIB))
            await waiting()
            nursery.start_soon(lose, near.send, LinkClosed(1))  # waits behind that
            await waiting()
            await close_at_once(near)
        assert len(lost) == 3
        await lose(near.send, PING)
        await lose(near.receive)
        await near.aclose()


@pytest.mark.cases(4)
@carriers
async def test_a_cancelled_receive_loses_nothing(carrier: MakeEnds) -> None:
    async with linked(carrier) as (near, far):
        for message in (bulk(20 * MIB), LinkClosed(1)):
            await near.send(message)
        found: list[Message] = []
        while len(found) < 2:
            with trio.move_on_after(0.0005):
                found.append(await far.receive())
        assert found == [bulk(20 * MIB), LinkClosed(1)]


@carriers
async def test_an_accepted_link_closes_with_its_task_and_errors_end_that_link_only(carrier: MakeEnds) -> None:
    async with trio.open_nursery() as nursery:
        made = await carrier(nursery)

        async def accepted(connection: Connection) -> None:
            await connection.shake_hands()
            request = await connection.receive()
            if request == LinkOpen(1):
                raise PeerError("no")
            if request == LinkOpen(2):
                raise ConnectionLost("no")
            await connection.send(LinkClosed(3))

        address = await nursery.start(made.far.listen, made.bind, accepted)
        for number in (1, 2, 3):
            near = await made.near.dial(address)
            await near.send(LinkOpen(number))
            if number == 3:
                assert await near.receive() == LinkClosed(3)
            with pytest.raises(ConnectionLost, match="closed by the peer"):
                await near.receive()
        nursery.cancel_scope.cancel()


# -------------------------------------------------------------------------------------------------- addresses


@carriers
async def test_dialling_nobody_says_whom_and_why(carrier: MakeEnds) -> None:
    async with trio.open_nursery() as nursery:
        made = await carrier(nursery)
        host = made.bind[0]
        with pytest.raises(ConnectionLost, match="(?i)" + re.escape(f"cannot reach {host}:1: connection refused")):
            await made.near.dial((host, 1))
        nursery.cancel_scope.cancel()


@carriers
async def test_a_port_in_use_says_what_to_do(carrier: MakeEnds) -> None:
    async with listening(carrier) as (made, address, _):
        cure = re.escape(f"port in use: {address[0]}:{address[1]} (--bind {address[0]}:0 picks a free one)")
        with pytest.raises(UserError, match=cure):
            await made.far.listen(address, nobody)


# -------------------------------------------------------------------------------------------------- datagrams


Bind = Callable[[Address], Awaitable[Datagrams]]
DatagramEnds = tuple[Bind, Bind, Address, Address]  # how each end is bound, and where
MakeDatagrams = Callable[[trio.Nursery], Awaitable[DatagramEnds]]


async def datagrams_of_peerd(_: trio.Nursery, name: str) -> DatagramEnds:
    one, other = (CARRIERS[name](CarrierSettings()) for _ in range(2))
    return one.bind, other.bind, ("127.0.0.1", 0), ("127.0.0.1", 0)


async def memory_datagrams(nursery: trio.Nursery) -> DatagramEnds:
    network = MemoryNetwork(nursery)
    return network.bind, network.bind, ("a", 0), ("b", 0)


async def udp_datagrams(_: trio.Nursery) -> DatagramEnds:
    return bind_udp, bind_udp, ("127.0.0.1", 0), ("127.0.0.1", 0)


DATAGRAMS: dict[str, MakeDatagrams] = {
    **{name: partial(datagrams_of_peerd, name=name) for name in CARRIERS},
    "memory": memory_datagrams,
    "udp": udp_datagrams,
}
datagrams = pytest.mark.parametrize("carrier", DATAGRAMS.values(), ids=DATAGRAMS.keys())


@asynccontextmanager
async def bound(carrier: MakeDatagrams) -> AsyncIterator[tuple[Datagrams, Datagrams]]:
    async with trio.open_nursery() as nursery:
        bind_one, bind_other, here, there = await carrier(nursery)
        one, other = await bind_one(here), await bind_other(there)
        yield one, other
        await one.aclose()
        await other.aclose()


@datagrams
async def test_datagrams_arrive_with_their_source(carrier: MakeDatagrams) -> None:
    async with bound(carrier) as (one, other):
        for sample in SAMPLES[:4]:
            await one.send(other.address, sample)
            assert await other.receive() == (sample, one.address)
        assert one.bytes_sent == other.bytes_received > 0
        assert one.unsendable == other.malformed == 0


@datagrams
async def test_an_address_in_use_says_what_to_do(carrier: MakeDatagrams) -> None:
    async with trio.open_nursery() as nursery:
        bind, _, here, _ = await carrier(nursery)
        first = await bind(here)
        with pytest.raises(UserError, match=r"port in use: .*picks a free one"):
            await bind(first.address)
        await first.aclose()
        await (await bind(first.address)).aclose()


@datagrams
async def test_closing_wakes_who_waits_for_a_datagram(carrier: MakeDatagrams) -> None:
    async with bound(carrier) as (one, _):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def wait() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await one.receive()

            await trio.testing.wait_all_tasks_blocked()
            await one.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await one.receive()
