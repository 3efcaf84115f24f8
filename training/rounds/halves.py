"""How is the mean of equal float32 values that value, to the bit? By summing it in two halves.

A sum of n equal float32 values is rounded at most additions, so a constant that all members hold would come out of a
round as another one. Each value v is cut into its upper and its lower 12 significant bits, v = upper + lower, which is
exact. A sum of up to 4096 (2**12) equal halves fits float32's 24 bits, so it is exact too, in any order and along any
tree; and so is upper + lower in float64, and the division by n. Of values that differ the mean is as good as ever.
"""

from __future__ import annotations

import numpy as np

from peerd.training.effects import Vector

UPPER_BITS = np.uint32(0xFFFFF000)  # sign, exponent and 11 bits: with the one that is not stored, 12


def halved(values: Vector) -> Vector:
    """The halves of `values`, shape (count,), one after the other: shape (2 * count,), in the same dtype."""
    exact = np.ascontiguousarray(values, np.float32)
    halves = np.empty(2 * exact.size, values.dtype)
    upper = (exact.view(np.uint32) & UPPER_BITS).view(np.float32)
    halves[: exact.size] = upper
    with np.errstate(invalid="ignore"):  # an infinity has no lower half: that is seen where it is sent
        halves[exact.size :] = exact - upper
    return halves


def mean_of(sums: Vector, count: int) -> Vector:
    """The mean of `count` vectors, shape (size,), from the sums of their halves, shape (2 * size,)."""
    upper, lower = np.split(sums.astype(np.float64), 2)
    mean: Vector = ((upper + lower) / count).astype(sums.dtype)
    return mean
