"""How far apart are two models? A few numbers of each tell, where the models themselves do not meet.

Each value is added, with a random sign, to one of WIDTH sums (a CountSketch; Charikar, Chen, Farach-Colton 2004,
doi:10.1016/S0304-3975(03)00400-6; that it keeps distances: Alon, Gibbons, Matias, Szegedy 2002,
doi:10.1006/jcss.2001.1813). The square of the distance of two sketches is that of the two models on average, and its
standard deviation sqrt(2 / WIDTH) of it where the difference is spread: 18 %, so 9 % of the distance. Signs come from a
seed by SHAKE-128 (FIPS 202), the same in any version of anything; who does not know the seed cannot make a model that
is far away and looks near.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.kernels.cores import each

WIDTH = 61  # sums, two of which a message takes; a prime, so that the columns of a tensor are spread over all
BLOCK = 16 * WIDTH * WIDTH  # values whose signs are drawn at once
TOGETHER = 256  # blocks that threads share among them: their sums take 8 MB, those of a model an eighth of it
_SUMS = np.dtype("<f4")  # as they travel
_OF_BYTE = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32)  # its bits' signs

Sketch = npt.NDArray[np.float64]
"""Of the parameters, and of all else in a model: shape (2, WIDTH)."""


def sketch(values: Vector, layout: Layout, seed: bytes) -> Sketch:
    """Of a model, shape (layout.total,)."""
    return np.stack([_sums(values, seed, 0, layout.parameters), _sums(values, seed, layout.parameters, layout.total)])


def _sums(values: Vector, seed: bytes, start: int, stop: int) -> npt.NDArray[np.float64]:
    """Of the values from `start` to `stop`, shape (WIDTH,). Of a column of as many values as there are sums each row
    goes to the next one: no column is a single sum, which would be next to nothing in one of so many models."""

    def one(first: int) -> npt.NDArray[np.float64]:
        signs = _signs(seed, first)
        block = values[first : min(first + BLOCK, stop)]
        signs[: len(block)] *= block
        signs[len(block) :] = 0.0
        summed: npt.NDArray[np.float64] = signs.reshape(-1, WIDTH, WIDTH).sum(axis=0, dtype=np.float64)
        return summed

    rows = np.zeros((WIDTH, WIDTH))
    with np.errstate(invalid="ignore", over="ignore"):  # of what is not finite
        for shared in range(start, stop, TOGETHER * BLOCK):
            for summed in each(one, range(shared, min(shared + TOGETHER * BLOCK, stop), BLOCK)):
                rows += summed
        found: npt.NDArray[np.float64] = np.sum([np.roll(row, shift) for shift, row in enumerate(rows)], axis=0)
    return found


def packed(sketch: Sketch) -> bytes:
    """As a message has it."""
    with np.errstate(over="ignore"):
        return sketch.astype(_SUMS).tobytes()


def unpacked(said: bytes) -> Sketch:
    """The sketch in a message. Raises ValueError: it is none."""
    return np.frombuffer(said, _SUMS).reshape(2, WIDTH).astype(np.float64)


def _signs(seed: bytes, first: int) -> npt.NDArray[np.float32]:
    """Of the block of values that begins at `first`: 1 and -1, shape (BLOCK,)."""
    drawn = hashlib.shake_128(seed + first.to_bytes(8, "little")).digest(BLOCK // 8)
    return np.take(_OF_BYTE, np.frombuffer(drawn, np.uint8), axis=0).reshape(-1)  # a sixth of what indexing takes
