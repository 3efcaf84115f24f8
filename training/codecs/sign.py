"""One bit a value, with a scale for every block of 256 (signSGD, Bernstein et al. 2018; scaled as in CHOCO-SGD)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from peerd.training.codecs.bfloat16 import scales_from_bits, to_bits
from peerd.training.codecs.blocks import BLOCK, as_blocks, block_count, deliver, room_for_blocks, sizes
from peerd.training.codecs.codec import (
    BATCH,
    Encoded,
    Float32s,
    batches,
    field,
    finite_float32,
    require_length,
)
from peerd.training.codecs.one_pass import encode_by
from peerd.training.effects import Vector
from peerd.training.kernels import library
from peerd.training.kernels.passes import address, is_plain
from peerd.transport.errors import PeerError

_EVERY_BYTE = np.arange(256, dtype=np.uint8)[:, None]
SIGNS: Float32s = np.float32(1.0) - np.float32(2.0) * np.unpackbits(_EVERY_BYTE, axis=1).astype(np.float32)
"""(256, 8): the eight signs in a byte. Looking them up is 1.3 times faster than unpacking and shifting bits."""
SIGN_BITS = np.unpackbits(_EVERY_BYTE, axis=1).astype(np.uint32) << np.uint32(31)
"""(256, 8): the same as sign bits of float32."""
_SIGN_BITS_AT = address(SIGN_BITS)


@dataclass(frozen=True)
class Sign:
    """The bfloat16 scales, then the sign bits, packed.

    The scale is the block's mean |v|, the best in L2: what is lost is ||v||^2 - n*mean^2. Rounding it to 8 bits loses a
    further 2**-18 of that at most, and saves 2 of 36 bytes a block against a float32 scale.
    """

    name: str = "sign"

    def encode(self, values: Vector) -> memoryview:
        """See `Codec.encode`."""
        exact = finite_float32(values)
        if (encoded := self.encode_in_one_pass(exact, None, None)) is not None:
            return encoded.body
        blocks = as_blocks(exact)
        totals = np.empty(len(blocks), np.float64)  # a block of 1e38s adds up to more than float32 holds
        for batch in batches(len(blocks), BATCH // BLOCK):
            np.add.reduce(np.abs(blocks[batch]), axis=1, dtype=np.float64, out=totals[batch])
        scales = to_bits((totals / sizes(exact.size)).astype(np.float32)).astype("<u2")
        body = np.empty(self.body_limit(exact.size), np.uint8)
        body[: 2 * scales.size] = scales.view(np.uint8)
        body[2 * scales.size :] = np.packbits(np.signbit(exact))
        return body.data

    def encode_in_one_pass(self, values: Vector, known: Vector | None, decoded: Vector | None) -> Encoded | None:
        """See `OnePassCodec.encode_in_one_pass`."""
        room = 2 * block_count(values.size), self.body_limit(values.size)
        return encode_by("peerd_sign_encode", values, known, decoded, room)

    def decode(self, body: bytes | bytearray | memoryview, out: Vector) -> None:
        """See `Codec.decode`."""
        require_length(body, self.body_limit(out.size), self.name)
        count = block_count(out.size)
        halves = field(body, "<u2", 0, count)
        scales = scales_from_bits(halves, self.name)
        packed = field(body, "u1", 2 * count, -(-out.size // 8))
        if out.size % 8 and packed[-1] & (0xFF >> out.size % 8):
            raise PeerError("sign: a bit is set beyond the last value")
        if (kernels := library.LIBRARY) is not None:
            own = out if is_plain(out) else np.empty(out.size, np.float32)
            kernels.peerd_sign_decode(address(halves), address(packed), _SIGN_BITS_AT, out.size, address(own))
            if own is not out:
                out[:] = own
            return
        blocks = room_for_blocks(out)
        if out.size % BLOCK:
            packed = np.concatenate([packed, np.zeros(len(blocks) * BLOCK // 8 - packed.size, np.uint8)])
        SIGNS.take(packed, axis=0, out=blocks.reshape(-1, 8), mode="clip")  # clip: raise would copy through a buffer
        np.multiply(blocks, scales[:, None], out=blocks)
        deliver(blocks, out)

    def body_limit(self, count: int) -> int:
        """See `Codec.body_limit`; every body has this length."""
        return 2 * block_count(count) + -(-count // 8)
