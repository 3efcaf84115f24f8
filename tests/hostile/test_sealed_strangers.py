"""Who has no certificate, before a sealed node: plain bytes, TLS that stops or goes no further, datagrams."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import victims as honest
from papers import Blocking, Papers, sealed
from stranger import Line, Stranger, datagram_bytes, stream_bytes
from victims import Victims

from peerd.security.trust import Newcomer
from peerd.transport.errors import PeerError
from peerd.transport.ids import Address
from peerd.transport.messages import (
    Ack,
    AuthorityShown,
    EnrolmentRequest,
    Hello,
    Keys,
    LinkOpen,
    MemberTable,
    Message,
    ModelRequest,
    Ping,
    SpeedRequest,
)
from peerd.transport.secure.handshake import ALPN

VICTIMS = {"sealed": True}
HELD = 200  # connections: more than a node lets in, greeted or not


class Nobody(Papers):
    """Shakes hands without a certificate."""

    def __init__(self, users: Path) -> None:
        super().__init__(users)
        self.credentials = Newcomer()


def nobody(them: Victims) -> Nobody:
    return Nobody(them.machine.state / "peerd" / ".authority")


def first_flight() -> bytes:
    """A ClientHello, whole."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([ALPN])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


@pytest.mark.soak
def test_plain_bytes_and_datagrams(them: Victims) -> None:
    """It is told that the node speaks TLS, and no more; of datagrams not even that."""
    row = them.rows()[0]
    with them.unharmed(), Stranger() as stranger:
        stranger.udp.settimeout(0.5)
        for address in them.addresses:
            for thrown in (
                os.urandom(4096),
                b"GET / HTTP/1.1\r\n\r\n",
                stream_bytes(stranger.hello()),
                b"\x16\x03\x01\xff\xff",
            ):
                with suppress(OSError):
                    stranger.call(address).raw(thrown)
            for message in (Ping(1, stranger.id, row.id, ()), Ack(2, stranger.id, (row,))):
                plain = datagram_bytes(message)
                for datagram in (plain, os.urandom(len(plain)), plain + bytes(60), b""):
                    for _ in range(50):
                        stranger.udp.sendto(datagram, address)
        with pytest.raises(TimeoutError):
            stranger.udp.recv(2048)
    assert all(node.ask("status")["counts"]["datagrams_undecipherable"] >= 50 for node in them.nodes)


def test_without_a_certificate_nothing_is_told(them: Victims) -> None:
    """But the authority's certificate, and that the token is none."""
    allowed = (AuthorityShown,)
    said: list[Message] = [
        Hello(1, "peerd", "", "x", "x", 1, "127.0.0.1", 1, "", "", ()),
        MemberTable("x", ()), ModelRequest(), SpeedRequest(), LinkOpen(1), Keys(()),
    ]  # fmt: skip
    with them.unharmed(), Stranger(papers=nobody(them)) as stranger:
        for address in them.addresses:
            for message in said:
                line = stranger.call(address)
                with suppress(OSError, PeerError):
                    line.say(message)
                    while True:
                        assert isinstance(line.hear(), allowed)


@pytest.mark.soak
def test_half_handshakes_that_are_held_open(them: Victims) -> None:
    """More than a node lets in, for longer than it waits; who has a certificate comes in all the same."""
    a, _ = them.addresses
    hello = first_flight()
    with them.unharmed(), ExitStack() as stack:
        for number in range(HELD):
            sock = stack.enter_context(socket.create_connection(a, timeout=10.0))
            with suppress(OSError):
                sock.sendall(hello[: len(hello) // 2] if number % 2 else hello)
        assert honest.comes_true(lambda: honest.gets_in(them), 60.0), "the port is full"


@pytest.mark.soak
def test_handshakes_without_end(them: Victims) -> None:
    """As many as come through, from several at once: what they cost is bounded by how many are let in a second."""
    a, _ = them.addresses
    pid = them.nodes[0].ask("info")["pid"]
    ended = threading.Event()
    made = 0

    def knock() -> None:
        nonlocal made
        while not ended.is_set():
            with suppress(OSError, PeerError), socket.create_connection(a, timeout=5.0) as sock:
                sealed(Blocking(sock), Newcomer(), dialled=True)
                made += 1

    with them.unharmed():
        before = cpu_s(pid)
        time.sleep(5.0)
        idle, before, began = cpu_s(pid) - before, cpu_s(pid), time.monotonic()
        threads = [threading.Thread(target=knock, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(20.0)
        ended.set()
        for thread in threads:
            thread.join()
        wall = time.monotonic() - began
        busy = (cpu_s(pid) - before) / wall
    print(f"{made / wall:.0f} handshakes/s; {idle / 5:.3f} of a core before, {busy:.3f} during them")  # noqa: T201
    assert made / wall < 100, "nothing bounds them"


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.soak
def test_made_up_tokens(them: Victims) -> None:
    """A thousand guesses: each costs a look, and none lets in."""
    with them.unharmed(), Stranger(papers=nobody(them)) as stranger:
        for number in range(200):
            with suppress(OSError, PeerError):
                line: Line = stranger.call(them.addresses[number % 2])
                line.hear()
                line.say(EnrolmentRequest(os.urandom(8), os.urandom(400), os.urandom(32)))
    assert not any(node.ask("status")["counts"]["enrolled"] for node in them.nodes)


@pytest.mark.soak
def test_a_flood_of_datagrams(them: Victims) -> None:
    """Each is dropped for the price of a hash; the loop goes on."""
    addresses: list[Address] = them.addresses
    with them.unharmed(), Stranger() as stranger:
        ends = time.monotonic() + 10.0
        while time.monotonic() < ends:
            for address in addresses:
                for _ in range(20):
                    stranger.udp.sendto(os.urandom(600), address)
            time.sleep(0.001)
