"""The largest values at two bits each: what SparseLoCo sends (Sarfi et al. 2025, arXiv:2508.15706), chosen as by top_k.

A body is empty for the zero vector, else: the number k of values (uint32), two magnitudes for each 64 of them
(bfloat16), k signs, k levels (a bit each, packed), the indices as gaps. A value is its sign and one of the two
magnitudes of the 64 that it is among, in their order: the means of the two groups that keep the most energy when each
is sent as its mean. Whatever the values (above 1e-38, where bfloat16 ends), at least a 400th of their energy gets
through: the 2 % that are named have a 50th of it, and two groups of 64 keep at least the largest value's square m^2,
and (their sum)^2 / 64, so the root of the product, which is m * (their sum) / 8 and no less than their own energy / 8.

That is 0.0264 bytes a value: ten bits for each that is named, and half a bit for the magnitudes of its 64; 0.0240 once
zstd has had it, less the more the values lie together.

    bits an index        12 as in the paper    Rice codes 7.5 to 7.7    gaps 8.1 to 9.4    gaps and zstd 5.7 to 7.5
    of exact values'     one magnitude for 64: .97, .93, .88, .73        two, cut at the mean: .99, .97, .95, .83
    energy               two, cut best: .99, .98, .97, .94

(Gaussian values, 32 steps of digits, iid and sorted, and Student t with 3 degrees of freedom.) The paper takes the 64
largest of each chunk of 4096. Those of all values up to a million keep more: summed every 8 steps among four workers
(digits, sorted) they were at an accuracy of .85 after 96 steps and 32 kB in place of 120 steps and 42 kB, and ended
at .964 in place of .947.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.bfloat16 import scales_from_bits, to_bits
from peerd.training.codecs.codec import Bytes, Float32s, field
from peerd.training.codecs.top_k import TopK
from peerd.transport.errors import PeerError

TOGETHER = 64
"""Values that share two magnitudes: half a bit a value."""


class TopK2Bit(TopK):
    """The `percent` % largest magnitudes of each piece, at least one."""

    def _written(self, kept: Float32s) -> list[Bytes]:
        table, high = two_magnitudes(np.abs(kept))
        return [table, np.packbits(np.signbit(kept)), np.packbits(high)]

    def _gaps_at(self, k: int) -> int:
        return header_bytes(k) + 2 * -(-k // 8)

    def _read(self, body: bytes | bytearray | memoryview, k: int) -> Float32s:
        signs_at = header_bytes(k)
        levels_at = signs_at + -(-k // 8)
        table = scales_from_bits(field(body, "<u2", 4, (signs_at - 4) // 2), self.name)
        values: Float32s = table[np.arange(k) // TOGETHER * 2 + self._bits(body, levels_at, k)]
        negative = self._bits(body, signs_at, k) != 0
        np.negative(values, out=values, where=negative)
        return values

    def _bits(self, body: bytes | bytearray | memoryview, start: int, k: int) -> Bytes:
        bits = np.unpackbits(field(body, "u1", start, -(-k // 8)))
        if bits[k:].any():
            raise PeerError(f"{self.name}: a bit is set beyond the last value")
        return bits[:k]


def header_bytes(k: int) -> int:
    """Bytes before the signs of `k` values."""
    return 4 + 4 * -(-k // TOGETHER)


def two_magnitudes(magnitude: Float32s) -> tuple[Bytes, npt.NDArray[np.bool_]]:
    """The lower and the higher magnitude of each 64 of `magnitude` (k,), all > 0, in bfloat16; and which are high (k,).

    All cuts of the 64 in their order of size are tried: a group that is sent as its mean keeps (its sum)^2 / its size.
    """
    rows = -(-magnitude.size // TOGETHER)
    each = np.zeros((rows, TOGETHER), np.float32)  # what the last row lacks is zeros, below all others
    each.reshape(-1)[: magnitude.size] = magnitude
    ordered = np.sort(each, axis=1)
    below = np.zeros((rows, TOGETHER + 1))  # the sum of those below a cut; in float64 no square overflows
    np.cumsum(ordered, axis=1, dtype=np.float64, out=below[:, 1:])
    whole, below = below[:, -1:], below[:, :-1]
    higher = np.arange(TOGETHER, 0, -1)
    lower = TOGETHER - higher - np.count_nonzero(ordered == 0, axis=1)[:, None]  # below 0: zeros are above the cut
    low_energy = np.divide(below**2, lower, out=np.zeros_like(below), where=lower > 0)
    energy = low_energy + (whole - below) ** 2 / higher
    among_zeros = lower < 0
    among_equals = (lower > 0) & (np.diff(ordered, axis=1, prepend=-1) == 0)
    energy[among_zeros | among_equals] = -1  # no cut: equals stay together
    cut, row = energy.argmax(axis=1), np.arange(rows)
    low, size = below[row, cut], lower[row, cut]
    means = np.stack([low / np.maximum(size, 1), (whole[:, 0] - low) / higher[cut]], axis=1)
    table = to_bits(means.astype(np.float32).reshape(-1)).astype("<u2").view(np.uint8)
    high = each >= ordered[row, cut][:, None]
    return table, high.reshape(-1)[: magnitude.size]
