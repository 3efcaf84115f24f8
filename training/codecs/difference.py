"""How does a vector travel to who knows another one? As its encoded difference; how long is one, and from what?"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from peerd.training.codecs import vector
from peerd.training.codecs.vector import VALUE_MAX, Gain, Layout, NotFinite
from peerd.training.effects import Sliced, Vector
from peerd.training.kernels.cores import each
from peerd.training.kernels.passes import parts, squares
from peerd.training.scratch import Scratch
from peerd.transport.errors import PeerError
from peerd.transport.messages import Chunk, Chunks

DIGEST_BYTES = 16


def encode_difference(
    codec: str, layout: Layout, values: Vector, known: Vector, gain: Gain, scratch: Scratch
) -> tuple[Chunks, Vector]:
    """The chunks for values - known, and what they decode to (scratch); the loss goes into `gain`. Raises NotFinite."""
    decoded = scratch.take(known)
    try:
        chunks, contraction = vector.encode(codec, layout, values, known=known, decoded=decoded)
    except NotFinite:
        scratch.give(decoded)
        raise
    gain.observe(contraction)
    return chunks, decoded


def decode_onto(
    codec: str,
    layout: Layout,
    chunks: Chunks,
    known: Sliced,
    scratch: Scratch,
    value_max: float = VALUE_MAX,
    *,
    corrects: bool = False,
) -> Vector:
    """known + what `chunks` hold, in scratch. Raises PeerError, also for a sum that no model reaches.

    `corrects`: what is made of it is a correction of the model.
    """
    incoming = scratch.take_for_event(known) if corrects else scratch.take(known)
    try:
        vector.decode(codec, layout, chunks, incoming, known=known, value_max=value_max)
    except PeerError:
        scratch.give(incoming)
        raise
    return incoming


def digest(start: Sliced, layout: Layout) -> bytes:
    """Of the bits of a vector, shape (layout.total,), that several members may count differences from: the first 16
    bytes of SHA-256 of those of its pieces."""
    assert start.shape == (layout.total,)
    of_pieces = each(lambda where: _of(np.ascontiguousarray(start[where]).data), vector.pieces(layout))
    return _of_all(of_pieces)[:DIGEST_BYTES]


def digest_of_chunks(chunks: Chunks) -> bytes:
    """Of an encoded vector, as it travels: SHA-256 of those of its chunks."""
    return _of_all(each(_of, chunks))


def _of(piece: Chunk) -> bytes:
    return hashlib.sha256(piece).digest()


def _of_all(digests: list[bytes]) -> bytes:
    return hashlib.sha256(b"".join(digests)).digest()


def norm_of_difference(a: Vector, b: Vector | None = None) -> float:
    """||a - b||, or ||a||."""
    return math.sqrt(squares(a, b))


def norm_of_sum(a: Vector, b: Vector | None) -> float:
    """||a + b||, or ||a||, in pieces that stay in the cache."""
    return math.sqrt(sum(each(lambda part: squares(a[part] if b is None else a[part] + b[part]), parts(len(a)))))
