"""With whom are whole tables exchanged, and when? What joins a swarm, and joins it again after any partition.

Gossip and probes reach only whom we believe to live. Everything else hangs on push-pulls:

- with a random live member at an interval, against news that got lost;
- with seeds while alone, soon and then ever more rarely, but for ever;
- with one failed member (and absent seeds) at an interval, for ever: a partition heals whenever the network does;
- once more with whom our table disagreed about who lives, when the refutations are in.
- with a few more, while what goes beside the tables is news;
- with all, one after the other, while they believe in a life of ours that is none.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

from peerd.membership.effects import MembershipEffect, PushPull
from peerd.membership.roster import Roster, address
from peerd.membership.timing import Timing
from peerd.training.effects import Log
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import State

TABLE_PART = 32  # members in one message: the longest legal rows take 1.6 kB each of the 64 KiB of a header
TABLE_PARTS_MAX = 160
PUSH_PULL_DEADLINE_S = 10.0  # two small messages; only a node that hangs takes longer
FOLLOW_UP_S = 2.0
"""By then those suspected through a merged table have refuted: less than the shortest suspicion."""

_RETRIED_FAILED = 8  # failed members that an isolated node dials at once


class TableExchange:
    """The push-pulls of one node."""

    def __init__(
        self, roster: Roster, seeds: Sequence[Address], counts: Counter[str], rng: random.Random, timing: Timing,
        now: float,
    ) -> None:  # fmt: skip
        self._roster = roster
        self._seeds = [seed for seed in dict.fromkeys(seeds) if seed != address(roster.me)]
        self._counts = counts
        self._rng = rng
        self._timing = timing
        self._push_pull_at = now + rng.random() * timing.push_pull_interval_s
        self._follow_up: Address | None = None  # whom the next push-pull is for
        self._follow_ups = 0  # in a row
        self._to_deny: list[NodeId] = []  # members to whom we have yet to say that a life of ours is none
        self._to_spread = 0  # push-pulls that are to follow soon upon each other
        self._retry_at = now
        self._retry_s = timing.seed_retry_first_s
        self._reported: set[Address] = set()  # seeds out of reach

    @property
    def deadline(self) -> float:
        """When on_timer has something to do."""
        return self._push_pull_at if self._push_pull_at < self._retry_at else self._retry_at

    def on_timer(self, now: float) -> list[MembershipEffect]:
        """The push-pulls that are due."""
        effects: list[MembershipEffect] = []
        if now >= self._push_pull_at:
            effects += self._push_pull(now)
        if now >= self._retry_at:
            effects += self._retry(now)
        return effects

    def hasten(self, when: float) -> None:
        """We may have missed something: exchange tables with anyone at `when`."""
        self._push_pull_at = min(self._push_pull_at, when)

    def agreed(self) -> None:
        """A table came, and said nothing against ours about who lives."""
        self._follow_ups = 0

    def disagreed(self, teller: NodeId, now: float) -> None:
        """A table came that differs about who lives: exchange again, at doubling intervals while it goes on."""
        row = self._roster.rows.get(teller)
        soon_s = min(self._timing.push_pull_interval_s, FOLLOW_UP_S * 2.0**self._follow_ups)
        if row is not None and row.state != State.LEFT and now + soon_s < self._push_pull_at:
            self._follow_ups = min(self._follow_ups + 1, 8)
            self._push_pull_at = now + soon_s
            self._follow_up = address(row)

    def visit(self, where: Address, now: float) -> None:
        """Soon exchange with this address: one of us is wrong about a life of the other."""
        self._follow_up = where
        self.hasten(now + FOLLOW_UP_S)

    def spread(self, now: float) -> None:
        """What goes beside tables is news: so many push-pulls as the number of members doubles, and some more."""
        self._to_spread = 3 + math.ceil(math.log2(self._roster.population))
        self.hasten(now + FOLLOW_UP_S * self._rng.random())

    def deny(self, now: float) -> None:
        """Others believe in a life of ours that is none: soon exchange with every live member, one after the other."""
        if not self._to_deny:
            self._to_deny = list(self._roster.live)
            self._rng.shuffle(self._to_deny)
        self.hasten(now + FOLLOW_UP_S)

    def company_changed(self, now: float) -> None:
        """We have just met the first other member, or lost the last one."""
        self._retry_s = self._timing.seed_retry_first_s
        if self._roster.live:
            self._retry_at = now + self._timing.seed_retry_s * (0.5 + self._rng.random() / 2)
            self._reported.clear()
            # Of many who join at once, some miss the news of others: it was told while the swarm was small.
            self.hasten(now + FOLLOW_UP_S * (1 + self._rng.random()))
        else:
            self._retry_at = now + self._retry_s

    def drop_seed(self, where: Address) -> None:
        """Dial this seed no more."""
        self._seeds = [seed for seed in self._seeds if seed != where]

    def on_unreachable(self, where: Address) -> list[MembershipEffect]:
        """A dial failed. The retries go on by themselves; say so once."""
        self._counts["unreachable"] += 1
        if where not in self._seeds or where in self._reported:
            return []
        self._reported.add(where)
        return [Log(f"cannot reach seed {where[0]}:{where[1]}: trying again for ever")]

    def _push_pull(self, now: float) -> list[MembershipEffect]:
        stretched_s = self._timing.push_pull_interval_s * self._timing.stretch(self._roster.company)
        self._push_pull_at = now + stretched_s * (0.5 + self._rng.random())  # so that nodes do not beat in time
        if self._to_spread:
            self._to_spread -= 1
            self.hasten(now + FOLLOW_UP_S * (0.5 + self._rng.random()))
        where, self._follow_up = self._follow_up, None
        while where is None and self._to_deny:
            if self._roster.is_live(id := self._to_deny.pop()):
                where = address(self._roster.rows[id])
        if self._to_deny:
            self.hasten(now + FOLLOW_UP_S)
        if where is None:
            partner = self._roster.pick(1, self._rng, alive_only=True)
            if not partner:
                return []
            where = address(partner[0])
        self._counts["push_pulls"] += 1
        return [PushPull(where)]

    def _retry(self, now: float) -> list[MembershipEffect]:
        if self._roster.live:
            self._retry_at = now + self._timing.seed_retry_s * self._timing.stretch(self._roster.company)
            present = self._roster.live_addresses()  # a new node may listen where a failed one did
            where = [seed for seed in self._seeds if seed not in present]
            where += map(address, self._roster.failed(1, self._rng, without=present))
        else:
            self._retry_at = now + self._retry_s
            self._retry_s = min(self._timing.seed_retry_s, 2 * self._retry_s)
            where = self._seeds + [address(row) for row in self._roster.failed(_RETRIED_FAILED, self._rng)]
        unique = dict.fromkeys(where)
        self._counts["retries"] += len(unique)
        return [PushPull(one) for one in unique]
