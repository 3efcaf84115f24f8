"""Whom a listener lets in, and how fast: a token bucket, and caps on the connections that have not said who they are.

A core: it knows no socket, and `now` comes in.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

ACCEPTS_PER_S = 50.0  # a TLS handshake costs 2.65 ms of CPU for both ends: 50/s is under 14 % of a core
BURST = 100.0
REFUSAL_COSTS = 0.05  # of an accept: a connection that is closed at once takes .1 ms
PENDING_MAX = 32
MAKES_WAY_AFTER_S = 1.0  # in a handshake, where others wait; it takes three round trips and 2.65 ms of CPU
PENDING_PER_HOST_MAX = 4  # not for loopback, where all tests and many small swarms live
GREETED_MAX = 128
GREETED_PER_PEER_MAX = 4  # one to send on, two table exchanges that cross, one that broke and has not been noticed
GUESTS_MAX = 64  # of a relay, one for each port that it lends: they stay
ACCEPTED_MAX = GREETED_MAX + PENDING_MAX  # so those who have greeted keep nobody out
UNPROVED_IDLE_S = 30.0  # a node dials when it has something to say
PROVED_S = 600.0  # after something useful; an honest node closes a connection that was idle for half as long

ConnectionT = TypeVar("ConnectionT")


class Admission:
    """What one listener has let in."""

    def __init__(self, now: float) -> None:
        self.accepted = 0
        self.refused = 0  # closed at once: their host has too many pending
        self._tokens = BURST
        self._refilled = now
        self._pending: dict[int, tuple[str, float]] = {}  # by number: the host, and since when; the oldest first
        self._numbers = itertools.count()

    @property
    def full(self) -> bool:
        """Whether nobody can be accepted before somebody leaves or is admitted."""
        return self.pending >= PENDING_MAX or self.accepted >= ACCEPTED_MAX + GUESTS_MAX

    @property
    def pending(self) -> int:
        """Return how many connections are in their handshake."""
        return len(self._pending)

    def delay_s(self, now: float) -> float:
        """Return how long to wait before the next accept."""
        self._tokens = min(BURST, self._tokens + (now - self._refilled) * ACCEPTS_PER_S)
        self._refilled = now
        return max(0.0, (1.0 - self._tokens) / ACCEPTS_PER_S)

    def enter(self, host: str, now: float) -> int | None:
        """Count an accepted connection as pending; its number. None: close it at once, its host has too many."""
        if self.refuses(host):
            self.refused += 1
            self._tokens -= REFUSAL_COSTS
            return None
        self._tokens -= 1.0
        number = next(self._numbers)
        self._pending[number] = host, now
        self.accepted += 1
        return number

    def refuses(self, host: str) -> bool:
        """Whether it has too many pending: where others wait, one, so that few hosts hold up nobody else."""
        most = 1 if self.full else PENDING_PER_HOST_MAX
        return self._of_hosts()[host] >= most and not ipaddress.ip_address(host).is_loopback

    def admit(self, number: int) -> None:
        """Count a connection as pending no longer: its handshake is over. It counts once."""
        self._pending.pop(number, None)

    def leave(self, number: int) -> None:
        """Count a connection no longer: it has ended."""
        self.admit(number)
        self.accepted -= 1

    def makes_way(self, now: float, host: str = "") -> int | None:
        """Which pending connection is to be closed, where somebody waits: the oldest of the host that has the most.

        Where that has several, and the `host` that waits has none, it need not be slow.
        """
        hosts = self._of_hosts()
        after_s = 0.0 if host and not hosts[host] and max(hosts.values(), default=0) > 1 else MAKES_WAY_AFTER_S
        old = [number for number, (_, since) in self._pending.items() if now >= since + after_s]
        return max(old, key=lambda number: hosts[self._pending[number][0]], default=None)

    @property
    def makes_way_at(self) -> float:
        """When the oldest of them may be closed for another; infinity: there is none."""
        return min((since + MAKES_WAY_AFTER_S for _, since in self._pending.values()), default=math.inf)

    def _of_hosts(self) -> Counter[str]:
        return Counter(host for host, _ in self._pending.values())


@dataclass(slots=True)
class _Standing:
    who: Hashable
    used: float  # when it greeted, or was last of use
    useful: float = -math.inf
    sends: bool = False


class Greeted(Generic[ConnectionT]):
    """The connections whose peers have said who they are, and which of them make way for others."""

    def __init__(self) -> None:
        self._standing: dict[ConnectionT, _Standing] = {}

    def enter(self, connection: ConnectionT, who: Hashable, now: float) -> list[ConnectionT]:
        """Count a connection of `who`; return those to close, perhaps this one."""
        self._standing[connection] = _Standing(who, now)
        closing = []
        if len(of_peer := self.of(who)) > GREETED_PER_PEER_MAX:
            closing.append(self._idlest(of_peer))
        elif len(self._standing) > GREETED_MAX:
            closing.append(self._idlest([each for each in self._standing if not self.proved(each, now)]))
        for each in closing:
            self.leave(each)
        return closing

    def sends(self, connection: ConnectionT) -> list[ConnectionT]:
        """It is the one that its peer sends on; return those that were before, to be closed."""
        if (standing := self._standing.get(connection)) is None or standing.sends:
            return []
        before = [each for each in self.of(standing.who) if self._standing[each].sends]
        standing.sends = True
        for each in before:
            self.leave(each)
        return before

    def useful(self, connection: ConnectionT, now: float) -> None:
        """A member has said something on it that could be used."""
        if (standing := self._standing.get(connection)) is not None:
            standing.used = standing.useful = now

    def proved(self, connection: ConnectionT, now: float) -> bool:
        """Whether a member has used it lately."""
        standing = self._standing.get(connection)
        return standing is not None and now - standing.useful < PROVED_S

    def of(self, who: Hashable) -> list[ConnectionT]:
        """Those of one peer."""
        return [connection for connection, standing in self._standing.items() if standing.who == who]

    def leave(self, connection: ConnectionT) -> None:
        """It has ended."""
        self._standing.pop(connection, None)

    def _idlest(self, connections: list[ConnectionT]) -> ConnectionT:
        return min(connections, key=lambda connection: self._standing[connection].used)
