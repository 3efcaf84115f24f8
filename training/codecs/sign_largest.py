"""One bit a value, and the largest of every 256 as it is: what `sign` loses over and over.

What a codec drops is sent later. Where few values move far more than those around them, as most of SGD's do, one scale
for 256 of them is too small for these few, whatever else is sent: after 100 rounds of `sign` 2 % of the values have 95
to 99 % of what waits, 20 to 300 times as much as a step (RESULTS.md). Here the largest goes out of the way each time.

A body is 4 bytes for each block of 256, then the sign bits, packed: the largest magnitude L (bfloat16), which value it
is (uint8), and the mean of the others as a share of L (uint8, see RATIO_STEPS). That is 1.125 bits a value, `sign` has
1.0625.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.bfloat16 import from_bits, scales_from_bits, to_bits
from peerd.training.codecs.blocks import BLOCK, sizes
from peerd.training.codecs.codec import Bytes, Float32s
from peerd.training.codecs.sign import Sign, magnitudes
from peerd.transport.errors import PeerError

HEAD = np.dtype([("largest", "<u2"), ("where", "u1"), ("ratio", "u1")])
RATIO_STEPS = 8
"""A ratio counts down from 0, which is 1, by eight to each power of two, all of a power as far apart, as the first bits
of a float32 do: within a 16th, which loses a 250th of what such a scale lets through at most."""
NO_RATIO = 255
"""The others are zeros, or below 2**-31 of the largest."""
_ONE = 127 * RATIO_STEPS  # the first twelve bits of 1.0
_DROPPED = 20  # bits of a float32 after those


@dataclass(frozen=True)
class SignLargest(Sign):
    """`sign`, but for the largest magnitude of each block: that is sent, and the scale is the others' mean."""

    HEAD: ClassVar[int] = HEAD.itemsize
    KERNELS: ClassVar[tuple[str, str]] = "peerd_sign_largest_encode", "peerd_sign_largest_decode"

    name: str = "sign_largest"

    def _heads(self, blocks: Float32s, count: int) -> Bytes:
        each, heads = np.arange(len(blocks)), np.empty(len(blocks), HEAD)
        others = np.abs(blocks)
        where = heads["where"] = others.argmax(axis=1)
        heads["largest"] = to_bits(others[each, where])
        others[each, where] = 0
        means = magnitudes(others) / np.maximum(sizes(count) - 1, 1)
        heads["ratio"] = ratios(means, from_bits(heads["largest"]))
        return heads.view(np.uint8)

    def _check(self, heads: Bytes, count: int) -> None:
        table = heads.view(HEAD)
        scales_from_bits(table["largest"], self.name)
        if count % BLOCK and table["where"][-1] >= count % BLOCK:
            raise PeerError(f"{self.name}: the largest value is beyond the last")

    def _scale(self, signs: Float32s, heads: Bytes) -> None:
        each, table = np.arange(len(signs)), heads.view(HEAD)
        largest, where = from_bits(table["largest"]), table["where"]
        largest_signed = signs[each, where] * largest
        np.multiply(signs, (largest * shares(table["ratio"]))[:, None], out=signs)
        signs[each, where] = largest_signed


def ratios(means: npt.NDArray[np.float64], largest: Float32s) -> Bytes:
    """`means` (n,) as shares of `largest` (n,), the nearest."""
    share = np.divide(means, largest, out=np.zeros_like(means), where=largest > 0).astype(np.float32)
    first = (share.view(np.uint32) + np.uint32(1 << (_DROPPED - 1))) >> np.uint32(_DROPPED)
    return np.clip(_ONE - first.astype(np.int64), 0, NO_RATIO).astype(np.uint8)


def shares(ratio: Bytes) -> Float32s:
    """The shares (n,) that `ratio` (n,) stand for."""
    bits = (_ONE - ratio.astype(np.uint32)) << np.uint32(_DROPPED)
    return np.where(ratio == NO_RATIO, np.float32(0), bits.view(np.float32))
