"""A `ByteStream` over another one: what is sent is sealed (records.py), what is received was.

Copies are few. Records are cut along the pieces that are sent, so a chunk begins with one: it is sealed from where it
lies into a buffer, which the kernel reads while a cache still holds it, and opened from such a buffer into the
memory that is handed on with its message.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peerd.transport.errors import PeerError
from peerd.transport.messages import Chunk
from peerd.transport.secure.records import (
    LENGTH_BYTES,
    OVERHEAD_BYTES,
    RECORD_MAX,
    Opener,
    Sealer,
    Secrets,
    length_of,
)
from peerd.transport.stream import ByteStream

SMALL = 16 << 10  # bytes; shorter pieces are sealed together
UNDUE_MAX = 96 << 10  # bytes of a record for which no memory is set aside yet: a header is 64 KiB
AHEAD_BYTES = 64 << 10  # received beyond the record under way, for what is short; they are moved once
_OUTGOING = RECORD_MAX + SMALL + 2 * OVERHEAD_BYTES


class SealedStream:
    """One end of a sealed connection."""

    checked = False

    def __init__(self, stream: ByteStream, secrets: Secrets, received: bytes = b"") -> None:
        """`received` came with the last bytes of the handshake, and belongs here."""
        self.name = stream.name
        self.host = stream.host
        self._stream = stream
        self._sealer, self._opener = Sealer(secrets.sending), Opener(secrets.receiving)
        self._outgoing = _buffer(_OUTGOING)  # records under way
        self._sealed = self._sent = 0  # bytes of it
        self._taken = 0  # plaintext in it
        self._incoming = _buffer(UNDUE_MAX + AHEAD_BYTES)
        self._incoming[: len(received)] = received
        self._start, self._end = 0, len(received)  # what of it is unread
        self._opened = memoryview(b"")  # what did not fit where it was to go

    @property
    def bytes_sent(self) -> int:
        """See `ByteStream`."""
        return self._stream.bytes_sent

    @property
    def bytes_received(self) -> int:
        """See `ByteStream`."""
        return self._stream.bytes_received

    @property
    def midway(self) -> bool:
        """See `ByteStream`."""
        return self._start != self._end

    # ------------------------------------------------------------------------------------------------------ sending

    def send_some(self, pieces: Sequence[Chunk]) -> int:
        """Send without waiting. What was sealed is sealed: a piece counts as sent once its whole record is."""
        if self._sent == self._sealed:
            self._seal(pieces)
        while self._sent < self._sealed:
            self._sent += self._stream.send_some([self._outgoing[self._sent : self._sealed]])
        return self._taken

    def _seal(self, pieces: Sequence[Chunk]) -> None:
        """Fill the outgoing buffer with records of what comes first."""
        self._sealed = self._sent = self._taken = 0
        small: list[Chunk] = []
        for piece in pieces:
            if len(piece) <= SMALL - sum(map(len, small)):
                small.append(piece)
                continue
            if not self._put(b"".join(small)):
                return
            small = []
            whole = memoryview(piece)
            for start in range(0, len(whole), RECORD_MAX):
                if not self._put(whole[start : start + RECORD_MAX]):
                    return
        self._put(b"".join(small))

    def _put(self, plaintext: Chunk) -> bool:
        """Seal a record if there is room for it."""
        if len(self._outgoing) - self._sealed < OVERHEAD_BYTES + len(plaintext):
            return False
        if len(plaintext):
            self._sealed += self._sealer.seal(plaintext, self._outgoing[self._sealed :])
            self._taken += len(plaintext)
        return True

    async def wait_sendable(self) -> None:
        """See `ByteStream`."""
        await self._stream.wait_sendable()

    # ---------------------------------------------------------------------------------------------------- receiving

    def receive_some(self, buffer: memoryview) -> int:
        """Receive without waiting, of one record at most.

        Raises PeerError where a seal is broken, or a record is long though the memory that it goes to is not.
        """
        if not self._opened:
            while (size := self._size()) is None or self._end - self._start < size:
                if size is not None and size > max(len(buffer), UNDUE_MAX) + OVERHEAD_BYTES:
                    raise PeerError(f"a sealed record of {size - OVERHEAD_BYTES} bytes where none is due")
                if not self._fill(size or LENGTH_BYTES):
                    return 0
            record = self._incoming[self._start : self._start + size]
            self._start += size
            size -= OVERHEAD_BYTES
            if size <= len(buffer):
                self._opener.open(record, buffer[:size])
                return size
            opened = _buffer(size)
            self._opener.open(record, opened)
            self._opened = opened
        count = min(len(buffer), len(self._opened))
        buffer[:count], self._opened = self._opened[:count], self._opened[count:]
        return count

    def _size(self) -> int | None:
        """How long the record under way is, if that is known."""
        if self._end - self._start < LENGTH_BYTES:
            return None
        return OVERHEAD_BYTES + length_of(self._incoming[self._start : self._end])

    def _fill(self, size: int) -> bool:
        """Receive more of a record of so many bytes; False: the peer has closed."""
        unread, wanted = self._end - self._start, size + AHEAD_BYTES
        if self._start or wanted > len(self._incoming):
            unmoved = self._incoming[self._start : self._end]
            if wanted > len(self._incoming):
                self._incoming = _buffer(wanted)
            self._incoming[:unread] = unmoved
            self._start, self._end = 0, unread
        count = self._stream.receive_some(self._incoming[unread:wanted])
        self._end += count
        return count > 0

    async def wait_receivable(self, due: int = 1) -> None:
        """See `ByteStream`: a record comes whole."""
        size = self._size() or OVERHEAD_BYTES + due
        await self._stream.wait_receivable(size - (self._end - self._start))

    def close(self) -> None:
        """See `ByteStream`."""
        self._stream.close()


def _buffer(size: int) -> memoryview:
    return np.empty(size, np.uint8).data  # its pages are taken as they are used
