"""The parameter server: its arithmetic against the plain rule, and every push in the weights once whatever dies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from server_swarm import ServerSwarm

from peerd.effects import Vector
from peerd.messages import Applied
from peerd.training.modes.shard_server import ShardServer
from peerd.training.modes.worker import NEVER

NAMES = "abcd"
PUSHES = 32
MARKS = (1.0, 2.0, 4.0)
MODES = ["hardsync", "softsync:1:constant", "softsync:2:constant", "softsync:99:constant"]


class Storm(RuleBasedStateMachine):
    """Steps, deliveries, cuts, deaths and joins in any order.

    Every push adds 1, 2 and 4 in places of its own (one in each third, so that three shards have one each), and the
    servers here add sums instead of means: the weights show how often each push was applied.
    """

    @initialize(mode=st.sampled_from(MODES), servers=st.sampled_from([1, 3]))
    def start(self, mode: str, servers: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.dropped: set[tuple[int, float]] = set()
        update, take = ShardServer._update, ShardServer.take

        def add_sum(server: ShardServer) -> None:
            server._sum *= len(server.pushers)
            update(server)

        def note_dropped(
            server: ShardServer, mark: Applied, clock: int, pushed: Vector, training: frozenset[str]
        ) -> None:
            before = server.counts["pushes_dropped"]
            take(server, mark, clock, pushed, training)
            if server.counts["pushes_dropped"] > before:
                self.dropped |= {(int(place) % PUSHES, float(pushed[place])) for place in np.flatnonzero(pushed)}

        self.patch.setattr(ShardServer, "_update", add_sum)
        self.patch.setattr(ShardServer, "take", note_dropped)
        self.swarm = ServerSwarm(mode, NAMES, size=3 * PUSHES, servers=servers)
        self.pushed: list[str] = []  # by whom
        self.unborn = list("efgh")

    def some(self, index: int) -> str:
        return sorted(self.swarm.nodes)[index % len(self.swarm.nodes)]

    @precondition(lambda self: len(self.pushed) < PUSHES)
    @rule(index=st.integers(0, 7))
    def step(self, index: int) -> None:
        name = self.some(index)
        if self.swarm.nodes[name].waits:
            return
        parts = self.swarm.nodes[name].core._worker.parts
        change = np.zeros((3, PUSHES))
        change[:, len(self.pushed)] = MARKS
        for mark, part in zip(MARKS, parts * (3 // len(parts)), strict=True):
            if part.clock == NEVER:  # it has not pulled
                self.dropped.add((len(self.pushed), mark))
        self.pushed.append(name)
        self.swarm.step(name, change.reshape(-1))

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

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        try:
            self.finish(self.swarm)
        finally:
            self.patch.undo()

    def finish(self, swarm: ServerSwarm) -> None:
        """Calm weather: nobody hangs, and all end with the same weights, each push in them once."""
        swarm.heal()
        for _ in range(3):
            for name in sorted(swarm.nodes):
                assert not swarm.nodes[name].waits or "hardsync" in swarm.mode, f"{name} hangs"
                if not swarm.nodes[name].waits:
                    swarm.step(name, 0.0)
            swarm.settle()
            swarm.timers()
            swarm.settle()
        for name in swarm.nodes:
            assert not swarm.nodes[name].waits, f"{name} hangs"
            swarm.step(name, 0.0, finishing=True)
        swarm.settle()
        weights = swarm.weights()
        for node in swarm.nodes.values():
            assert node.proceeded == [False, True]
            np.testing.assert_array_equal(node.x, weights)
        for mark, third in zip(MARKS, weights.reshape(3, PUSHES), strict=True):
            for place, worker in enumerate(self.pushed):
                excused = worker not in swarm.nodes or (place, mark) in self.dropped
                assert third[place] == mark or (excused and third[place] == 0), (place, mark, worker)
            assert not third[len(self.pushed) :].any()


TestStorm = Storm.TestCase
TestStorm.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    phases=[Phase.generate],
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
