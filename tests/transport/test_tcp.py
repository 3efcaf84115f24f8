"""What only real sockets do: names that do not resolve, floods, exhausted descriptors, strangers, short buffers."""

from __future__ import annotations

import errno
import socket
from contextlib import asynccontextmanager, closing

import pytest
import trio
import trio.testing

from peerd.effects import PeerError, UserError
from peerd.messages import LinkClosed, ModelSnapshot, Nack
from peerd.transport import stream, tcp, udp
from peerd.transport.admission import MAX_PENDING
from peerd.transport.framing import frames
from peerd.transport.link import LinkLost, shown
from peerd.transport.tcp import TcpTransport
from peerd.transport.udp import bind_udp

LOOPBACK = ("127.0.0.1", 0)


@asynccontextmanager
async def listening():
    """Yield a transport, where it listens, and a channel of accepted links."""
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            give, taken = trio.open_memory_channel(99)

            async def accepted(link):
                await give.send(link)
                await trio.sleep_forever()

            transport = TcpTransport(nursery)
            address = await nursery.start(transport.listen, LOOPBACK, accepted)
            yield transport, address, taken
            nursery.cancel_scope.cancel()


class Names(trio.abc.HostnameResolver):
    """No test asks a real name server: these names do not exist, and "slow" is never answered."""

    async def getaddrinfo(self, host, *args):
        if host == b"slow":
            await trio.sleep_forever()
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def getnameinfo(self, *args):
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
def test_addresses_that_cannot_be(address, monkeypatch):
    monkeypatch.setattr(tcp, "DIAL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(udp, "RESOLVE_TIMEOUT_S", 0.05)

    async def main():
        trio.socket.set_custom_hostname_resolver(Names())
        async with trio.open_nursery() as nursery:
            with pytest.raises(LinkLost, match=r"^cannot reach "):
                await TcpTransport(nursery).dial(address)
            for listen in (lambda: TcpTransport(nursery).listen(address, None), lambda: bind_udp(address)):
                with pytest.raises(UserError, match=r"^cannot listen on "):
                    await listen()
            datagrams = await bind_udp(LOOPBACK)
            await datagrams.send(address, Nack(1, "me"))
            await datagrams.send(address, Nack(1, "me"))
            assert datagrams.unsendable == 2
            await datagrams.aclose()

    trio.run(main)


def test_a_foreign_address_cannot_be_listened_on():
    async def main():
        async with trio.open_nursery() as nursery:
            with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:0: "):
                await TcpTransport(nursery).listen(("192.0.2.1", 0), None)

    trio.run(main)


def test_a_dial_without_an_answer_ends(monkeypatch):
    monkeypatch.setattr(tcp, "DIAL_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as full:
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())

        async def main():
            async with trio.open_nursery() as nursery:
                with pytest.raises(LinkLost, match=r"no answer within 0\.05 s"):
                    await TcpTransport(nursery).dial(full.getsockname())

        trio.run(main)
        for filler in fillers:
            filler.close()


def test_a_stranger_is_cut_off_and_the_next_one_served():
    async def main():
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

    trio.run(main)


def test_no_more_than_so_many_in_their_handshake():
    async def main():
        async with listening() as (transport, address, taken):
            links = [await transport.dial(address) for _ in range(MAX_PENDING + 3)]  # the last are in the backlog
            accepted = [await taken.receive() for _ in range(MAX_PENDING)]
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert taken.statistics().current_buffer_used == 0
            accepted[0].admit()
            accepted[0].admit()  # counts once
            await taken.receive()
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert taken.statistics().current_buffer_used == 0
            assert len(links) == MAX_PENDING + 3

    trio.run(main)


def test_a_host_with_too_many_pending_is_closed_at_once(monkeypatch):
    monkeypatch.setattr("peerd.transport.admission.MAX_PENDING_PER_HOST", 0)
    monkeypatch.setattr("ipaddress.IPv4Address.is_loopback", False)

    async def main():
        async with listening() as (transport, address, _):
            near = await transport.dial(address)
            with pytest.raises(LinkLost):
                await near.receive()

    trio.run(main)


def test_a_lack_of_descriptors_pauses_accepting(monkeypatch):
    monkeypatch.setattr(tcp, "PAUSE_S", 0.1)
    failures = [errno.EMFILE, errno.ECONNABORTED]
    accept = socket.socket.accept

    def failing(sock):
        if failures:
            raise OSError(failures.pop(), "no")
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", failing)

    async def main():
        began = trio.current_time()
        async with listening() as (transport, address, taken):
            await transport.dial(address)
            await taken.receive()
            assert trio.current_time() - began >= 0.1

    trio.run(main)


def test_a_reader_that_takes_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(stream, "PATIENCE_S", 0.1)
    monkeypatch.setattr(stream, "SLOWEST_RATE", 1 << 30)

    async def main():
        async with listening() as (transport, address, taken):
            near = await transport.dial(address)
            await near.send(ModelSnapshot(1, "c", tuple(bytes(4 << 20) for _ in range(9))))
            await taken.receive()
            await near.send(ModelSnapshot(2, "c", (b"",)))
            with pytest.raises(LinkLost, match="takes in less than"):
                await near.send(ModelSnapshot(3, "c", (b"",)))

    trio.run(main)


def test_what_a_peer_sent_before_it_went_is_received_after_sending_failed():
    async def main():
        async with listening() as (_, address, taken):
            with closing(socket.create_connection(address)) as peer:
                far = await taken.receive()
                peer.sendall(b"".join(frames(LinkClosed(7))))
            for _ in range(3):  # into the void: the peer's kernel answers with a reset
                await trio.sleep(0.01)
                try:
                    await far.send(LinkClosed(1))
                except LinkLost:
                    break
            assert await far.receive() == LinkClosed(7)
            with pytest.raises(LinkLost):
                await far.receive()

    trio.run(main)


def test_a_small_socket_buffer_and_odd_chunks():
    async def main():
        async with listening() as (transport, address, taken):
            near = await transport.dial(address)
            far = await taken.receive()
            far.payload_limit = 1 << 24
            near._stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
            sent = ModelSnapshot(1, "c", tuple(bytes([size % 251]) * size for size in range(0, 4000, 7)))
            await near.send(sent)
            assert await far.receive() == sent

    trio.run(main)


def test_a_chunk_that_dribbles_in_wakes_its_reader_rarely(monkeypatch):
    """And what follows it, however short, wakes it at once."""
    waits = 0
    wait = tcp.TcpStream.wait_receivable

    async def counted(self, due=1):
        nonlocal waits
        waits += 1
        await wait(self, due)

    monkeypatch.setattr(tcp.TcpStream, "wait_receivable", counted)

    async def body():
        async with listening() as (_, address, taken):
            sock = socket.create_connection(address)
            with closing(sock):
                link = await taken.receive()
                link.payload_limit = 2 << 20
                message = ModelSnapshot(1, "float32", (bytes(1 << 20), bytes(1 << 20)))
                raw = b"".join(map(bytes, frames(message)))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setblocking(False)

                async def dribble():
                    for start in range(0, len(raw), 2000):
                        await trio.sleep(0)
                        piece = raw[start : start + 2000]
                        assert sock.send(piece) == len(piece)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(dribble)
                    assert await link.receive() == message
                sock.send(b"".join(map(bytes, frames(LinkClosed(5)))))
                assert await link.receive() == LinkClosed(5)

    trio.run(body)
    assert waits < 60, "of a thousand pieces"


def test_ipv6():
    async def main():
        async with trio.open_nursery() as nursery:
            transport = TcpTransport(nursery)
            address = await nursery.start(transport.listen, ("::1", 0), lambda link: link.send(LinkClosed(1)))
            near = await transport.dial(address)
            assert near.remote == f"[::1]:{address[1]}"
            assert await near.receive() == LinkClosed(1)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_addresses_are_shown_as_people_write_them():
    assert [shown(("10.0.0.1", 1)), shown(("::1", 1))] == ["10.0.0.1:1", "[::1]:1"]


def test_malformed_datagrams_are_counted_and_dropped():
    async def main():
        datagrams = await bind_udp(LOOPBACK)
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as stranger:
            for datagram in (b"", b"x", bytes(5000), b"pd\x01\x01\xc1", b"pd\x01\xff"):
                stranger.sendto(datagram, datagrams.address)
        await datagrams.send(datagrams.address, Nack(1, "me"))
        assert await datagrams.receive() == (Nack(1, "me"), datagrams.address)
        assert datagrams.malformed == 5
        await datagrams.aclose()

    trio.run(main)
