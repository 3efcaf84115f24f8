"""A guest and its relay over real sockets: what comes to a lent port is what the guest's node hears, byte for byte."""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest
import trio
from machine import free_ports

from peerd.relay import guest as guest_module
from peerd.relay import lease as lease_module
from peerd.relay import streams as streams_module
from peerd.relay.envelope import KEY_BYTES, disclose, enclose
from peerd.relay.guest import Guest
from peerd.relay.lender import STREAMS_MIN, Lender, Near
from peerd.transport.admission import PENDING_MAX
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import PeerError, UserError
from peerd.transport.hello import answer
from peerd.transport.ids import Address
from peerd.transport.messages import Ping, RelayCall, RelayGranted, RelayRequest, Welcome
from peerd.transport.sending.budget import Budget
from peerd.transport.tcp import TcpTransport

HOST = "127.0.0.1"


class Place:
    """A relay, and what is needed to be its guest; `node` is what the guest's node would be: it echoes."""

    def __init__(self, nursery: trio.Nursery, ports: list[int], budget: Budget | None) -> None:
        self.nursery = nursery
        self.transport = TcpTransport(nursery)
        self.lender = Lender(ports, HOST, HOST, budget)
        self.errors: list[Exception] = []
        self.connections: list[Connection] = []  # to the relay, as it accepted them
        self.streams = 0  # that have come to the node
        self.moves: list[Address] = []
        self.relay: Address = (HOST, 0)
        self.node: Address = (HOST, 0)

    async def start(self) -> None:
        self.relay = await self.nursery.start(self.transport.listen, self.relay, self._accepted)
        listener = trio.socket.socket()
        await listener.bind((HOST, 0))
        listener.listen(64)
        self.node = listener.getsockname()
        datagrams = trio.socket.socket(type=trio.socket.SOCK_DGRAM)
        await datagrams.bind(self.node)
        self.nursery.start_soon(self._echo_streams, listener)
        self.nursery.start_soon(self._echo_datagrams, datagrams)

    async def guest(self, *others: Address) -> tuple[Address, trio.CancelScope]:
        """One that is served until the scope is cancelled, and where it is reached."""
        guest, scope = Guest([self.relay, *others], self.transport), trio.CancelScope()
        where = await guest.ask()

        async def run() -> None:
            with scope:
                await guest.run(self.node, self.moves.append)

        self.nursery.start_soon(run)
        return where, scope

    async def _accepted(self, connection: Connection) -> None:
        self.connections.append(connection)
        try:
            await answer(connection, lambda _: None, Welcome("r", "r", 1), {RelayRequest: self.lender.lend})
        except (ConnectionLost, PeerError) as error:
            self.errors.append(error)
            raise

    async def _echo_streams(self, listener: trio.socket.SocketType) -> None:
        with listener:
            while True:
                sock, _ = await listener.accept()
                self.streams += 1
                self.nursery.start_soon(self._echo, trio.SocketStream(sock))

    @staticmethod
    async def _echo(stream: trio.SocketStream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError):
                async for some in stream:
                    await stream.send_all(some)
                await stream.send_eof()

    @staticmethod
    async def _echo_datagrams(datagrams: trio.socket.SocketType) -> None:
        with datagrams:
            while True:
                said, source = await datagrams.recvfrom(2048)
                await datagrams.sendto(said[::-1], source)


@asynccontextmanager
async def place(ports: int = 4, budget: Budget | None = None) -> AsyncIterator[Place]:
    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):
            here = Place(nursery, free_ports(ports), budget)
            await here.start()
            yield here
            nursery.cancel_scope.cancel()


async def eventually(look: Callable[[], object]) -> None:
    with trio.fail_after(20):
        while not look():
            await trio.sleep(0.01)


async def echoed(where: Address, said: bytes, after_s: float = 0.0) -> bytes:
    """What comes back, until the other end closes; it is said so long `after` this end has connected."""
    heard = bytearray()
    async with await trio.open_tcp_stream(*where) as stream, trio.open_nursery() as nursery:

        async def say() -> None:
            await trio.sleep(after_s)
            with suppress(trio.BrokenResourceError):
                await stream.send_all(said)
                await stream.send_eof()

        nursery.start_soon(say)
        with suppress(trio.BrokenResourceError):
            async for some in stream:
                heard += some
    return bytes(heard)


async def datagram_echoed(where: Address, said: bytes) -> bytes:
    """One that is lost is sent again, ever more seldom: the guest's way to its relay may not be open, or be slow."""
    wait_s = 0.5
    with trio.socket.socket(type=trio.socket.SOCK_DGRAM) as sock:
        await sock.connect(where)
        while True:
            await sock.send(said)
            with trio.move_on_after(wait_s):
                return await sock.recv(2048)
            wait_s *= 2


async def test_streams_and_datagrams_of_many_come_through_whole() -> None:
    rng = random.Random(7)
    async with place() as here:
        where, _ = await here.guest()
        assert where[1] in here.lender.guests
        assert where != here.node
        texts = [  # more than may be pending
            rng.randbytes(rng.choice((1, 15, 16, 31, 32, 33, 5_000, 3_000_000))) for _ in range(48)
        ]

        async def one(text: bytes) -> None:
            assert await echoed(where, text) == text
            assert await datagram_echoed(where, text[:1400]) == text[:1400][::-1]

        async with trio.open_nursery() as nursery:
            for text in texts:
                nursery.start_soon(one, text)
        assert here.streams == len(texts)
        assert here.lender.relayed_bytes >= 2 * sum(map(len, texts))


async def test_who_says_no_more_than_how_the_guests_key_begins_is_passed_on() -> None:
    """One of 256 that say a single byte."""
    async with place() as here:
        where, _ = await here.guest()
        key = here.lender._leases[where[1]].key
        for length in (1, KEY_BYTES - 1):
            assert await echoed(where, key[:length]) == key[:length]


async def test_more_than_may_be_pending_who_are_slow_to_speak_all_come_through() -> None:
    """As where many dial at once, and their machines are busy."""
    async with place() as here, trio.open_nursery() as nursery:
        where, _ = await here.guest()

        async def one(text: bytes) -> None:
            assert await echoed(where, text, after_s=0.2) == text

        for number in range(PENDING_MAX + 16):
            nursery.start_soon(one, bytes([number]))


async def test_as_many_streams_as_a_port_may_have_leave_room_for_the_guests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place() as here:
        monkeypatch.setattr(here.lender, "_streams_max", STREAMS_MIN)
        where, _ = await here.guest()
        came: list[bytes] = []

        async def one() -> None:
            came.append(await echoed(where, b"hello"))

        async with trio.open_nursery() as nursery:
            for _ in range(STREAMS_MIN):
                nursery.start_soon(one)
        assert came == [b"hello"] * STREAMS_MIN


async def test_two_guests_have_a_port_each_and_reach_each_other() -> None:
    async with place() as here:
        one, _ = await here.guest()
        other, scope = await here.guest()
        assert one != other
        assert await echoed(one, b"one") == b"one"
        assert await echoed(other, b"other") == b"other"
        scope.cancel()
        await eventually(lambda: list(here.lender.guests) == [one[1]])
        with pytest.raises(OSError):
            await echoed(other, b"nobody is there")
        assert await echoed(one, b"still") == b"still"


async def test_a_relay_that_was_away_gives_the_port_that_all_know() -> None:
    async with place() as here:
        others = [await here.guest() for _ in range(2)]
        where, _ = await here.guest()
        for _, scope in others:
            scope.cancel()
        await eventually(lambda: list(here.lender.guests) == [where[1]])
        before = len(here.connections)
        for connection in here.connections:
            connection.drop(ConnectionLost("the line is cut"))
        await eventually(lambda: len(here.connections) > before and here.lender.guests)
        assert list(here.lender.guests) == [where[1]]
        assert await echoed(where, b"again") == b"again"
        assert await datagram_echoed(where, b"again") == b"niaga"
        assert not here.moves


async def test_where_a_relay_stays_away_another_is_asked_and_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "STAYS_S", 0.5)
    async with place() as here, place() as there:
        where, _ = await here.guest(there.relay)
        monkeypatch.setattr(here.lender, "_ports", [])  # what it lends is no more
        for connection in here.connections:
            connection.drop(ConnectionLost("it is gone"))
        await eventually(lambda: here.moves)
        assert [port for _, port in here.moves] == list(there.lender.guests)
        assert here.moves != [where]
        assert await echoed(here.moves[0], b"there") == b"there"


async def test_a_port_that_is_lent_no_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "STAYS_S", 0.5)
    async with place() as here:
        where, _ = await here.guest()
        monkeypatch.setattr(here.lender, "_ports", [port for port in here.lender._ports if port != where[1]])
        for connection in here.connections:
            connection.drop(ConnectionLost("it starts anew"))
        await eventually(lambda: here.moves)
        assert await echoed(here.moves[0], b"elsewhere") == b"elsewhere"


async def test_who_has_no_port_to_lend_says_so() -> None:
    async with place(ports=0) as here:
        with pytest.raises(UserError, match="it lends no ports; this node asked for a port"):
            await here.guest()
    async with place(ports=1) as here:
        await here.guest()
        with pytest.raises(UserError, match="of its 1 ports that it lends none is free"):
            await here.guest()


async def test_a_port_that_another_program_has_is_passed_over() -> None:
    async with place(ports=2) as here:
        first, second = here.lender._ports
        with socket.socket(type=socket.SOCK_DGRAM) as taken:
            taken.bind((HOST, first))
            where, _ = await here.guest()
        assert where == (HOST, second)
        assert await echoed(where, b"here") == b"here"


async def test_a_guest_that_breaks_a_rule_loses_its_port() -> None:
    async with place() as here:
        connection = await here.transport.dial(here.relay)
        await connection.send(RelayRequest(0))
        granted = await connection.receive()
        assert isinstance(granted, RelayGranted)
        await connection.send(Ping(1, "a", "b", ()))
        await eventually(lambda: bool(here.errors))
        assert "a Ping from a guest" in str(here.errors[0])
        assert not here.lender.guests


async def test_who_comes_new_puts_nobody_out() -> None:
    """Though where nothing is sealed all of one host look alike."""
    async with place() as here:
        where, _ = await here.guest()
        for _ in range(3):
            other, _ = await here.guest()
            assert other != where
        assert await echoed(where, b"mine") == b"mine"


async def test_who_is_known_has_one_port() -> None:
    async with place() as here:
        lend, granted = here.lender.lend, []

        async def known(connection: Connection, request: RelayRequest) -> None:
            connection.identity = "e" * 32
            await lend(connection, request)

        here.lender.lend = known  # type: ignore[method-assign]
        for port in here.lender._ports:
            connection = await here.transport.dial(here.relay)
            await connection.send(RelayRequest(port))
            granted.append(await connection.receive())
            assert list(here.lender.guests) == [port]


@pytest.mark.parametrize("granted", [("", 1), ("0.0.0.0", 9), ("%%%", 9), ("nosuch.invalid", 1), ("127.0.0.1", 0)])
async def test_a_relay_that_grants_nonsense_is_refused(granted: Address) -> None:
    async def grant(connection: Connection) -> None:
        await connection.receive()
        await connection.send(RelayGranted(*granted, bytes(16)))
        await connection.receive()

    async with trio.open_nursery() as nursery:
        transport = TcpTransport(nursery)
        relay = await nursery.start(transport.listen, (HOST, 0), grant)
        with pytest.raises(UserError, match=r"relay: .*nobody is reached at"):
            await Guest([relay], transport).ask()
        nursery.cancel_scope.cancel()


async def test_a_flood_of_datagrams_ends_no_guest_and_takes_no_more_than_its_part() -> None:
    """Many answers at once want to go by the guest's one socket; what does not go is lost."""
    async with place(budget=Budget(1_000_000.0)) as here:
        where, _ = await here.guest()
        assert await datagram_echoed(where, b"before") == b"erofeb"
        with ExitStack() as stack:
            strangers = [stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)) for _ in range(40)]
            for _ in range(50):
                for sock in strangers:
                    sock.sendto(bytes(1400), where)
                await trio.sleep(0)
        assert here.lender.relayed_bytes < 500_000, "of 2.8 MB"
        assert await echoed(where, b"meanwhile") == b"meanwhile"
        assert await datagram_echoed(where, b"after") == b"retfa"


async def test_models_over_a_thin_budget_go_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once each would be slower than its receiver bears (budget.py)."""
    monkeypatch.setattr(streams_module, "BULK_BYTES", 8 << 10)
    async with place(budget=Budget(125_000.0)) as here:
        where, _ = await here.guest()
        came: list[int] = []  # whose bytes, as they came, beyond the first few

        async def model(number: int) -> None:
            async with await trio.open_tcp_stream(*where) as stream, trio.open_nursery() as nursery:
                nursery.start_soon(stream.send_all, bytes(60_000))
                heard = 0
                while heard < 60_000:
                    heard += len(await stream.receive_some(65536))
                    came.extend([number] * (heard > 20_000))

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(model, number)
        assert sum(one != other for one, other in itertools.pairwise(came)) <= 4, came


async def test_strangers_who_say_nothing_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "GREETING_DEADLINE_S", 1.0)
    async with place() as here, trio.open_nursery() as nursery:
        where, _ = await here.guest()

        async def silent() -> None:
            with suppress(OSError):
                async with await trio.open_tcp_stream(*where) as stream:
                    with suppress(trio.BrokenResourceError):
                        assert await stream.receive_some(1) == b""

        for _ in range(40):
            nursery.start_soon(silent)
        await trio.sleep(0.2)
        while await echoed(where, b"after all") != b"after all":
            await trio.sleep(0.1)


async def test_whoever_has_not_written_is_not_written_to() -> None:
    """A guest could have its relay talk to anyone."""
    async with place() as here:
        connection = await here.transport.dial(here.relay)
        await connection.send(RelayRequest(0))
        granted = await connection.receive()
        assert isinstance(granted, RelayGranted)
        lent = granted.host, granted.port
        with (
            trio.socket.socket(type=trio.socket.SOCK_DGRAM) as guest,
            trio.socket.socket(type=trio.socket.SOCK_DGRAM) as victim,
        ):
            await victim.bind((HOST, 0))
            there = victim.getsockname()
            for _ in range(3):
                await guest.sendto(enclose(granted.key, there, b"unasked"), lent)
            with trio.move_on_after(0.3):
                told = await victim.recv(100)
                pytest.fail(f"it was told {told!r}")
            await victim.sendto(b"asked", lent)
            with trio.fail_after(5):
                assert disclose(granted.key, await guest.recv(100)) == (there, b"asked")
                await guest.sendto(enclose(granted.key, there, b"told"), lent)
                assert await victim.recv(100) == b"told"


async def test_a_guest_that_does_not_come_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "CALL_S", 0.3)
    async with place() as here:
        connection = await here.transport.dial(here.relay)
        await connection.send(RelayRequest(0))
        granted = await connection.receive()
        assert isinstance(granted, RelayGranted)
        assert await echoed((granted.host, granted.port), b"hello") == b""
        call = await connection.receive()
        assert isinstance(call, RelayCall)
        async with await trio.open_tcp_stream(granted.host, granted.port) as late:
            await late.send_all(granted.key + call.number)
            with suppress(trio.BrokenResourceError):
                assert await late.receive_some(1) == b"", "the call is over"


async def test_a_relay_keeps_to_its_budget() -> None:
    taken: list[int] = []

    class Counted(Budget):
        def take(self, count: int, now: float) -> float:
            taken.append(count)
            return super().take(count, now)

    async with place(budget=Counted(10_000_000.0)) as here:
        where, _ = await here.guest()
        text = os.urandom(500_000)
        assert await echoed(where, text) == text
        assert sum(taken) == here.lender.relayed_bytes >= 2 * len(text)
        assert max(taken) <= Counted(10_000_000.0).piece


async def test_a_relay_dials_its_guests_behind_its_own_outer_address() -> None:
    async with trio.open_nursery() as nursery:
        port, other = free_ports(2)
        lender = Lender([port], "0.0.0.0", "203.0.113.5")
        assert lender.near(("203.0.113.5", port)) == (HOST, port)
        for address in (("203.0.113.5", other), ("203.0.113.6", port)):
            assert lender.near(address) == address
        with pytest.raises(ConnectionLost, match=rf"cannot reach 127\.0\.0\.1:{port}"):
            await Near(TcpTransport(nursery), lender.near).dial(("203.0.113.5", port))
