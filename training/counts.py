"""How far may a number that a peer counts be ahead of ours? Rounds, attempts, terms, clocks, ages: so far in one step.

One message must not take a count that all share to its end: a swarm that is cut in two for months comes nowhere near
these limits, and a peer would have to take a swarm through hundreds of rounds to reach what the wire can hold.
"""

from __future__ import annotations

from peerd.transport.errors import PeerError

COUNT_MAX = 1 << 53  # of what the wire holds; nobody counts on from here
STEP_MAX = 1 << 44
FIRST_MAX = 1 << 48  # for one that has not counted yet


def within_step(what: str, told: int, ours: int) -> None:
    """Raises PeerError: `told` is negative, or too far ahead of `ours`."""
    if not 0 <= told <= min(COUNT_MAX - STEP_MAX, ours + STEP_MAX if ours > 0 else FIRST_MAX):
        raise PeerError(f"{what} {told}, where {ours} is known here")
