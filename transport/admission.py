"""Whom a listener lets in, and how fast: a token bucket, and caps on the connections that have not said who they are.

A core: it knows no socket, and `now` comes in.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

ACCEPTS_PER_S = 50.0  # a TLS handshake costs 2.65 ms of CPU for both ends: 50/s is under 14 % of a core
BURST = 100.0
PENDING_MAX = 32
PENDING_PER_HOST_MAX = 4  # not for loopback, where all tests and many small swarms live
GREETED_MAX = 128
GREETED_PER_PEER_MAX = 4  # one to send on, two table exchanges that cross, one that broke and has not been noticed
ACCEPTED_MAX = GREETED_MAX + PENDING_MAX  # so those who have greeted keep nobody out
UNPROVED_IDLE_S = 30.0  # a node dials when it has something to say
PROVED_S = 600.0  # after something useful; an honest node closes a connection that was idle for half as long

Link = TypeVar("Link")


class Admission:
    """What one listener has let in."""

    def __init__(self, now: float) -> None:
        self.accepted = 0
        self.refused = 0  # closed at once: their host has too many pending
        self._tokens = BURST
        self._refilled = now
        self._pending: Counter[str] = Counter()

    @property
    def full(self) -> bool:
        """Whether nobody can be accepted before somebody leaves or is admitted."""
        return self.pending >= PENDING_MAX or self.accepted >= ACCEPTED_MAX

    @property
    def pending(self) -> int:
        """Return how many connections are in their handshake."""
        return self._pending.total()

    def delay_s(self, now: float) -> float:
        """Return how long to wait before the next accept."""
        self._tokens = min(BURST, self._tokens + (now - self._refilled) * ACCEPTS_PER_S)
        self._refilled = now
        return max(0.0, (1.0 - self._tokens) / ACCEPTS_PER_S)

    def enter(self, host: str) -> bool:
        """Count an accepted connection as pending; False: close it at once, its host has too many."""
        self._tokens -= 1.0
        if self._pending[host] >= PENDING_PER_HOST_MAX and not ipaddress.ip_address(host).is_loopback:
            self.refused += 1
            return False
        self._pending[host] += 1
        self.accepted += 1
        return True

    def admit(self, host: str) -> None:
        """Count a connection as pending no longer: its handshake is over."""
        self._pending[host] -= 1
        if not self._pending[host]:
            del self._pending[host]

    def leave(self) -> None:
        """Count a connection no longer: it has ended."""
        self.accepted -= 1


@dataclass(slots=True)
class _Standing:
    who: Hashable
    used: float  # when it greeted, or was last of use
    useful: float = -math.inf
    sends: bool = False


class Greeted(Generic[Link]):
    """The connections whose peers have said who they are, and which of them make way for others."""

    def __init__(self) -> None:
        self._standing: dict[Link, _Standing] = {}

    def enter(self, link: Link, who: Hashable, now: float) -> list[Link]:
        """Count a connection of `who`; return those to close, perhaps this one."""
        self._standing[link] = _Standing(who, now)
        closing = []
        if len(of_peer := self.of(who)) > GREETED_PER_PEER_MAX:
            closing.append(self._idlest(of_peer))
        elif len(self._standing) > GREETED_MAX:
            closing.append(self._idlest([each for each in self._standing if not self.proved(each, now)]))
        for each in closing:
            self.leave(each)
        return closing

    def sends(self, link: Link) -> list[Link]:
        """It is the one that its peer sends on; return those that were before, to be closed."""
        if (standing := self._standing.get(link)) is None or standing.sends:
            return []
        before = [each for each in self.of(standing.who) if self._standing[each].sends]
        standing.sends = True
        for each in before:
            self.leave(each)
        return before

    def useful(self, link: Link, now: float) -> None:
        """A member has said something on it that could be used."""
        if (standing := self._standing.get(link)) is not None:
            standing.used = standing.useful = now

    def proved(self, link: Link, now: float) -> bool:
        """Whether a member has used it lately."""
        standing = self._standing.get(link)
        return standing is not None and now - standing.useful < PROVED_S

    def of(self, who: Hashable) -> list[Link]:
        """Those of one peer."""
        return [link for link, standing in self._standing.items() if standing.who == who]

    def leave(self, link: Link) -> None:
        """It has ended."""
        self._standing.pop(link, None)

    def _idlest(self, links: list[Link]) -> Link:
        return min(links, key=lambda link: self._standing[link].used)
