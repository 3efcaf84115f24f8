"""Paired-reference gossip: the mean is conserved and references agree, whatever happens to the connections."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from gossip_swarm import GossipSwarm, assert_references_agree
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from weather import NAMES, Connections, Partings, weather_settings

from peerd.training import room
from peerd.training.codecs import CODECS, vector
from peerd.training.effects import Send, Vector
from peerd.training.mode_settings import AUTO
from peerd.training.modes import EVERY_STEP, gossip
from peerd.training.modes.gossip import ANSWERED_MIN_S
from peerd.training.pairs.codec_choice import SPARSE_WORTH
from peerd.training.pairs.link import CAME, TRANSITIONS, WENT, LinkState
from peerd.training.pairs.links import OPENED_MAX
from peerd.training.pairs.reminders import REMINDERS
from peerd.training.pairs.robust import RATE
from peerd.training.trigger import SILENCE_MAX_S, WAKE_AFTER_S
from peerd.transport.errors import PeerError
from peerd.transport.messages import (
    Connected,
    Delta,
    DeltaTaken,
    LinkClosed,
    LinkEqual,
    LinkOpen,
    LinkSnapshot,
    Message,
)

WITH = [*sorted(CODECS), AUTO]
BATCHES: list[list[float]] = [[], [16, 16, 16, 16], [64, 8, 8, 8], [100, 64, 16, 8]]


def linked_pair() -> GossipSwarm:
    """a and b, which have a link and have exchanged nothing over it."""
    swarm = GossipSwarm(2, 10, "float32", view=1)
    swarm.everyone_alive()
    swarm.settle()
    return swarm


class Weather(Connections):
    """Exactness once the weather clears."""

    @initialize(
        codec=st.sampled_from(WITH), seed=st.integers(0, 2**16), view=st.integers(1, 3), robust=st.booleans(),
        samples=st.sampled_from(BATCHES),
    )  # fmt: skip
    def start(self, codec: str, seed: int, view: int, robust: bool, samples: list[float]) -> None:
        self.swarm: GossipSwarm = GossipSwarm(
            4, 40, codec, seed=seed, view=view, buffers=7, robust=robust, samples=samples
        )
        self.rng = np.random.default_rng(seed)
        self.swarm.everyone_alive()

    @rule(name=st.sampled_from(NAMES))
    def rotate(self, name: str) -> None:
        self.swarm.perform(name, self.swarm.nodes[name].core._links.rotate(self.swarm.now))

    @invariant()
    def references_agree(self) -> None:
        if hasattr(self, "swarm"):
            assert_references_agree(self.swarm)

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        self.swarm.calm()
        assert self.swarm.drift() < 1e-12
        assert_references_agree(self.swarm)
        for node in self.swarm.nodes.values():
            assert not node.core.under_way, "an exchange was left unfinished"
            assert not node.core.counts["exchanges_cut"], "nobody crashed"


class NarrowView(Partings, Weather):
    """As few links as there can be, and members that lose sight of each other: links are forgotten at any moment."""

    @initialize(codec=st.sampled_from(WITH), seed=st.integers(0, 2**16), robust=st.booleans())
    def start(self, codec: str, seed: int, robust: bool) -> None:
        super().start(codec, seed, view=1, robust=robust, samples=[])


for machine in (Weather, NarrowView):
    machine.TestCase.settings = weather_settings(60)
TestWeather = Weather.TestCase
TestNarrowView = NarrowView.TestCase


@pytest.mark.parametrize(("codec", "seed"), [("bfloat16", 4), ("float32", 4), ("sign", 4)])
def test_a_link_that_is_forgotten_while_its_answer_is_on_its_way_keeps_the_mean(codec: str, seed: int) -> None:
    """The first of these failed in a plain run of the tests, by 0.47 of the sum."""
    swarm = GossipSwarm(4, 40, codec, seed=seed, view=1, buffers=7)
    swarm.everyone_alive()
    swarm.settle()
    swarm.step("a", np.zeros(40))
    swarm.step("c", np.zeros(40))
    swarm.declare_dead("a", {"c"})
    swarm.settle()
    swarm.declare_dead("a", {"b"})
    swarm.calm()
    assert swarm.drift() < 1e-12
    assert not any(node.core.counts["exchanges_cut"] for node in swarm.nodes.values())


def test_what_is_left_of_many_links_to_a_tiny_model_is_kept() -> None:
    """A plain run of the tests found it: there was room for six models, and two links of float64 took more."""
    swarm = GossipSwarm(4, 40, "float32", seed=21218, view=1, buffers=7)
    swarm.everyone_alive()
    most = 0.0
    for one, others in (("b", "abcd"), ("b", "abcd"), ("d", "bca")):
        for other in others:
            swarm.step(one, swarm.rng.normal(size=40))
            swarm.step(other, swarm.rng.normal(size=40))
            swarm.declare_dead(one, {other} - {one})
            swarm.settle()
            left = (node.core._links.ended.remnants.values() for node in swarm.nodes.values())
            most = max(most, *(sum(remnant.unfinished.models for remnant in each) for each in left))
    assert most > 6
    swarm.calm()
    assert swarm.drift() < 1e-12
    assert not any(node.core.counts["exchanges_cut"] for node in swarm.nodes.values())


def crossed_and_one_lost(swarm: GossipSwarm) -> None:
    swarm.step("b", np.ones(10))
    swarm.deliver("a", "b")


HALFWAY: dict[str, Callable[[GossipSwarm], object]] = {
    "nothing came": lambda swarm: None,
    "one half came, and its answer is lost": lambda swarm: swarm.deliver("a", "b"),
    "the word that it was taken is lost": lambda swarm: [swarm.deliver(*link) for link in ("ab", "ba")],
    "the halves crossed, and one is lost": crossed_and_one_lost,
    "the halves crossed, and both are lost": lambda swarm: swarm.step("b", np.ones(10)),
}


@pytest.mark.parametrize("ends", ["a", "b", "ab", "ba"])
@pytest.mark.parametrize("halfway", HALFWAY)
@pytest.mark.parametrize("codec", ["float32", "sign"])
def test_however_a_link_ends_an_exchange_is_applied_on_both_ends_or_on_neither(
    codec: str, halfway: str, ends: str
) -> None:
    swarm = GossipSwarm(2, 10, codec, view=1)
    swarm.everyone_alive()
    for _ in range(2):  # one exchange that is whole, and one that is not
        swarm.settle()
        swarm.step("a", np.ones(10))
    HALFWAY[halfway](swarm)
    swarm.lose("a", "b")
    swarm.lose("b", "a")
    for name in ends:
        other = "b" if name == "a" else "a"
        swarm.perform(name, swarm.nodes[name].core._links.end(other, swarm.now))
        swarm.lose(name, other)  # nor does that arrive
    swarm.calm()
    assert swarm.drift() < 1e-12
    assert_references_agree(swarm)
    for node in swarm.nodes.values():
        assert not node.core.under_way
        assert not node.core._links.ended.remnants
        assert not node.core.counts["exchanges_cut"]


def trails(*gone: LinkState) -> list[tuple[LinkState, ...]]:
    """All ways through the table from there to the end that take no step of it twice."""
    taken = list(pairwise(gone))
    following = [state for state in TRANSITIONS[gone[-1]] if (gone[-1], state) not in taken]
    return [gone] if not TRANSITIONS[gone[-1]] else [end for state in following for end in trails(*gone, state)]


TRAILS = trails(LinkState.OPEN)


def test_the_trails_take_every_step_of_the_table() -> None:
    steps = {(state, after) for state, following in TRANSITIONS.items() for after in following}
    assert {step for trail in TRAILS for step in pairwise(trail)} == steps


@pytest.mark.parametrize("trail", TRAILS, ids=lambda trail: "-".join(state.name for state in trail))
@settings(max_examples=15)
@given(st.data())
def test_a_link_goes_where_the_table_says_and_there_alone(trail: tuple[LinkState, ...], data: st.DataObject) -> None:
    """Whatever is halfway when its peer comes or goes, or it is rotated out, or the other end lets go of it."""
    swarm = GossipSwarm(2, 10, "sign", view=1)
    swarm.everyone_alive()
    swarm.settle()
    swarm.peers("a", {"b", "nobody", "no other"})  # there are strangers to rotate to
    links = swarm.nodes["a"].core._links
    link = links.held["b"]
    for before, after in pairwise(trail):
        for state in set(LinkState) - TRANSITIONS[before].keys():
            with pytest.raises(AssertionError, match=f"{before.name} -> {state.name}"):
                link.enter(state)
        for name in data.draw(st.lists(st.sampled_from("ab"), max_size=3)):
            swarm.step(name, np.ones(10))
            for way in data.draw(st.lists(st.sampled_from(["ab", "ba"]), max_size=3)):
                swarm.deliver(*way)
        if link.state is LinkState.GONE:
            break  # the other end has heard of its rotation
        if before in CAME and after is CAME[before]:
            swarm.peers("a", {*swarm.nodes["a"].heard, "b"})
        elif before in WENT and after is WENT[before]:
            swarm.declare_dead("a", {"b"})
        elif after is LinkState.CLOSING:
            while not link.idle:
                swarm.settle()
            swarm.perform("a", links.rotate(swarm.now))
        else:
            swarm.perform("b", swarm.nodes["b"].core._links.end("a", swarm.now))
            swarm.settle()
        assert link.state is after
    swarm.calm()
    assert swarm.drift() < 1e-12
    assert_references_agree(swarm)
    assert not any(node.core.under_way or node.core.counts["exchanges_cut"] for node in swarm.nodes.values())


@pytest.mark.parametrize("dies", ["a", "b"])
def test_what_a_crash_takes_of_an_exchange_is_counted(dies: str) -> None:
    swarm = linked_pair()
    swarm.step("a", np.ones(10))
    swarm.deliver("a", "b")
    swarm.restart(dies, swarm.start)
    swarm.calm()
    (other,) = {"a", "b"} - {dies}
    assert swarm.nodes[other].core.counts["exchanges_cut"] == 1
    swarm.restart(dies, swarm.start)  # the next time nothing was halfway
    swarm.calm()
    assert swarm.nodes[other].core.counts["exchanges_cut"] == 1


def test_what_is_left_of_links_is_bounded_and_what_makes_room_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LEFT_VALUES", 0)  # as of a model that is no tiny one
    swarm = GossipSwarm(12, 400, "sign", view=1)
    core = swarm.nodes["a"].core
    others = "bcdefghijkl"
    for other in others:
        swarm.peers("a", {"a", other})
        swarm.peers(other, {"a", other})
        swarm.settle()
        swarm.step("a", np.ones(400))
        swarm.lose("a", other)
        swarm.peers("a", {"a"})
    models = sum(remnant.unfinished.models for remnant in core._links.ended.remnants.values())
    assert len(core.references()) <= 2, "a view's worth, and the link that was the last"
    assert models <= 8, "twice what a view's worth of links takes"
    assert core.counts["exchanges_cut"] == len(others) - len(core.references()) - len(core._links.ended.remnants)


@settings(max_examples=40, deadline=None, print_blob=True)
@given(codec=st.sampled_from(WITH), count=st.integers(2, 6), seed=st.integers(0, 1000))
def test_any_exchanges_keep_the_mean(codec: str, count: int, seed: int) -> None:
    swarm = GossipSwarm(count, 64, codec, seed=seed)
    swarm.everyone_alive()
    swarm.settle()
    rng = np.random.default_rng(seed)
    for _ in range(30):
        swarm.step(rng.choice(sorted(swarm.nodes)), rng.normal(size=64))
        swarm.settle()
        assert swarm.drift() < 1e-12


def test_an_exchange_that_overtakes_a_lost_answer_keeps_the_mean() -> None:
    swarm = linked_pair()
    swarm.step("b", np.ones(10))
    swarm.deliver("b", "a")
    swarm.queues["a", "b"].clear()  # the answer is lost with the connection
    swarm.step("a", np.ones(10))
    swarm.deliver("a", "b")  # the next exchange comes first on the new one
    swarm.perform("a", swarm.nodes["a"].core.on_message("b", Connected(), swarm.now))
    swarm.quiesce()
    assert swarm.drift() < 1e-12
    assert not swarm.nodes["b"].core.counts["link_mismatches"]


def test_models_meet_by_the_codec_that_each_link_chooses() -> None:
    """By each codec: tests/contracts/test_gossip_family.py."""
    swarm = GossipSwarm(6, 600, AUTO, seed=3)
    swarm.everyone_alive()
    swarm.settle()
    before = swarm.spread()
    for _ in range(60):
        for name in swarm.nodes:
            swarm.step(name)
            swarm.settle()
    assert swarm.spread() < 0.5 * before
    assert swarm.drift() < 1e-12


class OneStart(GossipSwarm):
    """All start from one model, as swarms do."""

    def first_model(self) -> Vector:
        return self.start


def pair(codec: str, swarm: type[GossipSwarm] = GossipSwarm, trigger: str = "always") -> GossipSwarm:
    made = swarm(2, 600, codec, trigger=trigger, view=1, seed=2)
    made.everyone_alive()
    made.settle()
    return made


def test_every_second_exchange_is_of_the_largest_values_alone() -> None:
    swarm, used = pair(AUTO), list[str]()
    for number in range(8):
        swarm.step("ab"[number % 2], 1.0)
        used += {delta.codec for queue in swarm.queues.values() for delta in queue if isinstance(delta, Delta)}
        swarm.settle()
    assert used == ["top_k_3", "sign"] * 4


def test_two_of_three_are_where_the_nodes_own_steps_are_of_few_values_and_not_where_its_partners_are() -> None:
    swarm, used = pair(AUTO), defaultdict[str, list[str]](list)
    few = np.where(np.arange(600) < 6, 100.0, 0.0)
    for _ in range(24):
        for name, move in (("a", few), ("b", np.ones(600))):  # all of b's turns are by one bit, while every second is
            swarm.step(name, move)
            (begun,) = (delta for delta in swarm.queues[name, "ba"["ab".index(name)]] if isinstance(delta, Delta))
            used[name].append(begun.codec)
            swarm.settle()
    assert used["b"] == ["sign"] * 24
    assert used["a"][6:] == ["sign" if number % 3 == 1 else "top_k_3" for number in range(6, 24)]


def test_neither_what_one_bit_leaves_nor_what_the_largest_values_leave_adds_up() -> None:
    """Steps have heavy tails, as those of many models."""
    apart, sent = {}, {}
    for codec in ("sign", "top_k_3", AUTO):
        swarm = pair(codec, OneStart, trigger="always")
        size = 0
        for number in range(120):
            swarm.step("ab"[number % 2], 0.05 * swarm.rng.standard_t(2, size=600))
            size += sum(
                sum(map(len, delta.chunks))
                for queue in swarm.queues.values()
                for delta in queue
                if isinstance(delta, Delta)
            )
            swarm.settle()
        apart[codec], sent[codec] = swarm.spread(), size
    assert apart[AUTO] < 0.6 * min(apart["sign"], apart["top_k_3"])
    assert sent[AUTO] < 0.85 * sent["sign"]


def test_what_is_said_again_has_been_waited_for_since_it_was_begun() -> None:
    swarm = pair(AUTO)
    a = swarm.nodes["a"].core
    (link,) = a._links.held.values()
    for _ in range(3):
        swarm.step("a", 9.0)
        swarm.lose("a", "b")
        swarm.now = a.deadline
        swarm.perform("a", a.on_timer(swarm.now))
        assert link.sent_at == swarm.now
        swarm.settle()
        swarm.now += 1
        assert link.took.of("top_k_3") > SILENCE_MAX_S


def test_an_answer_is_by_what_it_answers() -> None:
    swarm = pair(AUTO)
    for asked, own in permutations(("sign", "top_k_3")):
        for node, codec in (("a", asked), ("b", own)):
            (link,) = swarm.nodes[node].core._links.held.values()
            link.codec = codec
        swarm.step("a", 1.0)
        assert swarm.deliver("a", "b")
        (answer,) = [each for each in swarm.queues["b", "a"] if isinstance(each, Delta)]
        assert answer.codec == asked
        swarm.settle()


def test_an_exchange_of_the_largest_values_waits_for_less_change() -> None:
    swarm = pair(AUTO, trigger="change:0.01")
    core = swarm.nodes["a"].core
    (link,) = core._links.held.values()
    allowed = []
    for _ in range(3):
        core._policy.partner = link
        allowed.append(core.quiet.change / link.anchor_norm)
        swarm.step("a", 9.0)
        swarm.settle()
    assert allowed == pytest.approx([0.01, 0.01, 0.01 * SPARSE_WORTH])


def test_a_fine_exchange_from_before_a_runs_end_is_none_of_its_flush() -> None:
    """It lacks the last steps."""
    swarm = pair("int4")
    node = swarm.nodes["a"]
    (link,) = node.core._links.held.values()
    swarm.step("a", 9.0)
    assert link.reference.under_way is not None
    assert link.reference.under_way.codec == "int4"
    swarm.step("a", 9.0, finishing=True)
    assert link.reference.under_way is not None
    assert not link.reference.under_way.finishing
    assert swarm.deliver("a", "b")
    assert swarm.deliver("b", "a")
    assert link.reference.version == 1
    assert not link.flushed
    swarm.settle()
    assert link.flushed
    swarm.finish("b")
    swarm.quiesce()
    assert swarm.spread() < 0.01
    assert swarm.drift() < 1e-12


def test_a_flush_ends_with_one_model_and_lets_every_trainer_go() -> None:
    swarm = GossipSwarm(4, 600, "sign", trigger="change:0.05", seed=1)
    swarm.everyone_alive()
    swarm.settle()
    swarm.finish(*swarm.nodes)

    def halves() -> int:
        return sum(life.core.counts["exchanges"] for life in swarm.nodes.values())

    before, swarm.messages = halves(), 0
    swarm.quiesce()
    assert halves() - before <= 3 * 4 * 7, "all are as far apart as can be: each exchange tells all but an eighth"
    assert swarm.messages <= 3 * 4 * 40, "of each a word that it is taken, and to three where its model is now"
    assert swarm.spread() < 0.005
    assert swarm.drift() < 1e-12
    for node in swarm.nodes.values():
        assert node.proceeded == [False, True]


@pytest.mark.parametrize("codec", WITH)
def test_a_flush_over_thin_lines_waits_for_what_it_has_begun(codec: str) -> None:
    """By a codec that was given, each began another exchange every two seconds, while none could be through."""
    swarm = GossipSwarm(4, 600, codec, seed=1)
    swarm.everyone_alive()
    swarm.settle()
    for name in 4 * list(swarm.nodes):
        swarm.step(name, 1.0)
        swarm.now += 5.0
        swarm.settle()
    swarm.finish(*swarm.nodes)
    for _ in range(4):
        while lines := [line for line in swarm.waiting() if not isinstance(swarm.queues[line][0], Delta)]:
            swarm.deliver(*lines[0])
        swarm.pass_time(ANSWERED_MIN_S + 0.1)
    assert sum(node.core.counts["trigger_finishing"] for node in swarm.nodes.values()) <= len(swarm.nodes)
    swarm.quiesce()
    assert swarm.spread() < 0.01


def test_a_leaver_hands_over_to_partners_that_train_on() -> None:
    swarm = GossipSwarm(3, 600, "sign", trigger="change:0.05", seed=1)
    swarm.everyone_alive()
    swarm.settle()
    swarm.finish("a")
    swarm.settle()
    assert swarm.nodes["a"].proceeded == [False], "handed over, but nobody else has finished"


@pytest.mark.parametrize(("seed", "steps", "robust"), [(0, 1, False), (1, 5, False), (2, 1, True), (3, 5, True)])
def test_what_comes_of_one_who_trains_on_is_told_when_it_ends(seed: int, steps: int, robust: bool) -> None:
    swarm = GossipSwarm(4, 30, "float32", seed=seed, robust=robust)
    swarm.everyone_alive()
    swarm.settle()
    for _ in range(12):  # close enough for a bound flush
        for name in swarm.nodes:
            swarm.step(name, swarm.rng.normal(size=30))
            swarm.settle()
    for name in "abc":
        swarm.finish(name)
        swarm.settle()
    before = {name: dict(core.references()) for name, core in ((name, swarm.nodes[name].core) for name in "abc")}
    versions = {(name, peer): one.version for name in before for peer, one in before[name].items() if peer != "d"}
    for _ in range(steps):
        swarm.step("d", 10 * swarm.rng.normal(size=30))
        swarm.settle()
    after = {(name, peer): one.version for name in before for peer, one in before[name].items() if peer != "d"}
    assert versions == after, "who waits says nothing to others who wait"
    swarm.finish("d")
    swarm.quiesce()
    assert robust or swarm.drift() < 1e-12, "who has gone further than it may move the others comes to them"
    assert all(node.proceeded[-1] for node in swarm.nodes.values())
    assert swarm.spread() < (0.2 if robust else 0.02)


def test_while_one_trains_on_those_who_have_ended_agree_loosely() -> None:
    """Each end but the last set off a whole flush: 12 of 18 MB in runs of 8 whose ends were a tenth of them apart."""
    swarm = GossipSwarm(4, 600, "float32", seed=1)
    swarm.everyone_alive()
    swarm.settle()
    for _ in range(30):
        for name in swarm.nodes:
            swarm.step(name)
            swarm.settle()

    def version() -> int:
        return int(swarm.nodes["a"].core.references()["b"].version)

    for name in "ab":
        swarm.finish(name)
        swarm.settle()
    agreed = version()
    move = swarm.rng.normal(size=600)
    swarm.step("c", 0.035 * np.linalg.norm(swarm.nodes["c"].x) * move / np.linalg.norm(move), finishing=True)
    swarm.settle()
    assert swarm.nodes["c"].proceeded == [False], "what it held is with its partners"
    assert version() == agreed, "which may wait for what the last one brings"
    swarm.finish("d")
    swarm.quiesce()
    assert swarm.spread() < 0.01
    assert swarm.drift() < 1e-12
    assert all(node.proceeded == [False, True] for node in swarm.nodes.values())


def test_silence_ends() -> None:
    swarm = GossipSwarm(2, 600, "sign", trigger="change:0.05")
    swarm.everyone_alive()
    swarm.settle()
    exchanges = swarm.nodes["a"].core.counts["exchanges"]
    swarm.now += WAKE_AFTER_S
    assert swarm.nodes["a"].core.deadline <= swarm.now
    swarm.perform("a", swarm.nodes["a"].core.on_timer(swarm.now))
    swarm.settle()
    assert swarm.nodes["a"].core.counts["exchanges"] == exchanges + 1


def test_a_restarted_peer_gets_a_new_snapshot() -> None:
    swarm = GossipSwarm(2, 100, "sign", seed=5)
    swarm.everyone_alive()
    swarm.settle()
    swarm.step("a", np.ones(100))
    swarm.settle()
    swarm.nodes["b"] = GossipSwarm(2, 100, "sign", seed=6).nodes["b"]  # its references are gone
    swarm.peers("b", {"a", "b"})
    swarm.settle()
    for _ in range(3):
        swarm.step("a", np.ones(100))
        swarm.settle()
    assert_references_agree(swarm)
    assert swarm.nodes["b"].core.counts["exchanges"] > 0


@pytest.mark.one_run_in(3)
def test_views_are_bounded_and_rotate() -> None:
    swarm = GossipSwarm(12, 20, "float32", view=2, seed=2)
    swarm.everyone_alive()
    swarm.settle()
    met: set[str] = set()
    for _ in range(300):
        for name in swarm.nodes:
            swarm.step(name)
            swarm.settle()
        met |= set(swarm.nodes["a"].core.references())
        assert all(len(node.core.references()) <= 4 for node in swarm.nodes.values())
    assert len(met) > 4
    assert all(node.core.references() for node in swarm.nodes.values()), "nobody falls out of the gossip"
    assert swarm.drift() < 1e-12


def test_a_model_that_is_not_finite_sends_nothing() -> None:
    swarm = GossipSwarm(2, 50, "sign")
    swarm.everyone_alive()
    swarm.settle()
    swarm.nodes["a"].x[3] = np.nan
    before = swarm.nodes["b"].x.copy()
    swarm.step("a")
    swarm.step("b")
    swarm.settle()
    assert np.isfinite(swarm.nodes["b"].x).all()
    assert np.array_equal(swarm.nodes["b"].x, before)


@pytest.mark.parametrize("gain", [0.0, -0.1, 0.6, 1e9])
def test_a_gain_that_overshoots_is_refused(gain: float) -> None:
    swarm = GossipSwarm(2, 50, "float32")
    swarm.everyone_alive()
    swarm.settle()
    swarm.step("a", np.ones(50))
    message = swarm.queues["a", "b"].popleft()
    assert isinstance(message, Delta)
    bad = Delta(message.link, message.seq, message.codec, gain, True, False, b"", 0.0, 0.0, message.chunks)
    with pytest.raises(PeerError, match="gain"):
        swarm.nodes["b"].core.on_message("a", bad, 0.0)


@pytest.mark.parametrize("gain", [0.0, -0.1, 0.6, 1e9, math.nan])
def test_nor_does_one_that_what_is_left_of_a_link_has_waited_for(gain: float) -> None:
    swarm = linked_pair()
    swarm.step("a", np.ones(10))
    swarm.deliver("a", "b")
    core = swarm.nodes["a"].core
    swarm.perform("a", core._links.end("b", swarm.now))
    message = swarm.queues["b", "a"][0]
    assert isinstance(message, Delta)
    with pytest.raises(PeerError, match="gain"):
        core.on_message("b", replace(message, gain=gain), swarm.now)
    swarm.calm()
    assert swarm.drift() < 1e-12
    assert not core.under_way


def test_a_half_of_an_exchange_that_cannot_be_changes_nothing_and_ends_the_link() -> None:
    swarm = linked_pair()
    swarm.step("a", np.ones(10))
    message = swarm.queues["a", "b"].popleft()
    assert isinstance(message, Delta)
    core, before = swarm.nodes["b"].core, swarm.nodes["b"].x.copy()
    effects = core.on_message("a", replace(message, seq=3), swarm.now)
    assert Send("a", LinkClosed(message.link, 0)) in effects
    assert core.counts["link_mismatches"] == 1
    swarm.perform("b", effects)
    assert np.array_equal(swarm.nodes["b"].x, before)
    swarm.calm()
    assert swarm.drift() < 1e-12
    assert_references_agree(swarm)


def test_the_word_that_a_half_was_taken_is_of_its_link_alone() -> None:
    swarm = linked_pair()
    swarm.step("a", np.ones(10))
    swarm.deliver("a", "b")
    core = swarm.nodes["b"].core
    reference = core.references()["a"]
    for link, taken in ((reference.link + 1, False), (reference.link, True)):
        core.on_message("a", DeltaTaken(link, reference.version), swarm.now)
        assert reference.settled == taken


def test_a_payload_that_is_damaged_changes_nothing() -> None:
    swarm = GossipSwarm(2, 50, "int8")
    swarm.everyone_alive()
    swarm.settle()
    before = swarm.nodes["b"].x.copy()
    swarm.step("a", np.ones(50))
    message = swarm.queues["a", "b"].popleft()
    assert isinstance(message, Delta)
    bad = Delta(message.link, message.seq, message.codec, message.gain, True, False, b"", 0.0, 0.0, (b"\x00garbage",))
    with pytest.raises(PeerError):
        swarm.nodes["b"].core.on_message("a", bad, 0.0)
    assert np.array_equal(swarm.nodes["b"].x, before)
    swarm.perform("b", swarm.nodes["b"].core.on_message("a", message, 0.0))
    swarm.settle()
    assert_references_agree(swarm)


def test_messages_of_unknown_links_are_declined() -> None:
    core = GossipSwarm(2, 10, "sign").nodes["a"].core
    assert [e.message for e in core.on_message("b", LinkSnapshot(9, "bfloat16", ()), 0.0)] == [LinkClosed(9, -1)]
    stray = Delta(9, 1, "sign", 0.5, True, False, b"", 0.0, 0.0, ())
    assert [e.message for e in core.on_message("b", stray, 0.0)] == [LinkClosed(9, -1)]


def test_a_peer_that_membership_does_not_know_takes_no_place() -> None:
    swarm = GossipSwarm(4, 50, "sign", view=1)
    core = swarm.nodes["a"].core
    swarm.peers("a", {"a", "b"})
    for number, stranger in enumerate("cdxyz"):
        core.on_message(stranger, LinkOpen(number), 0.0)
    assert core.links() == []
    assert len(core.references()) <= 1, "dormant links are bounded by the view"


def test_a_delta_that_overflows_is_refused() -> None:
    swarm = GossipSwarm(2, 50, "float32")
    swarm.everyone_alive()
    swarm.settle()
    swarm.step("a", np.full(50, 3e38))
    message = swarm.queues["a", "b"].popleft()
    before = swarm.nodes["b"].x.copy()
    with pytest.raises(PeerError, match="beyond"):
        swarm.nodes["b"].core.on_message("a", message, 0.0)
    assert np.array_equal(swarm.nodes["b"].x, before)


@pytest.mark.parametrize(("more", "step_s", "told"), [(2, 10.0, 0), (40, 0.1, 0), (40, 1.0, 1)])
def test_who_trains_on_alone_for_long_is_told_once(more: int, step_s: float, told: int) -> None:
    swarm = GossipSwarm(3, 30, "float32", seed=1)
    swarm.everyone_alive()
    swarm.settle()
    for steps, names in ((100, "abc"), (more, "c")):
        for _ in range(steps):
            swarm.now += step_s
            for name in names:
                swarm.step(name, 0.1 * swarm.rng.normal(size=30))
            swarm.settle()
        swarm.finish(*set("ab") & set(names))
        swarm.settle()
    assert [(name, line.split(" runs have ended")[0]) for name, line in swarm.logged] == told * [("c", "all partners'")]


def test_a_finished_node_hands_its_model_over_once() -> None:
    swarm = GossipSwarm(2, 600, "sign", seed=1)
    swarm.everyone_alive()
    swarm.settle()
    swarm.finish("a")
    swarm.settle()
    handed = swarm.nodes["a"].core.counts["trigger_finishing"]
    for _ in range(10):
        swarm.step("b", np.full(600, 0.01))
        swarm.settle()
    assert swarm.nodes["a"].core.counts["trigger_finishing"] == handed == 1


def test_an_overdue_link_that_its_trigger_declines_is_not_looked_at_for_ever() -> None:
    swarm = GossipSwarm(2, 600, "sign", trigger="period:100")
    swarm.everyone_alive()
    swarm.settle()
    swarm.now += WAKE_AFTER_S
    node = swarm.nodes["a"].core
    swarm.perform("a", node.on_timer(swarm.now))
    assert node.deadline > swarm.now + 1


def test_who_declined_is_asked_again_however_often_others_exchange() -> None:
    swarm = GossipSwarm(3, 10, "sign", view=2)
    swarm.peers("a", {"b", "c"})
    asked: list[float] = []
    for _ in range(30):
        while swarm.queues["a", "c"]:
            message = swarm.queues["a", "c"].popleft()
            assert isinstance(message, LinkOpen)
            asked.append(swarm.now)
            swarm.perform("a", swarm.nodes["a"].core.on_message("c", LinkClosed(message.link, 0), swarm.now))
        swarm.deliver("a", "b")
        swarm.deliver("b", "a")
        swarm.step("a", np.ones(10))
        swarm.now += 5.0
        if swarm.now >= swarm.nodes["a"].core.deadline:
            swarm.perform("a", swarm.nodes["a"].core.on_timer(swarm.now))
    waits = [later - before for before, later in pairwise(asked)]
    assert len(waits) >= 1
    assert all(SILENCE_MAX_S <= wait <= SILENCE_MAX_S + 10 for wait in waits)


def test_who_never_answers_keeps_no_place_for_ever_and_may_still_answer() -> None:
    swarm = GossipSwarm(3, 10, "sign", view=1)
    swarm.peers("a", {"b", "c"})
    links = swarm.nodes["a"].core._links
    (silent,) = links.opening
    number, other = links.opening[silent].number, "bc"[silent == "b"]
    for _ in range(REMINDERS):
        assert links.expects_more(swarm.now)
        assert list(links.opening) == [silent]
        swarm.now += WAKE_AFTER_S
        swarm.perform("a", swarm.nodes["a"].core.on_timer(swarm.now))
    assert set(links.opening) == {silent, other}
    start = swarm.nodes["a"].core._links._offer()
    assert start
    swarm.perform("a", swarm.nodes["a"].core.on_message(silent, LinkEqual(number), swarm.now))
    assert links.held[silent].active
    assert set(links.opening) == {other}


def test_a_half_that_came_too_early_is_not_waited_for() -> None:
    """Without a timer: the peer that lacks an answer asks again, and gets what came too early with it."""
    swarm = linked_pair()
    swarm.step("b", np.ones(10))
    swarm.deliver("b", "a")
    swarm.queues["a", "b"].clear()  # the answer is lost, and no connection breaks
    swarm.step("a", np.ones(10))
    swarm.settle()
    for name, other in ("ab", "ba"):
        reference = swarm.nodes[name].core.references()[other]
        assert (reference.version, reference.under_way) == (2, None)
    assert swarm.drift() < 1e-12


def test_a_link_that_one_end_never_got_leaves_no_exchange_waiting() -> None:
    """Its snapshot was lost, an exchange began, and the link was let go of: the half that is awaited never comes."""
    swarm = GossipSwarm(2, 10, "float32", view=1)
    swarm.peers("b", {"a"})
    swarm.deliver("b", "a")
    swarm.peers("a", {"b"})
    swarm.lose("a", "b")
    swarm.step("a", np.ones(10))
    holder = swarm.nodes["a"].core
    swarm.perform("a", holder._links.end("b", swarm.now))
    assert holder.under_way
    swarm.calm()
    assert not holder.under_way
    assert swarm.drift() < 1e-12


@pytest.mark.parametrize("ended", ["b", "bcdefgh"])
def test_who_trains_on_alone_keeps_its_partners(ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of whom it lets go waits for nobody any more, and tells all others what it had of it: a whole flush."""
    monkeypatch.setattr(gossip, "ROTATE_AFTER_EXCHANGES", 4)
    swarm = GossipSwarm(8, 10, "float32", view=2, seed=1)
    swarm.everyone_alive()
    swarm.quiesce()
    swarm.finish(*ended)
    swarm.quiesce()

    def trains(steps: int) -> None:
        for _ in range(steps):
            swarm.step("a", swarm.rng.normal(size=10))
            swarm.settle()

    trains(20)
    before = swarm.nodes["a"].core.counts["rotations"]
    trains(60)
    assert (swarm.nodes["a"].core.counts["rotations"] == before) == (len(ended) > 1)
    assert swarm.drift() < 1e-9


@pytest.mark.parametrize("standing", ["a", "ab", "abcd"])
def test_a_pause_is_no_offence(standing: str) -> None:
    """Whoever makes no steps for a while follows nobody, and nobody is graylisted for that."""
    swarm = GossipSwarm(5, 40, "float32", "change:0.05", view=4, seed=1, dtype="float32", robust=True)
    for node in swarm.nodes.values():
        node.x = swarm.nodes["a"].x.copy()
        node.publish()
    swarm.everyone_alive()
    swarm.quiesce()
    goal = 10 * swarm.rng.normal(size=40)
    for second in range(400):
        for name, node in swarm.nodes.items():
            if name not in standing or not 50 < second < 350:
                swarm.step(name, 0.01 * (goal - node.x) + 0.02 * swarm.rng.normal(size=40))
        swarm.settle()
        swarm.now += 1
        if second % 60 == 59:
            swarm.quiesce()
    assert sum(node.core.counts["far_away"] for node in swarm.nodes.values()) > 20, "or nothing is seen here"
    assert not any(node.core.counts["graylisted"] for node in swarm.nodes.values())


def test_after_a_runs_end_each_step_is_news_be_the_partner_there_or_not() -> None:
    """Of another run, which the mode must hear of."""
    swarm = linked_pair()
    swarm.step("a", 9.0)
    assert swarm.nodes["a"].core.quiet != EVERY_STEP
    swarm.finish("a")
    assert not swarm.nodes["a"].core.drained
    assert swarm.nodes["a"].core.quiet == EVERY_STEP
    swarm.finish("b")
    swarm.quiesce()
    assert swarm.nodes["a"].core.drained
    assert swarm.nodes["a"].core.quiet == EVERY_STEP


def test_who_opens_link_after_link_is_given_a_few_a_minute() -> None:
    swarm = linked_pair()
    node = swarm.nodes["a"]

    def given(number: int) -> bool:
        effects = node.core.on_message("b", LinkOpen(number), swarm.now)
        return any(isinstance(effect, Send) and isinstance(effect.message, LinkSnapshot) for effect in effects)

    before = node.core.counts["links_declined"]
    assert 0 < sum(given(number) for number in range(100)) <= OPENED_MAX
    assert node.core.counts["links_declined"] >= before + 100 - OPENED_MAX
    swarm.now += SILENCE_MAX_S
    assert given(100)


def test_who_says_that_its_model_is_equal_and_ends_the_link_is_asked_for_a_few_a_minute() -> None:
    swarm = GossipSwarm(2, 10, "float32", view=1)
    node = swarm.nodes["a"]
    asked = 0
    swarm.hear("a")
    for _ in range(100):
        for message in [each for each in swarm.queues["a", "b"] if isinstance(each, LinkOpen)]:
            asked += 1
            swarm.queues["a", "b"].clear()
            for said in (LinkEqual(message.link), LinkClosed(message.link, 0)):
                swarm.perform("a", node.core.on_message("b", said, swarm.now))
    assert 0 < asked <= OPENED_MAX
    swarm.now += SILENCE_MAX_S + WAKE_AFTER_S
    swarm.perform("a", node.core.on_timer(swarm.now))
    assert any(isinstance(each, LinkOpen) for each in swarm.queues["a", "b"])


class WithSilent(GossipSwarm):
    """The last member opens and accepts links, and answers no exchange."""

    def deliver(self, source: str, target: str) -> bool:
        if source == max(self.nodes):
            self.lose(source, target, Delta, DeltaTaken)
        return super().deliver(source, target)


def test_who_answers_no_exchange_loses_its_place_though_it_opens_another_link() -> None:
    swarm = WithSilent(4, 10, "float32", view=1)
    swarm.everyone_alive()
    swarm.settle()
    node = swarm.nodes["a"]
    for number in range(16):
        swarm.perform("a", node.core.on_message("d", LinkOpen(number), swarm.now))
        for _ in range(9):
            swarm.step("a", swarm.rng.normal(size=10))
        swarm.now += 61.0
        swarm.perform("a", node.core.on_timer(swarm.now))
        swarm.settle()
    assert node.core.graylist.refuses("d", swarm.now)
    assert "d" not in node.core.references()
    assert {peer for peer in "bc" if peer in node.core.references()}
    assert not any(node.core.graylist.refuses(peer, swarm.now) for peer in "bc")


def test_what_has_no_answer_is_said_again_ever_later_until_answers_are_quick_again() -> None:
    """A half over a thin line takes minutes, and longer if it is said again meanwhile."""
    swarm = GossipSwarm(2, 10, "float32", view=1)
    swarm.everyone_alive()
    swarm.settle()
    core = swarm.nodes["a"].core

    def said_again(within_s: float) -> list[float]:
        """After how many seconds each time, while the other hears nothing."""
        while core.references()["b"].under_way is None:
            swarm.settle()
            swarm.step("a", swarm.rng.normal(size=10))
        swarm.lose("a", "b")
        began, said = swarm.now, list[float]()
        while core.deadline < began + within_s:
            swarm.pass_time(core.deadline - swarm.now)
            assert core.deadline > swarm.now, "what was due is done"
            if any(isinstance(message, Delta) for message in swarm.queues["a", "b"]):
                said.append(round(swarm.now - began))
            swarm.lose("a", "b")
        return said

    assert said_again(2000.0) == [60, 180, 420, 900, 1860]
    swarm.cut("a", "b")
    for _ in range(10):
        swarm.settle()
        swarm.step("a", swarm.rng.normal(size=10))
    swarm.settle()
    assert said_again(200.0) == [60, 180]


def test_who_takes_long_to_answer_is_kept_while_there_is_room_for_others_beside_it() -> None:
    """Its line may be thin, and a new link would cost it a model more."""
    swarm = WithSilent(5, 10, "float32", view=2)
    swarm.everyone_alive()
    swarm.settle()
    core = swarm.nodes["a"].core
    swarm.perform("a", core.on_message("e", LinkOpen(1), swarm.now))
    for number in range(2 * REMINDERS):
        for name in "abcd":
            swarm.step(name, swarm.rng.normal(size=10))
        swarm.pass_time(SILENCE_MAX_S + WAKE_AFTER_S)
        swarm.settle()
        if number == REMINDERS // 2:
            for peer in "bcd":  # it has this one alone
                swarm.perform("a", core.end_link(peer, swarm.now))
    assert core.references()["e"].under_way is not None
    assert len(core.references()) > 2
    assert not core.graylist.refuses("e", swarm.now)
    assert not core.counts["partners_silent"]


@pytest.mark.parametrize("seed", range(4))
def test_who_has_begun_anew_within_an_exchange_owes_no_half_and_is_left_alone_by_nobody(seed: int) -> None:
    """Its script is started again before anybody misses it, and others are the partners then."""
    swarm = GossipSwarm(6, 10, "float32", view=1, seed=seed)
    swarm.everyone_alive()
    swarm.settle()
    core = swarm.nodes["a"].core
    partner = min(core.references())
    while (reference := core.references()[partner]).under_way is None:
        swarm.settle()
        swarm.step("a", swarm.rng.normal(size=10))
    assert reference.under_way is not None
    swarm.restart(partner, swarm.nodes["a"].x)
    swarm.settle()
    for _ in range(REMINDERS + 2):
        for name in swarm.nodes:
            swarm.step(name, swarm.rng.normal(size=10))
        swarm.settle()
        swarm.pass_time(SILENCE_MAX_S + WAKE_AFTER_S)
        swarm.settle()
    assert not any(node.core.graylist.refuses(partner, swarm.now) for node in swarm.nodes.values())
    assert not any(node.core.counts["partners_silent"] for node in swarm.nodes.values())


@pytest.mark.parametrize("together", [1, 20])
def test_a_half_that_comes_after_its_links_end_moves_the_model_by_what_is_allowed_and_no_further(together: int) -> None:
    """Who ends each link while our half is under way, and gives its own then, has no allowance for each."""
    swarm = GossipSwarm(5, 60, "float32", robust=True)
    node = swarm.nodes["a"]
    for each in swarm.nodes.values():
        each.x = each.base = node.x.copy()
    swarm.everyone_alive()
    swarm.settle()

    def steps(names: str) -> None:
        for name in names:
            swarm.step(name, 0.01 * swarm.rng.normal(size=60))
            swarm.settle()

    def say(message: Message) -> None:
        swarm.perform("a", node.core.on_message("e", message, swarm.now))

    for _ in range(20):
        steps("abcd")
    moved, halves = 0.0, []
    far = vector.encode("float32", swarm.layout, np.full(60, 100.0, np.float32), known=np.zeros(60, np.float32))[0]
    for number in range(1, 41):
        swarm.now += SILENCE_MAX_S / OPENED_MAX
        say(LinkOpen(number))
        while (link := node.core._links.held.get("e")) is not None and link.reference.under_way is None:
            swarm.step("a", 0.001 * swarm.rng.normal(size=60))
        if link is None or link.reference.link != number:
            break  # it is left alone
        say(LinkClosed(number, 1))
        halves.append(Delta(number, 1, "float32", 0.5, False, False, b"", 0.0, 0.0, far))
        if len(halves) == together:
            before = node.x.copy()
            for half in halves:
                say(half)
                say(LinkClosed(half.link, 1))
            moved += float(np.linalg.norm(node.x - before))
            halves.clear()
    swarm.queues.clear()
    assert node.core.counts["exchanges"] > 20
    assert 0 < moved < RATE / 4 * float(node.core._allowances._way.sum())


@pytest.mark.parametrize(("alone", "before"), [(0, 0), (1000, 0), (1000, 20)])
def test_steps_that_a_node_has_made_alone_do_not_widen_what_those_who_come_may_do(alone: int, before: int) -> None:
    """It had moved far until the first exchange, and a step after that counted as half of all of it."""
    swarm = GossipSwarm(4, 40, "float32", dtype="float32", robust=True)
    node, step = swarm.nodes["a"], np.full(40, 0.01, np.float32)

    def train(steps: int) -> None:
        for name in "bcd":
            swarm.restart(name, node.x)
        swarm.everyone_alive()
        for _ in range(steps):
            for name in swarm.nodes:
                swarm.step(name, step)
            swarm.settle()

    if before:
        train(before)
    swarm.peers("a", set())
    for _ in range(alone):
        swarm.step("a", step)
    gone = node.core._allowances._way.copy()
    train(60)
    assert node.core.counts["exchanges"] > 20
    assert float(np.linalg.norm(node.core._allowances._way - gone)) < 1.1 * 60 * float(np.linalg.norm(step))


@pytest.mark.cases(4)
@pytest.mark.parametrize(("once", "decay"), [(False, 0.0), (True, 0.0), (False, 1e-5)])
@pytest.mark.parametrize(("count", "trainers"), [(4, "a"), (6, "ab"), (6, "abc"), (8, "abcd")])
def test_what_only_some_train_comes_to_all_and_nobody_is_left_alone_for_it(
    count: int, trainers: str, once: bool, decay: float
) -> None:
    """A head for what the others do not see, or a layer that they have not unfrozen yet: one tensor of four. Or they
    have trained it `once`, or its weights decay."""
    swarm = GossipSwarm(count, 11, AUTO, "change:0.05", dtype="float32", robust=True)
    start = swarm.nodes["a"].x.copy()
    for node in swarm.nodes.values():
        node.x = node.base = start.copy()
    swarm.everyone_alive()
    swarm.settle()
    for number in range(300):
        for name, node in swarm.nodes.items():
            step = 0.05 * swarm.rng.normal(size=11)
            trains = name in trainers or (once and not number)
            step[5:8] = step[5:8] + 0.01 if trains else -decay * node.x[5:8]
            step[8:] = 0.0  # nobody trains this one
            swarm.step(name, step)
        swarm.settle()
    apart = [float(np.linalg.norm(node.x[5:8] - start[5:8])) for node in swarm.nodes.values()]
    assert min(apart) > 0.5 * max(apart) > 0.1
    swarm.end()
    assert swarm.spread() < 0.01
    assert not any(node.core.counts["graylisted"] for node in swarm.nodes.values())
    assert all(float(np.linalg.norm(node.x[5:8] - start[5:8])) > 0.5 * max(apart) for node in swarm.nodes.values())
    assert all(float(np.linalg.norm(node.x[8:] - start[8:])) < 0.05 * max(apart) for node in swarm.nodes.values())
