"""Every mode of the gossip family: models meet, a run ends cheaply, and who is quiet says nothing.

What every mode keeps, whatever happens, is in test_modes.py.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from gossip_swarm import KeptMessages

from peerd.training.codecs import CODECS
from peerd.training.effects import Send
from peerd.training.flush import FLUSH_TOLERANCE
from peerd.transport.errors import PeerError
from peerd.transport.messages import Hello, LinkSketch, Message, Push, Pushed

GOSSIPING = ["gossip", "gossip-pull", "gossip-push", "push-sum", "elastic:pairwise"]  # elastic: test_elastic.py


class CountingSwarm(KeptMessages):
    """Counts what each push was merged into."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
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


@pytest.fixture(params=GOSSIPING)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.cases(12)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_models_meet(mode: str, codec: str) -> None:
    swarm = CountingSwarm(6, 600, codec, seed=3, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    before = swarm.spread()
    for _ in range(60):
        for name in swarm.nodes:
            swarm.step(name)
            swarm.settle()
    assert swarm.spread() < 0.5 * before


def test_who_stands_still_holds_nobody_back(mode: str) -> None:
    """Two make no step for long: the others' steps are in every model all the same, and no two push without end."""
    swarm = CountingSwarm(4, 600, "float32", trigger="always", seed=4, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    steps, move = 150, np.eye(600)[7]
    before = swarm.nodes["c"].x[7]
    for _ in range(steps):
        for name in "cd":
            swarm.step(name, move)
            swarm.settle()
    followed = min(swarm.nodes[name].x[7] for name in "ab") - before
    assert followed > 0.75 * (swarm.nodes["c"].x[7] - before)
    swarm.finish(*swarm.nodes)
    swarm.quiesce()
    least = min(node.x[7] for node in swarm.nodes.values()) - before
    assert least > 0.4 * steps / 2, "an even mean moves by half of their steps; merging one way is late"
    assert swarm.spread() < FLUSH_TOLERANCE


def test_who_waits_for_the_others_is_heard_by_one_that_begins_anew(mode: str) -> None:
    """A partner forgets in a restart that somebody has finished, and does not choose it again."""
    swarm = CountingSwarm(4, 60, "float32", seed=1, view=1, mode=mode)
    swarm.everyone_alive()
    swarm.settle()

    def train(names: str, steps: int) -> None:
        for _ in range(steps):
            for name in names:
                swarm.step(name, 0.0)
                swarm.settle()

    train("abcd", 5)
    swarm.finish("d")
    swarm.settle()
    swarm.restart("a", swarm.nodes["b"].x)
    train("abc", 30)
    for name in "abc":
        swarm.finish(name)
        swarm.settle()
    swarm.quiesce()
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())


def test_a_flush_ends_with_one_model_near_the_mean(mode: str) -> None:
    swarm = CountingSwarm(4, 600, "sign", trigger="change:0.05", seed=1, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    mean = sum(node.x for node in swarm.nodes.values()) / 4
    swarm.finish(*swarm.nodes)
    swarm.delivered.clear()
    swarm.quiesce()
    of_models = len(swarm.delivered) - swarm.count(LinkSketch)
    assert of_models <= 4 * 42, "seven rounds of three pushes and their answers each"
    assert swarm.spread() < FLUSH_TOLERANCE
    assert np.linalg.norm(swarm.nodes["a"].x - mean) < 0.1 * np.linalg.norm(mean)
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())


@pytest.mark.cases(2)
def test_a_large_swarm_agrees_on_small_views(mode: str) -> None:
    swarm = CountingSwarm(12, 60, "int8", seed=2, view=2, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    for name in swarm.nodes:
        swarm.finish(name)
        swarm.settle()
    swarm.quiesce()
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())
    assert swarm.spread() < 10 * FLUSH_TOLERANCE


def test_who_finishes_first_waits_for_the_others(mode: str) -> None:
    swarm = CountingSwarm(3, 600, "sign", trigger="change:0.05", seed=1, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    swarm.finish("a")
    swarm.settle()
    assert swarm.nodes["a"].proceeded == [False], "handed over, but nobody else has finished"
    for name in "bc":
        swarm.finish(name)
        swarm.settle()
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())


@pytest.mark.parametrize("mode", ["gossip-pull", "gossip-push", "push-sum"])
def test_a_partner_whose_push_was_lost_is_not_pushed_to_without_end(mode: str) -> None:
    swarm = CountingSwarm(2, 40, "bfloat16", seed=1, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    swarm.finish("a")
    swarm.settle()
    swarm.finish("b")
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
    swarm.finish("a")
    assert swarm.nodes["a"].proceeded == [False, True]


def test_a_quiet_node_sends_nothing(mode: str) -> None:
    swarm = CountingSwarm(3, 600, "sign", trigger="change:0.05", mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    sent, published = swarm.messages, [node.base for node in swarm.nodes.values()]
    for _ in range(50):
        for name in swarm.nodes:
            swarm.step(name)
    swarm.settle()
    assert swarm.messages == sent
    assert all(node.base is base for node, base in zip(swarm.nodes.values(), published, strict=True)), "no copy"


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


@pytest.mark.parametrize("mode", ["gossip-pull", "gossip-push", "push-sum"])
def test_an_answer_said_again_by_a_model_that_is_not_finite_any_more_is_no_offence(mode: str) -> None:
    swarm = CountingSwarm(2, 50, "sign", mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    swarm.step("a", 1.0)
    pushes: list[tuple[str, str, Push]] = []
    while waiting := swarm.waiting():
        source, target = waiting[0]
        pushes += [(source, target, each) for each in swarm.queues[source, target] if isinstance(each, Push)]
        swarm.deliver(source, target)
    giver, taker, push = pushes[-1]
    swarm.nodes[taker].x[3] = np.nan
    (answer,) = swarm.nodes[taker].core.on_message(giver, push, swarm.now)
    assert isinstance(answer, Send)
    swarm.nodes[giver].core.on_message(taker, answer.message, swarm.now)  # a PeerError is a strike


def test_a_message_of_another_kind_is_refused(mode: str) -> None:
    core = CountingSwarm(2, 10, "sign", mode=mode).nodes["a"].core
    with pytest.raises(PeerError, match="no meaning"):
        core.on_message("b", Hello(1, "s", "r", "n", "n", 1, "h", 1, mode, "", ()), 0.0)
