"""Who leads, when the leader makes no round? Members pass it by, and all pass the same by, whoever lies.

How this works. Each member counts how often a leader has kept it waiting in vain (`Patience`), and tells all others
when that grows. A member adds its own voice where two others have theirs, so that what AGREED voices say, of which one
may lie, is soon what all honest members say: none of them follows a leader that the others do not. The voice of one
alone is heeded, too, as it may be the only one that the leader starves, but after ALONE_PATIENCES, and then half as
often each time: who lies can have the lead change that often, which costs an attempt, and the search for a culprit.
The first time it need not wait if it says that no connection to the leader can be made, or that another says so.
The leader is the one against whom the fewest such counts speak, the smallest id of those; so an honest one that was
passed by loses nothing, and nobody is ever without one.

Of two members, one may have passed the other by while it could not be heard; then each would lead itself. So the first
words of either are heeded at once, and as they are: both count alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from peerd.transport.ids import NodeId

UNORDERED_PATIENCES = 4
"""With a contribution and no order: an honest leader waits for who is silent, then for who has no contribution."""
UNCOMMITTED_PATIENCES = 12
"""Without a result: the search for a culprit among 16 fails seven times (culprits.py)."""
DOUBLINGS_MAX = 6
"""Where no leader can make a round, as too few have a contribution, the lead goes round ever more slowly."""
ALONE_PATIENCES = UNCOMMITTED_PATIENCES
TOGETHER_S = 1.0  # for who complains of several to have said so of each
COMPLAINT = 2  # counts
HEARD_MAX = 1024  # leaders that one member speaks of
HEEDED_AT_ONCE = 4  # times that the only other member is heeded at once
BEYOND_MAX = 64  # our own counts: of what it says
TIMES_MAX = 1 << 48  # of what one says: our own complaints go on from there, and the wire holds 2 ** 53

AGREED = 3  # voices: two honest ones at least, and these are heard by all
JOINED = 2  # voices, of which one is honest

_NONE: Mapping[NodeId, int] = MappingProxyType({})


class Passing:
    """What one member knows of leaders that make no rounds."""

    def __init__(self, me: NodeId) -> None:
        self.counts: dict[NodeId, int] = {}  # by leader, what this member says
        self.unreached: set[NodeId] = set()
        """Of whom it says so as no connection to them can be made."""
        self.due_at = math.inf
        """When to join, as one's word alone will be enough."""
        self._me = me
        self._said: dict[NodeId, dict[NodeId, int]] = {}  # by member, what it says
        self._said_unreached: set[tuple[NodeId, NodeId]] = set()  # who says so for that reason, and of whom
        self._heeded: dict[NodeId, tuple[int, float]] = {}  # how often one's word alone was enough, and from when it is
        self._alone_since: dict[NodeId, float] = {}  # whose word alone waits for its others

    def complain(self, leader: NodeId, alive: frozenset[NodeId], *, unreached: bool = False) -> None:
        """It has kept this member waiting in vain, or cannot be reached.

        Who complains does not lead next while another can: it may have been left aside for a reason.
        """
        before = max(self.counts.values(), default=0) if len(alive) == 1 else self.counts.get(leader, 0)
        self.counts[leader] = before + COMPLAINT
        if not unreached or self.leader(alive - {leader}) == self._me:  # a leader that has crashed all complain of
            self.counts[self._me] = self.counts.get(self._me, 0) + 1
        (self.unreached.add if unreached else self.unreached.discard)(leader)

    def heard(self, sender: NodeId, leader: NodeId, times: int, *, unreached: bool = False) -> bool:
        """A member says so; whether it has not before. Less than it said is its next life's word."""
        said, times = self._said.setdefault(sender, {}), min(times, TIMES_MAX)
        if times == said.get(leader, 0) or (leader not in said and len(said) >= HEARD_MAX):
            return False
        said[leader] = times
        (self._said_unreached.add if unreached else self._said_unreached.discard)((sender, leader))
        return True

    def join(self, alive: frozenset[NodeId], alone_s: float, now: float) -> list[NodeId]:
        """Say what enough others say, or one alone may; returns of whom. Of who is no member nothing is said on."""
        joined: dict[NodeId, None] = {}
        everyone, since = alive | {self._me}, self._alone_since
        self.due_at, self._alone_since = math.inf, {}
        for leader in sorted({leader for said in self._said.values() for leader in said} & everyone):
            voices = self._voices(leader, alive)
            enough = voices[JOINED - 1] if len(voices) >= JOINED else 0
            if enough > self.counts.get(leader, 0):
                self.counts[leader] = enough
                joined[leader] = None
        for sender in sorted(alive & self._said.keys()):
            said = self._said[sender]
            beyond = {to: times for to, times in said.items() if times > self.counts.get(to, 0) and to in everyone}
            if beyond.keys() == {sender}:
                self.counts[sender] = beyond[sender]  # it speaks against itself
                joined[sender] = None
            elif beyond:
                unreached = {to for to in beyond if (sender, to) in self._said_unreached}
                times, from_s = self._heeded.setdefault(sender, (0, now + alone_s))
                is_first = bool(unreached) and not times
                if is_first:
                    from_s = since.get(sender, now) + TOGETHER_S
                pair = len(everyone) == 2
                if now >= from_s or (pair and times < HEEDED_AT_ONCE):
                    self._heeded[sender] = times + 1, now + alone_s * 2 ** min(times + 1, DOUBLINGS_MAX)
                    most_of_ours = max(self.counts.values(), default=0)
                    for to, most in beyond.items():
                        reach = most_of_ours + BEYOND_MAX if pair else self.counts.get(to, 0) + COMPLAINT
                        self.counts[to] = min(most, reach)
                    joined |= dict.fromkeys(beyond)
                    self.unreached |= unreached
                elif is_first:
                    self._alone_since[sender] = since.get(sender, now)
                    self.due_at = min(self.due_at, from_s)
        return list(joined)

    def leader(self, alive: frozenset[NodeId]) -> NodeId:
        """Whom this member follows."""
        everyone = alive | {self._me}
        agreed = min(AGREED, len(everyone) - 1)

        def against(leader: NodeId) -> tuple[int, NodeId]:
            if len(everyone) <= 2:
                return self.counts.get(leader, 0), leader  # the other one's word may be the liar's
            return self._voices(leader, alive)[agreed - 1], leader

        return min(everyone, key=against) if self.counts else min(everyone)

    def forget(self, gone: Iterable[NodeId]) -> None:
        """These are no members now: they say it again when they come back."""
        for member in gone:
            self._said.pop(member, None)
        self._said_unreached = {(says, of) for says, of in self._said_unreached if says in self._said}

    def _voices(self, leader: NodeId, alive: frozenset[NodeId]) -> list[int]:
        """How often each says to have been kept waiting, the most first."""
        others = [self._said.get(member, _NONE).get(leader, 0) for member in alive]
        return sorted([*others, self.counts.get(leader, 0)], reverse=True)


class Patience:
    """For how long this member has come to rounds and had no order, or no result."""

    def __init__(self) -> None:
        self._since: float | None = None  # its contribution is there, whichever it is
        self._ordered = False
        self._in_vain = 0  # leaders, one after the other

    def comes(self, now: float) -> None:
        """There is a contribution; one that was withdrawn and made anew has waited as long."""
        self._since = now if self._since is None else self._since

    def ordered(self) -> None:
        """The leader has begun an attempt with it."""
        self._ordered = True

    def ended(self) -> None:
        """There is a result, or there is nothing to wait for."""
        self._since, self._ordered, self._in_vain = None, False, 0

    def begins_anew(self, now: float) -> None:
        """With another leader, which has all the time that the last one had."""
        self._since, self._ordered = None if self._since is None else now, False

    def is_over(self, patience_s: float, now: float, *, finished: bool) -> bool:
        """Whether it is; then it begins again, with twice the time. `finished`: no order comes while others train."""
        if self._since is None:
            return False
        patiences = UNCOMMITTED_PATIENCES if self._ordered or finished else UNORDERED_PATIENCES
        if now - self._since <= patiences * patience_s * 2 ** min(self._in_vain, DOUBLINGS_MAX):
            return False
        self._in_vain += 1
        self._since, self._ordered = now, False
        return True
