"""Every mode of the gossip family: whatever happens to the connections and the peers, a run ends and all agree.

Modes with rounds and with servers have harnesses of their own (test_rounds.py, test_parameter_server.py): there a copy
of the model comes with a step, not by itself.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from gossip_swarm import GossipSwarm
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from peerd.effects import PeerError
from peerd.messages import Hello, Message, Push, Pushed
from peerd.training.codecs import CODECS
from peerd.training.modes.gossip import FLUSH_TOLERANCE

GOSSIPING = ["gossip", "gossip-pull", "gossip-push", "push-sum", "elastic:pairwise"]  # elastic: test_elastic.py
NAMES = "abcde"
SIZE = 40
EXAMPLES = 25  # of each mode: a minute in all
QUEUE_MOST = 8  # as the simulation's checker: what one node has under way to one other

names = st.sampled_from(NAMES)


class CountingSwarm(GossipSwarm):
    """Checks that nothing waits without bound, and counts what each push was merged into."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.merged: Counter[tuple[str, str, int, int]] = Counter()

    def deliver(self, source: str, target: str) -> bool:
        queue = self.queues[source, target]
        message: Message | None = queue[0] if queue else None
        before = self.nodes[target].core.counts["exchanges"]
        came = super().deliver(source, target)
        if isinstance(message, Push) and self.nodes[target].core.counts["exchanges"] > before:
            at = (source, target, message.link, message.seq)
            self.merged[at] += 1
            assert self.merged[at] == 1, "a push was merged twice"
        return came


class AnyMode(RuleBasedStateMachine):
    """Steps, deliveries, cuts, repetitions, deaths and returns in any order; then every run ends."""

    mode = "gossip"

    @initialize(
        codec=st.sampled_from(sorted(CODECS)), seed=st.integers(0, 2**16), view=st.integers(2, 3),
        dtype=st.sampled_from(["float32", "float64"]),
    )  # fmt: skip
    def start(self, codec: str, seed: int, view: int, dtype: str) -> None:
        self.swarm = CountingSwarm(
            len(NAMES), SIZE, codec, seed=seed, view=view, buffers=7, mode=self.mode, dtype=dtype
        )
        self.alive = {name: set(NAMES) for name in NAMES}
        self.cuts: set[tuple[str, str]] = set()
        self.rng = np.random.default_rng(seed)
        self.swarm.everyone_alive()

    @rule(name=names, scale=st.sampled_from([0.0, 1e-3, 1.0]))
    def local_step(self, name: str, scale: float) -> None:
        self.swarm.step(name, scale * self.rng.normal(size=SIZE))
        assert all(len(queue) <= 3 * QUEUE_MOST for queue in self.swarm.queues.values())

    @rule(name=names)
    def finish(self, name: str) -> None:
        self.swarm.step(name, finishing=True)

    @rule(one=names, other=names, count=st.integers(1, 4))
    def deliver(self, one: str, other: str, count: int) -> None:
        for _ in range(count):
            if one != other:
                self.swarm.deliver(one, other)

    @rule()
    def deliver_all(self) -> None:
        self.swarm.settle()

    @rule(one=names, other=names)
    def repeat(self, one: str, other: str) -> None:
        if one != other:
            self.swarm.duplicate(one, other)

    @rule(one=names, other=names)
    def cut(self, one: str, other: str) -> None:
        if one != other:
            self.swarm.cut(one, other)

    @rule(one=names, other=names)
    def lose(self, one: str, other: str) -> None:
        """As `cut`, but what comes next overtakes the word that messages flow again."""
        if one != other:
            self.swarm.queues[one, other].clear()

    @rule(one=names, other=names)
    def one_declares_other_dead(self, one: str, other: str) -> None:
        if one != other:
            self.swarm.queues[one, other].clear()
            self.alive[one].discard(other)
            self.swarm.peers(one, self.alive[one])

    @rule(one=names, other=names)
    def one_finds_other_again(self, one: str, other: str) -> None:
        self.alive[one].add(other)
        self.swarm.peers(one, self.alive[one])

    @rule(name=names)
    def restart(self, name: str) -> None:
        """The process dies, and comes back as a newcomer that fetched a peer's model."""
        donor = NAMES[(NAMES.index(name) + 1) % len(NAMES)]
        for other in NAMES:
            if other != name:
                self.swarm.queues[name, other].clear()
                self.swarm.queues[other, name].clear()
                self.swarm.peers(other, self.alive[other] - {name})
        self.swarm.restart(name, self.swarm.nodes[donor].x, int(self.rng.integers(1 << 30)))
        self.alive[name] = set(NAMES)
        for other in NAMES:
            self.alive[other].add(name)
            self.swarm.peers(other, self.alive[other])

    @rule(name=names)
    def timer(self, name: str) -> None:
        self.swarm.now += 61.0
        self.swarm.perform(name, self.swarm.nodes[name].core.on_timer(self.swarm.now))

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        for name in NAMES:
            self.swarm.peers(name, set(NAMES))
        for source, target in self.swarm.queues:
            self.swarm.cut(source, target)  # every connection is made anew
        self.swarm.quiesce()
        for name in NAMES:
            self.swarm.step(name, np.zeros(SIZE))  # a new run for those who had ended theirs
            self.swarm.nodes[name].proceeded.clear()
        self.swarm.quiesce()
        for name in NAMES:
            self.swarm.step(name, finishing=True)
        self.swarm.quiesce()
        for node in self.swarm.nodes.values():
            assert node.proceeded == [False, True]
        assert self.swarm.spread() < 2 * len(NAMES) * FLUSH_TOLERANCE


@pytest.mark.parametrize("mode", GOSSIPING)
def test_any_weather(mode: str) -> None:
    machine = type("AnyMode", (AnyMode,), {"mode": mode})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.fixture(params=GOSSIPING)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_models_meet(mode: str, codec: str) -> None:
    swarm = CountingSwarm(6, 600, codec, seed=3, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    before = swarm.spread()
    for _ in range(150):
        for name in swarm.nodes:
            swarm.step(name)
            swarm.settle()
    assert swarm.spread() < 0.5 * before


def test_a_flush_ends_with_one_model_near_the_mean(mode: str) -> None:
    swarm = CountingSwarm(4, 600, "sign", trigger="change:0.05", seed=1, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    mean = sum(node.x for node in swarm.nodes.values()) / 4
    for name in swarm.nodes:
        swarm.step(name, finishing=True)
    swarm.messages = 0
    swarm.quiesce()
    assert swarm.messages <= 4 * 36, "six rounds of three pushes and their answers each"
    assert swarm.spread() < FLUSH_TOLERANCE
    assert np.linalg.norm(swarm.nodes["a"].x - mean) < 0.1 * np.linalg.norm(mean)
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())


def test_a_large_swarm_agrees_on_small_views(mode: str) -> None:
    swarm = CountingSwarm(16, 60, "int8", seed=2, view=2, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    for name in swarm.nodes:
        swarm.step(name, finishing=True)
        swarm.settle()
    swarm.quiesce()
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())
    assert swarm.spread() < 10 * FLUSH_TOLERANCE


def test_who_finishes_first_waits_for_the_others(mode: str) -> None:
    swarm = CountingSwarm(3, 600, "sign", trigger="change:0.05", seed=1, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    swarm.step("a", finishing=True)
    swarm.settle()
    assert swarm.nodes["a"].proceeded == [False], "handed over, but nobody else has finished"
    for name in "bc":
        swarm.step(name, finishing=True)
        swarm.settle()
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())


@pytest.mark.parametrize("mode", ["gossip-pull", "gossip-push", "push-sum"])
def test_a_partner_whose_push_was_lost_is_not_pushed_to_without_end(mode: str) -> None:
    swarm = CountingSwarm(2, 40, "bfloat16", seed=1, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    swarm.step("a", finishing=True)
    swarm.settle()
    swarm.step("b", finishing=True)
    swarm.queues["b", "a"] = type(swarm.queues["b", "a"])(
        message for message in swarm.queues["b", "a"] if isinstance(message, Pushed)
    )  # b's push alone is lost
    swarm.messages = 0
    swarm.settle()
    assert swarm.messages <= 4 * 2 + 4, "a few rounds, then it waits to hear of the other"
    assert all(node.core.deadline <= swarm.now + 61 for node in swarm.nodes.values())
    swarm.quiesce()
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())
    assert swarm.spread() < FLUSH_TOLERANCE


def test_a_lone_node_is_let_go_at_once(mode: str) -> None:
    swarm = CountingSwarm(1, 10, "sign", mode=mode)
    swarm.step("a", finishing=True)
    assert swarm.nodes["a"].proceeded == [False, True]


def test_a_quiet_node_sends_nothing(mode: str) -> None:
    swarm = CountingSwarm(3, 600, "sign", trigger="change:0.05", mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    sent = swarm.messages
    for _ in range(50):
        for name in swarm.nodes:
            swarm.step(name)
    swarm.settle()
    assert swarm.messages == sent
    assert swarm.nodes["a"].core.counts["trigger_quiet"] == 50


def test_silence_ends(mode: str) -> None:
    swarm = CountingSwarm(2, 600, "sign", trigger="change:0.05", mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    before = swarm.nodes["b"].core.counts["exchanges"]
    swarm.now += 60.001
    assert swarm.nodes["a"].core.deadline <= swarm.now
    swarm.perform("a", swarm.nodes["a"].core.on_timer(swarm.now))
    swarm.settle()
    assert swarm.nodes["b"].core.counts["exchanges"] > before


def test_a_model_that_is_not_finite_spreads_nowhere(mode: str) -> None:
    swarm = CountingSwarm(2, 50, "sign", mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    swarm.nodes["a"].x[3] = np.nan
    before = swarm.nodes["b"].x.copy()
    swarm.step("a")
    swarm.settle()
    assert np.array_equal(swarm.nodes["b"].x, before)


def test_a_message_of_another_kind_is_refused(mode: str) -> None:
    core = CountingSwarm(2, 10, "sign", mode=mode).nodes["a"].core
    with pytest.raises(PeerError, match="no meaning"):
        core.on_message("b", Hello(1, "s", "r", "n", "n", 1, "h", 1, mode, "", ()), 0.0)
