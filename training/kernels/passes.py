"""What does one pass over whole models compute? Sums of squares, sums, and the two references of a link moved at once.

Arrays have shape (count,). float32 without gaps goes to the compiled kernels; anything else, and all where there are
none, to numpy in pieces that stay in the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from peerd.training.kernels import library
from peerd.training.kernels.cores import each

Vector = npt.NDArray[np.floating[Any]]
Sums = npt.NDArray[np.float64]
Stops = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]

PART = 1 << 20  # values: numpy may hold the interpreter for each operation
BATCH = 1 << 17
"""Values of which numpy makes arrays at a time, in encoders too: malloc keeps 512 KiB of scratch, and a cache holds it.
With 4 MiB, float32 and bfloat16 took 4 times the processor time, in page faults; from 2**15 to 2**18 the differences
are under 20 %."""
ROW = 4096  # values whose squares are added up in float32
SMALL = 1 << 14  # values of a model whose tensors are not worth an operation each
_FLOAT32 = np.dtype(np.float32)
_NOTHING = ctypes.c_char * 0  # lies in any buffer, an empty one too


def parts(count: int, most: int | None = None) -> Iterator[slice]:
    """Slices of at most so many values, or PART, that cover [0, count)."""
    step = most or PART
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def ranges_within(stops: Stops, part: slice) -> tuple[slice, Stops]:
    """Which of the ranges that end at `stops` lie in this part, not an empty one, and where they end within it."""
    first, last = np.searchsorted(stops, [part.start, part.stop - 1], side="right")
    return slice(first, last + 1), np.minimum(stops[first : last + 1], part.stop) - part.start


def is_plain(*arrays: npt.NDArray[np.generic] | None) -> bool:
    """Whether the kernels can take these, of one length: float32 without gaps, or None."""
    length = None
    for array in arrays:
        if array is not None:
            flags = array.flags
            if array.dtype != _FLOAT32 or not (flags.c_contiguous and flags.aligned):
                return False
            assert length in (None, array.size), "kernels go by one length"
            length = array.size
    return True


def squares(values: Vector, known: Vector | None = None) -> float:
    """||values - known||^2, or ||values||^2."""
    if len(values) <= ROW and values.dtype == np.float64:  # as simulated models are
        exact = values if known is None else values - known
        return float(exact.dot(exact))
    return float(squares_by(values, known, np.array([len(values)], np.int64))[0])


def squares_by(values: Vector, known: Vector | None, stops: Stops) -> Sums:
    """The same of each of the ranges that follow each other and end at `stops`, shape (ranges,)."""
    assert _cover(stops, values), "the ranges cover the vector"
    if len(values) > PART:
        return _squares_of_parts(values, known, stops)
    found = np.empty(len(stops))
    if (kernels := library.LIBRARY) is not None and is_plain(values, known):
        kernels.peerd_squares(address(values), address(known), address(stops), len(stops), address(found))
        return found
    if known is None or len(values) <= SMALL:
        return _squares_by(values if known is None else values - known, stops)
    for index, where in enumerate(_ranges(stops)):
        found[index] = _squares(values[where] - known[where])
    return found


def _squares_of_parts(values: Vector, known: Vector | None, stops: Stops) -> Sums:
    def one(part: slice) -> tuple[slice, Sums]:
        ranges, inner = ranges_within(stops, part)
        return ranges, squares_by(values[part], None if known is None else known[part], inner)

    found = np.zeros(len(stops))
    for ranges, sums in each(one, parts(len(values))):
        found[ranges] += sums
    return found


def scale_by(values: Vector, factors: Sums, stops: Stops) -> None:
    """Multiply each range by its factor."""
    assert values.flags.writeable
    assert _cover(stops, values), "the ranges cover the vector"
    if len(values) > PART:
        each(lambda part: _scale_part(values, factors, stops, part), parts(len(values)))
    elif (kernels := library.LIBRARY) is not None and is_plain(values):
        kernels.peerd_scale(address(values), address(stops), len(stops), address(factors))
    elif len(stops) == 1:
        values *= values.dtype.type(factors[0])
    elif len(values) <= SMALL:
        values *= np.repeat(factors.astype(values.dtype), np.diff(stops, prepend=0))
    else:
        for factor, where in zip(factors.tolist(), _ranges(stops), strict=True):
            values[where] *= factor


def _scale_part(values: Vector, factors: Sums, stops: Stops, part: slice) -> None:
    ranges, inner = ranges_within(stops, part)
    scale_by(values[part], factors[ranges], inner)


def add_within(values: Vector, known: Vector | None, most: float, out: Vector) -> bool:
    """out = values + known, or values; returns whether all of these are numbers in [-most, most]."""
    assert out.flags.writeable
    if (kernels := library.LIBRARY) is not None and is_plain(values, known, out):
        return not kernels.peerd_add_within(address(values), address(known), out.size, most, address(out))
    within = True
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts(len(out)):
            sums = out[part]
            if known is None:
                np.copyto(sums, values[part])
            else:
                np.add(values[part], known[part], out=sums)
            within &= bool(np.abs(sums).max() <= most)
    return within


def at_least(values: Vector, known: Vector | None, least: float) -> tuple[Places, Vector, float] | None:
    """Where |values - known|, or |values|, is `least` or more, in order; these differences; the squares of the others.

    None where one is not finite. `least` is above 0.
    """
    if (kernels := library.LIBRARY) is not None and is_plain(values, known):
        where, large, others = np.empty(values.size, np.int64), np.empty_like(values), np.zeros(1)
        of_all = address(values), address(known), values.size, least
        found = kernels.peerd_at_least(*of_all, address(where), address(large), address(others))
        return None if found < 0 else (where[:found], large[:found], float(others[0]))
    places, differences, total = [np.empty(0, np.int64)], [values[:0]], 0.0
    for part in parts(len(values), BATCH):
        with np.errstate(over="ignore", invalid="ignore"):
            apart = values[part].copy() if known is None else values[part] - known[part]
        if not is_finite(apart):
            return None
        enough = np.flatnonzero(np.abs(apart) >= least)
        places.append(enough + part.start)
        differences.append(apart[enough])
        apart[enough] = 0
        total += squares(apart)
    return np.concatenate(places), np.concatenate(differences), total


def move_references(mine: Vector, outgoing: Vector, theirs: Vector, following: Vector, stops: Stops) -> Sums:
    """mine += outgoing, theirs = following, following -= mine; returns its squares then, as `squares_by`."""
    assert mine.flags.writeable and theirs.flags.writeable and following.flags.writeable  # noqa: PT018
    assert _cover(stops, mine), "the ranges cover the vector"
    if (kernels := library.LIBRARY) is not None and is_plain(mine, outgoing, theirs, following):
        found = np.empty(len(stops))
        arrays = address(mine), address(outgoing), address(theirs), address(following)
        kernels.peerd_move_references(*arrays, address(stops), len(stops), address(found))
        return found
    for part in parts(len(mine)):
        moved, came = mine[part], following[part]
        np.add(moved, outgoing[part], out=moved)
        np.copyto(theirs[part], came)
        np.subtract(came, moved, out=came)
    return _squares_by(following, stops)


def add(values: Vector, correction: Vector, out: Vector) -> tuple[float, float]:
    """out = values + correction; returns ||out||^2 and ||correction||^2."""
    assert out.flags.writeable
    if (kernels := library.LIBRARY) is not None and is_plain(values, correction, out):
        totals = np.zeros(2)
        kernels.peerd_add(address(values), address(correction), address(out), out.size, address(totals))
        return float(totals[0]), float(totals[1])
    np.add(values, correction, out=out)
    return squares(out), squares(correction)


def correct(model: Vector, correction: Vector) -> None:
    """model += correction."""
    each(lambda part: np.add(model[part], correction[part], out=model[part]), parts(len(model)))


def mean(gradient: Vector, summed: Vector, members: float) -> tuple[float, float]:
    """gradient = summed / members; returns its squares, and those of what `gradient` was less what it is."""
    assert gradient.flags.writeable
    if (kernels := library.LIBRARY) is not None and is_plain(gradient, summed):
        totals = np.zeros(2)
        kernels.peerd_mean(address(gradient), address(summed), gradient.size, members, address(totals))
        return float(totals[0]), float(totals[1])
    length = apart = 0.0
    for part in parts(len(gradient)):
        divided = summed[part] / summed.dtype.type(members)
        length += squares(divided)
        apart += squares(gradient[part], divided)
        gradient[part] = divided
    return length, apart


def is_finite(values: Vector) -> bool:
    """Whether there is no NaN and no infinity."""
    if len(values) > PART:
        return all(each(lambda part: is_finite(values[part]), parts(len(values))))
    if (kernels := library.LIBRARY) is not None and is_plain(values):
        return bool(kernels.peerd_is_finite(address(values), values.size))
    return bool(np.isfinite(values).all())


def address(array: npt.NDArray[np.generic] | None) -> int | None:
    """Where its values are, without gaps, for a call while the caller holds the array."""
    if array is None:
        return None
    try:
        return ctypes.addressof(_NOTHING.from_buffer(array.data))  # a quarter of the time of `ctypes.data`
    except TypeError:  # it is read-only
        return array.ctypes.data


def _squares_by(values: Vector, stops: Stops) -> Sums:
    if len(values) <= ROW and len(stops) == 1:  # too few for BLAS to wake its threads
        exact = values.astype(np.float64, copy=False)
        return np.array([exact.dot(exact)])
    if len(values) <= SMALL:
        exact = np.zeros(len(values) + 1)
        np.multiply(values, values, out=exact[:-1], dtype=np.float64)
        starts = np.concatenate([[0], stops[:-1]])
        return np.where(stops > starts, np.add.reduceat(exact, starts), 0.0)  # of an empty range it is one value
    return np.array([_squares(values[where]) for where in _ranges(stops)])


def _cover(stops: Stops, values: Vector) -> bool:
    return not len(stops) or bool(stops[-1] == len(values))


def _ranges(stops: Stops) -> Iterator[slice]:
    return (slice(start, stop) for start, stop in pairwise([0, *stops.tolist()]))


def _squares(values: Vector) -> float:
    """Not by BLAS: it would wake a thread pool for 10 000 values, next to the trainer. Rows keep float32 exact."""
    cut = len(values) - len(values) % ROW
    rows = values[:cut].reshape(-1, ROW)
    total = float(np.einsum("ij,ij->i", rows, rows).sum(dtype=np.float64))
    total += float(np.einsum("i,i->", values[cut:], values[cut:]))
    if 1e-20 < total < np.inf:
        return total
    if not values.any():
        return 0.0
    return float(np.einsum("i,i->", values, values, dtype=np.float64))  # 3 times slower: only where float32 gives out
