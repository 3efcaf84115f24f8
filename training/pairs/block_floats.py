"""How is what both ends of a link know of a large model kept? In two bytes a value: block floating point.

Each block of BLOCK values shares an exponent (Wilkinson 1963), and each value is a whole multiple of one power of two,
2^-15 of the smallest that no value of the block reaches. So a step of one length for all values, as `sign` makes, is
the same for large values as for small ones, which in bfloat16 it is not: there one that is less than half of a large
value's last digit is lost, and two models that stand stay 1.7 % apart (benchmarks/RESULTS.md).

What rounding takes is a part of the next difference, as what a codec drops. Both ends round the same float32 values, by
multiplications with powers of two, which are exact, so they keep the same bits. Float buffers are kept as they are: one
that no step changes must stay the bits that it is.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.blocks import BLOCK, as_blocks, block_count
from peerd.training.codecs.codec import Float32s
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Sliced, Vector
from peerd.training.kernels import library
from peerd.training.kernels.passes import BATCH, address, is_plain, parts
from peerd.training.room import is_large

MULTIPLE_MAX = 32767
_BITS = 15  # of a multiple, less its sign
_LEAST = 15  # the smallest exponent of a block as float32 stores it: its unit is the smallest normal number
_OF_FRACTION = 23  # bits of a float32 below its exponent


class BlockFloats:
    """Such a vector, shape (total,), zeros at first; slices that begin at a block, or in the buffers, are float32."""

    def __init__(self, layout: Layout) -> None:
        self.shape = (layout.total,)
        self.dtype = np.dtype(np.float32)
        self._parameters = layout.parameters
        self._multiples = np.zeros(layout.parameters, np.int16)
        self._exponents = np.full(block_count(layout.parameters), _LEAST, np.uint8)  # biased, as float32 stores them
        self._exact = np.zeros(layout.total - layout.parameters, np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._multiples.nbytes + self._exponents.nbytes + self._exact.nbytes

    def copy(self) -> BlockFloats:
        """Another of the same values."""
        return copy.deepcopy(self)

    def tobytes(self) -> bytes:
        """All bits of it, which both ends of a link have alike."""
        return b"".join((self._multiples.tobytes(), self._exponents.tobytes(), self._exact.tobytes()))

    def __getitem__(self, where: slice) -> Vector:
        """Its values there, in memory of their own; of buffers alone a view."""
        start, cut, stop = self._cut(where)
        if cut == start:
            return self._exact[start - self._parameters : stop - self._parameters]
        values = np.empty(stop - start, np.float32)
        self._unpack(start, cut, values[: cut - start])
        values[cut - start :] = self._exact[: stop - cut]
        return values

    def __setitem__(self, where: slice, values: Vector) -> None:
        start, cut, stop = self._cut(where)
        if cut > start:
            self._pack(start, cut, np.ascontiguousarray(values[: cut - start], np.float32))
        if stop > cut:
            first = cut - self._parameters
            self._exact[first : first + stop - cut] = values[cut - start :]

    def move(self, where: slice, outgoing: Vector, theirs: Sliced, following: Vector) -> bool:
        """As kernels/passes.py moves two references, of which this is `mine`; False where there is no kernel for it."""
        assert isinstance(theirs, BlockFloats), "both references are kept alike"
        start, cut, stop = self._cut(where)
        if cut < stop or (kernels := library.LIBRARY) is None or not is_plain(outgoing, following):
            return False
        multiples, exponents = self._blocks(start, stop)
        others, of_others = theirs._blocks(start, stop)
        kernels.peerd_blocks_move(
            address(multiples), address(exponents), address(outgoing), address(others), address(of_others),
            address(following), stop - start,
        )  # fmt: skip
        return True

    def _cut(self, where: slice) -> tuple[int, int, int]:
        """Where a slice begins, where its buffers do, and where it ends."""
        start, stop, _ = where.indices(self.shape[0])
        cut = min(max(start, self._parameters), stop)
        assert cut == start or (start % BLOCK == 0 and (cut % BLOCK == 0 or cut == self._parameters)), "whole blocks"
        return start, cut, stop

    def _unpack(self, start: int, stop: int, out: Float32s) -> None:
        multiples, exponents = self._blocks(start, stop)
        if (kernels := library.LIBRARY) is not None:
            kernels.peerd_blocks_unpack(address(multiples), address(exponents), out.size, address(out))
            return
        for batch in parts(out.size, BATCH):
            units = _powers_of_two(exponents[_of_blocks(batch)] - (_BITS - 1))
            blocks = as_blocks(multiples[batch].astype(np.float32))
            blocks *= units[:, None]
            out[batch] = blocks.reshape(-1)[: batch.stop - batch.start]

    def _pack(self, start: int, stop: int, values: Float32s) -> None:
        multiples, exponents = self._blocks(start, stop)
        if (kernels := library.LIBRARY) is not None and is_plain(values):
            kernels.peerd_blocks_pack(address(values), values.size, address(multiples), address(exponents))
            return
        for batch in parts(values.size, BATCH):
            blocks = as_blocks(values[batch])
            found = np.abs(blocks).max(axis=1).view(np.uint32) >> _OF_FRACTION
            np.maximum(found, _LEAST, out=found)
            exponents[_of_blocks(batch)] = found
            rounded = (blocks * _powers_of_two(253 + _BITS - found)[:, None]).reshape(-1)[: batch.stop - batch.start]
            np.rint(rounded, out=rounded)
            np.clip(rounded, -MULTIPLE_MAX, MULTIPLE_MAX, out=rounded)
            multiples[batch] = rounded

    def _blocks(self, start: int, stop: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.uint8]]:
        return self._multiples[start:stop], self._exponents[_of_blocks(slice(start, stop))]


def _of_blocks(where: slice) -> slice:
    return slice(where.start // BLOCK, block_count(where.stop))


def _powers_of_two(biased: npt.NDArray[Any]) -> Float32s:
    """Of these exponents, as float32 stores them."""
    return (biased.astype(np.uint32) << np.uint32(_OF_FRACTION)).view(np.float32)


def known_vector(layout: Layout, dtype: np.dtype[np.floating[Any]]) -> Sliced:
    """Room for what both ends of a link know of a model, with any content; of a large one in two bytes a value."""
    if dtype == np.float32 and is_large(layout.total):
        return BlockFloats(layout)
    return np.empty(layout.total, dtype)
