"""How far may a round take the model? As far as its members say that they have come since the last one.

Each reports how long its contribution is, parameters and float buffers apart, and the leader's order repeats it, so
that all reckon alike: the agreed model moves by at most LIMIT times the median length. Whose length is beyond FAR
medians again and again, or beyond TOO_FAR medians, is left out by the leader. In a sum along a tree or a ring nobody
sees a single contribution, so a member that reports a small length and hands in a large vector is not named, only the
mean is shortened: it can turn a round its own way, by no more than an honest one goes.

Whose run has ended goes no further, and goes on saying what was usual of its contributions: else nobody but who trains
on would say how far that one may take all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import numpy as np

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.kernels.passes import Stops, Sums, parts, ranges_within, squares_by
from peerd.training.sample import evened_length, groups_of

LIMIT = 2.0
"""Times the median: room for one of five that is six times as fast as the others."""
FAR = 8.0
"""Times the median, of all that are not zero: longer than a member of any honest speed, but for a moment. Who trains
through the rounds while the others' processes stand still, or have just come back, is that far in one of them."""
TOO_FAR = 64.0
"""Times the median: longer than any honest moment."""
FORGIVEN = 1 / 8
"""Of a round that was too long, by each that was not."""
PATIENCE = 2
"""Rounds that may be too long."""
ROUNDING = 2.0**-20
"""Of a model's norm: who has come no further has not moved, but was rounded."""
GROUPS = 2  # parameters, float buffers
KEPT = 256
"""Of a member's own lengths, from all of its run: with a learning rate that falls the last ones are next to nothing,
and who is slower is not as far yet."""
SHORTENED = 2**12  # steps of a factor: sums that differ by 1e-13 lie on both sides of one once in 1e9 rounds

Lengths = tuple[float, ...]


def lengths_of(values: Vector, layout: Layout, since: Vector, lost: Vector | None = None) -> Lengths:
    """Of the two groups of a model that has gone from `since` to `values`, with what its encoding lost before.

    What is not finite is as long as can be said. No tensor of parameters counts as gone far less than the others: who
    trains what this member leaves to others would be far beyond it.
    """
    found = [0.0] * GROUPS
    for group, stops in groups_of(layout):
        squared = _squares(values[group], since[group], lost if lost is None else lost[group], stops)
        length = math.sqrt(squared.sum())
        if length <= ROUNDING * norm_of_difference(since[group]):
            continue
        are_parameters = group.stop <= layout.parameters
        if not math.isfinite(length):
            length = 1e300
        elif are_parameters:
            length = evened_length(squared, stops)
        found[0 if are_parameters else 1] = length
    return tuple(found)


def _squares(values: Vector, since: Vector, lost: Vector | None, stops: Stops) -> Sums:
    """Of values - since + lost, by tensor, of each part of them: none is as large as a model."""
    if lost is None:
        return squares_by(values, since, stops)
    found = np.zeros(len(stops))
    for part in parts(len(values)):
        ranges, inner = ranges_within(stops, part)
        found[ranges] += squares_by(values[part] - since[part] + lost[part], None, inner)
    return found


def are_lengths(lengths: Sequence[float], members: int) -> bool:
    """Whether so many members could have said this."""
    return len(lengths) == GROUPS * members and all(0 <= length < math.inf for length in lengths)


def limits_of(lengths: Sequence[float]) -> Lengths:
    """Of the groups of a mean, from what all members of its round have said."""
    return tuple(LIMIT * _median(lengths[group::GROUPS]) for group in range(GROUPS))


class Usual:
    """How long the contributions of one member were in its run."""

    def __init__(self) -> None:
        self._kept: list[Lengths] = []
        self._count = 0
        self._apart = 1  # contributions from one that is kept to the next

    def note(self, lengths: Lengths) -> None:
        """It contributes."""
        if self._count % self._apart == 0:
            self._kept.append(lengths)
        self._count += 1
        if len(self._kept) > KEPT:
            del self._kept[1::2]
            self._apart *= 2

    def or_longer(self, lengths: Lengths) -> Lengths:
        """What it says once its run has ended, for what is left of its way."""
        return tuple(max(left, _median(each[group] for each in self._kept)) for group, left in enumerate(lengths))


def longest_mean(lengths: Sequence[float], shares: Sequence[float]) -> float:
    """The longest that the mean of such gradients can be, `shares` of it being each member's.

    Gradients vary from batch to batch: one that is long makes a mean beyond LIMIT medians among few members, and the
    mean must be what it is. A mean that is longer than its parts were said to be, or were worth up to FAR medians, is
    no mean of them. What is no length was not said: it may be as long as any.
    """
    said = [length if length >= 0 else math.inf for length in lengths]
    usual = _median(length for length, share in zip(said, shares, strict=True) if share > 0 and length < math.inf)
    worth = sum(share * min(length, FAR * usual) for length, share in zip(said, shares, strict=True))
    longest = max(LIMIT * usual, (1 + ROUNDING) * worth / (sum(shares) or 1.0))
    return longest if longest < math.inf else sys.float_info.max  # of lengths that no gradient of float32 has


class FarRounds:
    """In how many rounds has each member been too long? Such a round is worth at most LIMIT medians, as any is."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def note(self, far: set[str], roster: Iterable[str]) -> None:
        """A round of these begins; `far` are too long."""
        self._counts = {
            member: count
            for member in roster
            if (count := self._counts.get(member, 0.0) + (1.0 if member in far else -FORGIVEN)) > 0
        }

    def worn_out(self, far: set[str]) -> set[str]:
        """Those of `far` who have been too long too often."""
        return {member for member in far if self._counts.get(member, 0.0) > PATIENCE - 1}


def far_off(lengths: Mapping[str, Lengths], times: float = FAR) -> set[str]:
    """Who is longer than so many medians; with fewer than three nobody could say."""
    if len(lengths) < 3:
        return set()
    far = set()
    for group in range(GROUPS):
        most = times * _median(each[group] for each in lengths.values())
        far |= {name for name, each in lengths.items() if each[group] > most > 0}
    return far


def shorten(difference: Vector, layout: Layout, limits: Sequence[float]) -> bool:
    """Keep each group of a mean difference to its limit, in place; says whether one was longer."""
    was_long = False
    for group, limit in zip((slice(0, layout.parameters), slice(layout.parameters, None)), limits, strict=True):
        length = norm_of_difference(difference[group])
        if length > limit:
            difference[group] *= shortening(limit, length)
            was_long = True
    return was_long


def shortening(limit: float, length: float) -> float:
    """What a mean of this length is multiplied by, rounded down: all members are to take the same bits.

    Their sums of squares differ in the last digits, as compiled kernels and NumPy add in another order.
    """
    mantissa, exponent = math.frexp(limit / length)
    return math.ldexp(math.floor(mantissa * SHORTENED) / SHORTENED, exponent)


def _median(lengths: Iterable[float]) -> float:
    """Of those that have moved: who has finished says nothing of the others' speed."""
    moved = [length for length in lengths if length > 0]
    return median(moved) if moved else 0.0
