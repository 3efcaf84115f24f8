"""Who is probed next? All in shuffled rounds (SWIM, Das, Gupta and Motivala 2002, section 4.3): none waits for long.

Strangers (see roster.py) have rounds of their own, and one probe in a few: however many somebody makes up, a member
that has shown itself is missed hardly later.
"""

from __future__ import annotations

import random

from peerd.membership.roster import STRANGERS_ONE_IN, Roster
from peerd.transport.ids import NodeId


class ProbeRounds:
    """The round of the strangers, and that of all others."""

    def __init__(self, roster: Roster, rng: random.Random) -> None:
        self._roster = roster
        self._rounds = {strangers: _Round(rng) for strangers in (False, True)}
        self._turn = 0
        self._answered: list[NodeId] = []  # in this round

    def welcome(self, id: NodeId) -> None:
        """A member entered, or is no stranger any more."""
        self._rounds[self._roster.is_stranger(id)].welcome(id)

    def answered(self, id: NodeId) -> None:
        """It is there: in a plain swarm that is all the proof there is.

        It counts when all have been asked: while the first few alone were preferred, they were told the same again and
        again, and 200 nodes that start together took 5.3 s to know each other instead of 3.9.
        """
        if not self._roster.handshakes:
            self._answered.append(id)

    def next(self) -> NodeId | None:
        """Whose turn it is; None where nobody is."""
        self._turn += 1
        strangers = self._turn % STRANGERS_ONE_IN == 0
        return self._next(strangers) or self._next(not strangers)

    def _next(self, strangers: bool) -> NodeId | None:
        roster, round = self._roster, self._rounds[strangers]
        while (id := round.pop()) is not None:
            if roster.is_live(id) and roster.is_stranger(id) == strangers:
                return id
        while self._answered:
            roster.prove(self._answered.pop())
        round.begin(roster.strangers() if strangers else roster.acquainted())  # O(N), once per N probes
        return round.pop()


class _Round:
    """Who is left of it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ids: list[NodeId] = []  # popped from the end
        self._waiting: set[NodeId] = set()  # who is in it

    def begin(self, ids: list[NodeId]) -> None:
        """With all of these."""
        self._rng.shuffle(ids)
        self._ids, self._waiting = ids, set(ids)

    def welcome(self, id: NodeId) -> None:
        """At a random point of it, once however often it comes and goes."""
        at = int(self._rng.random() * (len(self._ids) + 1))
        if id not in self._waiting:
            self._waiting.add(id)
            self._ids.insert(at, id)

    def pop(self) -> NodeId | None:
        """Its next one."""
        if not self._ids:
            return None
        self._waiting.discard(id := self._ids.pop())
        return id
