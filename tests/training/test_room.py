"""A swarm with a large model keeps few links, and is a swarm all the same. Here all models are large ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gossip_swarm import GossipSwarm, assert_references_agree
from hypothesis import given
from hypothesis import strategies as st
from mode_swarm import ModeSwarm

from peerd.training import room as rooms
from peerd.training import sample
from peerd.training.room import LARGE, room

VIEW = 3


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As of a model of hundreds of millions."""
    monkeypatch.setattr(rooms, "LARGE", 0)
    monkeypatch.setattr(sample, "WHOLE_MAX", 0)
    monkeypatch.setattr(sample, "KEPT_MIN", 8)
    monkeypatch.setattr(sample, "RUN", 2)
    sample.sample_of.cache_clear()
    yield
    sample.sample_of.cache_clear()


def places(swarm: GossipSwarm) -> dict[str, tuple[int, int]]:
    """Links to the living, and all."""
    found = {}
    for name, node in swarm.nodes.items():
        held = node.core._links.held
        found[name] = sum(link.active for link in held.values()), len(held)
    return found


@given(st.integers(1, 1024))
def test_a_small_model_has_places_to_spare(view: int) -> None:
    small = room(view, 1_000_000)
    assert (small.active, small.dormant(0), small.dormant(2 * view), small.left) == (2 * view, view, view, 6 * view)
    assert small.models == 3 * 5 * view, "as the links of a node were told before there was another rule"
    assert room(view, 40).left >= 2**20 // 40, "and of a tiny one what is left of hundreds of links"


@given(st.integers(1, 1024), st.data())
def test_a_large_model_has_a_view_and_one(view: int, data: st.DataObject) -> None:
    few = room(view, LARGE)
    active = data.draw(st.integers(0, few.active))
    assert active + few.dormant(active) == few.active == view + 1
    assert few.models == view + 1 + few.left < room(view, LARGE - 1).models


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("seed", range(4))
def test_whoever_comes_finds_a_partner_and_nobody_has_more_than_its_room(seed: int) -> None:
    swarm = GossipSwarm(16, 20, "float32", view=VIEW, seed=seed)
    names = sorted(swarm.nodes)
    for count in range(2, len(names) + 1):
        for name in names[:count]:
            swarm.perform(name, swarm.nodes[name].core.on_peers(frozenset(names[:count]) - {name}, swarm.now))
        swarm.settle()
        held = places(swarm)
        assert all(active >= 1 for active, _ in list(held.values())[:count]), held
        assert all(whole <= VIEW + 1 for _, whole in held.values()), held


@pytest.mark.usefixtures("large")
def test_absent_peers_have_the_places_that_the_living_leave() -> None:
    swarm = GossipSwarm(8, 20, "float32", view=VIEW, seed=1)
    swarm.everyone_alive()
    swarm.settle()
    core = swarm.nodes["a"].core
    partners = sorted(core._links.held)
    swarm.perform("a", core.on_peers(frozenset(partners[:1]), swarm.now))
    assert places(swarm)["a"] == (1, len(partners))
    swarm.perform("a", core.on_peers(frozenset(swarm.nodes) - {"a"} - set(partners[1:]), swarm.now))
    swarm.settle()
    assert all(whole <= VIEW + 1 for _, whole in places(swarm).values())


@pytest.mark.cases(1)
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("codec", ["sign", "int8"])
@pytest.mark.parametrize(("dtype", "drift"), [("float64", 1e-9), ("float32", 1e-5)])
def test_a_large_model_is_conserved_and_agreed_upon(codec: str, dtype: str, drift: float) -> None:
    swarm = GossipSwarm(8, 5000, codec, "change:0.05", view=VIEW, seed=3, buffers=5, dtype=dtype)
    assert not swarm.nodes["a"].core._sample.is_whole
    assert swarm.nodes["a"].core._sample.kept < 3000
    swarm.everyone_alive()
    swarm.settle()
    for _ in range(60):
        for name in sorted(swarm.nodes):
            swarm.step(name, 0.05 * swarm.rng.normal(size=5000))
        swarm.settle()
    assert swarm.nodes["a"].core.counts["exchanges"] > 10
    assert swarm.drift() < drift
    swarm.finish(*sorted(swarm.nodes))
    for _ in range(40):  # a flush goes on where its corrections have arrived, at once
        swarm.settle()
        swarm.pass_time(0)
    for _ in range(6):
        swarm.quiesce()
    models = np.array([node.x for node in swarm.nodes.values()])
    mean = models.mean(axis=0)
    assert np.linalg.norm(models - mean, axis=1).max() < 0.02 * np.linalg.norm(mean)
    assert swarm.drift() < drift
    assert_references_agree(swarm)


@pytest.mark.usefixtures("large")
def test_a_flush_that_waits_for_its_correction_goes_on_and_is_forgotten_by_a_new_run() -> None:
    swarm = GossipSwarm(3, 600, "sign", dtype="float32", view=VIEW)
    swarm.everyone_alive()
    swarm.settle()
    for name in swarm.nodes:
        swarm.step(name, 0.1 * swarm.rng.normal(size=600))
    core = swarm.nodes["a"].core
    swarm.finish(*swarm.nodes)

    def deliver_until_it_waits() -> None:
        for _ in range(1000):
            if core.deadline <= swarm.now or not swarm.waiting():
                return
            swarm.deliver(*swarm.waiting()[0])

    deliver_until_it_waits()
    assert core._flush_waits
    for other in "bc":
        swarm.lose("a", other)
    swarm.pass_time(0)
    assert {source for source, _ in swarm.waiting()} >= {"a"}, "it goes on at once, and says where its model is"
    deliver_until_it_waits()
    assert core._flush_waits
    swarm.step("a", 0.1)
    assert not core._flush_waits
    assert core.deadline > swarm.now
    for source, target in swarm.waiting():
        swarm.lose(source, target)
    swarm.pass_time(61)
    assert sum(life.core.counts["repeats"] for life in swarm.nodes.values()), "what has had no answer is said again"


@pytest.mark.usefixtures("large")
def test_a_run_that_begins_while_a_flush_is_under_way_has_a_flush_of_its_own() -> None:
    """Two had flushed to each other, and not to all: each took the other for one that had all of its new run, too."""
    swarm = ModeSwarm("gossip", "abcd", 40, buffers=7, dtype="float32", codec="bfloat16", view=2, trigger="always")
    swarm.heal()
    for name in "ba":
        swarm.finish(name)
    swarm.heal()
    for name in "abcd":
        swarm.begin_again(name)
    swarm.train(2)
    swarm.end()
    assert all(node.proceeded[-1] for node in swarm.nodes.values())


@pytest.mark.usefixtures("large")
def test_the_trigger_of_a_large_model_never_says_more_than_the_bound() -> None:
    swarm = GossipSwarm(2, 5000, "sign", "change:0.05", view=1, seed=3)
    swarm.everyone_alive()
    swarm.settle()
    (link,) = swarm.nodes["a"].core._links.held.values()
    for _ in range(60):
        before = link.exchanges
        change = 0.01 * swarm.rng.normal(size=5000)
        bound = link.moved + float(np.linalg.norm(change))
        swarm.step("a", change)
        if link.exchanges == before and swarm.nodes["a"].core._policy.partner is link:
            assert link.moved <= bound * (1 + 1e-6)
        swarm.settle()
    assert link.exchanges


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("mode", ["gossip-push", "gossip-pull", "push-sum"])
def test_modes_that_push_keep_as_few(mode: str) -> None:
    swarm = GossipSwarm(10, 5000, "sign", "change:0.05", view=VIEW, seed=3, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    for _ in range(40):
        for name in sorted(swarm.nodes):
            swarm.step(name, 0.05 * swarm.rng.normal(size=5000))
        swarm.settle()
        for node in swarm.nodes.values():
            assert max(len(node.core._copies.outgoing), len(node.core._copies.incoming)) <= VIEW + 1
    assert swarm.nodes["a"].core.counts["exchanges"] > 10
    if mode == "push-sum":
        assert swarm.drift() < 1e-9
