"""The upper half of each float32: 8 bits of precision and float32's whole range."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peerd.training.codecs import planes
from peerd.training.codecs.codec import Float32s, field, finite_float32, require_length
from peerd.training.effects import Vector
from peerd.training.kernels.passes import BATCH, is_finite, parts
from peerd.transport.errors import PeerError

LARGEST = float(np.uint32(0x7F7F0000).view(np.float32))
"""3.39e38, the largest finite bfloat16: beyond it, rounding to nearest would give an infinity."""

INFINITY_BITS = 0x7F80


def to_bits(values: Float32s) -> npt.NDArray[np.uint32]:
    """The nearest bfloat16 of each value (count,), as its 16 bits in a uint32; ties go away from zero.

    Ties to even would take three more passes to mend one value in 65 536, whose error is the same either way.
    """
    bits = np.clip(values, -LARGEST, LARGEST).view(np.uint32)
    bits += np.uint32(0x8000)
    bits >>= np.uint32(16)
    return bits


def rounded(values: Vector) -> Float32s:
    """What `Bfloat16.decode` makes of what `encode` makes of these, shape (count,). Raises NotFinite."""
    exact = finite_float32(values)
    out = np.empty(exact.size, np.float32)
    for batch in parts(exact.size, BATCH):
        bits = to_bits(exact[batch])
        np.left_shift(bits, np.uint32(16), out=out[batch].view(np.uint32))
    return out


def from_bits(bits: npt.NDArray[np.uint16]) -> Float32s:
    """The float32 values of bfloat16 bits (count,)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def scales_from_bits(bits: npt.NDArray[np.uint16], codec: str) -> Float32s:
    """The values (count,) of bits that must stand for finite numbers >= 0, else PeerError."""
    if bits.size and int(bits.max()) >= INFINITY_BITS:  # a sign bit, too, makes the number as large as that
        raise PeerError(f"{codec}: a scale is negative or not finite")
    return from_bits(bits)


@dataclass(frozen=True)
class Bfloat16:
    """Two byte planes, 2 bytes a value; relative error at most 2**-8."""

    name: str = "bfloat16"

    def encode(self, values: Vector) -> memoryview:
        """See `Codec.encode`."""
        exact = finite_float32(values)
        body = np.empty((2, exact.size), np.uint8)
        for batch in parts(exact.size, BATCH):
            planes.split(to_bits(exact[batch]), body[:, batch])
        return body.reshape(-1).data

    def decode(self, body: bytes | bytearray | memoryview, out: Vector) -> None:
        """See `Codec.decode`."""
        require_length(body, self.body_limit(out.size), self.name)
        own = out if out.dtype == np.float32 and out.flags.c_contiguous else np.empty(out.size, np.float32)
        words = own.view(np.uint32)
        planes.join(field(body, "u1", 0, len(body)).reshape(2, out.size), words)
        words <<= np.uint32(16)
        if not is_finite(own):
            raise PeerError("bfloat16: a value is not finite")
        if own is not out:
            out[:] = own

    def body_limit(self, count: int) -> int:
        """See `Codec.body_limit`; every body has this length."""
        return 2 * count
