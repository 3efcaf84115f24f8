"""What only real sockets do: names that do not resolve, floods, exhausted descriptors, strangers, short buffers."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from typing import Any, NoReturn

import pytest
import trio
import trio.testing
from connection_ends import nobody

from peerd.transport import stream, tcp
from peerd.transport.admission import PENDING_MAX
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import PeerError, UserError
from peerd.transport.framing import frames
from peerd.transport.ids import Address, shown
from peerd.transport.messages import LinkClosed, ModelSnapshot, Nack
from peerd.transport.stream import StreamConnection
from peerd.transport.tcp import TcpTransport
from peerd.transport.udp import bind_udp

LOOPBACK = ("127.0.0.1", 0)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[TcpTransport, Address, trio.MemoryReceiveChannel[Connection]]]:
    """Yield a transport, where it listens, and a channel of accepted connections."""
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            give, taken = trio.open_memory_channel[Connection](99)

            async def accepted(connection: Connection) -> None:
                await give.send(connection)
                await trio.sleep_forever()

            transport = TcpTransport(nursery)
            address = await nursery.start(transport.listen, LOOPBACK, accepted)
            yield transport, address, taken
            nursery.cancel_scope.cancel()


class Names(trio.abc.HostnameResolver):
    """No test asks a real name server: these names do not exist, and "slow" is never answered."""

    async def getaddrinfo(self, host: Any, *args: Any) -> NoReturn:
        if host == b"slow":
            await trio.sleep_forever()
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def getnameinfo(self, *args: Any) -> NoReturn:
        raise AssertionError


BAD_ADDRESSES = [
    ("no-such-host.invalid", 1),
    ("slow", 1),
    ("127.0.0.1", 99999),
    ("127.0.0.1", -1),
    ("x" * 70 + ".example", 1),
    ("nul\0", 1),
    ("\udcff", 1),
    ("a..b", 1),
]


@pytest.mark.parametrize("address", BAD_ADDRESSES, ids=repr)
async def test_addresses_that_cannot_be(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "DIAL_TIMEOUT_S", 0.05)
    trio.socket.set_custom_hostname_resolver(Names())
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConnectionLost, match=r"^cannot reach "):
            await TcpTransport(nursery).dial(address)
        for listen in (lambda: TcpTransport(nursery).listen(address, nobody), lambda: bind_udp(address)):
            with pytest.raises(UserError, match=r"^cannot listen on "):
                await listen()
        datagrams = await bind_udp(LOOPBACK)
        await datagrams.send(address, Nack(1, "me"))
        await datagrams.send(address, Nack(1, "me"))
        assert datagrams.unsendable == 2
        await datagrams.aclose()


async def test_a_foreign_address_cannot_be_listened_on() -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(UserError, match=r"192\.0\.2\.1:0: .*; --bind takes an address of this machine"):
            await TcpTransport(nursery).listen(("192.0.2.1", 0), nobody)
        with pytest.raises(UserError, match=r"\[fe80::1\]:0: .*; one that begins with fe80 says nothing to other"):
            await TcpTransport(nursery).listen(("fe80::1", 0), nobody)


async def test_a_dial_without_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "DIAL_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as full:
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        async with trio.open_nursery() as nursery:
            with pytest.raises(ConnectionLost, match=r"no answer within 0\.05 s"):
                await TcpTransport(nursery).dial(full.getsockname())
        for filler in fillers:
            filler.close()


async def test_an_address_that_is_silent_hides_no_other_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.2", 0))
        silent.listen(0)
        for _ in range(4):  # until its backlog is full
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        port = silent.getsockname()[1]

        async def kept(_: Connection) -> None:
            await trio.sleep_forever()

        async def both(*_: object, **__: object) -> list[tuple[int, Address]]:
            return [(socket.AF_INET, (host, port)) for host in ("127.0.0.2", "127.0.0.1")]

        monkeypatch.setattr(tcp, "DIAL_TIMEOUT_S", 1.0)
        async with trio.open_nursery() as nursery:
            transport = TcpTransport(nursery)
            await nursery.start(transport.listen, ("127.0.0.1", port), kept)
            monkeypatch.setattr(tcp, "resolve", both)
            assert await transport.dial(("both", port))
            nursery.cancel_scope.cancel()


async def test_an_address_of_a_kind_that_the_kernel_lacks_hides_no_other_of_the_same_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = 0

    class WithoutIPv6(socket.socket):
        def __init__(self, family: int = -1, *others: int, **named: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *others, **named)

    async def both(*_: object, **__: object) -> list[tuple[int, Address]]:
        return [(socket.AF_INET6, ("::1", port)), (socket.AF_INET, ("127.0.0.1", port))]

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(tcp, "resolve", both)
        monkeypatch.setattr(socket, "socket", WithoutIPv6)
        sock, host = await tcp.connect(("both", port))
        sock.close()
        assert host == "127.0.0.1"


async def test_a_dial_that_is_given_up_as_it_connects_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, scope = tcp.connect, trio.CancelScope()
    made: list[tuple[socket.socket, str]] = []

    async def connected(address: Address) -> tuple[socket.socket, str]:
        made.append(await connect(address))
        scope.cancel()
        return made[0]

    monkeypatch.setattr(tcp, "connect", connected)
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with trio.open_nursery() as nursery:
            with scope:
                await TcpTransport(nursery).dial(server.getsockname())
    assert scope.cancelled_caught
    assert made[0][0].fileno() < 0


async def test_a_connection_that_is_gone_as_it_is_made_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    async def connect(_: Address) -> tuple[socket.socket, str]:
        made.append(socket.socket(socket.AF_UNIX))  # which takes none of TCP's options
        return made[0], "127.0.0.1"

    monkeypatch.setattr(tcp, "connect", connect)
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConnectionLost, match=r"^cannot reach 127\.0\.0\.1:1: "):
            await TcpTransport(nursery).dial(("127.0.0.1", 1))
    assert made[0].fileno() < 0, "closed"


async def test_a_stranger_is_cut_off_and_the_next_one_served() -> None:
    async with listening() as (transport, address, taken):
        with closing(socket.create_connection(address)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")
            far = await taken.receive()
            with pytest.raises(PeerError, match="not peerd's"):
                await far.receive()
            stranger.settimeout(5)
            assert await trio.to_thread.run_sync(stranger.recv, 1) == b""
        near = await transport.dial(address)
        far = await taken.receive()
        await near.send(LinkClosed(1))
        assert await far.receive() == LinkClosed(1)


async def test_no_more_than_so_many_in_their_handshake() -> None:
    async with listening() as (transport, address, taken):
        connections = [await transport.dial(address) for _ in range(PENDING_MAX + 3)]  # the last are in the backlog
        accepted = [await taken.receive() for _ in range(PENDING_MAX)]
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert taken.statistics().current_buffer_used == 0
        accepted[0].admit()
        accepted[0].admit()  # counts once
        await taken.receive()
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert taken.statistics().current_buffer_used == 0
        assert len(connections) == PENDING_MAX + 3


async def test_who_is_slow_in_its_handshake_makes_way_where_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.transport.admission.MAKES_WAY_AFTER_S", 0.05)
    async with listening() as (transport, address, taken):
        connections = [await transport.dial(address) for _ in range(PENDING_MAX + 3)]
        for _ in connections:
            await taken.receive()
        for slow in connections[:3]:
            with pytest.raises(ConnectionLost):
                await slow.receive()
        await connections[-1].send(LinkClosed(1))
        await connections[-1].flushed()


async def test_a_few_hosts_that_say_nothing_hold_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipaddress.IPv4Address.is_loopback", False)
    async with listening() as (transport, address, taken):
        with ExitStack() as held:
            for number in range(100):
                held.enter_context(socket.create_connection(address, source_address=(f"127.0.1.{number % 12}", 0)))
            await transport.dial(address)
            with trio.fail_after(0.5):
                while (await taken.receive()).host != "127.0.0.1":
                    pass


async def test_a_host_with_too_many_pending_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.transport.admission.PENDING_PER_HOST_MAX", 0)
    monkeypatch.setattr("ipaddress.IPv4Address.is_loopback", False)
    async with listening() as (transport, address, _):
        near = await transport.dial(address)
        with pytest.raises(ConnectionLost):
            await near.receive()


async def test_a_lack_of_descriptors_pauses_accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "PAUSE_S", 0.1)
    failures = [errno.EMFILE, errno.ECONNABORTED]
    accept = socket.socket.accept

    def failing(sock: socket.socket) -> object:
        if failures:
            raise OSError(failures.pop(), "no")
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", failing)
    began = trio.current_time()
    async with listening() as (transport, address, taken):
        await transport.dial(address)
        await taken.receive()
        assert trio.current_time() - began >= 0.1


async def test_a_reader_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PATIENCE_S", 0.1)
    monkeypatch.setattr(stream, "SLOWEST_RATE", 1 << 30)
    async with listening() as (transport, address, taken):
        near = await transport.dial(address)
        await near.send(ModelSnapshot(1, "c", tuple(bytes(4 << 20) for _ in range(9))))
        await taken.receive()
        await near.send(ModelSnapshot(2, "c", (b"",)))
        with pytest.raises(ConnectionLost, match="takes in less than"):
            await near.send(ModelSnapshot(3, "c", (b"",)))


async def test_what_a_peer_sent_before_it_went_is_received_after_sending_failed() -> None:
    async with listening() as (_, address, taken):
        with closing(socket.create_connection(address)) as peer:
            far = await taken.receive()
            peer.sendall(b"".join(frames(LinkClosed(7))))
        for _ in range(3):  # into the void: the peer's kernel answers with a reset
            await trio.sleep(0.01)
            try:
                await far.send(LinkClosed(1))
            except ConnectionLost:
                break
        assert await far.receive() == LinkClosed(7)
        with pytest.raises(ConnectionLost):
            await far.receive()


async def test_a_small_socket_buffer_and_odd_chunks() -> None:
    async with listening() as (transport, address, taken):
        near = await transport.dial(address)
        far = await taken.receive()
        far.payload_limit = 1 << 24
        assert isinstance(near, StreamConnection)
        assert isinstance(near._stream, tcp.TcpStream)
        near._stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
        sent = ModelSnapshot(1, "c", tuple(bytes([size % 251]) * size for size in range(0, 4000, 7)))
        await near.send(sent)
        assert await far.receive() == sent


async def test_a_chunk_that_dribbles_in_wakes_its_reader_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what follows it, however short, wakes it at once."""
    waits = 0
    wait = tcp.TcpStream.wait_receivable

    async def counted(self: tcp.TcpStream, due: int = 1) -> None:
        nonlocal waits
        waits += 1
        await wait(self, due)

    monkeypatch.setattr(tcp.TcpStream, "wait_receivable", counted)
    async with listening() as (_, address, taken):
        sock = socket.create_connection(address)
        with closing(sock):
            connection = await taken.receive()
            connection.payload_limit = 2 << 20
            message = ModelSnapshot(1, "float32", (bytes(1 << 20), bytes(1 << 20)))
            raw = b"".join(map(bytes, frames(message)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)

            async def dribble() -> None:
                for start in range(0, len(raw), 2000):
                    await trio.sleep(0)
                    piece = raw[start : start + 2000]
                    assert sock.send(piece) == len(piece)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(dribble)
                assert await connection.receive() == message
            sock.send(b"".join(map(bytes, frames(LinkClosed(5)))))
            assert await connection.receive() == LinkClosed(5)
    assert waits < 60, "of a thousand pieces"


async def test_ipv6() -> None:
    async with trio.open_nursery() as nursery:
        transport = TcpTransport(nursery)
        address = await nursery.start(transport.listen, ("::1", 0), lambda connection: connection.send(LinkClosed(1)))
        near = await transport.dial(address)
        assert near.remote == f"[::1]:{address[1]}"
        assert await near.receive() == LinkClosed(1)
        nursery.cancel_scope.cancel()


async def test_ipv4_reaches_whoever_listens_on_all_addresses_of_ipv6() -> None:
    async with trio.open_nursery() as nursery:
        transport = TcpTransport(nursery)
        remotes = []

        async def accepted(connection: Connection) -> None:
            remotes.append(connection.remote)
            await connection.send(LinkClosed(1))

        _, port = await nursery.start(transport.listen, ("::", 0), accepted)
        near = await transport.dial(("127.0.0.1", port))
        assert await near.receive() == LinkClosed(1)
        assert remotes[0].startswith("127.0.0.1:"), "one host has one name: limits and subnets are told of it"
        nursery.cancel_scope.cancel()
    everywhere, old = await bind_udp(("::", 0)), await bind_udp(LOOPBACK)
    await everywhere.send(old.address, Nack(1, "me"))
    _, source = await old.receive()
    await old.send(source, Nack(2, "you"))
    assert await everywhere.receive() == (Nack(2, "you"), old.address)
    await everywhere.aclose()
    await old.aclose()


def test_addresses_are_shown_as_people_write_them() -> None:
    assert [shown(("10.0.0.1", 1)), shown(("::1", 1))] == ["10.0.0.1:1", "[::1]:1"]


async def test_datagrams_of_another_swarm_are_dropped() -> None:
    """An address may have changed hands: what was meant for the swarm before must not join the two."""
    ours, same, other, default = [await bind_udp(LOOPBACK, tag) for tag in (b"\xffour", b"\xffour", b"\xffelse", b"")]
    for stranger, to in ((other, ours), (default, ours), (ours, default)):
        await stranger.send(to.address, Nack(1, "not-ours"))
    await same.send(ours.address, Nack(2, "ours"))
    assert await ours.receive() == (Nack(2, "ours"), same.address)
    assert ours.malformed == 2
    for datagrams in (ours, same, other, default):
        await datagrams.aclose()


async def test_malformed_datagrams_are_counted_and_dropped() -> None:
    datagrams = await bind_udp(LOOPBACK)
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as stranger:
        for datagram in (b"", b"x", bytes(5000), b"pd\x01\x01\xc1", b"pd\x01\xff"):
            stranger.sendto(datagram, datagrams.address)
    await datagrams.send(datagrams.address, Nack(1, "me"))
    assert await datagrams.receive() == (Nack(1, "me"), datagrams.address)
    assert datagrams.malformed == 5
    await datagrams.aclose()
