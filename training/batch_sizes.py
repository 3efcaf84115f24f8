"""How much does what a node has made count beside what others have? By the samples of its steps, where batches differ.

Steps of small batches are noisy, and where they count as much as others the mean is so, too: a transformer, trained by
four nodes of which one has batches eight times as large, ends 4 points lower (RESULTS.md).

Who has larger batches and makes fewer steps has a model that is old when it comes, and draws the others back: half as
many steps are enough for that, though it has seen four times as much. So a node counts more only while it is about as
fast, less only while it is no faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_high, median_low

SHARES_MAX, SHARES_MIN = 4.0, 1 / 16
"""Times the median: a model that is worth more would be that of whoever claims to have the largest batches."""
PAIR_MIN = 1 / 16
RATIO_MAX = 1e6
ALIKE = 1.1
"""What differs by less than this factor is one size."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one node says; 0: it does not."""

    samples: float = 0.0  # of a step
    steps: float = 0.0  # a second, where two are compared; since its last contribution, where members of a round are

    @property
    def is_said(self) -> bool:
        """Whether both are sizes."""
        return 0 < self.samples < math.inf and 0 < self.steps < math.inf

    def worth(self, other: Work) -> float:
        """How many times as much as the other's it is worth: by samples, and the fourth power of its speed."""
        if not (self.is_said and other.is_said):
            return 1.0
        times, faster = (
            min(RATIO_MAX, max(1 / RATIO_MAX, ours / theirs))
            for ours, theirs in ((self.samples, other.samples), (self.steps, other.steps))
        )
        return median((times, times * faster**4, 1.0))


def shares(works: Sequence[Work]) -> tuple[float, ...]:
    """Of each member's progress in the mean of a round, the largest 1; empty: all count alike.

    Who does not say counts as the median of those who do: of two sizes the lower one, and of two speeds the higher, for
    who is as slow as that for its large batches is no more worth.
    """
    said = [work for work in works if work.is_said]
    if not said:
        return ()
    usual = Work(median_low(work.samples for work in said), median_high(work.steps for work in said))
    worths = [min(SHARES_MAX, max(SHARES_MIN, work.worth(usual))) for work in works]
    return () if max(worths) <= ALIKE * min(worths) else tuple(each / max(worths) for each in worths)


def are_shares(given: Sequence[float], members: int) -> bool:
    """Whether so many members can have been given this."""
    if not given:
        return True
    least = SHARES_MIN / SHARES_MAX / ALIKE  # but for rounding
    near = max(given) == 1 <= ALIKE * SHARES_MAX * median_low(given)
    return len(given) == members and near and all(share >= least for share in given)


def share_of_pair(ours: Work, theirs: Work) -> float:
    """What part of the way to the other, as the gain has it, our model goes: all, or less than all if it is worth more.

    The other goes its own part of the same way back, so that the mean of the two, each by its worth, stays. Nobody goes
    further than where both count alike, whatever the other says of its batches.
    """
    times = ours.worth(theirs)
    return 1.0 if times <= ALIKE else max(PAIR_MIN, 1 / times)
