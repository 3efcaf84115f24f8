"""How a body becomes a chunk: a flag byte, then the body as it is or as one zstd frame.

The decoder trusts nothing in the frame. A zstd header may claim any size, and the library's own limits do not hold once
it does (a 16 KB frame gave 512 MiB through `decompress(max_output_size=1 MiB)`): so the claim is checked against OUR
bound first, memory is allocated once, by us, and the frame must fill it exactly and then end.
"""

from __future__ import annotations

import numpy as np
import zstandard

from peerd.transport.errors import PeerError
from peerd.transport.messages import Chunk

RAW = 0
ZSTD = 1
WINDOW_LIMIT = 8 << 20
WORTH = 0.95
"""Compress only if that saves 5 %: decompressing costs the receiver about 1 ms a MiB."""

PARAMETERS = zstandard.ZstdCompressionParameters(
    compression_level=1,
    strategy=zstandard.STRATEGY_FAST,
    hash_log=6,
    min_match=7,
    target_length=0,
    write_content_size=True,
)
"""Level 1 with hardly any search for repeats, of which float bytes have none: entropy coding alone. On bfloat16 planes
1.15 GB/s to 0.67 of the size; level 1 gives 0.48 GB/s and 0.68, level -5 (no entropy coding) 0.64 and 0.86."""

MAGIC = zstandard.MAGIC_NUMBER.to_bytes(4, "little")
_SMALLEST_FRAME = 10  # bytes: magic, two of the frame's header, three of a block's, one of content


class Compressor:
    """Packs the bodies of one kind in one message: tries zstd on the first, and believes the answer for the rest."""

    def __init__(self) -> None:
        self._pays: bool | None = None

    def pack(self, body: bytes | memoryview) -> Chunk:
        """The chunk that carries `body`, at most one byte longer; a copy, so that `body`'s memory is free again.

        After the first, any thread may call it.
        """
        if self._pays is None and len(body) <= _SMALLEST_FRAME:
            self._pays = False
        if self._pays is not False:
            # one each: no two threads may use it, and it costs a tenth of what a piece of 2^20 values takes
            frame = zstandard.ZstdCompressor(compression_params=PARAMETERS).compress(body)
            if self._pays is None:
                self._pays = len(frame) <= WORTH * len(body)
            if self._pays and len(frame) < len(body):
                return _flagged(ZSTD, frame)
        return _flagged(RAW, body)


def unpack(chunk: Chunk, limit: int) -> memoryview:
    """The body in `chunk`, of at most `limit` bytes; a view into the chunk where it came uncompressed.

    Raises:
        PeerError: no flag or an unknown one, too long, or not exactly one sound zstd frame.
    """
    view = memoryview(chunk)
    if not 1 <= len(view) <= 1 + limit:
        raise PeerError(f"a chunk of {len(view)} bytes where 1 to {1 + limit} are due")
    flag, body = view[0], view[1:]
    if flag == RAW:
        return body
    if flag == ZSTD:
        return decompress(body, limit)
    raise PeerError(f"a chunk begins with {flag}, which is neither raw nor zstd")


def decompress(frame: memoryview, limit: int) -> memoryview:
    """What `frame`, one zstd frame that states its size, holds: at most `limit` bytes.

    Raises:
        PeerError: anything else. No more than `limit` bytes and one zstd window are ever allocated.
    """
    if frame[:4] != MAGIC:  # a skippable frame states its own length as the content's, and hides the real header
        raise PeerError("not a zstd frame")
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size > limit:  # an unstated size reads as 2**64 - 1
            raise PeerError(f"a zstd frame of {header.content_size} bytes where {limit} are the most")
        if header.window_size > WINDOW_LIMIT or header.dict_id != 0:
            raise PeerError(f"a zstd frame with window {header.window_size}, dictionary {header.dict_id}")
        body = np.empty(header.content_size, np.uint8)
        reader = zstandard.ZstdDecompressor(max_window_size=WINDOW_LIMIT).stream_reader(frame, read_across_frames=False)
        filled = 0
        while filled < body.size:
            more = reader.readinto(body[filled:].data)
            if not more:
                raise PeerError(f"a zstd frame ends after {filled} of {body.size} bytes")
            filled += more
        if reader.read(1):
            raise PeerError("a zstd frame goes on after its stated size")
    except zstandard.ZstdError as error:
        raise PeerError(f"a zstd frame is broken: {error}") from None
    return body.data


def _flagged(flag: int, body: bytes | memoryview) -> memoryview:
    """`flag`, then `body`, in one buffer; numpy copies without holding the GIL, joining bytes would hold it."""
    chunk = np.empty(1 + len(body), np.uint8)
    chunk[0] = flag
    if len(body):
        chunk[1:] = np.frombuffer(body, np.uint8)
    return chunk.data
