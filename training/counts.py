"""How far may a number that a peer counts be ahead of ours? Rounds, attempts, terms, clocks, ages: so far in one step.

One message must not take a count that all share to its end: a swarm that is cut in two for months comes nowhere near
these limits, and a peer would have to take a swarm through thousands of rounds to where a newcomer does not believe it,
and through 100,000 to what the wire can hold.
"""

from __future__ import annotations

from peerd.transport.errors import PeerError
from peerd.transport.messages import COUNT

COUNT_END = COUNT.high + 1  # of what the wire holds; nobody counts on from here
STEP_MAX = 1 << 36  # two years of a thousand a second
FIRST_MAX = 1 << 48  # for one that has not counted yet
REPORTED_MAX = FIRST_MAX - STEP_MAX  # a leader that has not: its orders go on from here, to others that have not
REPORTED_STEP = STEP_MAX // 2  # so far may one that has go by what one member says: others are to believe its order


def within_step(what: str, told: int, ours: int, first: int = FIRST_MAX) -> None:
    """Raises PeerError: `told` is negative, or too far ahead of `ours`; or beyond `first`, where nothing is counted."""
    if not 0 <= told <= min(COUNT_END - STEP_MAX, ours + STEP_MAX if ours > 0 else first):
        raise PeerError(f"{what} {told}, where {ours} is known here")
