"""One bit a value, with a scale for every block of 256 (signSGD, Bernstein et al. 2018; scaled as in CHOCO-SGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.bfloat16 import from_bits, scales_from_bits, to_bits
from peerd.training.codecs.blocks import BLOCK, as_blocks, block_count, deliver, room_for_blocks, sizes
from peerd.training.codecs.codec import Bytes, Encoded, Float32s, field, finite_float32, require_length
from peerd.training.codecs.one_pass import encode_by
from peerd.training.effects import Vector
from peerd.training.kernels import library
from peerd.training.kernels.passes import BATCH, address, is_plain, parts
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

    HEAD: ClassVar[int] = 2  # bytes a block, before the bits of all
    KERNELS: ClassVar[tuple[str, str]] = "peerd_sign_encode", "peerd_sign_decode"

    name: str = "sign"

    def encode(self, values: Vector) -> memoryview:
        """See `Codec.encode`."""
        exact = finite_float32(values)
        if (encoded := self.encode_in_one_pass(exact, None, None)) is not None:
            return encoded.body
        body = np.empty(self.body_limit(exact.size), np.uint8)
        heads = self._heads(as_blocks(exact), exact.size)
        body[: heads.size] = heads
        body[heads.size :] = np.packbits(np.signbit(exact))
        return body.data

    def encode_in_one_pass(self, values: Vector, known: Vector | None, decoded: Vector | None) -> Encoded | None:
        """See `OnePassCodec.encode_in_one_pass`."""
        room = self.HEAD * block_count(values.size), self.body_limit(values.size)
        return encode_by(self.KERNELS[0], values, known, decoded, room)

    def decode(self, body: bytes | bytearray | memoryview, out: Vector) -> None:
        """See `Codec.decode`."""
        require_length(body, self.body_limit(out.size), self.name)
        heads = field(body, "u1", 0, self.HEAD * block_count(out.size))
        packed = field(body, "u1", heads.size, -(-out.size // 8))
        self._check(heads, out.size)
        if out.size % 8 and packed[-1] & (0xFF >> out.size % 8):
            raise PeerError(f"{self.name}: a bit is set beyond the last value")
        if (kernels := library.LIBRARY) is not None:
            own = out if is_plain(out) else np.empty(out.size, np.float32)
            getattr(kernels, self.KERNELS[1])(address(heads), address(packed), _SIGN_BITS_AT, out.size, address(own))
            if own is not out:
                out[:] = own
            return
        blocks = room_for_blocks(out)
        if out.size % BLOCK:
            packed = np.concatenate([packed, np.zeros(len(blocks) * BLOCK // 8 - packed.size, np.uint8)])
        SIGNS.take(packed, axis=0, out=blocks.reshape(-1, 8), mode="clip")  # clip: raise would copy through a buffer
        self._scale(blocks, heads)
        deliver(blocks, out)

    def body_limit(self, count: int) -> int:
        """See `Codec.body_limit`; every body has this length."""
        return self.HEAD * block_count(count) + -(-count // 8)

    # ---------------------------------------------------------------- what stands before the bits

    def _heads(self, blocks: Float32s, count: int) -> Bytes:
        """Of `count` values in `blocks` (n, BLOCK)."""
        means = magnitudes(blocks) / sizes(count)
        return to_bits(means.astype(np.float32)).astype("<u2").view(np.uint8)

    def _check(self, heads: Bytes, count: int) -> None:
        """Raise PeerError for what `_heads` never gives."""
        scales_from_bits(heads.view("<u2"), self.name)

    def _scale(self, signs: Float32s, heads: Bytes) -> None:
        """Make the values of the signs (n, BLOCK)."""
        np.multiply(signs, from_bits(heads.view("<u2"))[:, None], out=signs)


def magnitudes(blocks: Float32s) -> npt.NDArray[np.float64]:
    """The sum of |v| of each of `blocks` (n, BLOCK): of 1e38s it is more than float32 holds."""
    totals = np.empty(len(blocks), np.float64)
    for batch in parts(len(blocks), BATCH // BLOCK):
        np.add.reduce(np.abs(blocks[batch]), axis=1, dtype=np.float64, out=totals[batch])
    return totals
