"""Whom a listener lets in, and how fast: a token bucket, and caps on the connections that have not said who they are.

A core: it knows no socket, and `now` comes in.
"""

from __future__ import annotations

import ipaddress
from collections import Counter

ACCEPTS_PER_S = 50.0  # a TLS handshake costs 2.65 ms of CPU for both ends: 50/s is under 14 % of a core
BURST = 100.0
PENDING_MAX = 32
PENDING_PER_HOST_MAX = 4  # not for loopback, where all tests and many small swarms live
ACCEPTED_MAX = 128


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
