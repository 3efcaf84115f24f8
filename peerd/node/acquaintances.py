"""Whom has this node met? A core; daemon/meetings.py dials.

A member's record is signed by its own key alone, and a key is made in no time: whoever is in a sealed swarm could add
as many members as it likes, ready and under any plan, and have them outvote, lead and outrank the others. So a member
counts for the model (as partner, leader, server, donor, voice for a plan) from when it has shown here a certificate of
the swarm's, in a handshake that either end began. Membership itself goes by records, as ever: it takes no handshake to
be told of. Where nothing is sealed nobody can show anything, and every record counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from peerd.transport.ids import NodeId
from peerd.transport.messages import Member, State

AGAIN_FIRST_S = 1.0  # after a meeting that failed
AGAIN_MAX_S = 60.0
GONE_MAX = 64


class Acquaintances:
    """Of one node."""

    def __init__(self, me: NodeId, rng: random.Random, met: Callable[[NodeId], None], *, sealed: bool) -> None:
        """`met` is told of each that is new."""
        self.sealed = sealed
        self._me = me
        self._rng = rng
        self._told = met
        self._met: set[NodeId] = set()
        self._tried: dict[NodeId, tuple[int, float]] = {}  # how often in vain, and when it is tried again

    def note(self, identity: NodeId | None) -> None:
        """A handshake has shown this one's certificate: None or empty where none was shown."""
        if not identity or not self.sealed or identity in self._met:
            return
        self._met.add(identity)
        self._tried.pop(identity, None)
        self._told(identity)

    def counts(self, id: NodeId) -> bool:
        """Whether this member has a say, and a part in the model."""
        return not self.sealed or id == self._me or id in self._met

    def doubtful(self, id: NodeId) -> bool:
        """Whether this node has tried to meet it in vain."""
        return not self.counts(id) and self._tried.get(id, (0, 0.0))[0] > 0

    def of(self, members: Mapping[NodeId, Member]) -> dict[NodeId, Member]:
        """Those that count."""
        return {id: member for id, member in members.items() if self.counts(id)}

    def due(self, members: Mapping[NodeId, Member], now: float, most: int) -> list[Member]:
        """At most so many of the live ones to meet now: each is tried, and again later unless `note` comes.

        Those tried least go first, in an order of this node's own: whoever comes new does not wait for made-up ones.
        """
        self._forget(members)
        strangers = self._strangers(members)
        tries = {member.id: self._tried.get(member.id, (0, now)) for member in strangers}
        ready = [member for member in strangers if tries[member.id][1] <= now]
        self._rng.shuffle(ready)
        ready.sort(key=lambda member: tries[member.id][0])
        for member in ready[:most]:
            count = tries[member.id][0]
            self._tried[member.id] = count, now + min(AGAIN_FIRST_S * 2.0**count, AGAIN_MAX_S)
        return ready[:most]

    def failed(self, id: NodeId) -> bool:
        """It could not be reached, or showed another's certificate; says whether that is so again."""
        count, again = self._tried.get(id, (0, 0.0))
        if self.counts(id):
            return False
        self._tried[id] = count + 1, again
        return count > 0

    def next_at(self, members: Mapping[NodeId, Member], now: float) -> float:
        """When somebody is to be met, should nothing come until then."""
        tries = (self._tried.get(member.id, (0, now)) for member in self._strangers(members))
        return min((again for _, again in tries), default=float("inf"))

    def _strangers(self, members: Mapping[NodeId, Member]) -> list[Member]:
        return [member for id, member in members.items() if not self.counts(id) and member.state <= State.SUSPECT]

    def _forget(self, members: Mapping[NodeId, Member]) -> None:
        """Those who are gone for good; who is met before its record comes is not."""
        if len(self._met) > 2 * len(members) + GONE_MAX:
            self._met &= members.keys()
        if len(self._tried) > len(members):
            self._tried = {id: tried for id, tried in self._tried.items() if id in members}
