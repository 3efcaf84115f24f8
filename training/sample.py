"""How far is a model from what it was? By all of its values, or of a large one by a sample of them.

A node wants to know how far its model has come since several moments (one for each link), and to keep the model of each
would be a copy each. Of a small model it does. Of a large one it keeps runs of RUN neighbours, one of each block, at a
place of the block that a fixed seed has drawn: no length of a row meets the same column each time, and whatever moved,
the expected square of the estimate is the square of the distance. Each range of the model (a tensor, or some) has a
rate of its own, and KEPT_MIN values at least; float buffers are kept whole, as a few statistics are no sample.

Its error, of the norm of a change over one range of which `kept` values are known: about sqrt(1 / (2 kept)) where all
move alike, 0.3 % and less; where few runs have moved, of which `hit` are kept, about sqrt(1 / (4 hit)). A change of one
single value is missed, or said to be up to sqrt(THIN_MAX) times as long: who knows a bound takes the smaller of both.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.kernels.cores import each
from peerd.training.kernels.passes import add, parts, squares_by
from peerd.training.model.variances import bounded
from peerd.training.sketch import Sketch, sketch

WHOLE_MAX = 1 << 22
"""Values of a model that is kept whole: 16 MB."""
RUN = 16  # values, a cache line of float32: to read fewer of them would cost as much
THIN_MAX = 64
"""One of so many values is kept, at most: 0.06 bytes a value and moment in place of 4."""
KEPT_MIN = 1 << 16  # values of a range
RANGES_MAX = 128  # of a model of more tensors, neighbours share one; a message has a limit for each (robust.py)
TENSOR_MIN = 1 / 4
"""A tensor of parameters counts as gone at least this share of their mean way, value for value."""
_SEED = 0x7065657264  # the same sample in every run: what a figure means does not change


class _Range:
    """One range of the model, and what of it is kept."""

    def __init__(self, start: int, stop: int, rng: random.Random, *, whole: bool) -> None:
        self.where = slice(start, stop)
        count = stop - start
        rate = 1 if whole else min(THIN_MAX, max(1, count // KEPT_MIN))
        self.runs: npt.NDArray[np.int64] | None = None  # which of its runs, where not all
        if rate > 1:
            blocks = count // (rate * RUN)
            self.runs = np.arange(blocks, dtype=np.int64) * rate
            for part in parts(blocks):  # the same numbers as all at once, but 2**31 random bits are not to be had
                self.runs[part] += np.frombuffer(rng.randbytes(4 * (part.stop - part.start)), np.uint32) % rate
        # what is left at the end is less than a block: it stands for itself
        self._tail = count if self.runs is None else count - count // (rate * RUN) * rate * RUN
        self.kept = self._tail + (0 if self.runs is None else RUN * len(self.runs))
        self.stops = [self.kept] if self.runs is None else [self.kept - self._tail, self.kept]
        self.weights = [1.0] if self.runs is None else [float(rate), 1.0]

    def take(self, values: Vector, out: Vector) -> None:
        part = values[self.where]
        if self.runs is None:
            np.copyto(out, part)
            return
        cut = len(part) - self._tail
        sampled = out[: len(self.runs) * RUN].reshape(-1, RUN)
        np.take(part[:cut].reshape(-1, RUN), self.runs, axis=0, out=sampled, mode="clip")
        np.copyto(out[len(self.runs) * RUN :], part[cut:])


class Sample:
    """Which values of a model stand for it."""

    def __init__(self, layout: Layout, whole_max: int) -> None:
        stops = stops_of(layout)
        rng = random.Random(_SEED)
        self.is_whole = layout.total <= whole_max
        self._stops = stops
        self._ranges: list[_Range] = []
        if not self.is_whole:
            for start, stop in pairwise([0, *stops.tolist()]):
                self._ranges.append(_Range(start, stop, rng, whole=start >= layout.parameters))
        of_range = [len(one.stops) for one in self._ranges]
        self._kept_stops = self._all_stops()
        self._weights = np.array([weight for one in self._ranges for weight in one.weights])
        self._firsts = np.cumsum([0, *of_range])[:-1]
        self.kept = sum(one.kept for one in self._ranges) if self._ranges else layout.total
        self._parameters = layout.parameters
        self._of_parameters = int(np.searchsorted(stops, layout.parameters, side="right"))
        gap = layout.total - self.kept  # buffers, the last of all, are kept whole
        self._layout = layout
        self._buffers = layout.total - layout.parameters  # all of them are kept
        self._variances = [slice(start - gap, stop - gap) for start, stop in layout.variances]

    def take(self, values: Vector) -> Vector:
        """The values that are kept of a model, in memory of their own, shape (kept,)."""
        if self.is_whole:
            return values.copy()
        out: Vector = np.empty(self.kept, values.dtype)
        self.refresh(out, values)
        return out

    def refresh(self, kept: Vector, values: Vector) -> None:
        """Keep what is so of this model in place of another's."""
        if self.is_whole:
            np.copyto(kept, values)
            return
        start = 0
        for one in self._ranges:
            one.take(values, kept[start : start + one.kept])
            start += one.kept

    def refresh_with_sum(self, kept: Vector, values: Vector, correction: Vector) -> tuple[float, float]:
        """Keep what is so of values + correction; returns both squares, of the sum and of it, of the parameters."""
        cut = self._parameters
        if self.is_whole:
            np.add(values[cut:], correction[cut:], out=kept[cut:])
            return add(values[:cut], correction[:cut], kept[:cut])
        self.refresh(kept, values)
        kept += self.take(correction)

        def lengths(part: slice) -> tuple[float, float]:
            return add(values[part], correction[part], np.empty(part.stop - part.start, values.dtype))

        found = each(lengths, parts(cut))
        return sum(norm for norm, _ in found), sum(length for _, length in found)

    def correct(self, kept: Vector, correction: Vector) -> None:
        """The model has been corrected by this, and what is kept of it is, too; variances as everywhere."""
        before = [kept[where].copy() for where in self._variances]
        kept += correction if self.is_whole else self.take(correction)
        for where, values in zip(self._variances, before, strict=True):
            kept[where] = bounded(values, kept[where])

    def squares(self, values: Vector, kept: Vector) -> npt.NDArray[np.float64]:
        """About ||values - model||^2 over each range, of a model of which this is kept."""
        if self.is_whole:
            return squares_by(values, kept, self._stops)
        parts = self._weights * squares_by(self.take(values), kept, self._kept_stops)
        sums: npt.NDArray[np.float64] = np.add.reduceat(parts, self._firsts)
        return sums

    def distance(self, values: Vector, kept: Vector) -> float:
        """About ||values - model|| over the parameters."""
        if self.is_whole:
            return norm_of_difference(values[: self._parameters], kept[: self._parameters])
        return math.sqrt(self.squares(values, kept)[: self._of_parameters].sum())

    def sketch(self, values: Vector, seed: bytes) -> Sketch:
        """About the model's, shape (2, WIDTH): the distance of two is about that of the two models."""
        if self.is_whole:
            return sketch(values, self._layout, seed)
        kept, start = self.take(values), 0
        for stop, weight in zip(self._kept_stops, self._weights, strict=True):
            kept[start:stop] *= math.sqrt(weight)
            start = stop
        return sketch(kept, Layout(len(kept) - self._buffers, len(kept)), seed)

    def _all_stops(self) -> npt.NDArray[np.int64]:
        found: list[int] = []
        for one in self._ranges:
            start = found[-1] if found else 0
            found += [start + stop for stop in one.stops]
        return np.array(found, np.int64)


@lru_cache(maxsize=8)
def sample_of(layout: Layout) -> Sample:
    """One for all that is kept of a model."""
    return Sample(layout, WHOLE_MAX)


def stops_of(layout: Layout) -> npt.NDArray[np.int64]:
    """Where the ranges of a model end, most often its tensors; parameters and buffers share none."""
    inner = {stop for stop in layout.tensors if 0 < stop < layout.total}
    stops = sorted(stop for stop in inner | {layout.parameters, layout.total} if stop > 0)
    step = math.ceil(len(stops) / (RANGES_MAX - 1))
    return np.array(sorted({*stops[step - 1 :: step], layout.parameters, layout.total} - {0}), np.int64)


def groups_of(layout: Layout) -> list[tuple[slice, npt.NDArray[np.int64]]]:
    """Where its parameters and its float buffers are, if it has any, and where the ranges of each end within them."""
    cut, stops = layout.parameters, stops_of(layout)
    both = (slice(0, cut), stops[stops <= cut]), (slice(cut, layout.total), stops[stops > cut] - cut)
    return [(group, inner) for group, inner in both if len(inner)]


def evened_length(squares: npt.NDArray[np.float64], stops: npt.NDArray[np.int64]) -> float:
    """Of a vector of parameters whose tensors have these squares, and end at `stops`: none counts as less than in
    `evened`, by degrees."""
    sizes = np.diff(stops, prepend=0)
    least = TENSOR_MIN**2 * squares.sum() / sizes.sum() * sizes
    # the less, the less it says of the others: one that counted or not would make members who are alike far apart
    says = np.divide(squares, least, out=np.ones(len(sizes)), where=squares < least)
    mean = says.dot(squares) / says.dot(sizes)
    return math.sqrt(np.maximum(squares, TENSOR_MIN**2 * mean * sizes).sum())


def evened(norms: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """No tensor of these has less than TENSOR_MIN of the mean, value for value, of those that have more."""
    squares = norms * norms
    mean = squares.sum() / max(1, sizes.sum())
    rest = squares >= TENSOR_MIN**2 * mean * sizes
    mean = squares[rest].sum() / max(1, sizes[rest].sum())
    most: npt.NDArray[np.float64] = np.maximum(norms, TENSOR_MIN * np.sqrt(mean * sizes))
    return most
