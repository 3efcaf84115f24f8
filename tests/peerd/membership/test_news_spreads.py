"""What one member tells comes to all others by gossip alone, however few they are."""

from __future__ import annotations

import heapq
import random

import pytest
from test_membership import member

from peerd.membership.core import Membership
from peerd.membership.effects import MembershipEffect, SendDatagram
from peerd.transport.ids import Address
from peerd.transport.messages import MemberTable, Message

QUIET_S = 20.0
FLIGHT_S = 0.001
LOSS = 0.01


class Gossips:
    """Cores that know each other; nobody exchanges tables, and one datagram in a hundred is lost."""

    def __init__(self, count: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._queue: list[tuple[float, int, Address, Address, Message]] = []
        self._sent = 0
        rows = [member(f"n{number}") for number in range(count)]
        self.cores: dict[Address, Membership] = {}
        for row in rows:
            core = Membership(row, [], random.Random(f"{seed} {row.id}"), 0.0)
            core.on_table(MemberTable(rows[row.id == "n0"].id, tuple(rows)), 0.0)
            self.cores[row.host, row.port] = core

    def perform(self, source: Address, effects: list[MembershipEffect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, SendDatagram) and self._rng.random() >= LOSS:
                self._sent += 1
                heapq.heappush(self._queue, (now + FLIGHT_S, self._sent, source, effect.address, effect.message))

    def run_until(self, end: float) -> None:
        while True:
            where = min(self.cores, key=lambda each: self.cores[each].deadline)
            at = self.cores[where].deadline
            if self._queue and self._queue[0][0] <= min(at, end):
                now, _, source, target, message = heapq.heappop(self._queue)
                self.perform(target, self.cores[target].on_datagram(message, source, now), now)
            elif at <= end:
                self.perform(where, self.cores[where].on_timer(at), at)
            else:
                return

    def missed_by(self) -> int:
        """How many have not heard, five seconds later, what the first of them has told."""
        self.run_until(QUIET_S)
        where, first = next(iter(self.cores.items()))
        self.perform(where, first.set_meta(b"news", QUIET_S), QUIET_S)
        self.run_until(QUIET_S + 5.0)
        return sum(core.members["n0"].meta != b"news" for core in self.cores.values())


@pytest.mark.one_run_in(3)
@pytest.mark.parametrize("count", [3, 5, 8, 9])
def test_news_hardly_ever_misses_anybody(count: int) -> None:
    """13 of 150 did among 9, when members below 10 told it four times each."""
    assert sum(Gossips(count, seed).missed_by() > 0 for seed in range(150)) <= 2
