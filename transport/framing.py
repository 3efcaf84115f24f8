"""How messages follow one another in a stream of bytes: frames, and the reader that takes them apart.

How this works. Every frame is 32 fixed bytes, then a msgpack header, then a payload. A message without chunks is one
frame (header, no payload). A bulk message is its head frame, which announces the lengths of the chunks, followed by
one CHUNK frame (payload, no header) for each; frames of messages without chunks may come in between.

Large chunks may travel beside the stream, over another carrier. The head frame says so by its flag, the frame of such
a chunk has the flag too and no payload behind it, but its checksum, unless the carrier needs none. The reader tells
what is to come beside it (`take_announced`), and what it waits for (`out_of_band_due`).

`FrameReader` knows no socket. It says where the next bytes belong (`buffer`), is told how many came (`received`), and
gives out messages (`next_message`). Headers are read into a small staging area; a chunk is read straight into the
memory that is handed on with the message, allocated only when its frame has come and agrees with the head.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from peerd.transport import wire
from peerd.transport.errors import Blameless, Encrypted, PeerError
from peerd.transport.messages import MESSAGES, Chunk, Chunks, Message

MAGIC = b"PEER"
TLS = b"\x16\x03"  # how a connection of TLS begins
CHUNK = 255  # the kind of a frame that continues the bulk message under way
HANDSHAKE_PAYLOAD_LIMIT = 64 << 10
"""Bytes of bulk a connection takes in one message until the daemon, knowing the model, raises `payload_limit`."""
OUT_OF_BAND = 1  # the flag: large chunks travel beside the stream
OUT_OF_BAND_MIN = 64 << 10  # bytes of a large chunk

_FIXED = struct.Struct("<4sBBHIIQ4xI")  # magic, version, kind, flags, header length, payload length, 0, 0, checksum
FIXED_SIZE = _FIXED.size
_CHECKSUMMED = FIXED_SIZE - 4  # the fixed bytes before the checksum

_FOLD_ROWS, _FOLD_WORDS = 64, 512
FOLD_BYTES = _FOLD_ROWS * _FOLD_WORDS * 8

assert FIXED_SIZE == 32
assert CHUNK not in MESSAGES


class Fixed(NamedTuple):
    """The first 32 bytes of a frame, checked but for the checksum."""

    kind: int
    out_of_band: bool
    header_length: int
    payload_length: int
    checksum: int
    partial_checksum: int  # over the fixed bytes so far


def payload_checksum(payload: Chunk, checksum: int = 0) -> int:
    """Continue a CRC-32 over `payload`, whose full blocks of 256 KiB are first folded to 4 KiB.

    Folding adds 64 rows of 512 words: any error within 4 KiB shows in the sums, rows that change places do not. 4 MiB
    take 0.20 ms, of which 0.15 are the reading of it; 0.29 in blocks of 64 KiB, and 1.2 with plain crc32.
    """
    folded = len(payload) // FOLD_BYTES * FOLD_BYTES
    if folded:
        words = np.frombuffer(payload, "<u8", folded // 8).reshape(-1, _FOLD_ROWS, _FOLD_WORDS)
        sums = words.sum(axis=1).astype("<u8", copy=False)  # they wrap modulo 2**64
        checksum = zlib.crc32(sums.data, checksum)
    return zlib.crc32(memoryview(payload)[folded:], checksum)


# ------------------------------------------------------------------------------------------------------- sending


def head_frame(kind: int, header: bytes, out_of_band: bool = False) -> bytes:
    """Return the frame that is, or opens, a message."""
    return _fixed(kind, header, b"", out_of_band) + header


def chunk_frame(chunk: Chunk, out_of_band: bool = False, checked: bool = True) -> bytes:
    """Return the 32 bytes that go before a chunk, or in the place of one that travels beside."""
    return _fixed(CHUNK, b"", chunk, out_of_band, checked)


def frames(message: Message) -> Iterator[Chunk]:
    """Return all that a message is in a stream, piece by piece."""
    return framed(message.KIND, *wire.encode(message))


def framed(kind: int, header: bytes, chunks: Chunks) -> Iterator[Chunk]:
    """The same of one that is encoded already."""
    yield head_frame(kind, header)
    for chunk in chunks:
        yield chunk_frame(chunk)
        yield chunk


def _fixed(kind: int, header: bytes, payload: Chunk, out_of_band: bool, checked: bool = True) -> bytes:
    flags = OUT_OF_BAND if out_of_band else 0
    fixed = _FIXED.pack(MAGIC, wire.VERSION, kind, flags, len(header), len(payload), 0, 0)
    checksum = zlib.crc32(header, zlib.crc32(fixed[:_CHECKSUMMED]))
    if checked:
        checksum = payload_checksum(payload, checksum)
    return fixed[:_CHECKSUMMED] + checksum.to_bytes(4, "little")


# ------------------------------------------------------------------------------------------------------ receiving


class FrameReader:
    """Takes a stream apart: `buffer()`, fill some of it, `received(count)`, then `next_message()` until it is None."""

    def __init__(self, payload_limit: int = HANDSHAKE_PAYLOAD_LIMIT) -> None:
        self.payload_limit = payload_limit
        self.frames = 0  # completed so far
        self.bulk_size = 0  # bytes of all chunks of the bulk message under way
        self.checked = True  # whether chunks in the stream have checksums
        self.out_of_band = False  # whether chunks may come beside the stream
        self.out_of_band_checked = True  # whether their checksums are over what they hold, too
        self._staging = memoryview(bytearray(FIXED_SIZE + wire.HEADER_MAX))
        self._start = self._end = 0  # what of the staging area is unread
        self._fixed: Fixed | None = None  # of the frame under way
        self._head: wire.Head | None = None  # of the bulk message under way
        self._chunks: list[Chunk] = []  # its chunks so far
        self._chunk: memoryview | None = None  # the one under way
        self._filled = 0
        self._head_out_of_band = False  # of the bulk message under way
        self._announced: list[int] = []

    @property
    def midway(self) -> bool:
        """Whether a message has begun and not ended."""
        return self._head is not None or self._fixed is not None or self._start != self._end

    @property
    def chunk_due(self) -> int:
        """Return the bytes that the chunk under way lacks; 0: none is under way."""
        return len(self._chunk) - self._filled if self._chunk is not None else 0

    @property
    def frame_size(self) -> int:
        """Return the bytes of the frame under way, as far as known."""
        fixed = self._fixed
        return FIXED_SIZE + (fixed.header_length + fixed.payload_length if fixed else 0)

    @property
    def out_of_band_due(self) -> int:
        """Return the size of the chunk beside the stream without which nothing goes on; 0: no such."""
        fixed = self._fixed
        return fixed.payload_length if fixed is not None and fixed.out_of_band and fixed.kind == CHUNK else 0

    def take_announced(self) -> list[int]:
        """Return the sizes of chunks that will come beside the stream, in order; each is told once."""
        announced, self._announced = self._announced, []
        return announced

    def received_out_of_band(self, chunk: memoryview) -> None:
        """Take the chunk that is due, whole."""
        assert len(chunk) == self.out_of_band_due, "not the chunk that is due"
        self._chunk, self._filled = chunk, len(chunk)

    def buffer(self) -> memoryview:
        """Return the memory that the next bytes belong in; empty only while a chunk beside the stream is due."""
        if self._chunk is not None:
            return self._chunk[self._filled :]
        if self._start:  # at most what is staged moves, once for as many bytes read
            unread = self._end - self._start
            self._staging[:unread] = self._staging[self._start : self._end]
            self._start, self._end = 0, unread
        return self._staging[self._end :]

    def received(self, count: int) -> None:
        """Note that the first `count` bytes of `buffer()` have come."""
        if self._chunk is not None:
            self._filled += count
        else:
            self._end += count

    def next_message(self) -> Message | None:
        """Return the next whole message, None when more bytes are needed; PeerError when they break the rules."""
        while True:
            if self._fixed is None:
                if self._end - self._start < FIXED_SIZE:
                    return None
                self._fixed = self._open_frame()
            if self._fixed.kind == CHUNK:
                if not self._read_chunk(self._fixed):
                    return None
            elif self._end - self._start < self._fixed.header_length:
                return None
            else:
                message = self._read_head(self._fixed)
                if message is not None:
                    return message
            message = self._finished_bulk()
            if message is not None:
                return message

    def _take(self, count: int) -> memoryview:
        taken = self._staging[self._start : self._start + count]
        self._start += count
        return taken

    def _open_frame(self) -> Fixed:
        """Check the fixed part: no memory is set aside for a frame before this has passed."""
        head = self._take(FIXED_SIZE)
        magic, version, kind, flags, header_length, payload_length, _, checksum = _FIXED.unpack(head)
        if magic.startswith(TLS):
            raise Encrypted("it speaks TLS, this connection is not sealed")
        if magic != MAGIC:
            raise PeerError(f"these bytes are not peerd's: {bytes(head[:16])!r}")
        if version != wire.VERSION:
            raise Blameless(f"the peer speaks wire version {version}, this node {wire.VERSION}")
        out_of_band = flags == OUT_OF_BAND and self.out_of_band
        if flags and not out_of_band:
            raise PeerError(f"unknown flags {flags:#x}")
        if kind == CHUNK:
            self._check_chunk(header_length, payload_length, out_of_band)
        elif kind not in MESSAGES:
            raise PeerError(f"no message is of kind {kind}")
        elif header_length > wire.header_max(self.payload_limit if wire.is_bulk(kind) else 0) or payload_length:
            raise PeerError(f"a header of {header_length} bytes with a payload of {payload_length}")
        elif wire.is_bulk(kind) and self._head is not None:
            raise PeerError("a second bulk message before the first has ended")
        elif out_of_band and not wire.is_bulk(kind):
            raise PeerError("no chunks, and yet some beside the stream")
        if header_length > len(self._staging):
            self._stage(header_length)
        return Fixed(kind, out_of_band, header_length, payload_length, checksum, zlib.crc32(head[:_CHECKSUMMED]))

    def _stage(self, size: int) -> None:
        """Make room for so many bytes: the head of a message of more than 1024 chunks may have as many."""
        larger = memoryview(bytearray(size))
        self._end -= self._start
        larger[: self._end] = self._staging[self._start : self._start + self._end]
        self._staging, self._start = larger, 0

    def _check_chunk(self, header_length: int, payload_length: int, out_of_band: bool) -> None:
        if self._head is None or self._head.lengths is None:
            raise PeerError("a chunk of no message")
        announced = self._head.lengths[len(self._chunks)]
        if header_length or payload_length != announced:
            raise PeerError(f"a chunk of {payload_length} bytes where {announced} were announced")
        if out_of_band != (self._head_out_of_band and announced >= OUT_OF_BAND_MIN):
            raise PeerError(f"a chunk of {announced} bytes on the wrong way")

    def _read_chunk(self, fixed: Fixed) -> bool:
        """Move on with the chunk under way; say whether it is complete."""
        if self._chunk is None and fixed.out_of_band:
            return False
        if self._chunk is None:
            # numpy's memory is not zeroed first; what it held before is never handed on, as a chunk is so only full
            self._chunk = np.empty(fixed.payload_length, np.uint8).data
            self._filled = min(self._end - self._start, fixed.payload_length)
            self._chunk[: self._filled] = self._take(self._filled)
        if self._filled < fixed.payload_length:
            return False
        checked = self.out_of_band_checked if fixed.out_of_band else self.checked
        partial = fixed.partial_checksum
        self._close_frame(fixed, payload_checksum(self._chunk, partial) if checked else partial)
        self._chunks.append(self._chunk)
        self._chunk = None
        return True

    def _read_head(self, fixed: Fixed) -> Message | None:
        """Take the header from the staging area; return the message if no chunks are to come."""
        header = self._take(fixed.header_length)
        self._close_frame(fixed, zlib.crc32(header, fixed.partial_checksum))
        head = wire.decode(fixed.kind, header, self.payload_limit)
        if head.lengths is None:
            return head.message()
        self._head, self._head_out_of_band = head, fixed.out_of_band
        self.bulk_size = sum(head.lengths)
        if fixed.out_of_band:
            self._announced += [length for length in head.lengths if length >= OUT_OF_BAND_MIN]
        return None

    def _close_frame(self, fixed: Fixed, checksum: int) -> None:
        if checksum != fixed.checksum:
            raise PeerError(f"wrong checksum: {checksum:#010x}, not {fixed.checksum:#010x}")
        self._fixed = None
        self.frames += 1

    def _finished_bulk(self) -> Message | None:
        """Return the bulk message under way if it has all its chunks."""
        head = self._head
        if head is None or head.lengths is None or len(self._chunks) < len(head.lengths):
            return None
        message = head.message(tuple(self._chunks))
        self._head, self._chunks, self.bulk_size = None, [], 0
        return message
