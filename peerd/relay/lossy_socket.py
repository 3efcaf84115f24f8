"""A UDP socket that loses what does not go: nobody waits for one, and several may send on it."""

from __future__ import annotations

import socket
from typing import Any

import trio

from peerd.relay.envelope import ENCLOSED_MAX
from peerd.transport.ids import Address
from peerd.transport.tcp import unmapped


class LossySocket:
    """Over a non-blocking socket, which is closed with it."""

    def __init__(self, sock: socket.socket) -> None:
        """It may be connected: then `send` needs no target."""
        self._sock = sock

    @classmethod
    def to(cls, address: Address) -> LossySocket:
        """Those with one other end. Raises OSError."""
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            sock.setblocking(False)
            sock.connect(address)
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    @property
    def closed(self) -> bool:
        """Whether nothing comes or goes any more."""
        return self._sock.fileno() < 0

    def send(self, said: bytes, target: Address | None = None) -> None:
        """Send, or drop."""
        try:
            if target is None:
                self._sock.send(said)
            else:
                self._sock.sendto(said, self._as_here(target))
        except OSError:  # BlockingIOError too: the line is full
            pass

    async def receive(self) -> tuple[bytes, Address]:
        """The next one, and where it came from. Raises trio.ClosedResourceError."""
        while True:
            await trio.lowlevel.checkpoint()
            try:
                said, source = self._sock.recvfrom(ENCLOSED_MAX)
                return said, unmapped(source)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._sock)
            except OSError as error:  # an ICMP answer to something sent earlier
                if self.closed:
                    raise trio.ClosedResourceError("closed here") from error

    def close(self) -> None:
        """At once; who receives gets trio.ClosedResourceError."""
        if not self.closed:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    def _as_here(self, address: Address) -> Any:
        """What it is called on this socket, where a host of IPv4 may have a name of IPv6."""
        host, port = address
        return (f"::ffff:{host}" if self._sock.family == socket.AF_INET6 and ":" not in host else host), port
