"""When does a slow node's run end before its last step? With most others' runs.

What it learnt alone from there on would be of its own data, and gossip would have the others' models follow it.
"""

from __future__ import annotations

NEARLY = 0.9
"""Of its steps: from there on a run is made to its end, for equal nodes do not end in the same moment."""


def is_over(step: int, total: int, *, most_ended: bool) -> bool:
    """Whether a run of `total` steps ends after this one."""
    return step >= total or (most_ended and step < NEARLY * total)
