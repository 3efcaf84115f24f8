"""Ports of this node's that it lends to members which nobody can dial: who has which?"""

from __future__ import annotations

import math
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import trio

from peerd.process.logs import LOGGER
from peerd.process.seldom import Seldom
from peerd.relay.envelope import KEY_BYTES
from peerd.relay.lease import Lease
from peerd.relay.streams import Toll, within
from peerd.transport.admission import ACCEPTED_MAX
from peerd.transport.connection import Connection, Transport
from peerd.transport.errors import UserError
from peerd.transport.ids import Address
from peerd.transport.messages import Refuse, RelayGranted, RelayRequest
from peerd.transport.sending.budget import Budget
from peerd.transport.tcp import BACKLOG, bound_socket

DATAGRAMS_RATE = 64e3  # bytes a second of one port; a member of a swarm of a hundred hears some 20,000
DATAGRAMS_RATE_MIN, DATAGRAMS_SHARE = 4e3, 8  # with a budget, of which all ports have one part in so many
DESCRIPTORS_KEPT = 512  # for what else this process has open
STREAMS_MIN = 16  # of a port, however few descriptors there are


def streams_of_each(ports: int) -> int:
    """How many streams each port may have at once, of two descriptors each; as many may be open as the system lets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_KEPT + ports * (2 * ACCEPTED_MAX + 2)
    if ports and soft < min(wanted, hard):
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(ACCEPTED_MAX, max(STREAMS_MIN, (soft - DESCRIPTORS_KEPT) // (2 * max(1, ports))))


@dataclass(frozen=True, slots=True)
class Near:
    """A `Transport` that dials guests of this node where they are near."""

    transport: Transport
    near: Callable[[Address], Address]

    async def dial(self, address: Address) -> Connection:
        """See `Transport.dial`."""
        return await self.transport.dial(self.near(address))

    async def listen(
        self,
        address: Address,
        accepted: Callable[[Connection], Awaitable[None]],
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See `Transport.listen`."""
        await self.transport.listen(address, accepted, task_status)


class Lender:
    """The ports that one node lends."""

    def __init__(self, ports: Sequence[int], host: str, outer_host: str, budget: Budget | None = None) -> None:
        """They are of this `host`, which others reach at `outer_host`."""
        self._ports = ports
        self._host = host
        self._outer_host = outer_host
        self._toll = Toll(budget)
        self._datagrams_rate = DATAGRAMS_RATE
        if budget is not None and ports:
            self._datagrams_rate = max(DATAGRAMS_RATE_MIN, budget.rate / DATAGRAMS_SHARE / len(ports))
        self._streams_max = streams_of_each(len(ports))
        self._one_at_a_time = trio.Lock()
        self._had_until: dict[int, float] = {}
        self._leases: dict[int, Lease] = {}
        self._had: dict[int, str] = {}  # who had each last
        self._seldom = Seldom()

    @property
    def relayed_bytes(self) -> int:
        """Passed on to guests and from them, datagrams too."""
        return self._toll.passed_bytes

    @property
    def guests(self) -> dict[int, str]:
        """Who has each port that is lent: a node's id, or where nothing is sealed its host."""
        return {port: self._had[port] for port in self._leases}

    def near(self, address: Address) -> Address:
        """Where this node itself reaches one of its guests: from behind an outer address that is seldom dialled."""
        host, port = address
        return (within(self._host), port) if host == self._outer_host and port in self._ports else address

    async def lend(self, connection: Connection, request: RelayRequest) -> None:
        """Serve a guest until its connection ends. Raises ConnectionLost, or PeerError when it broke a rule."""
        who = connection.identity or connection.host
        name = who[:8] if connection.identity else who
        async with self._one_at_a_time:
            lease = await self._lease(who, request.port, known=bool(connection.identity))
        if lease is None:
            here = f"of its {len(self._ports)} ports that it lends none is free" if self._ports else "it lends no ports"
            if request.port:
                here = f"it does not lend that port{' now' if request.port in self._ports else ''}"
            await connection.send(Refuse("relay", here, f"port {request.port}" if request.port else "a port"))
            return
        try:
            await connection.send(RelayGranted(self._outer_host, lease.port, lease.key))
            connection.admit()
            self._tell(f"{name} is reached through this node now, at port {lease.port}")
            await lease.run(connection, self._toll)
        finally:
            lease.end()
            if self._leases.get(lease.port) is lease:
                del self._leases[lease.port]
                self._had_until[lease.port] = trio.current_time()
                self._tell(f"{name} is reached through this node no more, at port {lease.port}")

    async def _sockets(self, port: int) -> tuple[socket.socket, socket.socket]:
        """One that listens, and one for datagrams. Raises UserError or OSError."""
        listener = await bound_socket((self._host, port), socket.SOCK_STREAM)
        try:
            listener.listen(BACKLOG)
            return listener, await bound_socket((self._host, port), socket.SOCK_DGRAM)
        except BaseException:
            listener.close()
            raise

    def _tell(self, text: str) -> None:
        if self._seldom.is_news(text, now=trio.current_time()):
            LOGGER.info("%s", text)

    async def _lease(self, who: str, wanted: int, *, known: bool) -> Lease | None:
        """Of the port that it wants, or of any: the one that it had, one that nobody had, the one free longest.

        It may be back before its old connection was missed; but where it is not `known`, others of its host are, too.
        Who is known has one port.
        """
        chosen = {port: sha256(f"{who} {port}".encode()).digest() for port in self._ports}  # also after a restart
        order = sorted(
            chosen, key=lambda port: (self._had.get(port) != who, self._had_until.get(port, -math.inf), chosen[port])
        )
        for port in order:
            taken = self._leases.get(port)
            is_back = self._had.get(port) == who and (known or wanted)
            if wanted not in (0, port) or (taken is not None and not is_back):
                continue
            if taken is not None:
                taken.end()
            try:
                listener, datagrams = await self._sockets(port)
            except (UserError, OSError) as error:
                self._tell(f"port {port} of relay_ports cannot be lent: {str(error).partition(' (')[0]}")
                continue
            for another in [one for one in self._leases if known and self._had[one] == who]:
                self._leases.pop(another).end()
            self._had[port] = who
            self._leases[port] = lease = Lease(
                port, os.urandom(KEY_BYTES), listener, datagrams, self._datagrams_rate, self._streams_max
            )
            return lease
        return None
