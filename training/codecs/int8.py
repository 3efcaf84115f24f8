"""Eight bits a value, with a scale for every block of 256."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.blocks import BLOCK, as_blocks, block_count, deliver, room_for_blocks
from peerd.training.codecs.codec import Encoded, Float32s, field, finite_float32, require_length
from peerd.training.codecs.one_pass import encode_by
from peerd.training.effects import Vector
from peerd.training.kernels import library
from peerd.training.kernels.passes import BATCH, address, is_plain, parts
from peerd.transport.errors import PeerError

LEVELS = 127
BEYOND = "int8: a value of -128 where -127 is the least"
SMALLEST = np.finfo(np.float32).smallest_subnormal
SMALLEST_NORMAL = np.finfo(np.float32).tiny
LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(LEVELS), np.float32(0.0))
"""A scale just small enough that 127 times it is finite: the decoder then needs no look at its results."""


@dataclass(frozen=True)
class Int8:
    """The float32 scales (largest |v| of the block / 127), then round-to-nearest-even multiples of them."""

    name: str = "int8"

    def encode(self, values: Vector) -> memoryview:
        """See `Codec.encode`."""
        exact = finite_float32(values)
        if (encoded := self.encode_in_one_pass(exact, None, None)) is not None:
            return encoded.body
        blocks = as_blocks(exact)
        body = np.empty(4 * len(blocks) + blocks.size, np.uint8)
        scales = body[: 4 * len(blocks)].view("<f4")
        multiples = body[4 * len(blocks) :].view(np.int8).reshape(blocks.shape)
        for batch in parts(len(blocks), BATCH // BLOCK):
            scales[batch] = quantise(blocks[batch], multiples[batch])
        return body[: self.body_limit(exact.size)].data

    def encode_in_one_pass(self, values: Vector, known: Vector | None, decoded: Vector | None) -> Encoded | None:
        """See `OnePassCodec.encode_in_one_pass`."""
        room = 4 * block_count(values.size), self.body_limit(values.size)
        bounds = float(SMALLEST), float(LARGEST_SCALE)
        return encode_by("peerd_int8_encode", values, known, decoded, room, *bounds)

    def decode(self, body: bytes | bytearray | memoryview, out: Vector) -> None:
        """See `Codec.decode`."""
        require_length(body, self.body_limit(out.size), self.name)
        count = block_count(out.size)
        scales = field(body, "<f4", 0, count)
        if not ((scales >= 0) & (scales <= LARGEST_SCALE)).all():
            raise PeerError("int8: a scale is negative, too large or not a number")
        multiples = field(body, "i1", 4 * count, out.size)
        if (kernels := library.LIBRARY) is not None and is_plain(out):
            if kernels.peerd_int8_decode(address(scales), address(multiples), out.size, address(out)):
                raise PeerError(BEYOND)
            return
        if multiples.size and multiples.min() < -LEVELS:
            raise PeerError(BEYOND)
        blocks = room_for_blocks(out)
        blocks.reshape(-1)[: out.size] = multiples
        np.multiply(blocks, scales[:, None], out=blocks)
        deliver(blocks, out)

    def body_limit(self, count: int) -> int:
        """See `Codec.body_limit`; every body has this length."""
        return 4 * block_count(count) + count


def quantise(blocks: Float32s, multiples: npt.NDArray[np.int8]) -> Float32s:
    """The scale of each of `blocks` (rows, BLOCK); `multiples`, of that shape, gets the values in units of it."""
    quotients = np.abs(blocks)
    largest = np.maximum.reduce(quotients, axis=1)
    scales: Float32s = np.clip(largest / np.float32(LEVELS), SMALLEST, LARGEST_SCALE)
    np.divide(blocks, scales[:, None], out=quotients)
    np.rint(quotients, out=quotients)
    # Where a scale is clipped or is a denormal, the quotient can pass 127; everywhere else it cannot.
    if scales.max() >= LARGEST_SCALE or scales.min() < SMALLEST_NORMAL:
        np.clip(quotients, -LEVELS, LEVELS, out=quotients)
    np.copyto(multiples, quotients, casting="unsafe")
    scales[largest == 0] = 0
    return scales
