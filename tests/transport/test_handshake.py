"""Who is let in, who is told what: the handshake of sealed connections over this machine's network."""

from __future__ import annotations

import errno
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import trio
from certificates import DAY, Authority, TestCredentials

from peerd.transport import stream, tcp
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import PeerError
from peerd.transport.framing import frames
from peerd.transport.hello import Refused, answer, greet
from peerd.transport.messages import Hello, LinkClosed, Welcome
from peerd.transport.secure.credentials import STRANGER, Credentials
from peerd.transport.secure.handshake import shake_hands
from peerd.transport.tcp import TcpTransport

pytestmark = pytest.mark.trio(limit_s=30)

LOOPBACK = ("127.0.0.1", 0)
OURS, OTHERS = Authority(), Authority()


class Met:
    """What a listener and who dialled it made of each other."""

    def __init__(self) -> None:
        self.near: Connection | None = None
        self.far: Connection | None = None
        self.said: list[str] = []  # by the dialler, then the listener
        self.errors: list[Exception] = []


@asynccontextmanager
async def meeting(near: Credentials | None, far: Credentials | None) -> AsyncIterator[Met]:
    """Dial, greet where there is no handshake, and yield both ends, or what they say of it."""
    met, done = Met(), trio.Event()
    hello = Hello(1, "swarm", "", "near", "near", 1, "127.0.0.1", 1, "gossip", "", ())

    async def accepted(connection: Connection) -> None:
        try:
            await connection.shake_hands()
            if far is None:
                await answer(connection, lambda _: None, Welcome("far", "far", 1))
            met.far = connection
        except (ConnectionLost, PeerError) as error:
            met.errors.append(error)
        done.set()
        with suppress(ConnectionLost):
            await connection.flushed()
        await trio.sleep_forever()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            transport = TcpTransport(nursery, credentials=far)
            address = await nursery.start(transport.listen, LOOPBACK, accepted)
            dialler: list[Exception] = []
            try:
                met.near = await TcpTransport(nursery, credentials=near).dial(address)
                if near is None:
                    await greet(met.near, hello)
            except (ConnectionLost, PeerError) as error:
                dialler.append(error)
            await done.wait()
            met.errors = [*dialler, *met.errors]
            met.said = [str(error) for error in met.errors]
            yield met
            nursery.cancel_scope.cancel()


async def test_two_of_one_authority_know_who_the_other_is() -> None:
    near, far = TestCredentials(OURS), TestCredentials(OURS)
    async with meeting(near, far) as met:
        assert met.near is not None
        assert met.far is not None
        assert (met.near.identity, met.far.identity) == (far.id, near.id)
        await met.near.send(LinkClosed(1))
        assert await met.far.receive() == LinkClosed(1)


async def test_a_node_without_a_certificate_is_a_stranger() -> None:
    far = TestCredentials(OURS)
    async with meeting(TestCredentials(OURS, certified=False), far) as met:
        assert met.near is not None
        assert met.far is not None
        assert (met.near.identity, met.far.identity) == (far.id, STRANGER)


async def test_nothing_is_proved_in_the_clear() -> None:
    async with meeting(None, None) as met:
        assert met.near is not None
        assert met.near.identity is None


class Exhausted(TestCredentials):
    """A node's that has no descriptor left."""

    def context(self, *, server: bool) -> ssl.SSLContext:
        raise OSError(errno.EMFILE, "Too many open files")


async def test_who_dials_is_not_to_blame_for_what_the_listener_lacks() -> None:
    async with meeting(TestCredentials(OURS), Exhausted(OURS)) as met:
        assert [type(error) for error in met.errors] == [ConnectionLost, ConnectionLost]
        assert met.said[1].endswith("no handshake, for this node lacks what it takes (Too many open files)")


class Broken(TestCredentials):
    """A node's whose key is not that of its certificate."""

    def context(self, *, server: bool) -> ssl.SSLContext:
        raise ssl.SSLError(1, "key values mismatch")


async def test_what_is_wrong_with_our_own_certificate_is_no_lack_that_passes() -> None:
    """Who listens says nothing of a connection that is lost: it would let nobody in, and its log had no word."""
    nobody: Any = None
    with pytest.raises(ssl.SSLError, match="key values mismatch"):
        await shake_hands(nobody, "there", Broken(OURS), dialled=False)


class Late(TestCredentials):
    """Whom it has let in once it refuses: that was revoked in the middle of a handshake."""

    def identity(self, certificate: bytes | None) -> str:
        found = super().identity(certificate)
        self.refused.add(found)
        return found


async def test_who_is_revoked_in_the_middle_of_a_handshake_is_not_let_in() -> None:
    async with meeting(TestCredentials(OURS), Late(OURS)) as met:
        assert met.far is None
        assert "its certificate is revoked" in met.said[-1]


def revoking(who: TestCredentials, by: TestCredentials) -> tuple[TestCredentials, TestCredentials]:
    by.refused.add(who.id)
    return who, by


def near_is_revoked() -> tuple[Credentials, Credentials]:
    return revoking(TestCredentials(OURS), TestCredentials(OURS))


def far_is_revoked() -> tuple[Credentials, Credentials]:
    who, by = revoking(TestCredentials(OURS), TestCredentials(OURS))
    return by, who


def ours() -> TestCredentials:
    return TestCredentials(OURS)


def late() -> TestCredentials:
    return TestCredentials(OURS, ends=timedelta(seconds=-1))


def early() -> TestCredentials:
    return TestCredentials(OURS, begins=DAY, ends=2 * DAY)


class Mixed(TestCredentials):
    """Believes ours, and has a certificate of another authority."""

    def __init__(self) -> None:
        super().__init__(OTHERS)
        self._believed = OURS


ANOTHER, EXPIRED, EARLY = "of another authority", "expired, or a clock is wrong", "not valid yet, or a clock is wrong"
MINE, ITS = "PEER refused this node: our certificate is {}", "refused PEER: its certificate is {}"
DIALLED = "PEER dialled, and is {} than this node"
OUT, IN = "PEER refused this node: its encryption is {!r}, ours {!r}", "refused PEER: its encryption is {!r}, ours {!r}"
REFUSALS: dict[str, tuple[Callable[[], tuple[Credentials | None, Credentials | None]], str, str, str]] = {
    "near of another": (lambda: (Mixed(), ours()), MINE.format(ANOTHER), ITS.format(ANOTHER), "authority"),
    "far of another": (lambda: (ours(), Mixed()), ITS.format(ANOTHER), DIALLED.format(ANOTHER), "authority"),
    "near expired": (lambda: (late(), ours()), MINE.format(EXPIRED), ITS.format(EXPIRED), "certificate"),
    "far expired": (lambda: (ours(), late()), ITS.format(EXPIRED), MINE.format(EXPIRED), "certificate"),
    "near early": (lambda: (early(), ours()), MINE.format(EARLY), ITS.format(EARLY), "certificate"),
    "far early": (lambda: (ours(), early()), ITS.format(EARLY), MINE.format(EARLY), "certificate"),
    "near revoked": (near_is_revoked, MINE.format("revoked"), ITS.format("revoked"), "revoked"),
    "far revoked": (far_is_revoked, ITS.format("revoked"), MINE.format("revoked"), "revoked"),
    "near plain": (lambda: (None, ours()), OUT.format("on", "off"), IN.format("off", "on"), "encryption"),
    "far plain": (lambda: (ours(), None), OUT.format("off", "on"), IN.format("on", "off"), "encryption"),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_both_ends_are_told_in_a_line_why_one_is_refused(name: str) -> None:
    make, near, far, field = REFUSALS[name]
    async with meeting(*make()) as met:
        assert [re.sub(r"127\.0\.0\.1(:\d+)?", "PEER", said) for said in met.said] == [near, far]
        assert [getattr(error, "field", None) for error in met.errors] == [field, field]


async def test_garbage_in_place_of_a_handshake_is_a_broken_rule() -> None:
    async with refusing() as (address, errors):
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x01\xff\xff" + bytes(70_000)):
            with closing(socket.create_connection(address)) as sock:
                sock.sendall(garbage)
                error = await errors.receive()
            assert isinstance(error, PeerError), repr(error)
            assert "SSL" not in str(error), "OpenSSL's words are nobody's"
            assert str(error).startswith("127.0.0.1:")


@asynccontextmanager
async def refusing() -> AsyncIterator[tuple[tuple[str, int], trio.MemoryReceiveChannel[Exception]]]:
    """Yield where a sealed node listens, and how each handshake failed."""
    give, errors = trio.open_memory_channel[Exception](9)

    async def accepted(connection: Connection) -> None:
        try:
            await connection.shake_hands()
        except (ConnectionLost, PeerError) as error:
            await give.send(error)

    async with trio.open_nursery() as nursery:
        yield await nursery.start(TcpTransport(nursery, credentials=ours()).listen, LOOPBACK, accepted), errors
        nursery.cancel_scope.cancel()


async def test_who_goes_or_is_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "GREETING_DEADLINE_S", 0.1)
    async with refusing() as (address, errors):
        socket.create_connection(address).close()
        assert isinstance(await errors.receive(), ConnectionLost)
        with closing(socket.create_connection(address)):
            assert "no handshake within 0.1 s" in str(await errors.receive())


async def test_who_dials_waits_for_a_handshake_no_longer_than_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "DIAL_TIMEOUT_S", 0.1)
    with socket.create_server(LOOPBACK) as silent:
        async with trio.open_nursery() as nursery:
            with pytest.raises(ConnectionLost, match=r"no answer within 0\.1 s"):
                await TcpTransport(nursery, credentials=ours()).dial(silent.getsockname())


async def test_older_tls_and_other_protocols_over_tls_are_refused() -> None:
    async with refusing() as (address, errors):
        for version, match in ((ssl.TLSVersion.TLSv1_2, "not TLS 1.3"), (ssl.TLSVersion.TLSv1_3, "no node of peerd")):
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.maximum_version = version

            def talk(context: ssl.SSLContext) -> None:
                with suppress(OSError), socket.create_connection(address) as sock, context.wrap_socket(sock) as sealed:
                    sealed.recv(1)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(trio.to_thread.run_sync, talk, context))
                error = await errors.receive()
            assert isinstance(error, PeerError)
            assert match in str(error)


async def test_frames_of_a_plain_node_reach_nobody() -> None:
    async with refusing() as (address, errors):
        with closing(socket.create_connection(address)) as sock:
            sock.sendall(b"".join(map(bytes, frames(LinkClosed(1)))))
            assert isinstance(await errors.receive(), Refused)
