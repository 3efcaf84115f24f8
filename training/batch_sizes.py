"""How much does what a node has made count beside what others have? By the samples of its steps, where batches differ.

Steps of small batches are noisy, and where they count as much as others the mean is so, too: a transformer, trained by
four nodes of which one has batches eight times as large, ends 4 points lower (RESULTS.md).

By a step, and not by all samples since models last met: who made fewer steps has come less far as it is (Wang et al.
2020, arXiv:2007.07481).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

SHARES_MAX, SHARES_MIN = 4.0, 1 / 16
"""Times the median: a model that is worth more would be that of whoever claims to have the largest batches."""
PAIR_MIN = 1 / 16
ALIKE = 1.1
"""What differs by less than this factor is one size."""


def shares(samples: Sequence[float]) -> tuple[float, ...]:
    """Of each member's progress in the mean of a round, the largest 1; empty: all count alike.

    Who does not say counts as the median of those who do.
    """
    said = [size for size in samples if is_said(size)]
    if not said:
        return ()
    usual = median(said)
    sizes = [min(max(size, usual * SHARES_MIN), usual * SHARES_MAX) if is_said(size) else usual for size in samples]
    return () if max(sizes) <= ALIKE * min(sizes) else tuple(size / max(sizes) for size in sizes)


def are_shares(given: Sequence[float], members: int) -> bool:
    """Whether so many members can have been given this."""
    least = SHARES_MIN / SHARES_MAX / ALIKE  # but for rounding
    return not given or (len(given) == members and max(given) == 1 and all(share >= least for share in given))


def share_of_pair(ours: float, theirs: float) -> float:
    """What part of the way to the other, as the gain has it, our model goes: all, or less than all if it is worth more.

    The other goes its own part of the same way back, so that the mean of the two, each by its samples, stays. Nobody
    goes further than where both count alike, whatever the other says of its batches.
    """
    if not (is_said(ours) and is_said(theirs)) or ours <= ALIKE * theirs:
        return 1.0
    return max(PAIR_MIN, theirs / ours)


def is_said(samples: float) -> bool:
    """Whether it is a size of batches."""
    return 0 < samples < math.inf
