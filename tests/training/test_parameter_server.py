"""The parameter server: its arithmetic against the plain rule, and every push in the weights once whatever dies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from server_swarm import ServerSwarm

from peerd.effects import PeerError, UserError
from peerd.messages import Delta, Push, Weights
from peerd.training.codecs import CODECS
from peerd.training.modes import parse_mode

NAMES = "abcd"
EVERY = "abcdefgh"
MODES = ["hardsync", "softsync:1:constant", "softsync:2:constant", "softsync:99:constant"]


class Storm(RuleBasedStateMachine):
    """Steps, deliveries, cuts, deaths and joins in any order.

    Every push adds 1 in a place of its own, times 12 so that the mean of up to four is a whole number: the weights
    show what was applied how often. Whether a push was dropped for its staleness is counted, not shown.
    """

    @initialize(mode=st.sampled_from(MODES), servers=st.integers(1, 3))
    def start(self, mode: str, servers: int) -> None:
        self.swarm = ServerSwarm(mode, NAMES, size=96, servers=servers)
        self.pushed: dict[int, str] = {}  # who pushed at this place
        self.unborn = list("efgh")

    def some(self, index: int) -> str:
        return sorted(self.swarm.nodes)[index % len(self.swarm.nodes)]

    @precondition(lambda self: len(self.pushed) < 32)
    @rule(index=st.integers(0, 7))
    def step(self, index: int) -> None:
        name = self.some(index)
        if self.swarm.nodes[name].waits:
            return
        place = len(self.pushed)
        self.pushed[place] = name
        change = np.zeros(96)
        change[[place, 32 + place, 64 + place]] = 1.0  # in each third, so that every shard has some
        self.swarm.step(name, change)

    @rule(one=st.integers(0, 7), other=st.integers(0, 7), count=st.integers(1, 3))
    def deliver(self, one: int, other: int, count: int) -> None:
        pairs = sorted(pair for pair, queue in self.swarm.queues.items() if queue)
        if pairs:
            pair = pairs[(8 * one + other) % len(pairs)]
            for _ in range(count):
                self.swarm.deliver(*pair)

    @rule()
    def deliver_all(self) -> None:
        self.swarm.settle()

    @rule(one=st.integers(0, 7), other=st.integers(0, 7))
    def cut(self, one: int, other: int) -> None:
        self.swarm.cut(self.some(one), self.some(other))

    @rule(one=st.integers(0, 7), other=st.integers(0, 7))
    def lose(self, one: int, other: int) -> None:
        """What comes next overtakes the word that messages flow again."""
        self.swarm.queues.get((self.some(one), self.some(other)), []).clear()  # type: ignore[union-attr]

    @rule(one=st.integers(0, 7), other=st.integers(0, 7))
    def double(self, one: int, other: int) -> None:
        """The next message comes twice."""
        if queue := self.swarm.queues.get((self.some(one), self.some(other))):
            queue.appendleft(queue[0])

    @precondition(lambda self: len(self.swarm.nodes) > 2)
    @rule(index=st.integers(0, 7))
    def die(self, index: int) -> None:
        self.swarm.die(self.some(index))

    @precondition(lambda self: self.unborn)
    @rule(donor=st.integers(0, 7))
    def join(self, donor: int) -> None:
        self.swarm.join(self.unborn.pop(0), self.some(donor))

    @rule(index=st.integers(0, 7))
    def learns_who_lives(self, index: int) -> None:
        self.swarm.peers(self.some(index), set(self.swarm.nodes))

    @rule()
    def timers(self) -> None:
        self.swarm.timers(15.0)

    @invariant()
    def nothing_is_stale_beyond_the_rule(self) -> None:
        for node in getattr(self, "swarm", ServerSwarm("async", "a")).nodes.values():
            assert all(staleness >= 0 for staleness in node.core.staleness)

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        swarm = self.swarm
        swarm.heal()
        for _ in range(12):  # hardsync: those whose push was stale go again
            for name in sorted(swarm.nodes):
                if not swarm.nodes[name].waits:
                    swarm.step(name, 0.0)
            swarm.settle()
            swarm.timers()
            swarm.settle()
        for name, node in swarm.nodes.items():
            if not node.waits:
                swarm.step(name, 0.0, finishing=True)
        swarm.settle()
        assert not [name for name, node in swarm.nodes.items() if node.waits], "somebody hangs"
        for shard in range(swarm.settings.servers):
            assert len(swarm.serving(shard)) == 1


TestStorm = Storm.TestCase
TestStorm.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
