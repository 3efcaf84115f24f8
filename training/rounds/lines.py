"""Which members cannot reach each other, and how do rounds go on? By their words, and by attempts that came no further.

How this works. A member says to whom it can make no connection. Only once an attempt with such a pair has come no
further are the two apart: a line is no matter to rounds that do not use it. From then on, until it says so no more,
rounds have an order in which the two are no neighbours, by a tree where there is none in a ring or by halving: with the
leader at its root all others are leaves. Whom the leader itself cannot reach, or who cannot reach it, is left out.

An attempt need not wait for the leader's patience then. A word that cuts it short is heeded MISSES_MAX times in as
long as a culprit is set aside for; so who says another thing each time costs what it would by silence, and nobody is
set aside by words.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from peerd.training.rounds.culprits import MISSES_MAX, TRIES_APART
from peerd.training.rounds.topology import ARITY_MAX, parse_topology
from peerd.transport.ids import NodeId

TRIES = 64  # orders, drawn: of four in a ring one in three has two of them apart
SEGMENTS_MAX = 64  # whose trees are looked at: a tree of trees has one

Pair = tuple[NodeId, NodeId]
"""Who says so, and whom it cannot reach."""
Unreached = Mapping[NodeId, Iterable[NodeId]]


class Lines:
    """What one leader makes of the members' words about their lines."""

    def __init__(self, me: NodeId, rng: random.Random) -> None:
        self._me = me
        self._rng = rng
        self._apart: set[Pair] = set()
        self._heeded: dict[NodeId, deque[float]] = {}  # when a member's word has cut an attempt short

    def stuck(self, unreached: Unreached, patience_s: float, now: float, *, early: bool) -> bool:
        """An attempt of these has come no further; `early`: not for as long as the leader is patient.

        Whether it is over: there is a pair in it of which a word is heeded.
        """
        pairs = _pairs(unreached)
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
        self._apart &= _pairs(unreached)
        while pairs := [pair for pair in sorted(self._apart) if pair[0] in roster and pair[1] in roster]:
            size = len(roster)
            if not any(self._me in pair for pair in pairs):  # who leads must reach all, whatever their order
                for name in (topology(size), "tree:2", f"tree:{min(size, ARITY_MAX)}"):
                    if order := self._arranged(roster, pairs, name):
                        return order, name
            of = [member for pair in pairs for member in pair if member != self._me]
            out = max(of, key=lambda member: (of.count(member), member))
            roster = [member for member in roster if member != out]
        return roster, topology(len(roster))

    def _is_heeded(self, says: NodeId, patience_s: float, now: float) -> bool:
        before = self._heeded.get(says)
        return before is None or len(before) < MISSES_MAX or now - before[0] > TRIES_APART * patience_s

    def _arranged(self, roster: list[NodeId], pairs: list[Pair], topology: str) -> list[NodeId] | None:
        if parse_topology(topology).segments(len(roster)) > SEGMENTS_MAX:
            return None
        near, order = _neighbours(topology, len(roster)), list(roster)
        for _ in range(TRIES):
            if not any((order.index(one), order.index(other)) in near for one, other in pairs):
                return order
            self._rng.shuffle(order)
        return None


def _pairs(unreached: Unreached) -> set[Pair]:
    return {(says, other) for says, others in unreached.items() for other in others if other in unreached}


@lru_cache(maxsize=16)
def _neighbours(topology: str, size: int) -> set[tuple[int, int]]:
    """The ranks that send each other anything."""
    trees, ranks = parse_topology(topology), range(size)
    found: set[tuple[int, int]] = set()
    for segment in range(trees.segments(size)):
        for rank in ranks:
            for other in (trees.parent(segment, rank, size), trees.giver(segment, rank, size)):
                found |= set() if other is None else {(rank, other), (other, rank)}
    return found
