"""The largest values of each chunk, at two bits a value: SparseLoCo's codec (Sarfi et al. 2025, arXiv:2508.15706).

Of each chunk of 4096 values the 64 largest magnitudes travel, so that every layer says something, however small its
scale is beside another's. A value is its sign and one of its chunk's two magnitudes: the means of the two groups that
keep the most energy when each is sent as its mean. Whatever the values, at least 1/512 of their energy gets through:
the k largest have 1/64 of it; two groups keep at least the largest value's square m^2, and (sum of the k)^2 / k, so the
root of their product, which is m * (sum of the k) / sqrt(k) and no less than the k's own energy / 8.

A body is empty for the zero vector, else: the number k of values (uint32), two magnitudes a chunk (bfloat16), k signs,
k levels (a bit each, packed), the indices as gaps. That is 0.0208 bytes a value: ten bits for each of the 64, and the
chunk's magnitudes; 0.0194 once zstd has had it, less the more the values lie together. Bits an index, Gaussian values
and 32 steps of digits that are iid, sorted, and sorted later on:

    12 as in the paper    gaps 8.1, 9.0, 9.3, 9.4    gaps and zstd 7.5, 7.3, 6.7, 5.7    Rice codes 7.5, 7.6, 7.7, 7.7

Kept of the energy that 64 exact values would keep, of these three and of Student t with 3 degrees of freedom:

    one magnitude .97, .93, .88, .73    two, cut at the mean .99, .97, .95, .83    two, cut best .99, .98, .97, .94
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.bfloat16 import scales_from_bits, to_bits
from peerd.training.codecs.codec import BATCH, Float32s, batches, field, finite_float32
from peerd.training.codecs.gaps import Indices, from_gaps, gaps_limit, to_gaps
from peerd.training.effects import Vector
from peerd.training.kernels import library
from peerd.training.kernels.passes import address
from peerd.transport.errors import PeerError

CHUNK = 4096
MAGNITUDES = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True)
class TopK2Bit:
    """The `kept` largest magnitudes of each CHUNK values, a ragged chunk's share of them, at least one."""

    name: str
    kept: int

    def most(self, count: int) -> int:
        """Values that a body for `count` values may name."""
        return -(-count * self.kept // CHUNK)

    def encode(self, values: Vector) -> bytes | memoryview:
        """See `Codec.encode`."""
        exact = finite_float32(values)
        chosen = largest_of_chunks(exact, self.kept)
        if not chosen.size:
            return b""
        kept = exact[chosen]
        scales, high = quantise(np.abs(kept), chosen // CHUNK, chunk_count(exact.size), self.kept)
        named = np.array([chosen.size], "<u4").view(np.uint8)
        return np.concatenate([named, scales, np.packbits(np.signbit(kept)), np.packbits(high), to_gaps(chosen)]).data

    def decode(self, body: bytes | bytearray | memoryview, out: Vector) -> None:
        """See `Codec.decode`."""
        out.fill(0)
        if not len(body):
            return
        chunks = chunk_count(out.size)
        scales, signs = 4, 4 + 4 * chunks
        if not signs < len(body) <= self.body_limit(out.size):
            raise PeerError(f"{self.name}: a body of {len(body)} bytes for {out.size} values")
        k = int(field(body, "<u4", 0, 1)[0])
        packed = -(-k // 8)
        levels, gaps = signs + packed, signs + 2 * packed
        if not 1 <= k <= self.most(out.size) or len(body) < gaps + k:
            raise PeerError(f"{self.name}: {k} values named, in {len(body)} bytes, for {out.size}")
        table = scales_from_bits(field(body, "<u2", scales, 2 * chunks), self.name)
        indices = from_gaps(field(body, "u1", gaps, len(body) - gaps), k, out.size)
        arrived = table[2 * (indices // CHUNK) + self._bits(body, levels, k)]
        out[indices] = np.where(self._bits(body, signs, k), -arrived, arrived)

    def body_limit(self, count: int) -> int:
        """See `Codec.body_limit`."""
        k = self.most(count)
        return 4 + 4 * chunk_count(count) + 2 * -(-k // 8) + gaps_limit(k, count) if count else 0

    def _bits(self, body: bytes | bytearray | memoryview, start: int, k: int) -> npt.NDArray[np.uint8]:
        bits = np.unpackbits(field(body, "u1", start, -(-k // 8)))
        if bits[k:].any():
            raise PeerError(f"{self.name}: a bit is set beyond the last value")
        return bits[:k]


def chunk_count(count: int) -> int:
    """Chunks that hold `count` values, the last perhaps ragged."""
    return -(-count // CHUNK)


def largest_of_chunks(values: Float32s, kept: int) -> Indices:
    """Where the largest |v| of each chunk of `values` (count,) lie, increasing; of equals, the first; zeros never."""
    if (kernels := library.LIBRARY) is not None:
        chosen = np.empty(-(-values.size * kept // CHUNK), np.int64)
        found = kernels.peerd_largest_of_chunks(address(values), values.size, CHUNK, kept, address(chosen))
        return chosen[:found].astype(np.intp, copy=False)
    parts = [
        _largest_of_rows(values[batch].reshape(-1, CHUNK), kept) + batch.start
        for batch in batches(values.size - values.size % CHUNK, BATCH)
    ]
    if ragged := values.size % CHUNK:
        last = values[values.size - ragged :].reshape(1, -1)
        parts.append(_largest_of_rows(last, -(-ragged * kept // CHUNK)) + (values.size - ragged))
    return np.concatenate([np.empty(0, np.intp), *parts])


def _largest_of_rows(rows: Float32s, kept: int) -> Indices:
    """Of each row (rows, length), as places in all of it; as integers, magnitudes have the order of numbers."""
    magnitudes = rows.view(np.uint32) & MAGNITUDES
    least = np.partition(magnitudes, rows.shape[1] - kept, axis=1)[:, rows.shape[1] - kept, None]
    chosen = magnitudes >= np.maximum(least, 1)
    for row in np.flatnonzero(np.count_nonzero(chosen, axis=1) > kept):  # there are equals
        surplus = int(np.count_nonzero(chosen[row])) - kept
        chosen[row, np.flatnonzero(magnitudes[row] == least[row])[-surplus:]] = False
    return np.flatnonzero(chosen)


def quantise(
    magnitude: Float32s, chunk: Indices, chunks: int, kept: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """The lower and the higher magnitude of each chunk, in bfloat16 (4 * chunks bytes), and which has the higher (k,).

    `magnitude` (k,), all > 0, has at most `kept` values of each chunk, in the order of `chunk` (k,). All cuts of the
    ordered magnitudes in two groups are tried: a group that is sent as its mean keeps (its sum)^2 / its values.
    """
    first = np.searchsorted(chunk, np.arange(chunks))
    ordered = np.zeros((chunks, kept), np.float32)  # those of a chunk that has fewer are zeros, below all others
    ordered[chunk, np.arange(chunk.size) - first[chunk]] = magnitude
    ordered.sort(axis=1)
    below = np.zeros((chunks, kept + 1))  # the sum of those below the cut; in float64 no square overflows
    np.cumsum(ordered, axis=1, dtype=np.float64, out=below[:, 1:])
    whole, below = below[:, -1:], below[:, :-1]
    higher = np.arange(kept, 0, -1)
    lower = kept - higher - np.count_nonzero(ordered == 0, axis=1)[:, None]  # below zero: the cut leaves zeros above it
    energy = np.divide(below**2, lower, out=np.zeros_like(below), where=lower > 0) + (whole - below) ** 2 / higher
    energy[(lower < 0) | ((lower > 0) & (np.diff(ordered, axis=1, prepend=-1) == 0))] = -1  # equals stay together
    cut = energy.argmax(axis=1)
    row = np.arange(chunks)
    means = np.zeros((chunks, 2))
    means[:, 0] = below[row, cut] / np.maximum(lower[row, cut], 1)
    means[:, 1] = (whole[:, 0] - below[row, cut]) / higher[cut]
    high: npt.NDArray[np.bool_] = magnitude >= ordered[row, cut][chunk]
    return to_bits(means.astype(np.float32).reshape(-1)).astype("<u2").view(np.uint8), high
