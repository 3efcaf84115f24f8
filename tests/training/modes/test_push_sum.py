"""Push-sum as a whole: the mean is kept with every codec, whatever is lost."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from gossip_swarm import GossipSwarm
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.training.codecs import CODECS
from peerd.training.effects import Send
from peerd.training.modes.push_sum import WEIGHT_MIN
from peerd.training.one_way import core as one_way_core
from peerd.transport.errors import PeerError
from peerd.transport.messages import Push


def total_weight(swarm: GossipSwarm) -> float:
    return float(sum(node.core.weight for node in swarm.nodes.values()))


@settings(max_examples=40, deadline=None, print_blob=True)
@given(codec=st.sampled_from(sorted(CODECS)), count=st.integers(2, 5), seed=st.integers(0, 1000), lossy=st.booleans())
def test_the_mean_is_kept(codec: str, count: int, seed: int, lossy: bool) -> None:
    swarm = GossipSwarm(count, 64, codec, seed=seed, mode="push-sum")
    swarm.everyone_alive()
    rng = np.random.default_rng(seed)
    pairs = list(permutations(sorted(swarm.nodes), 2))
    for _ in range(40):
        swarm.step(rng.choice(sorted(swarm.nodes)), rng.normal(size=64))
        source, target = pairs[rng.integers(len(pairs))]
        swarm.duplicate(source, target)
        if lossy:
            swarm.cut(*pairs[rng.integers(len(pairs))])
        for _ in range(3):
            swarm.deliver(*pairs[rng.integers(len(pairs))])
    swarm.quiesce()
    swarm.quiesce()
    assert abs(total_weight(swarm) - count) < 1e-12
    assert swarm.drift() < 1e-10


@pytest.mark.parametrize("seed", range(4))
def test_the_mean_is_kept_where_links_make_room_for_others(seed: int) -> None:
    """More members than links, and messages that come in any order: what is under way is never given up."""
    swarm = GossipSwarm(9, 40, "float32", view=2, seed=seed, mode="push-sum")
    swarm.everyone_alive()
    swarm.settle()
    rng = np.random.default_rng(seed)

    def come(most: int) -> None:
        while most and (links := swarm.waiting()):
            swarm.deliver(*links[rng.integers(len(links))])
            most -= 1

    for _ in range(20):
        for name in swarm.nodes:
            swarm.step(name, 0.1 * rng.normal(size=40))
            come(9)
    swarm.finish(*swarm.nodes)
    come(100_000)
    swarm.quiesce()
    assert abs(total_weight(swarm) - 9) < 1e-12
    assert swarm.drift() < 1e-10
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())


@pytest.mark.cases(3)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_in_float32_the_mean_drifts_by_rounding_alone(codec: str) -> None:
    swarm = GossipSwarm(4, 300, codec, seed=1, mode="push-sum", dtype="float32")
    swarm.everyone_alive()
    rng = np.random.default_rng(1)
    pushes = 0
    for _ in range(300):
        for name in swarm.nodes:
            swarm.step(name, 0.01 * rng.normal(size=300))
            swarm.settle()
    pushes = sum(node.core.counts["exchanges"] for node in swarm.nodes.values())
    assert pushes > 1000
    assert abs(total_weight(swarm) - 4) < 1e-12
    # a rounding is at most 2**-24 of a value, and random: far below one for each push, added up
    assert swarm.drift() < 2**-24 * 300
    swarm.finish(*swarm.nodes)
    swarm.quiesce()
    assert swarm.spread() < 0.01


@pytest.mark.cases(3)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_what_a_codec_drops_does_not_grow(codec: str) -> None:
    swarm = GossipSwarm(3, 600, codec, seed=1, mode="push-sum")
    swarm.everyone_alive()
    largest = max(np.abs(node.x).max() for node in swarm.nodes.values())
    for _ in range(200):
        for name in swarm.nodes:
            swarm.step(name)
            swarm.settle()
    assert max(np.abs(node.x).max() for node in swarm.nodes.values()) < 1.5 * largest


@pytest.mark.parametrize("lives_on", [True, False])
@pytest.mark.parametrize("arrived", [True, False])
def test_a_push_to_a_peer_that_went_waits_for_it(arrived: bool, lives_on: bool) -> None:
    """It is there once: with the peer that comes back, or with the giver if that is another life."""
    swarm = GossipSwarm(2, 50, "sign", mode="push-sum")
    swarm.everyone_alive()
    weights = []
    for _ in range(2):  # a first push, which any life would take, and the one that waits
        swarm.settle()
        swarm.step("a", np.zeros(50))
        weights.append(swarm.nodes["a"].core.weight)
    if arrived:
        swarm.deliver("a", "b")
    swarm.lose("a", "b")
    swarm.lose("b", "a")
    swarm.peers("a", {"a"})
    swarm.peers("b", {"b"})
    assert swarm.nodes["a"].core.weight == weights[1]
    if not lives_on:
        swarm.restart("b", swarm.start)
    swarm.all_hear()
    swarm.settle()
    assert not any(node.core.under_way for node in swarm.nodes.values())
    assert abs(total_weight(swarm) - (2 if lives_on else 1 + weights[0])) < 1e-12
    assert swarm.drift() < 1e-12 or not lives_on


def test_of_pushes_to_peers_that_went_the_oldest_are_taken_back_and_counted() -> None:
    swarm = GossipSwarm(8, 50, "sign", view=1, mode="push-sum")
    core = swarm.nodes["a"].core
    for other in "bcdefgh":
        swarm.peers("a", {"a", other})
        swarm.step("a", np.zeros(50))  # nothing is ever delivered
        swarm.peers("a", {"a"})
    assert len(core._copies.outgoing) <= 4, "two for the living, two for those who went"
    assert core.counts["exchanges_cut"] > 0
    assert abs(core.weight + sum(flow.under_way for flow in core._outflows.values()) - 1) < 1e-12


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stands still keeps what it gets."""
    monkeypatch.setattr(one_way_core, "STILL_AFTER", math.inf)


@pytest.mark.usefixtures("keeping")
def test_a_node_that_gave_nearly_all_away_waits() -> None:
    swarm = GossipSwarm(2, 50, "float32", mode="push-sum")
    swarm.everyone_alive()
    for _ in range(100):
        swarm.step("a", np.ones(50))
        swarm.settle()
    node = swarm.nodes["a"].core
    assert WEIGHT_MIN / 3 < node.weight < WEIGHT_MIN
    assert node.counts["trigger_light"] > 50


def test_a_slow_member_does_not_gather_the_weight_of_a_fast_one() -> None:
    """It begins an exchange at every 20th of its own steps only, as the other does."""
    swarm = GossipSwarm(2, 40, "float32", trigger="period:20", mode="push-sum")
    swarm.everyone_alive()
    for step in range(5000):
        swarm.step("a", np.zeros(40))
        swarm.settle()
        if step % 75 == 0:
            swarm.step("b", np.zeros(40))
            swarm.settle()
    assert swarm.nodes["a"].core.weight > 0.2


def test_who_has_finished_does_not_gather_the_weight_of_those_who_train_on() -> None:
    swarm = GossipSwarm(4, 40, "sign", seed=3, mode="push-sum")
    swarm.everyone_alive()
    swarm.settle()
    swarm.finish("b")
    for _ in range(300):
        for name in "acd":
            swarm.step(name, np.full(40, 0.01))
            swarm.settle()
    assert min(swarm.nodes[name].core.weight for name in "acd") > 0.2
    assert np.linalg.norm(swarm.nodes["b"].x - swarm.nodes["a"].x) < 0.1 * np.linalg.norm(swarm.nodes["a"].x)
    swarm.finish("a", "c", "d")
    swarm.quiesce()
    assert abs(total_weight(swarm) - 4) < 1e-12
    assert all(node.proceeded[-1] for node in swarm.nodes.values())


@pytest.mark.usefixtures("keeping")
def test_who_has_no_weight_left_to_give_pushes_its_model_alone() -> None:
    swarm = GossipSwarm(2, 50, "float32", mode="push-sum")
    swarm.everyone_alive()
    for _ in range(100):
        swarm.step("a", np.ones(50))
        swarm.settle()
    light, other = swarm.nodes["a"].core.weight, swarm.nodes["b"].x.copy()
    swarm.step("a", np.ones(50), finishing=True)
    swarm.settle()
    assert swarm.nodes["a"].proceeded == [False], "it was flushed all the same"
    assert swarm.nodes["a"].core.weight == light
    assert np.array_equal(swarm.nodes["b"].x, other)
    swarm.finish("b")
    swarm.quiesce()
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())
    assert swarm.spread() < 0.01
    assert abs(total_weight(swarm) - 2) < 1e-12
    assert swarm.drift() < 1e-10


def test_who_has_not_heard_of_an_end_is_told_again() -> None:
    """The word was said once: a partner that had pushed all it had waited for it for ever, if it was lost."""
    swarm = GossipSwarm(3, 40, "float32", view=1, mode="push-sum")  # a pushes to b, b to c, c to a
    swarm.everyone_alive()
    for _ in range(5):
        for name in swarm.nodes:
            swarm.step(name)
            swarm.settle()
    swarm.finish("a")
    swarm.settle()
    swarm.finish("b")
    assert swarm.queues["b", "a"], "the word of its end"
    swarm.queues["b", "a"].clear()
    swarm.settle()
    swarm.finish("c")
    swarm.settle()
    assert True not in swarm.nodes["a"].proceeded
    for wait_s in (1, 2, 4):
        swarm.now += wait_s + 0.01
        for name, node in swarm.nodes.items():
            if node.core.deadline <= swarm.now:
                swarm.perform(name, node.core.on_timer(swarm.now))
        swarm.settle()
    assert swarm.nodes["a"].proceeded == [False, True]


@pytest.mark.parametrize("back", [False, True])
def test_two_without_weight_do_not_ask_each_other_without_end(back: bool) -> None:
    swarm = GossipSwarm(2, 50, "float32", mode="push-sum")
    swarm.everyone_alive()
    swarm.step("a", np.ones(50))
    push = swarm.queues["a", "b"].popleft()
    assert isinstance(push, Push)
    core = swarm.nodes["b"].core
    swarm.finish("b")
    core._account.weight = WEIGHT_MIN / 2
    asks = replace(push, weight=0.0, finishing=True, back=back)
    answers = [effect.message for effect in core.on_message("z", asks, 0.0) if isinstance(effect, Send)]
    assert any(isinstance(answer, Push) for answer in answers) is not back


@pytest.mark.parametrize("weight", [-1.0, 1e9, float("nan")])
def test_a_weight_that_cannot_be_is_refused(weight: float) -> None:
    swarm = GossipSwarm(2, 50, "float32", mode="push-sum")
    swarm.everyone_alive()
    swarm.step("a", np.ones(50))
    push = swarm.queues["a", "b"].popleft()
    assert isinstance(push, Push)
    before = swarm.nodes["b"].x.copy()
    bad = Push(push.link, push.seq, push.codec, push.gain, weight, False, False, push.chunks)
    with pytest.raises(PeerError, match="weight"):
        swarm.nodes["b"].core.on_message("a", bad, 0.0)
    assert np.array_equal(swarm.nodes["b"].x, before)
    assert swarm.nodes["b"].core.weight == 1
