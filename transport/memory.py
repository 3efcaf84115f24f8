"""Peers in one process: the carriers of tests and of the simulated daemon.

Nothing is short-circuited: messages become the same bytes and frames as over TCP and UDP, and pass the same limits.
No wait here ends by the clock, so trio's MockClock can jump; chance comes from the injected `random` alone, so a run
is as deterministic as trio's scheduler.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container
from contextlib import suppress
from random import Random

import trio

from peerd.transport import wire
from peerd.transport.connection import Connection, ConnectionLost, NobodyListens
from peerd.transport.errors import PeerError, UserError
from peerd.transport.ids import Address, shown
from peerd.transport.memory_stream import MemoryPipe, MemoryStream
from peerd.transport.messages import Message
from peerd.transport.stream import StreamConnection, serve

BACKLOG = 128
INBOX_DATAGRAMS = 1024
FIRST_FREE_PORT = 49152


class MemoryNetwork:
    """Hosts in one process, and what can go wrong between them.

    `random` decides which datagrams are lost; `nursery` owns the sender tasks of the connections that are dialled.
    """

    def __init__(self, nursery: trio.Nursery, random: Random | None = None) -> None:
        self.datagram_loss = 0.0  # the share of datagrams that are lost
        self.nursery = nursery
        self._random = random or Random(0)
        self._next_port = FIRST_FREE_PORT
        self._listeners: dict[Address, trio.MemorySendChannel[StreamConnection]] = {}
        self._inboxes: dict[Address, MemoryDatagrams] = {}
        self._pipes: list[MemoryPipe] = []
        self._apart: set[frozenset[str]] = set()

    def transport(self, host: str) -> MemoryTransport:
        """Return the carrier of connections to and from `host`."""
        return MemoryTransport(self, host)

    async def bind(self, address: Address) -> MemoryDatagrams:
        """Return datagrams bound to `address`; raises UserError when it is taken."""
        await trio.lowlevel.checkpoint()
        address = self.free_address(address, self._inboxes)
        self._inboxes[address] = datagrams = MemoryDatagrams(self, address)
        return datagrams

    def cut(self, one: str, other: str) -> None:
        """Separate two hosts: connections break, dials fail and datagrams are lost until `heal`."""
        self._apart.add(frozenset((one, other)))
        self.reset(one, other)

    def heal(self, one: str, other: str) -> None:
        """Let two hosts reach one another again."""
        self._apart.discard(frozenset((one, other)))

    def reset(self, one: str, other: str, after_bytes: int = 0) -> None:
        """Break the connections between two hosts, each when it has carried so many more bytes in one direction."""
        for pipe in self._pipes:
            if pipe.hosts == frozenset((one, other)):
                if after_bytes:
                    pipe.cut_after(after_bytes)
                else:
                    pipe.cut()

    def deliver(self, source: Address, target: Address, datagram: bytes) -> bool:
        """Put bytes on the network as one datagram, which may be lost; False: nobody is there."""
        lost = self._random.random() < self.datagram_loss
        inbox = self._inboxes.get(target)
        if inbox is None:
            return False
        if not lost and frozenset((source[0], target[0])) not in self._apart:
            inbox.deliver(datagram, source)
        return True

    def connect(self, host: str, address: Address) -> StreamConnection:
        """Return the dialler's end of a new pipe, having handed the other end to the listener."""
        listener = self._listeners.get(address)
        hosts = frozenset((host, address[0]))
        if hosts in self._apart:
            raise ConnectionLost(f"cannot reach {shown(address)}: no route to host")
        if listener is None:
            raise NobodyListens(f"cannot reach {shown(address)}: connection refused")
        self._pipes = [pipe for pipe in self._pipes if not pipe.over]
        pipe = MemoryPipe(hosts)
        there = shown(self.free_address((host, 0), ()))
        try:
            listener.send_nowait(StreamConnection(MemoryStream(pipe, 1, there), there))
        except trio.WouldBlock:
            raise ConnectionLost(f"cannot reach {shown(address)}: too many wait to be accepted") from None
        self._pipes.append(pipe)
        return StreamConnection(MemoryStream(pipe, 0, shown(address)), shown(address))

    def open_listener(self, address: Address) -> tuple[Address, trio.MemoryReceiveChannel[StreamConnection]]:
        """Return the actual address and where the connections that are dialled to it come out."""
        address = self.free_address(address, self._listeners)
        self._listeners[address], connections = trio.open_memory_channel[StreamConnection](BACKLOG)
        return address, connections

    def close_listener(self, address: Address) -> None:
        """Let nobody connect to `address` any more."""
        self._listeners.pop(address).close()

    def close_datagrams(self, address: Address) -> None:
        """Let no datagram arrive at `address` any more."""
        self._inboxes.pop(address, None)

    def free_address(self, address: Address, taken: Container[Address]) -> Address:
        """Return `address`, its port replaced when it is 0; raises UserError when it is taken."""
        host, port = address
        if port == 0:
            port, self._next_port = self._next_port, self._next_port + 1
        if (host, port) in taken:
            cure = f"--bind {shown((host, 0))} picks a free one"
            raise UserError(f"port in use: {shown((host, port))} ({cure})")
        return host, port


class MemoryTransport:
    """A `Transport` of one host in a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, host: str) -> None:
        self._network = network
        self._host = host

    async def dial(self, address: Address) -> Connection:
        """Connect; see `Transport.dial`."""
        await trio.lowlevel.checkpoint()
        connection = self._network.connect(self._host, address)
        self._network.nursery.start_soon(connection.run_sender)
        return connection

    async def listen(
        self,
        address: Address,
        accepted: Callable[[Connection], Awaitable[None]],
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen; see `Transport.listen`."""
        actual, connections = self._network.open_listener(address)
        try:
            async with trio.open_nursery() as nursery:
                task_status.started(actual)
                async for connection in connections:
                    nursery.start_soon(serve, connection, accepted)
        finally:
            self._network.close_listener(actual)
            for connection in _left_in(connections):
                connection.drop(ConnectionLost(f"{connection.remote}: closed here"))


def _left_in(connections: trio.MemoryReceiveChannel[StreamConnection]) -> list[StreamConnection]:
    """Return what was dialled and never accepted."""
    return [connections.receive_nowait() for _ in range(connections.statistics().current_buffer_used)]


class MemoryDatagrams:
    """`Datagrams` in a `MemoryNetwork`; made by `MemoryNetwork.bind`."""

    def __init__(self, network: MemoryNetwork, address: Address) -> None:
        self.address = address
        self.malformed = 0
        self.unsendable = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self._network = network
        self._sender, self._inbox = trio.open_memory_channel[tuple[bytes, Address]](INBOX_DATAGRAMS)

    async def send(self, address: Address, message: Message) -> None:
        """Send, or drop and count."""
        datagram = wire.encode_datagram(message)
        await trio.lowlevel.checkpoint()
        if self._network.deliver(self.address, address, datagram):
            self.bytes_sent += len(datagram)
        else:
            self.unsendable += 1

    async def receive(self) -> tuple[Message, Address]:
        """Return the next message, dropping and counting what is none."""
        while True:
            datagram, source = await self._inbox.receive()
            self.bytes_received += len(datagram)
            try:
                return wire.decode_datagram(datagram), source
            except PeerError:
                self.malformed += 1

    async def aclose(self) -> None:
        """Give the address back; a `receive` that waits raises trio.ClosedResourceError."""
        self._network.close_datagrams(self.address)
        self._inbox.close()
        self._sender.close()
        await trio.lowlevel.checkpoint()

    def deliver(self, datagram: bytes, source: Address) -> None:
        """Take a datagram from the network; one too many is lost."""
        with suppress(trio.WouldBlock):
            self._sender.send_nowait((datagram, source))
