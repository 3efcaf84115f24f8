"""A connection within one process: two pipes of bytes, which can be cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import trio

from peerd.transport.connection import ConnectionLost
from peerd.transport.messages import Chunk

PIPE_BYTES = 256 << 10  # in flight in one direction, as in a kernel's buffers


class _Pipe:
    """One direction of a connection."""

    def __init__(self) -> None:
        self.moved = trio.lowlevel.ParkingLot()
        self.ended = False  # the sender has closed; what is here can still be read
        self.broken = ""  # why nothing more gets through
        self.bytes_until_cut: int | None = None
        self._pieces: deque[memoryview] = deque()
        self._size = 0

    def write(self, pieces: Sequence[Chunk]) -> int:
        room = PIPE_BYTES - self._size
        if self.bytes_until_cut is not None:
            room = min(room, self.bytes_until_cut)
            self.bytes_until_cut -= min(room, sum(map(len, pieces)))
        written = 0
        for piece in pieces:
            part = bytes(memoryview(piece)[: room - written])  # the wire's own copy, as the kernel makes one
            if not part:
                break
            self._pieces.append(memoryview(part))
            written += len(part)
        self._size += written
        self.moved.unpark_all()
        return written

    def read(self, buffer: memoryview) -> int:
        count = 0
        while self._pieces and count < len(buffer):
            piece = self._pieces.popleft()
            part = piece[: len(buffer) - count]
            buffer[count : count + len(part)] = part
            count += len(part)
            if len(part) < len(piece):
                self._pieces.appendleft(piece[len(part) :])
        self._size -= count
        self.moved.unpark_all()
        return count

    def drop(self) -> None:
        self._pieces.clear()
        self._size = 0


class MemoryPipe:
    """Both directions between two hosts."""

    def __init__(self, hosts: frozenset[str]) -> None:
        self.hosts = hosts
        self.pipes = (_Pipe(), _Pipe())

    @property
    def over(self) -> bool:
        """Whether neither end can send any more."""
        return all(pipe.ended or pipe.broken for pipe in self.pipes)

    def cut(self) -> None:
        """Break it now, losing what is in flight."""
        for pipe in self.pipes:
            pipe.drop()
        self.break_off()

    def cut_after(self, count: int) -> None:
        """Break it when `count` more bytes were sent in one of the directions; the peer receives those."""
        for pipe in self.pipes:
            pipe.bytes_until_cut = count

    def break_off(self) -> None:
        """Let nothing more in; what is in flight can be read."""
        for pipe in self.pipes:
            pipe.broken = pipe.broken or "connection reset"
            pipe.moved.unpark_all()


class MemoryStream:
    """A `ByteStream`: one end of a connection."""

    name = "memory"
    host = ""  # has no address
    checked = True
    midway = False

    def __init__(self, connection: MemoryPipe, end: int, remote: str) -> None:
        self._connection = connection
        self._outgoing, self._incoming = connection.pipes[end], connection.pipes[1 - end]
        self.bytes_sent = self.bytes_received = 0
        self._remote = remote
        self._closed = False

    def send_some(self, pieces: Sequence[Chunk]) -> int:
        """Write without waiting."""
        self._check_open()
        if self._outgoing.broken:
            raise self._lost(self._outgoing)
        sent = self._outgoing.write(pieces)
        if self._outgoing.bytes_until_cut == 0:
            self._connection.break_off()
        if not sent:
            raise BlockingIOError
        self.bytes_sent += sent
        return sent

    def receive_some(self, buffer: memoryview) -> int:
        """Read without waiting."""
        self._check_open()
        count = self._incoming.read(buffer)
        if not count and self._incoming.broken:
            raise self._lost(self._incoming)
        if not count and not self._incoming.ended:
            raise BlockingIOError
        self.bytes_received += count
        return count

    async def wait_sendable(self) -> None:
        """Wait until something has moved on the way out."""
        await self._outgoing.moved.park()

    async def wait_receivable(self, due: int = 1) -> None:
        """Wait until something has moved on the way in."""
        await self._incoming.moved.park()

    def close(self) -> None:
        """Close: the peer can still read what was sent, and no longer send."""
        if self._closed:
            return
        self._closed = True
        self._outgoing.ended = True
        self._incoming.drop()
        self._incoming.broken = self._incoming.broken or "closed by the peer"
        for pipe in self._connection.pipes:
            pipe.moved.unpark_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLost(f"{self._remote}: closed here")

    def _lost(self, pipe: _Pipe) -> ConnectionLost:
        return ConnectionLost(f"{self._remote}: connection lost ({pipe.broken})")
