"""A hand on the line between two nodes that are sealed: on the records of their connection, and on chunks beside it.

What comes out must be what was sealed, in order and once. What was not touched must come out, whoever sealed it and
wherever they cut it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from decoders import ALL, PAYLOAD_LIMIT, mutated_stream
from material import pick
from mutate import TOUCH_BYTES, touched
from target import Drawn

from peerd.transport.bulk import nothing
from peerd.transport.connection import ConnectionLost
from peerd.transport.errors import Blameless, PeerError
from peerd.transport.framing import FrameReader
from peerd.transport.messages import Chunk
from peerd.transport.secure.records import OVERHEAD_BYTES, RECORD_MAX, Sealer, Secrets
from peerd.transport.secure.sealed_channel import SealedChannel
from peerd.transport.secure.sealed_stream import UNDUE_MAX, SealedStream

HONEST, CUT, TOUCHED, AGAIN, SWAPPED, RAW, BACK, LONG, BESIDE = range(9)
KEPT = 16  # records that may come again


class Line:
    """A stream that holds what was sent until it is let through, at most `most` bytes a call."""

    name, host, checked, midway = "line", "", True, False
    bytes_sent = bytes_received = 0

    def __init__(self) -> None:
        self.sent = bytearray()
        self.comes = bytearray()
        self.most = 1 << 30

    def send_some(self, pieces: Sequence[Chunk]) -> int:
        for piece in pieces:
            self.sent += piece
        return sum(map(len, pieces))

    def receive_some(self, buffer: memoryview) -> int:
        if not self.comes:
            raise BlockingIOError
        count = min(len(buffer), len(self.comes), self.most)
        buffer[:count] = self.comes[:count]
        del self.comes[:count]
        return count

    async def wait_sendable(self) -> None:
        raise NotImplementedError

    async def wait_receivable(self, due: int = 1) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Beside:
    """A channel that holds one chunk."""

    name, checked, lost, ready = "beside", True, None, True
    on_close: Callable[[ConnectionLost], None] = staticmethod(nothing)

    def __init__(self) -> None:
        self.held: list[bytes] = []

    async def send(self, chunk: Chunk) -> None:
        self.held.append(bytes(chunk))

    def take(self) -> memoryview:
        return memoryview(self.held.pop(0))

    def expect(self, sizes: list[int]) -> None:
        raise NotImplementedError

    def goes_ahead(self, size: int) -> bool:
        raise NotImplementedError

    async def arrival(self) -> None:
        raise NotImplementedError

    async def drained(self) -> None:
        raise NotImplementedError

    async def tried(self) -> None:
        raise NotImplementedError

    def close(self, lost: ConnectionLost) -> None:
        raise NotImplementedError


class Records(Drawn):
    """One connection after the other. An item is what is done, how (`TOUCH_BYTES`), then plaintext or bytes."""

    def __init__(self) -> None:
        self._connections = 0
        self._anew()

    def _anew(self) -> None:
        self._connections += 1
        share = self._connections.to_bytes(32, "big")
        ours = [Secrets.of("fuzz", share, share[::-1], dialled=dialled) for dialled in (True, False)]
        self._secrets = ours
        self._there, self._here = Line(), Line()
        self._sender, self._receiver = SealedStream(self._there, ours[0]), SealedStream(self._here, ours[1])
        self._reader = FrameReader(PAYLOAD_LIMIT)
        self._reader.checked = False
        self._due = bytearray()  # plaintext that was sealed and not read yet
        self._whole = True  # nothing was touched so far
        self._past: list[bytes] = []
        self._beside = [SealedChannel(Beside(), secrets) for secrets in ours]

    def draw(self, rng: Random) -> bytes:
        drawn = rng.random()
        what = HONEST if drawn < 0.4 else CUT if drawn < 0.55 else TOUCHED if drawn < 0.7 else int(rng.random() * 9)
        return bytes([what]) + rng.randbytes(TOUCH_BYTES) + mutated_stream(rng, pick(rng, ALL))

    def take(self, item: bytes) -> None:
        what, how, data = item[0] % 9 if item else HONEST, item[1 : 1 + TOUCH_BYTES], item[1 + TOUCH_BYTES :]
        if not data or len(how) < TOUCH_BYTES:
            return
        if what == BESIDE:
            self._take_beside(how, data)
            return
        sealed, whole = self._sealed(what, how, data)
        if not sealed:
            return
        self._whole &= whole
        self._here.comes += sealed
        self._here.most = 1 + how[3] if how[0] % 4 == 0 else 1 << 30
        try:
            self._read()
        except PeerError:
            self._anew()
            return
        assert not self._whole or not self._due, "what nobody touched did not come out"
        self._past = [*self._past[-KEPT:], sealed]

    def _sealed(self, what: int, how: bytes, data: bytes) -> tuple[bytes, bool]:
        """What comes over the line, and whether all of it is as it was sealed."""
        if what == RAW:
            return data, False
        if what == BACK:
            return _record(self._receiver._sealer, data), False
        if what == AGAIN:
            return (self._past[how[1] % len(self._past)] if self._past else b""), False
        if what == HONEST:
            self._due += data
            left = data
            while left:
                left = left[self._sender.send_some([left[: len(left) // 2], left[len(left) // 2 :]]) :]
            sealed, self._there.sent = bytes(self._there.sent), bytearray()
            return sealed, True
        if what == LONG:
            data += bytes(UNDUE_MAX)
        self._due += data
        step = 1 + how[3] if what == CUT else len(data) if what == LONG else 1 + len(data) // 2
        records = [_record(self._sender._sealer, data[at : at + step]) for at in range(0, len(data), step)]
        if what == SWAPPED and len(records) > 1:
            return b"".join([records[1], records[0], *records[2:]]), False
        if what == TOUCHED:
            whole = b"".join(records)
            sealed = touched(how, whole, self._past[-1] if self._past else b"")
            return sealed, sealed == whole
        return b"".join(records), True

    def _read(self) -> None:
        """As a connection does. Raises PeerError."""
        while True:
            buffer = self._reader.buffer()
            try:
                count = self._receiver.receive_some(buffer)
            except BlockingIOError:
                return
            assert count, "the line has not ended"
            assert buffer[:count] == self._due[:count], "what came out is not what was sealed"
            del self._due[:count]
            self._reader.received(count)
            while self._reader.next_message() is not None:
                pass

    def _take_beside(self, how: bytes, data: bytes) -> None:
        sender, receiver = self._beside
        for chunk in (data, data[::-1]):
            _at_once(sender.send(chunk))
        there, here = self._held(sender), self._held(receiver)
        here += reversed(there) if how[0] % 8 == 7 else there
        there.clear()
        if how[0] % 8 < 5:  # its size is known from the stream
            changed = touched(how, here[0], b"")
            here[0] = (changed + here[0][len(changed) :])[: len(here[0])]
        try:
            came = [bytes(receiver.take()) for _ in range(2)]
        except Blameless:
            self._beside = [SealedChannel(Beside(), secrets) for secrets in self._secrets]
            return
        assert came == [data, data[::-1]], "a chunk is not what was sealed"

    @staticmethod
    def _held(channel: SealedChannel) -> list[bytes]:
        beside: Any = channel._channel
        held: list[bytes] = beside.held
        return held


def _record(sealer: Sealer, plaintext: bytes) -> bytes:
    assert len(plaintext) <= RECORD_MAX
    record = bytearray(OVERHEAD_BYTES + len(plaintext))
    sealer.seal(plaintext, memoryview(record))
    return bytes(record)


def _at_once(task: Any) -> None:
    try:
        task.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")
