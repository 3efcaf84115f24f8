"""Which members cannot reach each other, and how do rounds go on? By their words, and by attempts that came no further.

How this works. A member says to whom it can make no connection. Only once an attempt that needs this line has come no
further are the two apart. From then on, until it says so no more, rounds have an order in which the two are no
neighbours. Where none is found in a ring or by halving, they go along a tree: the leader at its root, and of each two
who are apart one a leaf right below it, so that nobody but the leader is its neighbour. Whom the leader itself cannot
reach, or who cannot reach it, is left out.

An attempt need not wait for the leader's patience then. A word that cuts it short is heeded MISSES_MAX times in as
long as a culprit is set aside for; so who says another thing each time costs what it would by silence, and nobody else
is left out for words.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache

from peerd.training.rounds.culprits import MISSES_MAX, TRIES_APART
from peerd.training.rounds.topology import ARITY_MAX, parse_topology
from peerd.transport.ids import NodeId

TRIES = 64  # orders, drawn: of four in a ring one in three has two of them apart
SEGMENTS_MAX = 64  # whose trees are looked at: a tree alone has one

Pair = tuple[NodeId, NodeId]
"""Who says so, and whom it cannot reach."""
Unreached = Mapping[NodeId, Sequence[NodeId]]
"""To whom each member says that it can make no connection."""


class Lines:
    """What one leader makes of the members' words about their lines."""

    def __init__(self, me: NodeId, rng: random.Random) -> None:
        self._me = me
        self._rng = rng
        self._apart: set[Pair] = set()
        self._heeded: dict[NodeId, deque[float]] = {}  # when a member's word has cut an attempt short

    def note_stuck(
        self, roster: Sequence[NodeId], topology: str, unreached: Unreached, patience_s: float, now: float, *,
        early: bool,
    ) -> bool:  # fmt: skip
        """An attempt of these has come no further; `early`: not for as long as the leader is patient.

        Whether it is over: it needs a line that is broken by a word which is heeded. That line is then broken until
        the member says so no more.
        """
        pairs = self._needed(_pairs(unreached), roster, topology)
        if early:
            pairs = {pair for pair in pairs if self._is_heeded(pair[0], patience_s, now)}
            for says in {says for says, _ in pairs}:
                self._heeded.setdefault(says, deque(maxlen=MISSES_MAX)).append(now)
        self._apart |= pairs
        return bool(pairs)

    def fitting(
        self, roster: list[NodeId], unreached: Unreached, topology: Callable[[int], str]
    ) -> tuple[list[NodeId], str]:
        """Who of these can be in a round together, an order in which they can, and by which topology.

        It is as it was, and by `topology(size)`, if that may be.
        """
        self._apart = {pair for pair in self._apart if pair[1] in unreached.get(pair[0], ())}
        roster = _without(_apart_from(self._me, self._apart), roster)
        pairs = _among(roster, self._apart)
        name = topology(len(roster))
        if not pairs:
            return roster, name
        if order := self._arranged(roster, pairs, name):
            return order, name
        count = Counter(member for pair in pairs for member in pair)
        root = self._me if self._me in roster else min(roster, key=lambda member: (count[member], member))
        roster = _without(_apart_from(root, pairs), roster)
        below = _cover(_among(roster, pairs))
        roster = _without(below[ARITY_MAX - 1 :], roster)
        below = below[: ARITY_MAX - 1]
        return [root, *below, *_without([root, *below], roster)], f"tree:{max(2, 1 + len(below))}"

    def _needed(self, pairs: set[Pair], roster: Sequence[NodeId], topology: str) -> set[Pair]:
        """Whose lines an attempt of these needs: who leads must reach all, whatever their order."""
        near = _neighbours(topology, len(roster))
        if near is None:
            return pairs
        return {pair for pair in pairs if self._me in pair} | set(_neighbouring(pairs, roster, near))

    def _is_heeded(self, says: NodeId, patience_s: float, now: float) -> bool:
        before = self._heeded.get(says)
        return before is None or len(before) < MISSES_MAX or now - before[0] > TRIES_APART * patience_s

    def _arranged(self, roster: list[NodeId], pairs: set[Pair], topology: str) -> list[NodeId] | None:
        near, order = _neighbours(topology, len(roster)), list(roster)
        if near is None:
            return None
        for _ in range(TRIES):
            if not any(_neighbouring(pairs, order, near)):
                return order
            self._rng.shuffle(order)
        return None


def _pairs(unreached: Unreached) -> set[Pair]:
    return {(says, it) for says, others in unreached.items() for it in others if it in unreached and it != says}


def _apart_from(member: NodeId, pairs: set[Pair]) -> set[NodeId]:
    """Who is apart from it."""
    return {other for pair in pairs if member in pair for other in pair} - {member}


def _without(some: Collection[NodeId], roster: list[NodeId]) -> list[NodeId]:
    return [member for member in roster if member not in some]


def _among(roster: list[NodeId], pairs: set[Pair]) -> set[Pair]:
    return {pair for pair in pairs if pair[0] in roster and pair[1] in roster}


def _neighbouring(pairs: set[Pair], order: Sequence[NodeId], near: set[tuple[int, int]]) -> Iterator[Pair]:
    """Who are neighbours in this order."""
    ranks = {member: rank for rank, member in enumerate(order)}
    return (pair for pair in pairs if (ranks.get(pair[0]), ranks.get(pair[1])) in near)


def _cover(pairs: set[Pair]) -> list[NodeId]:
    """Few of whom each pair has one; first who is in the most."""
    found: list[NodeId] = []
    while pairs:
        count = Counter(member for pair in pairs for member in pair)
        found.append(max(count, key=lambda member: (count[member], member)))
        pairs = {pair for pair in pairs if found[-1] not in pair}
    return found


@lru_cache(maxsize=16)
def _neighbours(topology: str, size: int) -> set[tuple[int, int]] | None:
    """The ranks that send each other anything; None: not known, there are too many trees."""
    trees, ranks = parse_topology(topology), range(size)
    if trees.segments(size) > SEGMENTS_MAX:
        return None
    found: set[tuple[int, int]] = set()
    for segment in range(trees.segments(size)):
        for rank in ranks:
            for other in (trees.parent(segment, rank, size), trees.giver(segment, rank, size)):
                found |= set() if other is None else {(rank, other), (other, rank)}
    return found
