"""Datagrams over UDP: one message each, best effort. Nothing that comes in or fails to go out raises."""

from __future__ import annotations

import hashlib
import socket
from typing import Any

import trio

from peerd.transport import wire
from peerd.transport.errors import PeerError
from peerd.transport.ids import Address
from peerd.transport.messages import Message
from peerd.transport.secure.datagrams import OVERHEAD, DatagramSeal
from peerd.transport.sending.budget import Budget
from peerd.transport.tcp import bound_socket, unmapped


class UdpDatagrams:
    """`Datagrams` over a bound non-blocking socket; made by `bind_udp`."""

    def __init__(self, sock: socket.socket, tag: bytes, seal: DatagramSeal | None, budget: Budget | None) -> None:
        host, port = sock.getsockname()[:2]
        self.address: Address = (host, port)
        self.malformed = 0
        self.unsendable = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self._sock = sock
        self._tag = tag
        self._seal = seal
        self._budget = budget

    async def send(self, address: Address, message: Message) -> None:
        """Send to an IP address, or drop and count."""
        plain = wire.encode_datagram(message)
        datagram = plain if self._seal is None else self._seal.seal(plain, self._tag)
        await trio.lowlevel.checkpoint()
        if datagram is None:  # no key has come yet: with the first table one does
            self.unsendable += 1
            return
        try:
            sent = self._sock.sendto(self._tag + datagram, self._target(address))
            self.bytes_sent += sent
            if self._budget is not None:  # it waits for nothing: who is silent is taken for dead
                self._budget.take(sent, trio.current_time())
        except (OSError, ValueError):  # also a full buffer: a datagram may be lost
            self.unsendable += 1

    async def receive(self) -> tuple[Message, Address]:
        """Return the next message, dropping and counting what is none."""
        while True:
            await trio.lowlevel.checkpoint()
            try:
                # one byte more than the limit shows that a datagram is longer
                datagram, source = self._sock.recvfrom(len(self._tag) + OVERHEAD + wire.DATAGRAM_MAX + 1)
                self.bytes_received += len(datagram)
                if not datagram.startswith(self._tag):
                    raise PeerError("of another swarm")
                datagram = datagram[len(self._tag) :]
                if self._seal is not None:
                    datagram = self._seal.open(datagram, self._tag)
                return wire.decode_datagram(datagram), unmapped(source)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._sock)
            except PeerError:
                self.malformed += 1
            except OSError as error:  # an ICMP answer to something sent earlier, say: nothing that came in
                if self._sock.fileno() < 0:
                    raise trio.ClosedResourceError("closed here") from error

    async def aclose(self) -> None:
        """Close the socket; a `receive` that waits raises trio.ClosedResourceError."""
        if self._sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()
        await trio.lowlevel.checkpoint()

    def _target(self, address: Address) -> Any:
        """Return what sendto takes. It would look names up, too, and block everything meanwhile: none pass."""
        host, port = address
        if not 0 <= port <= 65535:  # getaddrinfo takes it modulo 65536
            raise ValueError(f"there is no port {port}")
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        if self._sock.family == socket.AF_INET6:  # its sockets reach IPv4 under these names
            flags |= socket.AI_V4MAPPED
        return socket.getaddrinfo(host, port, self._sock.family, socket.SOCK_DGRAM, flags=flags)[0][4]


def tag_of(swarm: str, run: str) -> bytes:
    """Return what datagrams of a swarm begin with: an address may change hands, and no greeting goes before them.

    Those of the default swarm have none, and none is the beginning of such a datagram.
    """
    return b"" if (swarm, run) == ("peerd", "") else b"\xff" + hashlib.sha256(f"{swarm}\0{run}".encode()).digest()[:3]


async def bind_udp(
    address: Address, tag: bytes = b"", seal: DatagramSeal | None = None, budget: Budget | None = None
) -> UdpDatagrams:
    """Return datagrams bound to `address`, for those with this tag; raises UserError when that cannot be.

    Without a `seal` they are plain, and sealed ones are malformed. What they take is missing from the `budget`.
    """
    return UdpDatagrams(await bound_socket(address, socket.SOCK_DGRAM), tag, seal, budget)
