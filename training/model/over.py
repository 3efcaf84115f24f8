"""How far is a run, of which each node makes its part at its own speed? As far as most others are.

What a slow node learnt alone after the others' last steps would be of its own data, and gossip would have their models
follow it: its run ends with theirs. And by its own count it would be far behind until then, at a learning rate that the
others left long ago: so its steps bear the swarm's numbers, and it leaves out those that it comes too late for.
"""

from __future__ import annotations

PARTS = 16
"""Of a run: a node says how many it has made. Finer ones gain nothing (RESULTS.md)."""
OVER = PARTS + 1
"""Said of the others when most of them have ended."""
NEARLY = 0.9
"""Of its steps: from there on a run is made to its end, for equal nodes do not end in the same moment."""


def parts_of(step: int, total: int) -> int:
    """How many parts of a run of `total` steps are made after this one; 0 where there is no total."""
    return min(PARTS, PARTS * step // total) if total > 0 else 0


def number_of(last: int, made: int, total: int, others: int) -> int:
    """Which of `total` steps a node makes next, that has `made` so many, the `last` of which bore this number.

    Most others have made these parts of their runs. No step is made twice.
    """
    return min(total - 1, max(last + 1, made, total * min(others, PARTS - 1) // PARTS))


def is_over(made: int, total: int, others: int, last: int = -1) -> bool:
    """Whether a run of `total` steps ends for a node that has `made` so many, the `last` of which bore this number."""
    return made >= total or last >= total - 1 or (others >= OVER and made < NEARLY * total)
