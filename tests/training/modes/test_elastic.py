"""Elastic averaging: models and centre keep their sum, both ends of a link agree, and there is one centre."""

from __future__ import annotations

import numpy as np
import pytest
from gossip_swarm import GossipSwarm, assert_references_agree
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from weather import NAMES, Connections, weather_settings

from peerd.training.codecs import CODECS
from peerd.training.modes.elastic import BETA
from peerd.training.modes.gossip import ANSWERED_MIN_S
from peerd.transport.errors import PeerError
from peerd.transport.messages import CentreIs, Delta, DeltaTaken, LinkClosed, LinkOpen, LinkSnapshot, PairInvite


def elastic_swarm(count: int, size: int, codec: str, mode: str = "elastic", **settings: object) -> GossipSwarm:
    """All of them alive and linked; what the centre starts from counts as put in."""
    swarm = GossipSwarm(count, size, codec, mode=mode, **settings)  # type: ignore[arg-type]
    swarm.everyone_alive()
    swarm.settle()
    swarm.initial_sum = sum(swarm.centres(), swarm.initial_sum)
    return swarm


def centres_of(swarm: GossipSwarm) -> set[str]:
    return {node.core.centre for node in swarm.nodes.values()}


class Weather(Connections):
    """Workers seem dead: exactness once the weather clears."""

    may_seem_dead = NAMES[1:]

    @initialize(codec=st.sampled_from(sorted(CODECS)), seed=st.integers(0, 2**16))
    def start(self, codec: str, seed: int) -> None:
        self.swarm: GossipSwarm = elastic_swarm(4, 40, codec, seed=seed, buffers=7)
        self.rng = np.random.default_rng(seed)

    @invariant()
    def references_agree(self) -> None:
        if hasattr(self, "swarm"):
            assert_references_agree(self.swarm)

    def teardown(self) -> None:
        if hasattr(self, "swarm"):
            self.swarm.calm()
            assert centres_of(self.swarm) == {"a"}
            assert self.swarm.drift() < 1e-12
            assert_references_agree(self.swarm)
            for node in self.swarm.nodes.values():
                assert all(reference.under_way is None for reference in node.core.references().values())


class Upheaval(Weather):
    """The centre seems dead, too, and comes back: then there is one centre, and a flush ends with one model."""

    may_seem_dead = NAMES

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        self.swarm.calm()
        assert len(centres_of(self.swarm)) == len(self.swarm.centres()) == 1
        (centre,) = centres_of(self.swarm)
        assert {link.peer for link in self.swarm.nodes[centre].core.links()} == set(NAMES)
        first, *others = (node.x for node in self.swarm.nodes.values())
        self.swarm.initial_sum = sum([*others, *self.swarm.centres()], first)
        self.swarm.injected[:] = 0.0
        self.swarm.finish(*NAMES)
        self.swarm.quiesce()
        assert self.swarm.spread() < 0.02
        assert self.swarm.drift() < 1e-12
        assert all(node.proceeded == [False, True] for node in self.swarm.nodes.values())


for machine in (Weather, Upheaval):
    machine.TestCase.settings = weather_settings(40)
TestWeather = Weather.TestCase
TestUpheaval = Upheaval.TestCase


@settings(max_examples=30, deadline=None, print_blob=True)
@given(codec=st.sampled_from(sorted(CODECS)), count=st.integers(1, 6), seed=st.integers(0, 1000))
def test_any_exchanges_keep_the_sum_and_a_flush_ends_with_one_model(codec: str, count: int, seed: int) -> None:
    swarm = elastic_swarm(count, 64, codec, seed=seed)
    rng = np.random.default_rng(seed)
    for _ in range(30):
        swarm.step(rng.choice(sorted(swarm.nodes)), rng.normal(size=64))
        swarm.settle()
        assert swarm.drift() < 1e-12
    swarm.finish(*swarm.nodes)
    swarm.quiesce()
    assert swarm.spread() < 0.01
    assert swarm.drift() < 1e-12
    (centre,) = swarm.centres()
    assert np.linalg.norm(centre - swarm.nodes["a"].x) < 0.01 * np.linalg.norm(centre)
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())


@pytest.mark.parametrize("slow", ["", "f", "def", "bcdef"])
def test_a_flush_costs_no_more_exchanges_where_some_answer_late(slow: str) -> None:
    """In rounds of those alone who had answered it took thrice as many, and each was sent over the slow lines, too."""
    swarm = elastic_swarm(6, 20, "float32")
    swarm.finish(*swarm.nodes)
    for _ in range(400):
        for _ in range(2):  # the time that a slow one takes
            while quick := [line for line in swarm.waiting() if not set(line) & set(slow)]:
                swarm.deliver(*quick[0])
            swarm.pass_time(ANSWERED_MIN_S + 0.1)
        for line in [line for line in swarm.waiting() if set(line) & set(slow)]:
            swarm.deliver(*line)
        if all(node.proceeded == [False, True] for node in swarm.nodes.values()):
            break
    assert swarm.spread() < 0.01
    assert swarm.drift() < 1e-12
    assert swarm.nodes["a"].core.counts["trigger_finishing"] < 120


def test_one_that_never_answers_keeps_the_others_of_a_flush_from_agreeing_for_a_minute() -> None:
    swarm = elastic_swarm(6, 20, "float32")
    swarm.finish(*swarm.nodes)
    for _ in range(40):
        swarm.lose("f", "a", Delta, DeltaTaken)
        while others := swarm.waiting():
            swarm.deliver(*others[0])
            swarm.lose("f", "a", Delta, DeltaTaken)
        swarm.pass_time(ANSWERED_MIN_S + 0.1)
    del swarm.nodes["f"]
    assert swarm.spread() < 0.02


@pytest.mark.parametrize(("mode", "beta"), [("elastic", BETA), ("elastic:0.5", 0.5), ("elastic:1.4", 1.4)])
def test_worker_and_centre_move_by_the_elastic_step(mode: str, beta: float) -> None:
    swarm = elastic_swarm(3, 50, "float32", mode)
    (centre,) = swarm.centres()
    model, before = swarm.nodes["b"].x.copy(), centre.copy()
    swarm.step("b")
    swarm.settle()
    moved = beta / 3 * (model - before)
    assert np.allclose(swarm.nodes["b"].x, model - moved, atol=1e-5)
    assert np.allclose(centre, before + moved, atol=1e-5)


@pytest.mark.parametrize("robust", [True, False])
def test_a_centre_whose_own_model_leaps_away_goes_on_and_is_back_when_it_is(robust: bool) -> None:
    swarm = elastic_swarm(3, 50, "float32", robust=robust)
    away = np.full(50, 1e35)
    swarm.step("a", away)
    for _ in range(3):
        swarm.step("a", 0.0)
        swarm.settle()
    a = swarm.nodes["a"].core
    assert a.counts["not_finite"] > 0
    (centre,) = swarm.centres()
    assert np.linalg.norm(centre) < 100, "it takes nothing of that"
    swarm.nodes["a"].x = np.ones(50)
    before = a.counts["exchanges"]
    for _ in range(8):
        swarm.step("a", 0.0)
        swarm.settle()
    assert a.counts["exchanges"] > before


def test_a_newcomer_of_a_smaller_id_does_not_take_the_centre() -> None:
    swarm = GossipSwarm(4, 50, "float32", mode="elastic")
    for name in "bcd":
        swarm.peers(name, set("bcd"))
    swarm.settle()
    for _ in range(3):
        swarm.step("c", np.ones(50))
        swarm.settle()
    swarm.everyone_alive()
    swarm.settle()
    assert centres_of(swarm) == {"b"}
    assert [link.peer for link in swarm.nodes["a"].core.links()] == ["b"]


def test_the_next_is_the_centre_when_it_dies_and_the_returned_one_follows() -> None:
    swarm = elastic_swarm(4, 50, "sign")
    for name in "bcd":
        swarm.peers(name, set("bcd"))
    swarm.settle()
    for _ in range(3):
        for name in "bcd":
            swarm.step(name, np.ones(50))
            swarm.settle()
    assert {swarm.nodes[name].core.centre for name in "bcd"} == {"b"}
    swarm.nodes["a"] = GossipSwarm(4, 50, "sign", mode="elastic").nodes["a"]  # its next life
    swarm.everyone_alive()
    swarm.settle()
    assert centres_of(swarm) == {"b"}
    assert_references_agree(swarm)


def test_two_centres_become_the_older_one() -> None:
    swarm = GossipSwarm(4, 50, "float32", mode="elastic")
    for half in ("ab", "cd"):
        for name in half:
            swarm.peers(name, set(half))
    swarm.settle()
    for _ in range(3):
        swarm.step("d", np.ones(50))
        swarm.settle()
    assert centres_of(swarm) == {"a", "c"}
    swarm.everyone_alive()
    swarm.settle()
    assert centres_of(swarm) == {"c"}
    assert len(swarm.centres()) == 1


def test_a_centre_whose_trainer_ends_first_hands_over_and_waits() -> None:
    swarm = elastic_swarm(4, 600, "sign", trigger="change:0.05")
    swarm.finish("a")
    swarm.settle()
    assert swarm.nodes["a"].proceeded == [False]
    exchanges = swarm.nodes["a"].core.counts["exchanges"]
    swarm.finish("b")
    swarm.settle()
    assert swarm.nodes["a"].core.counts["exchanges"] <= exchanges + 60
    swarm.finish("c", "d")
    swarm.quiesce()
    assert swarm.spread() < 0.01
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())


def test_who_is_not_the_centre_names_it() -> None:
    core = elastic_swarm(3, 50, "float32").nodes["b"].core
    assert [effect.message for effect in core.on_message("c", LinkOpen(7), 0.0)] == [CentreIs("a", 0)]


def test_two_who_name_each_other_send_nobody_to_and_fro() -> None:
    swarm = elastic_swarm(4, 50, "float32")
    a, b = swarm.nodes["a"].core, swarm.nodes["b"].core
    b.on_message("a", CentreIs("b", 0), swarm.now)  # of the centre that b follows: b is another
    swarm.perform("a", a.on_message("b", CentreIs("b", a._age + 1), swarm.now))
    swarm.perform("b", b.on_message("a", CentreIs("a", b._age + 1), swarm.now))  # of its reign, and late
    for one, other in ("ab", "ba"):
        swarm.lose(one, other)  # what each asks of the other
    assert (a.centre, b.centre) == ("b", "a")
    swarm.settle()  # c and d were told of b, which tells them of a
    swarm.calm()
    assert len(centres_of(swarm)) == len(swarm.centres()) == 1
    assert_references_agree(swarm)


def test_a_link_of_an_earlier_reign_is_not_given_again() -> None:
    swarm = elastic_swarm(3, 50, "float32")
    core = swarm.nodes["a"].core
    asked = LinkOpen(7)
    *_, given = core.on_message("c", asked, swarm.now)  # the link that there was is closed
    assert isinstance(given.message, LinkSnapshot)
    core.on_message("b", CentreIs("b", core._age + 1), swarm.now)
    core.on_message("b", CentreIs("a", 0), swarm.now)
    assert core.centre == "a"
    swarm.nodes["a"].x += 1.0
    assert [effect.message for effect in core.on_message("c", asked, swarm.now)] == [LinkClosed(7, -1)]


def test_a_foreign_message_is_refused() -> None:
    core = elastic_swarm(2, 50, "float32").nodes["b"].core
    with pytest.raises(PeerError):
        core.on_message("a", PairInvite(1), 0.0)
