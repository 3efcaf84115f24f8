"""Only the largest values: the codec for slow links, with a gain to match (CHOCO-SGD, Koloskova et al. 2019).

A body is empty for the zero vector, else: the number k of values (uint32), eight magnitudes (bfloat16), k nibbles (sign
and which magnitude), the indices as gaps. The eight magnitudes are the means of eight geometric ranges. Kept energy and
bytes for each of the 1 % selected, indices included (Gaussian / Student t, 3 degrees of freedom):

    bfloat16 values 3.08 bytes .085 / .364        sign and 8 magnitudes 1.58 bytes .085 / .359
    int8 values     2.10 bytes .085 / .364        sign and 1 magnitude  1.21 bytes .084 / .264
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from peerd.training.codecs.bfloat16 import scales_from_bits, to_bits
from peerd.training.codecs.codec import Bytes, Encoded, Float32s, field, finite_float32, not_finite
from peerd.training.codecs.gaps import Indices, from_gaps, gaps_limit, to_gaps
from peerd.training.codecs.nibbles import pack_nibbles, unpack_nibbles
from peerd.training.effects import Vector
from peerd.training.kernels.passes import at_least, is_plain, squares
from peerd.transport.errors import PeerError

MAGNITUDES = 8
HEADER = 4 + 2 * MAGNITUDES
SMALLEST = np.finfo(np.float32).smallest_subnormal
SAMPLE = 1 << 14
"""Magnitudes looked at to find the threshold; 164 of them are in the top 1 %, give or take 8 %."""
MARGIN = 1.25
"""The threshold is set for this many times the values wanted: three standard deviations of the sample's error."""
SELECT_BITS = 12
"""Counted first: ten or so of 40,000 magnitudes are alike in these. A selection among all takes three times as long."""


@dataclass(frozen=True)
class TopK:
    """The `percent` % largest magnitudes of each piece, at least one, as sign and one of eight magnitudes."""

    name: str
    percent: int

    def most(self, count: int) -> int:
        """Values that a body for `count` values may name."""
        return -(-count * self.percent // 100)

    def encode(self, values: Vector) -> memoryview:
        """See `Codec.encode`."""
        return self._encoded(finite_float32(values), None, None).body

    def encode_in_one_pass(self, values: Vector, known: Vector | None, decoded: Vector | None) -> Encoded | None:
        """See `OnePassCodec.encode_in_one_pass`."""
        return self._encoded(values, known, decoded) if is_plain(values, known, decoded) else None

    def decode(self, body: bytes | bytearray | memoryview, out: Vector) -> None:
        """See `Codec.decode`."""
        out.fill(0)
        if not len(body):
            return
        if not self._gaps_at(0) < len(body) <= self.body_limit(out.size):
            raise PeerError(f"{self.name}: a body of {len(body)} bytes for {out.size} values")
        k = int(field(body, "<u4", 0, 1)[0])
        gaps_at = self._gaps_at(k)
        if not 1 <= k <= self.most(out.size) or len(body) < gaps_at + k:
            raise PeerError(f"{self.name}: {k} values named, in {len(body)} bytes, for {out.size}")
        arrived = self._read(body, k)
        gaps = field(body, "u1", gaps_at, len(body) - gaps_at)
        out[from_gaps(gaps, k, out.size, self.name)] = arrived

    def body_limit(self, count: int) -> int:
        """See `Codec.body_limit`."""
        k = self.most(count)
        return self._gaps_at(k) + gaps_limit(k, count) if count else 0

    def _encoded(self, values: Vector, known: Vector | None, decoded: Vector | None) -> Encoded:
        """See `OnePassCodec.encode_in_one_pass`; of values in float32."""
        chosen = largest(values, known, self.most(values.size))
        if decoded is not None:
            decoded.fill(0)
        if not chosen.where.size:
            return Encoded(memoryview(b""), chosen.others, chosen.others)
        named = np.array([chosen.where.size], "<u4").view(np.uint8)
        body = np.concatenate([named, *self._written(chosen.values), to_gaps(chosen.where)]).data
        arrives = self._read(body, chosen.where.size)
        if decoded is not None:
            decoded[chosen.where] = arrives
        lost, energy = squares(chosen.values, arrives), squares(chosen.values)
        return Encoded(body, chosen.others + lost, chosen.others + energy)

    # ---------------------------------------------------------------- how the values are written

    def _written(self, kept: Float32s) -> list[Bytes]:
        """What stands between k and the indices, for values (k,)."""
        levels, table = quantise(np.abs(kept))
        nibbles = levels | (np.signbit(kept).view(np.uint8) << np.uint8(3))
        return [table, pack_nibbles(nibbles)]

    def _gaps_at(self, k: int) -> int:
        """Where the indices begin."""
        return HEADER + (k + 1) // 2

    def _read(self, body: bytes | bytearray | memoryview, k: int) -> Float32s:
        """The values (k,). Raises PeerError."""
        table = scales_from_bits(field(body, "<u2", 4, MAGNITUDES), self.name)
        nibbles = unpack_nibbles(field(body, "u1", HEADER, (k + 1) // 2), k, self.name)
        values: Float32s = np.concatenate([table, -table]).take(nibbles)
        return values


class Largest(NamedTuple):
    """Some of a difference's values."""

    where: Indices  # increasing
    values: Float32s
    others: float  # the squares of all that are not among them


def largest(values: Vector, known: Vector | None, most: int) -> Largest:
    """The `most` largest |v| of values - known, or of values, (count,) in float32; of equals the first, zeros never.

    A full selection takes 10 ms for a million values. A threshold from a sample leaves about 1.25 * `most` candidates
    in one pass of less than 1 ms, and selecting among those is exact. The stride is fixed, so equal vectors give equal
    bytes, and odd, so that it does not walk down one column of a matrix.

    Raises:
        NotFinite: a difference is a NaN or an infinity.
    """
    spread = slice(None, None, (values.size // SAMPLE) | 1)
    with np.errstate(over="ignore", invalid="ignore"):
        sample = np.abs(values[spread] if known is None else values[spread] - known[spread])
    threshold = float(SMALLEST)
    if sample.size:
        rank = min(sample.size, int(np.ceil(MARGIN * most * sample.size / values.size)))
        threshold = max(threshold, float(of_rank(sample, sample.size - rank)))
    if (candidates := at_least(values, known, threshold)) is None:
        raise not_finite()
    where, large, others = candidates
    surplus = where.size - most
    if surplus <= 0:
        return Largest(where, large, others)
    magnitude = np.abs(large)
    least = of_rank(magnitude, surplus)
    enough = magnitude >= least
    beyond = int(np.count_nonzero(enough)) - most  # among equals
    if beyond:
        enough[np.flatnonzero(magnitude == least)[-beyond:]] = False
    kept = np.flatnonzero(enough)  # a third of the time of an index of booleans
    return Largest(where[kept], large[kept], others + squares(large * ~enough))


def of_rank(magnitude: Float32s, rank: int) -> np.float32:
    """`np.sort(magnitude)[rank]`, of `magnitude` (k,) without signs: these are ordered as their bits are."""
    bits = magnitude.view(np.int32)
    lowest = int(bits.min())
    coarse = (bits - lowest) >> max(0, (int(bits.max()) - lowest).bit_length() - SELECT_BITS)
    up_to = np.cumsum(np.bincount(coarse))
    among = int(np.searchsorted(up_to, rank, side="right"))
    near = magnitude[coarse == among]
    within = rank - (int(up_to[among - 1]) if among else 0)
    found: np.float32 = np.partition(near, within)[within]
    return found


def quantise(magnitude: Float32s) -> tuple[Bytes, Bytes]:
    """The geometric range (k,) that each of `magnitude` (k,), all > 0, falls in, and the ranges' means in bfloat16."""
    heights = np.log(magnitude)
    heights -= heights.min()
    top = float(heights.max())
    heights *= np.float32(MAGNITUDES / top if top > 0 else 0.0)
    levels = np.minimum(heights, MAGNITUDES - 1).astype(np.uint8)
    members = np.bincount(levels, minlength=MAGNITUDES)
    means = np.bincount(levels, weights=magnitude, minlength=MAGNITUDES) / np.maximum(members, 1)
    return levels, to_bits(means.astype(np.float32)).astype("<u2").view(np.uint8)
