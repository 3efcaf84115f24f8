"""What do a few seeds say? The mean with its interval (Student 1908), and the order of two lists (Spearman 1904)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
_ANGLES = 20_001  # of the grid on which the t distribution is summed: six digits of a quantile


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `count` seeds and its two-sided interval; of one seed, the interval is the whole line."""

    mean: float
    low: float
    high: float
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """The t-interval of the mean of independent values, at CONFIDENCE. Needs one value at least."""
    count = len(values)
    mean = float(np.mean(values))
    if count < 2:
        return Estimate(mean, -math.inf, math.inf, count)
    half = student(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def exactly(value: float) -> Estimate:
    """A number that no seed moves."""
    return Estimate(value, value, value, 1)


def student(freedom: int) -> float:
    """The t of which |t| is exceeded with chance 1 - CONFIDENCE.

    With t = sqrt(freedom) tan(angle) the density is cos(angle)^(freedom - 1), summed here by the trapezoid's rule.
    """
    angles = np.linspace(0.0, math.pi / 2, _ANGLES)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    angle = float(np.interp(CONFIDENCE, below / below[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of the ranks, from -1 to 1; NaN: one list is constant. Equal values share their mean rank."""
    ranks = [_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second)]
    a, b = (each - each.mean() for each in ranks)
    length = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / length if length > 0 else math.nan


def _ranks(
    values: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = (last - (counts - 1) / 2)[places]
    return ranks
