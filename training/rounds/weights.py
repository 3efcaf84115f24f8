"""How much does each member's gradient count in their mean? By its samples, within reason.

The leader repeats what members report, so that all scale and divide alike. Who reports far more samples than the others
would make the mean its own: its weight is cut to CAP times the median of those that count. Equal weights scale by 1 and
divide by how many there are: nothing is rounded that an unweighted mean would not round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

CAP = 16.0


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
