"""Connections over TCP: our own non-blocking sockets, tried before they are waited for.

trio's SocketStream waits first and copies once more; on loopback this way carries 5.6 GB/s where it carries 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import trio

from peerd.transport.admission import Admission
from peerd.transport.bulk import Fabric
from peerd.transport.connection import Connection, ConnectionLost, NobodyListens
from peerd.transport.errors import UserError, cause
from peerd.transport.ids import Address, shown
from peerd.transport.messages import Chunk
from peerd.transport.patience import DIAL_TIMEOUT_S
from peerd.transport.secure.credentials import Credentials
from peerd.transport.secure.handshake import shake_hands
from peerd.transport.sending.budget import Budget
from peerd.transport.stream import ShakeHands, StreamConnection, serve

BACKLOG = 128
PAUSE_S = 1.0  # without accepting, when file descriptors run out
USER_TIMEOUT_MS = 10_000  # sent data that stays unacknowledged, or a window that stays shut, ends the connection
WAKE_BYTES = 256 << 10
"""Who waits within a chunk is woken for so many of its bytes, not for every few packets: with a ring over 100 Mbit/s
that halves the processor time (benchmarks/RESULTS.md). The slowest rate that one may have brings them in 4 s, sooner
than anybody's patience ends. The kernel lets the receive buffer of such a socket grow, up to tcp_rmem."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 5, 2, 3  # a silent dead peer is noticed after 11 s

EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class TcpStream:
    """A `ByteStream` over a connected non-blocking socket."""

    name = "tcp"
    checked = True
    midway = False

    def __init__(self, sock: socket.socket, remote: str, host: str) -> None:
        self.host = host
        self._sock = sock
        self._remote = remote
        self.bytes_sent = self.bytes_received = 0
        self._wakes_at = 1  # bytes that end a wait
        keep_watch(sock)

    def send_some(self, pieces: Sequence[Chunk]) -> int:
        """Send without waiting."""
        try:
            sent = self._sock.sendmsg(pieces)
        except BlockingIOError:
            raise
        except OSError as error:
            raise self._lost(error) from None
        self.bytes_sent += sent
        return sent

    def receive_some(self, buffer: memoryview) -> int:
        """Receive without waiting."""
        try:
            received = self._sock.recv_into(buffer)
        except BlockingIOError:
            raise
        except OSError as error:
            raise self._lost(error) from None
        self.bytes_received += received
        return received

    async def wait_sendable(self) -> None:
        """Wait for room in the socket's buffer."""
        await self._wait(trio.lowlevel.wait_writable)

    async def wait_receivable(self, due: int = 1) -> None:
        """Wait for bytes in the socket's buffer; see `WAKE_BYTES`."""
        if (wakes_at := min(due, WAKE_BYTES)) != self._wakes_at:
            self._wakes_at = wakes_at
            with contextlib.suppress(OSError):  # it is closed, which the wait tells
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)
        await self._wait(trio.lowlevel.wait_readable)

    def close(self) -> None:
        """Close the socket, waking those who wait for it."""
        if self._sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    async def _wait(self, wait: Callable[[socket.socket], Awaitable[None]]) -> None:
        try:
            await wait(self._sock)
        except (trio.ClosedResourceError, OSError, ValueError):  # ValueError: it was closed before
            raise ConnectionLost(f"{self._remote}: closed here") from None

    def _lost(self, error: OSError) -> ConnectionLost:
        if error.errno == errno.EBADF:
            return ConnectionLost(f"{self._remote}: closed here")
        return ConnectionLost(f"{self._remote}: connection lost ({cause(error)})")


class TcpTransport:
    """A `Transport` over TCP; `nursery` owns the sender tasks of the connections it dials.

    With `fabrics`, the best first, connections can be upgraded to one of them. With `credentials` they are sealed, and
    each end proves who it is; without, anybody may read and change what passes, and claim to be anyone.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        *fabrics: Fabric,
        credentials: Credentials | None = None,
        stream: type[TcpStream] = TcpStream,
        budget: Budget | None = None,
    ) -> None:
        """`stream` is what moves the bytes: one that is slower on purpose stands for a slow line.

        All connections together send no more than the `budget`; what goes over fabrics is not counted.
        """
        self._nursery = nursery
        self._fabrics = fabrics
        self._credentials = credentials
        self._stream = stream
        self._budget = budget

    async def dial(self, address: Address) -> Connection:
        """Connect; see `Transport.dial`."""
        remote = shown(address)
        try:
            with trio.fail_after(DIAL_TIMEOUT_S):
                sock, host = await connect(address)
                try:
                    stream = self._stream(sock, remote, host)
                except BaseException:  # it is gone already
                    sock.close()
                    raise
                hands = hands_of(self._credentials, remote, dialled=True)
                connection = StreamConnection(
                    stream, remote, fabrics=self._fabrics, shake_hands=hands, budget=self._budget
                )
                await connection.shake_hands()
        except trio.TooSlowError:
            raise ConnectionLost(f"cannot reach {remote}: no answer within {DIAL_TIMEOUT_S:g} s") from None
        except (OSError, ValueError) as error:  # ValueError: what cannot be a port or a host name
            kind = NobodyListens if isinstance(error, ConnectionRefusedError) else ConnectionLost
            raise kind(f"cannot reach {remote}: {cause(error)}") from None
        self._nursery.start_soon(connection.run_sender)
        return connection

    async def listen(
        self,
        address: Address,
        accepted: Callable[[Connection], Awaitable[None]],
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen; see `Transport.listen`."""
        with await bound_socket(address, socket.SOCK_STREAM) as sock:
            sock.listen(BACKLOG)
            host, port = sock.getsockname()[:2]
            async with trio.open_nursery() as nursery:
                listener = _Listener(
                    sock, accepted, nursery, self._fabrics, self._credentials, self._stream, self._budget
                )
                task_status.started((host, port))
                await listener.run()


class _Listener:
    """The accept loop, and what it has let in."""

    def __init__(
        self,
        sock: socket.socket,
        accepted: Callable[[Connection], Awaitable[None]],
        nursery: trio.Nursery,
        fabrics: Sequence[Fabric],
        credentials: Credentials | None,
        stream: type[TcpStream],
        budget: Budget | None,
    ) -> None:
        self._budget = budget
        self._credentials = credentials
        self._stream = stream
        self._sock = sock
        self._fabrics = fabrics
        self._accepted = accepted
        self._nursery = nursery
        self._admission = Admission(trio.current_time())
        self._connections: dict[int, StreamConnection] = {}  # by their number there
        self._freed = trio.lowlevel.ParkingLot()

    async def run(self) -> None:
        while True:
            await trio.sleep(self._admission.delay_s(trio.current_time()))
            try:
                sock, peer = self._sock.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._sock)
            except OSError as error:
                # any other error belongs to the connection that was to be accepted (accept(2)): on to the next
                await trio.sleep(PAUSE_S if error.errno in EXHAUSTED else 0)
            else:
                sock.setblocking(False)
                await self._let_in(sock, unmapped(peer))

    async def _let_in(self, sock: socket.socket, where: Address) -> None:
        number = None
        try:
            while self._admission.full and not self._admission.refuses(where[0]):
                await self._make_room(where[0])
            number = self._admission.enter(where[0], trio.current_time())
        finally:
            if number is None:
                sock.close()
        if number is not None:
            self._nursery.start_soon(self._serve, sock, where, number)

    async def _make_room(self, host: str) -> None:
        """For one that waits, who is slow in its handshake makes way: half of one costs a stranger nothing."""
        if (number := self._admission.makes_way(trio.current_time(), host)) in self._connections:
            self._connections[number].drop(ConnectionLost("closed, it was slow, and others wait"))
            self._admission.admit(number)
        elif self._admission.full:
            with trio.move_on_at(self._admission.makes_way_at):
                await self._freed.park()

    async def _serve(self, sock: socket.socket, peer: Address, number: int) -> None:
        def admitted() -> None:
            self._admission.admit(number)
            self._freed.unpark_all()

        remote = shown(peer)
        try:
            try:
                stream = self._stream(sock, remote, peer[0])
            except OSError:  # it is gone already
                sock.close()
                return
            hands = hands_of(self._credentials, remote, dialled=False)
            self._connections[number] = StreamConnection(stream, remote, admitted, self._fabrics, hands, self._budget)
            await serve(self._connections[number], self._accepted)
        finally:
            self._connections.pop(number, None)
            self._admission.leave(number)
            self._freed.unpark_all()


def keep_watch(sock: Any) -> None:
    """Have the kernel send at once, and miss the other end of a connected socket soon. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def hands_of(credentials: Credentials | None, remote: str, *, dialled: bool) -> ShakeHands | None:
    """What a connection is sealed by, where it is."""
    if credentials is None:
        return None
    return partial(shake_hands, remote=remote, credentials=credentials, dialled=dialled)


async def bound_socket(address: Address, kind: socket.SocketKind) -> socket.socket:
    """Return a non-blocking socket bound to `address`; UserError says what is wrong and how to mend it."""
    try:
        with trio.fail_after(DIAL_TIMEOUT_S):
            family, target = (await resolve(address, kind, flags=socket.AI_PASSIVE))[0]
        sock = socket.socket(family, kind)
    except trio.TooSlowError:
        raise UserError(
            f"cannot listen on {shown(address)}: looking the name up takes too long; --bind with an IP address"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot listen on {shown(address)}: {cause(error)}; look at --bind") from None
    try:
        sock.setblocking(False)
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            cure = f"--bind {shown((address[0], 0))} picks a free one"
            raise UserError(f"port in use: {shown(address)} ({cure})") from None
        cures = {
            errno.EADDRNOTAVAIL: "; --bind takes an address of this machine: ip address lists them",
            errno.EACCES: "; ports below 1024 are root's: --bind with one from 1024 on",
            errno.EINVAL: "; one that begins with fe80 says nothing to other machines: --bind with another of this one",
        }
        raise UserError(f"cannot listen on {shown(address)}: {cause(error)}{cures.get(error.errno or 0, '')}") from None
    return sock


def unmapped(source: Any) -> Address:
    """Return host and port of a socket address; a host of IPv4 has its own name on a socket of IPv6, too."""
    return source[0].removeprefix("::ffff:") if "." in source[0] else source[0], source[1]


async def resolve(address: Address, kind: socket.SocketKind, flags: int = 0) -> list[tuple[socket.AddressFamily, Any]]:
    """Return the families and socket addresses behind an address; OSError or ValueError when there is none."""
    host, port = address
    if not 0 <= port <= 65535:  # getaddrinfo takes it modulo 65536
        raise ValueError(f"there is no port {port}")
    found = await trio.socket.getaddrinfo(host, port, 0, kind, flags=flags)
    return [(entry[0], entry[4]) for entry in found]


async def connect(address: Address, source: str = "") -> tuple[socket.socket, str]:
    """Return a socket connected to the first of the addresses behind a name that answers, and that address.

    From the local address `source` if one is named. Raises OSError, or ValueError where there is no such port.
    """
    failure: OSError = OSError(errno.EADDRNOTAVAIL, "it has no address")
    found = await resolve(address, socket.SOCK_STREAM)
    for family, target in found:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # a kernel without IPv6: another address may be of IPv4
            failure = error
            continue
        try:
            sock.setblocking(False)
            if source:
                sock.bind((source, 0))
            code = sock.connect_ex(target)
            if code == errno.EINPROGRESS:
                code = errno.ETIMEDOUT
                with trio.move_on_after(DIAL_TIMEOUT_S / len(found)):  # one that is silent hides no other
                    await trio.lowlevel.wait_writable(sock)
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0:
                return sock, target[0]
            failure = OSError(code, os.strerror(code))
        except BaseException:
            sock.close()
            raise
        sock.close()
    raise failure
