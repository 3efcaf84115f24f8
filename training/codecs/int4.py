"""Four bits a value, with a scale for every block of 256."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from peerd.training.codecs.bfloat16 import from_bits, scales_from_bits, to_bits
from peerd.training.codecs.blocks import BLOCK, as_blocks, block_count, deliver, room_for_blocks
from peerd.training.codecs.codec import Encoded, Float32s, field, finite_float32, require_length
from peerd.training.codecs.nibbles import pack_nibbles, require_end, unpack_nibbles
from peerd.training.codecs.one_pass import encode_by
from peerd.training.effects import Vector
from peerd.training.kernels import library
from peerd.training.kernels.passes import BATCH, address, is_plain, parts
from peerd.transport.errors import PeerError

LEVELS = 7
BEYOND = "int4: a value of -8 where -7 is the least"
LARGEST_SCALE_BITS = int((np.finfo(np.float32).max / np.float32(LEVELS)).view(np.uint32) >> 16)
"""Of the largest bfloat16 of which 7 times is finite."""
LARGEST_SCALE = float(from_bits(np.array([LARGEST_SCALE_BITS], np.uint16))[0])
"""That bfloat16, for the kernel."""
_EVERY_BYTE = np.arange(256, dtype=np.uint8)
_NIBBLES = unpack_nibbles(_EVERY_BYTE, 512, "int4").reshape(256, 2)
MULTIPLES: Float32s = ((_NIBBLES ^ np.uint8(8)).astype(np.float32) - np.float32(8)).astype(np.float32)
"""(256, 2): what the two nibbles of a byte stand for, in two's complement."""
IS_BEYOND = (_NIBBLES == LEVELS + 1).any(axis=1)
"""(256,): whether one of them is -8, which no value becomes."""


@dataclass(frozen=True)
class Int4:
    """The bfloat16 scales (largest |v| of the block / 7), then round-to-nearest-even multiples of them, packed.

    Of normal values .984 of the energy gets through: the largest of 256 is 2.9 deviations, a step .41 of one.
    """

    name: str = "int4"

    def encode(self, values: Vector) -> memoryview:
        """See `Codec.encode`."""
        exact = finite_float32(values)
        if (encoded := self.encode_in_one_pass(exact, None, None)) is not None:
            return encoded.body
        blocks = as_blocks(exact)
        body = np.zeros(self.body_limit(blocks.size), np.uint8)
        scales = body[: 2 * len(blocks)].view("<u2")
        packed = body[2 * len(blocks) :].reshape(-1, BLOCK // 2)
        for batch in parts(len(blocks), BATCH // BLOCK):
            largest = np.abs(blocks[batch]).max(axis=1)
            scales[batch] = np.minimum(to_bits(largest / np.float32(LEVELS)), LARGEST_SCALE_BITS)
            units = from_bits(scales[batch])
            units[units == 0] = np.inf  # of a block of zeros, or of values with no digits left
            multiples = np.rint(blocks[batch] / units[:, None])
            np.clip(multiples, -LEVELS, LEVELS, out=multiples)
            nibbles = multiples.astype(np.int8).view(np.uint8) & np.uint8(15)
            packed[batch] = pack_nibbles(nibbles.reshape(-1)).reshape(-1, BLOCK // 2)
        return body[: self.body_limit(exact.size)].data

    def encode_in_one_pass(self, values: Vector, known: Vector | None, decoded: Vector | None) -> Encoded | None:
        """See `OnePassCodec.encode_in_one_pass`."""
        room = 2 * block_count(values.size), self.body_limit(values.size)
        return encode_by("peerd_int4_encode", values, known, decoded, room, LARGEST_SCALE)

    def decode(self, body: bytes | bytearray | memoryview, out: Vector) -> None:
        """See `Codec.decode`."""
        require_length(body, self.body_limit(out.size), self.name)
        count = block_count(out.size)
        halves = field(body, "<u2", 0, count)
        if halves.size and int(halves.max()) > LARGEST_SCALE_BITS:
            raise PeerError("int4: a scale is negative, too large or not a number")
        scales = scales_from_bits(halves, self.name)
        packed = field(body, "u1", 2 * count, -(-out.size // 2))
        if (kernels := library.LIBRARY) is not None and is_plain(out):
            if kernels.peerd_int4_decode(address(halves), address(packed), out.size, address(out)):
                raise PeerError(BEYOND)
            require_end(packed, out.size, self.name)
            return
        if IS_BEYOND.take(packed, mode="clip").any():
            raise PeerError(BEYOND)
        require_end(packed, out.size, self.name)
        blocks = room_for_blocks(out)
        if out.size % BLOCK:
            packed = np.concatenate([packed, np.zeros(count * BLOCK // 2 - packed.size, np.uint8)])
        MULTIPLES.take(packed, axis=0, out=blocks.reshape(-1, 2), mode="clip")  # raise would copy through a buffer
        np.multiply(blocks, scales[:, None], out=blocks)
        deliver(blocks, out)

    def body_limit(self, count: int) -> int:
        """See `Codec.body_limit`; every body has this length."""
        return 2 * block_count(count) + -(-count // 2)
