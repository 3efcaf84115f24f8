"""Ports of this node's that it lends to members which nobody can dial: who has which?"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import trio

from peerd.process.logs import LOGGER
from peerd.relay.lease import Lease
from peerd.relay.streams import Toll, within
from peerd.transport.connection import Connection, Transport
from peerd.transport.errors import UserError
from peerd.transport.ids import Address
from peerd.transport.messages import Refuse, RelayGranted, RelayRequest
from peerd.transport.sending.budget import Budget
from peerd.transport.tcp import bound_socket

TELL_EVERY_S = 60.0


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

    def __init__(self, ports: Sequence[int], bound: str, reached: str, budget: Budget | None = None) -> None:
        """They are of the host `bound`, which others reach at `reached`."""
        self._ports = ports
        self._bound = bound
        self._reached = reached
        self._toll = Toll(budget)
        self._leases: dict[int, Lease] = {}
        self._had: dict[int, str] = {}  # who had each last
        self._told_at: dict[str, float] = {}

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
        return (within(self._bound), port) if host == self._reached and port in self._ports else address

    async def lend(self, connection: Connection, request: RelayRequest) -> None:
        """Serve a guest until its connection ends. Raises ConnectionLost, or PeerError when it broke a rule."""
        who = connection.identity or connection.host
        if (lease := await self._lease(who, request.port, known=bool(connection.identity))) is None:
            here = f"of its {len(self._ports)} ports that it lends none is free" if self._ports else "it lends no ports"
            await connection.send(Refuse("relay", here, f"port {request.port}" if request.port else "a port"))
            return
        try:
            await connection.send(RelayGranted(self._reached, lease.port, lease.key))
            connection.admit()
            self._tell(f"{who[:8]} is reached through this node now, at port {lease.port}")
            await lease.run(connection, self._toll)
        finally:
            lease.end()
            if self._leases.get(lease.port) is lease:
                del self._leases[lease.port]
                self._tell(f"{who[:8]} is reached through this node no more, at port {lease.port}")

    def _tell(self, text: str) -> None:
        """A member can come and go as often as it likes."""
        now = trio.current_time()
        if now - self._told_at.get(text, -math.inf) >= TELL_EVERY_S:
            self._told_at = {told: at for told, at in self._told_at.items() if now - at < TELL_EVERY_S} | {text: now}
            LOGGER.info("%s", text)

    async def _lease(self, who: str, wanted: int, *, known: bool) -> Lease | None:
        """Of the port that it wants, or of any: the one that it had, else one that nobody had.

        It may be back before its old connection was missed; but where it is not `known`, others of its host are, too.
        """
        chosen = {port: sha256(f"{who} {port}".encode()).digest() for port in self._ports}  # also after a restart
        order = sorted(chosen, key=lambda port: (self._had.get(port) != who, port in self._had, chosen[port]))
        for port in order:
            taken = self._leases.get(port)
            is_back = self._had.get(port) == who and (known or wanted)
            if wanted not in (0, port) or (taken is not None and not is_back):
                continue
            if taken is not None:
                taken.end()
            try:
                listener = await bound_socket((self._bound, port), socket.SOCK_STREAM)
                try:
                    datagrams = await bound_socket((self._bound, port), socket.SOCK_DGRAM)
                except BaseException:
                    listener.close()
                    raise
            except UserError as error:
                LOGGER.warning("port %d, which is to be lent: %s", port, error)
                continue
            self._had[port] = who
            self._leases[port] = lease = Lease(port, os.urandom(16), listener, datagrams)
            return lease
        return None
