"""The parameter server: its arithmetic against the plain rule, and every push in the weights once whatever dies."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from server_swarm import ServerSwarm
from weather import weather_settings

from peerd.training.codecs import CODECS
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.modes import parse_mode
from peerd.training.parameter_server.leadership import HEARD_S
from peerd.training.parameter_server.optimizer import DIFFERENCE
from peerd.training.parameter_server.shard_server import ShardServer
from peerd.training.parameter_server.worker import NEVER, Worker
from peerd.transport.errors import PeerError, UserError
from peerd.transport.messages import Applied, Delta, Message, Pass, Prepare, ShardLeader, ShardPull, ShardPush, Weights

NAMES = "abcd"
PUSHES = 32
MARKS = (1.0, 2.0, 4.0)
MODES = ["hardsync", "softsync:1:constant", "softsync:2:constant", "softsync:99:constant"]


class Storm(RuleBasedStateMachine):
    """Steps, deliveries, cuts, deaths and joins in any order.

    Every push adds 1, 2 and 4 in places of its own (one in each third, so that three shards have one each), and the
    servers here add sums instead of means: the weights show how often each push was applied.
    """

    names, topology = NAMES, "auto"

    @initialize(mode=st.sampled_from(MODES), servers=st.sampled_from([1, 3]))
    def start(self, mode: str, servers: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.mode = mode
        self.dropped: set[tuple[int, float]] = set()
        update, take = ShardServer._update, ShardServer.take

        def add_sum(server: ShardServer, updates: int) -> None:
            server._sum *= len(server.pushers) / updates
            update(server, updates)

        def note_dropped(
            server: ShardServer, marks: list[Applied], clock: int, pushed: Vector, training: frozenset[str],
            rate: float, *, ended: int,
        ) -> None:  # fmt: skip
            before = server.counts["pushes_dropped"]
            take(server, marks, clock, pushed, training, rate, ended=ended)
            if server.counts["pushes_dropped"] > before:
                self.dropped |= {(int(place) % PUSHES, float(pushed[place])) for place in np.flatnonzero(pushed)}

        self.patch.setattr(ShardServer, "_update", add_sum)
        self.patch.setattr(ShardServer, "take", note_dropped)
        self.swarm = ServerSwarm(mode, self.names, size=3 * PUSHES, servers=servers, topology=self.topology)
        self.pushed: list[str] = []  # by whom
        self.unborn = list("wxyz")

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
        if pairs := self.swarm.waiting():
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
        self.swarm.lose(self.some(one), self.some(other))

    @rule(one=st.integers(0, 7), other=st.integers(0, 7))
    def double(self, one: int, other: int) -> None:
        """The next message comes twice."""
        self.swarm.duplicate(self.some(one), self.some(other), late=False)

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
        self.swarm.hear(self.some(index))

    @rule()
    def timers(self) -> None:
        """Membership names whoever lives before its ballot is forgotten: a partition loses pushes."""
        now = self.swarm.now + 15.0
        for name, node in self.swarm.nodes.items():
            heard = node.core._leadership._heard.items()
            if any(id in self.swarm.nodes and now - at >= HEARD_S for id, at in heard):
                self.swarm.hear(name)
        self.swarm.pass_time(15.0)

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
        steps = {name: node.steps + 3 for name, node in swarm.nodes.items()}

        def go_on(name: str) -> None:
            assert not swarm.nodes[name].waits or self.mode == "hardsync", f"{name} hangs"
            if not swarm.nodes[name].waits:
                swarm.step(name, 0.0)

        swarm.come_to(lambda name: swarm.nodes[name].steps >= steps[name], go_on)
        swarm.end()
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
TestStorm.settings = weather_settings(100)


@settings(max_examples=20, deadline=None)
@given(
    codec=st.sampled_from(sorted(CODECS)),
    rounds=st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=1, max_size=10),
)
def test_what_a_codec_drops_comes_later(codec: str, rounds: list[list[int]]) -> None:
    """Weights and residuals together are what was pushed."""
    swarm = ServerSwarm("hardsync", "abc", size=30, codec=codec, servers=2)
    total = np.zeros(30)
    for updates in rounds:
        for name, update in zip("abc", updates, strict=True):
            change = update * np.cos(np.arange(30.0) + update)
            total += change / 3
            swarm.step(name, change)
        swarm.settle()
    kept = sum(node.core._worker._residual for node in swarm.nodes.values()) / 3
    np.testing.assert_allclose(swarm.weights() + kept, total, atol=1e-4)


def test_workers_know_the_weights_bit_for_bit() -> None:
    swarm = ServerSwarm("hardsync", "abcd", size=50, codec="int8", servers=3)
    for _ in range(5):
        for name in "abcd":
            swarm.step(name, np.random.default_rng(ord(name)).integers(-9, 9, 50).astype(float))
        swarm.settle()
        bases = [node.core._worker.base.astype(np.float32).tobytes() for node in swarm.nodes.values()]
        assert len(set(bases)) == 1


def test_a_death_moves_only_its_own_shards() -> None:
    swarm = ServerSwarm("async", "abcdef", size=64, servers=16)
    before = [swarm.serving(shard) for shard in range(16)]
    (victim,) = max(before, key=before.count)
    swarm.die(victim)
    swarm.all_hear()
    swarm.settle()
    for shard, servers in enumerate(before):
        after = swarm.serving(shard)
        assert len(after) == 1
        assert servers in (after, [victim])


@pytest.mark.parametrize("messages", range(30))
@pytest.mark.parametrize("mode", ["hardsync", "softsync:1", "async"])
def test_a_server_that_dies_after_any_message_holds_nobody_up(mode: str, messages: int) -> None:
    swarm = ServerSwarm(mode, "abcd")
    (victim,) = swarm.serving()
    for name in swarm.nodes:
        swarm.step(name, 12.0)
    swarm.dies_after(messages, victim)
    assert not [name for name, node in swarm.nodes.items() if node.waits], "without any timer"


def test_who_is_waited_for_is_named_in_the_log() -> None:
    """Once a step: on the server the worker that has not pushed, on the other workers the server."""
    swarm = ServerSwarm("hardsync", "abcd", servers=1)
    (server,) = swarm.serving()
    missing, *others = sorted(swarm.nodes.keys() - {server})
    for name in (server, *others):
        swarm.step(name, 1.0)
    swarm.settle()
    for _ in range(60):
        swarm.pass_time(10.0)
        swarm.settle()
    assert sorted(name for name, _ in swarm.logged) == sorted([server, *others])
    for name, text in swarm.logged:
        assert f"s for member {missing if name == server else server}" in text


def test_two_halves_of_a_partition_become_one() -> None:
    swarm = ServerSwarm("async", "abcd")
    for half in ("ab", "cd"):
        for name in half:
            swarm.peers(name, set(half))
    swarm.settle()
    for name in "abcabc":
        swarm.step(name, 1.0)
        swarm.settle()
    for name in "abcd":
        swarm.peers(name, set("abcd"))
        swarm.settle()
    assert len(swarm.serving()) == 1
    assert not [name for name, node in swarm.nodes.items() if node.waits]
    for name in "abcd":
        swarm.step(name, 0.0, finishing=True)
    swarm.settle()
    assert len({node.x[0] for node in swarm.nodes.values()}) == 1
    assert swarm.weights()[0] > 2.0, "the half with the higher clock goes on"


def test_who_serves_and_who_claims_do_not_argue_without_end() -> None:
    """The ballot was lost, and each hears of the other: the proposer asks again."""
    swarm = ServerSwarm("hardsync", NAMES, servers=3)
    for name in "wxyz":
        swarm.join(name, "a")
    swarm.lose("y", "c")
    swarm.all_hear()
    swarm.settle()
    assert [len(swarm.serving(shard)) for shard in range(3)] == [1, 1, 1]


def test_rounds_close_with_all_while_a_shard_has_no_server() -> None:
    """The proposer died unknown; else the other shards' rounds, each without one worker, set both apart for good."""
    swarm = ServerSwarm("hardsync", NAMES, servers=3)
    swarm.die("a")
    swarm.die("d")
    swarm.join("w", "b")
    swarm.join("x", "c")
    swarm.die("b")
    swarm.step("c", 1.0)
    swarm.step("w", 1.0)
    swarm.join("y", "c")
    swarm.die("y")
    swarm.die("x")
    swarm.settle()
    swarm.heal()
    for _ in range(5):
        for name in [name for name in "cw" if not swarm.nodes[name].waits]:
            swarm.step(name, 1.0)
        swarm.settle()
    assert not [name for name, node in swarm.nodes.items() if node.waits], "without any timer"
    assert min(node.steps for node in swarm.nodes.values()) > 3


def test_who_owns_a_shard_after_a_claimant_that_is_forgotten_need_not_ask_again() -> None:
    """It proposed itself while the dead one, whom no membership named, still seemed to own the shard."""
    swarm = ServerSwarm("softsync:99", NAMES, servers=3)
    swarm.join("w", "a")
    swarm.join("x", "b")
    swarm.join("y", "c")
    for victim in "abcdw":
        swarm.die(victim)
    swarm.settle()
    swarm.die("y")
    swarm.join("z", "x")
    swarm.all_hear()
    swarm.settle()
    swarm.now += HEARD_S
    swarm.perform("x", swarm.nodes["x"].core.on_timer(swarm.now))
    swarm.settle()
    assert [len(swarm.serving(shard)) for shard in range(3)] == [1, 1, 1]


def test_a_bid_of_long_ago_that_cannot_be_any_more_keeps_nobody_from_hearing_of_a_death() -> None:
    """It came before there was a term, of one that owned no shard; who dies leaves it two."""
    swarm = ServerSwarm("hardsync", "abc", servers=3)
    swarm.join("y", "a")
    (owner,) = swarm.serving(0)
    swarm.nodes["y"].core.on_message("a", Prepare(0, 1 << 47, NEVER), swarm.now)
    swarm.all_hear()
    swarm.settle()
    swarm.die(owner)
    swarm.all_hear()
    swarm.settle()
    assert [len(swarm.serving(shard)) for shard in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("named", [True, False])
def test_a_server_that_no_membership_names_is_a_half_of_its_own(named: bool) -> None:
    """While it is silent for longer than a proposer may be: as in a partition, which ends when it is named."""
    swarm = ServerSwarm("async", NAMES, servers=3)
    swarm.join("y", "a")
    swarm.settle()
    assert swarm.serving(1) == ["y"]
    if named:
        swarm.all_hear()
    swarm.pass_time(HEARD_S)
    swarm.settle()
    assert swarm.serving(1) == (["y"] if named else ["c", "y"])
    swarm.all_hear()
    swarm.settle()
    assert swarm.serving(1) == ["y"]


def test_a_model_that_is_not_finite_holds_nobody_up() -> None:
    swarm = ServerSwarm("hardsync", "ab")
    swarm.step("a", np.nan)
    swarm.step("b", 2.0)
    swarm.settle()
    assert not any(node.waits for node in swarm.nodes.values())
    assert swarm.nodes["b"].x[0] == 1.0
    assert swarm.nodes["a"].core.counts["not_finite"] == 1


def test_a_worker_that_restarts_counts_anew() -> None:
    """Its first push is lost with its connection; the reminder must not be answered for the life before."""
    swarm = ServerSwarm("async", "abc")
    (server,) = swarm.serving()
    worker = next(name for name in swarm.nodes if name != server)
    for _ in range(5):
        swarm.step(worker, 1.0)
        swarm.settle()
    swarm.die(worker)
    swarm.join(worker, server)
    swarm.settle()
    swarm.cut(server, worker)  # who it is and whom it lost, its peers see before they declare it dead
    swarm.settle()
    swarm.step(worker, 1.0)
    swarm.cut(worker, server)
    swarm.settle()
    assert not swarm.nodes[worker].waits
    assert swarm.weights()[0] == 6.0


def test_who_has_finished_is_not_waited_for() -> None:
    swarm = ServerSwarm("hardsync", "abc")
    for name in "abc":
        swarm.step(name, 3.0, finishing=name == "a")
    swarm.settle()
    assert swarm.nodes["a"].proceeded == [False]
    for _ in range(3):
        for name in "bc":
            swarm.step(name, 1.0)
        swarm.settle()
    assert swarm.nodes["b"].x[0] == 6.0


@pytest.mark.parametrize("mode", ["async", "softsync:1", "softsync:4"])
def test_last_pushes_count_though_others_have_ended(mode: str) -> None:
    """Of equal workers that end one after the other each has made its last step by weights that all had."""
    names = "abcdefghijklmnop"
    swarm = ServerSwarm(mode, names)
    for step in range(3):
        for name in names:
            swarm.step(name, np.eye(8)[0])
            swarm.settle()
            if step == 2:
                swarm.finish(name)
                swarm.settle()
    swarm.end()
    assert sum(node.core.counts["pushes_dropped"] for node in swarm.nodes.values()) == 0


def test_a_trainer_that_goes_after_its_last_step_holds_nobody_up() -> None:
    swarm = ServerSwarm("hardsync", "abc")
    swarm.step("b", 3.0, finishing=True)
    swarm.perform("b", swarm.nodes["b"].core.on_trainer_lost(swarm.now))
    for _ in range(3):
        for name in "ac":
            swarm.step(name, 1.0)
        swarm.settle()
    assert swarm.nodes["b"].proceeded == [False]
    assert not swarm.nodes["a"].waits


def test_a_server_that_is_back_before_it_is_missed_serves_again() -> None:
    """Its next life first prepares a term below the one that it served by."""
    swarm = ServerSwarm("hardsync", "abcd")
    (first,) = swarm.serving()
    swarm.die(first)
    swarm.all_hear()
    swarm.settle()
    (server,) = swarm.serving()
    donor = next(name for name in swarm.nodes if name != server)
    swarm.die(server)
    swarm.join(server, donor)
    swarm.settle()
    assert swarm.serving() == [server]
    for name in swarm.nodes:
        swarm.step(name, 3.0)
    swarm.settle()
    assert not [name for name, node in swarm.nodes.items() if node.waits]


@pytest.mark.parametrize("late", "abc")
def test_who_comes_back_after_all_have_ended_ends_too(late: str) -> None:
    swarm = ServerSwarm("hardsync", "abc")
    for name in "abc":
        swarm.step(name, 3.0, finishing=True)
    swarm.settle()
    donor = next(name for name in "abc" if name != late)
    swarm.die(late)
    swarm.all_hear()
    swarm.join(late, donor)
    for name in "abc":
        swarm.peers(name, set("abc"))
    swarm.settle()
    swarm.step(late, 0.0, finishing=True)
    swarm.settle()
    assert swarm.nodes[late].proceeded == [False, True]
    assert len({node.x.tobytes() for node in swarm.nodes.values()}) == 1


def test_a_lone_node_trains_and_ends() -> None:
    swarm = ServerSwarm("hardsync", "a")
    swarm.step("a", 1.0)
    swarm.step("a", 1.0, finishing=True)
    assert swarm.nodes["a"].proceeded == [False, True]
    assert swarm.nodes["a"].x[0] == 2.0
    assert not swarm.messages


@pytest.mark.parametrize(
    "message",
    [
        Delta(1, 1, "sign", 0.5, True, False, b"", 0.0, 0.0, ()),
        ShardPull(7, 1, 1, Pass.NONE, True),
        ShardPull(-1, 1, 1, Pass.NONE, True),
        ShardPush(0, 1, 1, 1, 0, "sign", True, False, DIFFERENCE, (b"", b"")),
        ShardPush(0, 1, 1, 1, 0, "nope", True, False, DIFFERENCE, (b"",)),
        Weights(0, 1 << 60, "b", 0, (Applied("a", 0, 0),), False, (), (b"",)),
        Prepare(0, 1 << 63, 0),
        ShardLeader(3, 1, "b", True, 0, ()),
        ShardLeader(0, 9, "b", True, 2, (Applied("a", 1, 1),)),
        ShardLeader(0, 9, "b", True, 0, (Applied("b", 1, 1),)),
        ShardLeader(0, 9, "b", True, 2, (Applied("b", 1, 1), Applied("b", 1, 1))),
    ],
)
def test_what_breaks_the_rules_is_refused(message: Message) -> None:
    swarm = ServerSwarm("async", "ab")
    (server,) = swarm.serving()
    with pytest.raises(PeerError):
        swarm.nodes[server].core.on_message("b", message, 0.0)


@pytest.mark.parametrize(
    "text", ["", "nope", "gossip:2", "softsync:", "softsync:0", "softsync:x", "softsync:4:fast", "async:2", "hardsync:"]
)
def test_a_bad_mode_is_the_users_error(text: str) -> None:
    with pytest.raises(UserError, match=f"--mode {text}"):
        parse_mode(text)


@pytest.mark.parametrize("mode", ["hardsync", "async"])
def test_a_claim_that_was_lost_with_a_connection_is_said_when_it_is_back(mode: str) -> None:
    """Without any timer: nobody trains until all have answered it."""
    swarm = ServerSwarm(mode, "abcd")
    (server,) = swarm.serving()
    swarm.die(server)
    left = sorted(swarm.nodes)
    swarm.all_hear()
    proposers = {
        source for source, _ in swarm.waiting() if swarm.nodes[source].core._leadership.shards[0].preparing is not None
    }
    (proposer,) = proposers
    others = [name for name in left if name != proposer]
    for name in others:
        assert any(isinstance(each, Prepare) for each in swarm.queues[proposer, name])
        swarm.lose(proposer, name)
    swarm.settle()
    assert swarm.serving() == []
    for name in others:
        swarm.cut(proposer, name)
    swarm.settle()
    assert swarm.serving() == [proposer]


def test_weights_that_a_worker_does_not_take_take_no_push_of_its_with_them() -> None:
    """An answer that comes twice may hold the push, and die with its server before this worker has what it holds."""
    worker = Worker("w", 1, Layout(2, 2), 1, "float32", np.zeros(2, np.float32))
    (part,) = worker.parts
    assert worker.take(part, 0, 0, [], np.zeros(2, np.float32), False) is True
    worker.step(np.ones(2, np.float32), 0.0)
    (said,) = worker.to_say(part, (1, "s"), finishing=False)
    assert worker.take(part, 0, said.seq, [], np.zeros(2, np.float32), False) is True, "the push has come, no more"
    mine = [Applied("w", 1, said.seq)]
    assert worker.take(part, 1, said.seq, mine, np.ones(2, np.float32), False) is None, "nobody asked for these"
    assert [push.seq for push in worker.to_say(part, (2, "t"), finishing=False)] == [said.seq]
    worker.step(2 * np.ones(2, np.float32), 1.0)
    assert worker.take(part, 1, said.seq + 1, mine, np.ones(2, np.float32), False) is True
    assert [push.seq for push in worker.to_say(part, (3, "u"), finishing=False)] == [said.seq + 1]


SHARDS, OLD, NEW = [1, 2, 3, 5], ["ab", "abc"], ["d", "de", "def"]


def course_of_newcomers(seed: int, topology: str, servers: int, names: str, who: str) -> int:
    """All end in the same rounds, whoever hears first of whom. Says how often nothing went on without a timer."""
    swarm, rng = ServerSwarm("hardsync", names, size=12, servers=servers, topology=topology), random.Random(seed)
    come_at = {name: rng.randrange(40, 80) for name in who}
    hear_at = {(name, other): rng.randrange(80, 400) for name in names + who for other in who}
    speeds = dict[tuple[str, str], float]()
    reminders = 0
    for turn in range(2000):
        for name in [name for name, at in come_at.items() if at == turn]:
            swarm.live(name, swarm.nodes["a"].x)
            swarm.peers(name, set())  # it serves itself until it hears of the others
        for name in [name for (name, _), at in hear_at.items() if at == turn]:
            swarm.hear(name)
        free = [name for name, node in sorted(swarm.nodes.items()) if node.heard and not node.waits]
        links = [(source, target) for source, target in swarm.waiting() if source in swarm.nodes[target].heard]
        if links and (not free or rng.random() < 0.9):
            speed = [speeds.setdefault(link, rng.choice([0.03, 1.0])) for link in links]
            swarm.deliver(*rng.choices(links, speed)[0])
        elif free:
            swarm.step(rng.choice(free), 1.0)
        elif turn >= 400:
            reminders += 1
            swarm.pass_time(min(node.core.deadline for node in swarm.nodes.values()) - swarm.now)
    swarm.settle()
    marks = [swarm.server(shard).applied for shard in range(servers)]
    assert all(marks[0][name].seq == mark.seq for each in marks for name, mark in each.items()), "rounds apart"
    assert min(marks[0][name].seq for name in who) > 3
    return reminders


@settings(deadline=None)
@given(started=st.floats(0, 1e6), slowest_s=st.floats(0, 100), wait_s=st.lists(st.floats(0.001, 20), max_size=4))
def test_a_timer_that_is_due_is_not_due_at_once_again(started: float, slowest_s: float, wait_s: list[float]) -> None:
    swarm = ServerSwarm("hardsync", "ab", size=4)
    swarm.now = started
    swarm.join("c", "a")  # whoever prepares hears nothing
    for node in swarm.nodes.values():
        node.core._slowest_s = slowest_s
    swarm.hear("a")
    swarm.hear("b")
    armed = 0
    for seconds in [*wait_s, 0.0]:
        swarm.pass_time(seconds)
        for name, node in sorted(swarm.nodes.items()):
            if (due := node.core.deadline) < math.inf:
                swarm.now = max(swarm.now, due)
                swarm.perform(name, node.core.on_timer(swarm.now))
                assert node.core.deadline > swarm.now
                armed += 1
    assert armed


@pytest.mark.one_run_in(3)
@given(
    seed=st.integers(0, 2**32), topology=st.sampled_from(["auto", "adv:2"]), servers=st.sampled_from(SHARDS),
    names=st.sampled_from(OLD), who=st.sampled_from(NEW),
)  # fmt: skip
@settings(max_examples=20)
def test_who_comes_is_taken_in_by_all_servers(seed: int, topology: str, servers: int, names: str, who: str) -> None:
    """Nor may two be a round apart in what they wait for, which halves their speed."""
    course_of_newcomers(seed, topology, servers, names, who)


@pytest.mark.one_run_in(3)
def test_newcomers_seldom_stand_still_until_a_timer() -> None:
    """A worker that waits for a server that waits for a worker of another server: in some 50 of 3,000 courses."""
    rng = random.Random(1)
    timers = [
        course_of_newcomers(
            rng.getrandbits(32), rng.choice(["auto", "adv:2"]), rng.choice(SHARDS), rng.choice(OLD), rng.choice(NEW)
        )
        for _ in range(20)
    ]
    assert sum(count > 0 for count in timers) <= 1
