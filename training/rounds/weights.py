"""How much does each member's gradient, or its progress, count in their mean? By its samples, within reason.

The leader repeats what members report, so that all scale and divide alike. Who reports far more samples than the others
would make the mean its own: its weight is cut to CAP times the median of those that count. Equal weights scale by 1 and
divide by how many there are: nothing is rounded that an unweighted mean would not round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

CAP = 16.0
SHARES_MAX, SHARES_MIN = 4.0, 1 / 16
"""Times the median: a model that is worth more would be that of whoever claims to have the largest batches."""
ALIKE = 1.1


def capped(weights: Iterable[float]) -> tuple[float, ...]:
    """What the members' order says, from what they reported; what is no weight counts nothing."""
    said = [weight if 0 < weight < math.inf else 0.0 for weight in weights]
    counting = [weight for weight in said if weight > 0]
    most = CAP * median(counting) if counting else 0.0
    return tuple(min(weight, most) for weight in said)


def are_weights(weights: Sequence[float], members: int) -> bool:
    """Whether so many members can have been given this."""
    return len(weights) == members and capped(weights) == tuple(weights)


def scales(weights: Sequence[float]) -> list[float]:
    """By what each multiplies its gradient; the sum of these divides the sum. The largest is 1."""
    most = max(weights, default=0.0)
    return [weight / most if most > 0 else 0.0 for weight in weights]


def shares(samples: Sequence[float]) -> tuple[float, ...]:
    """Of each member's progress in the mean of models, by the samples of its steps; empty: all count alike.

    Who does not say counts as the median of those who do; what differs by less than a tenth is one size. By a step, and
    not by all since the last round: who made fewer steps has come less far as it is (Wang et al. 2020,
    arXiv:2007.07481).
    """
    said = [size for size in samples if 0 < size < math.inf]
    if not said:
        return ()
    usual = median(said)
    sizes = [
        min(max(size, usual * SHARES_MIN), usual * SHARES_MAX) if 0 < size < math.inf else usual for size in samples
    ]
    return () if max(sizes) <= ALIKE * min(sizes) else tuple(scales(sizes))


def are_shares(given: Sequence[float], members: int) -> bool:
    """Whether so many members can have been given this."""
    least = SHARES_MIN / SHARES_MAX / ALIKE  # but for rounding
    return not given or (len(given) == members and max(given) == 1 and all(share >= least for share in given))
