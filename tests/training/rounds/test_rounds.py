"""Rounds: one result a number, nothing applied twice, nobody hangs, whatever dies, breaks or comes twice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from round_swarm import RoundSwarm
from weather import weather_settings

from peerd.training.mode_settings import AUTO, OVERLAPS, QUORUM, STANDING
from peerd.training.modes.allreduce import LANDS_WITHIN, SETTLE_STEPS
from peerd.training.rounds import leader
from peerd.training.rounds.attempt import LAST_CODEC, WINDOW
from peerd.training.rounds.culprits import MISSES_MAX
from peerd.training.rounds.leader import PATIENCE_FIRST_S, PATIENCE_MIN_S
from peerd.training.rounds.member import REPEAT_S, TRANSITIONS, Rounds
from peerd.transport.errors import PeerError
from peerd.transport.messages import LinkClosed, RoundBegin, RoundCommit, RoundPhase, RoundPieces

NAMES = "abcde"
names = st.sampled_from(NAMES)
overlaps = st.sampled_from(OVERLAPS)
topologies = st.sampled_from(["auto", "ring", "tree", "halving"])


def assert_one_result_a_round(swarm: RoundSwarm) -> None:
    """Those who are alive never applied two attempts under one number, but those of a leader that did without one.

    These are a quarter to a half of what Weather commits, nearly all of them rounds of a node alone.
    """
    attempts: dict[int, int] = {}
    for name, node in sorted(swarm.nodes.items()):
        for number, attempt in node.rounds.items():
            if attempt not in swarm.impatient:
                assert attempts.setdefault(number, attempt) == attempt, f"{name} applied another round {number}"


def end(swarm: RoundSwarm) -> None:
    """All faults over: every run ends, and all models are the same to the bit, but for those of runs that ended before,
    where somebody went on without another."""
    apart = {name for name, node in swarm.nodes.items() if swarm.impatient and node.proceeded[-1:] == [True]}
    swarm.all_hear()
    for _ in range(400):
        swarm.settle()
        for name in sorted(swarm.nodes):
            swarm.finish(name)
        swarm.pass_time(1.0)
        if all(node.proceeded[-1:] == [True] for node in swarm.nodes.values()):
            break
    else:
        states = {
            name: (node.waits, node.finishing, node.core._rounds._report(swarm.now))
            for name, node in swarm.nodes.items()
        }
        raise AssertionError(f"hangs: {states}")
    swarm.settle()
    for _ in range(20):
        swarm.pass_time(1.0)
        swarm.settle()
    assert len({node.x.tobytes() for name, node in swarm.nodes.items() if name not in apart}) <= 1
    assert_one_result_a_round(swarm)


class Weather(RuleBasedStateMachine):
    """Steps, deliveries, deaths, restarts, cuts and repetitions in any order."""

    @initialize(
        mode=st.sampled_from(["allreduce", "diloco", "diloco:3"]), overlap=overlaps, topology=topologies,
        every=st.integers(0, 3),
        codec=st.sampled_from(["float32", "float32", "int8", "sign", "top_k", AUTO]), seed=st.integers(0, 2**16),
        min_peers=st.sampled_from([1, 1, 2]),
    )  # fmt: skip
    def start(self, mode: str, overlap: str, topology: str, every: int, codec: str, seed: int, min_peers: int) -> None:
        overlap = "delayed" if overlap == "hpsgd" and ":" in mode else overlap  # refused together
        chooses = mode == "allreduce" and overlap == QUORUM
        codec = "top_k_2bit" if codec == AUTO and not chooses else codec
        self.swarm = RoundSwarm(
            NAMES, mode=mode, codec=codec, overlap=overlap, topology=topology, every=every, seed=seed,
            min_peers=min_peers,
        )  # fmt: skip
        self.swarm.all_hear()

    @rule(name=names, count=st.integers(1, 3))
    def local_step(self, name: str, count: int) -> None:
        for _ in range(count):
            if name in self.swarm.nodes:
                self.swarm.step(name)

    @rule()
    def all_step(self) -> None:
        for name in NAMES:
            self.local_step(name, 1)

    @rule(one=names, other=names, count=st.integers(1, 6))
    def deliver(self, one: str, other: str, count: int) -> None:
        for _ in range(count):
            self.swarm.deliver(one, other)

    @rule()
    def deliver_all(self) -> None:
        self.swarm.settle()

    @rule(one=names, other=names)
    def deliver_again(self, one: str, other: str) -> None:
        self.swarm.deliver_again(one, other)

    @rule(one=names, other=names)
    def cut(self, one: str, other: str) -> None:
        if one != other:
            self.swarm.cut(one, other)

    @rule(name=names)
    def die(self, name: str) -> None:
        if name in self.swarm.nodes and len(self.swarm.nodes) > 1:
            self.swarm.die(name)

    @rule(name=names)
    def restart(self, name: str) -> None:
        self.swarm.restart(name, next(iter(self.swarm.nodes.values())).x)

    @rule(name=names)
    def hear(self, name: str) -> None:
        if name in self.swarm.nodes:
            self.swarm.hear(name)

    @rule(name=names)
    def finish(self, name: str) -> None:
        if name in self.swarm.nodes:
            self.swarm.finish(name)

    @rule(seconds=st.sampled_from([0.1, 3.0, 70.0, 400.0]))
    def pass_time(self, seconds: float) -> None:
        self.swarm.pass_time(seconds)

    @invariant()
    def one_result_a_round(self) -> None:
        if hasattr(self, "swarm"):
            assert_one_result_a_round(self.swarm)

    def teardown(self) -> None:
        if hasattr(self, "swarm"):
            for name in NAMES:  # a round of fewer than `min_peers` waits for more, be it for ever
                if name not in self.swarm.nodes and len(self.swarm.nodes) < self.swarm.settings.min_peers:
                    self.restart(name)
            end(self.swarm)


TestWeather = Weather.TestCase
TestWeather.settings = weather_settings(40, 60)


@pytest.mark.parametrize("names", ["a", "abc"])
@pytest.mark.parametrize(("codec", "overlap"), [(AUTO, QUORUM), ("int8", "blocking"), ("top_k", "delayed")])
def test_another_run_goes_on_from_where_the_last_one_ended(names: str, codec: str, overlap: str) -> None:
    every = 1 if codec == AUTO else 2
    swarm = RoundSwarm(names, 40, codec=codec, overlap=overlap, every=every, robust=True)
    swarm.all_hear()
    for _ in range(9):
        for name in names:
            swarm.step(name, swarm.rng.normal(size=40))
        swarm.now += 1.0
        swarm.settle()
    end(swarm)
    agreed = swarm.nodes["a"].x.copy()
    for name, node in swarm.nodes.items():
        swarm.begin_again(name)
        node.steps = node.core._due_step - 1
    for _ in range(20):
        for name in names:
            swarm.step(name, np.zeros(40))
        swarm.now += 1.0
        swarm.settle()
        for node in swarm.nodes.values():
            assert np.allclose(node.x, agreed, atol=0.05 * np.abs(agreed).max()), "nobody has made a step"
    end(swarm)


def test_an_order_for_an_earlier_life_is_no_offence() -> None:
    swarm = RoundSwarm("ab", 40, codec="int8", every=2, robust=True)
    swarm.all_hear()
    swarm.settle()
    order = RoundBegin(
        1, 1 << 16, "int8", "ring", False, False, ("a", "b"), (1, 2), (3.0, 0.0, 7.0, 0.0), waited=(0.0, 0.0)
    )
    swarm.perform("b", swarm.nodes["b"].core.on_message("a", order, swarm.now))
    swarm.step("b")
    swarm.step("b")
    assert swarm.nodes["b"].core._rounds.phase == RoundPhase.READY
    life = swarm.nodes["b"].core._rounds._life
    with pytest.raises(PeerError, match="did not say these lengths"):
        swarm.nodes["b"].core.on_message("a", replace(order, lives=(1, life)), swarm.now)


def test_two_leaders_that_waited_in_vain_for_reports_agree_again() -> None:
    """b believes a dead, and nothing arrives for 400 s: each leads a first round of its own."""
    swarm = RoundSwarm(NAMES, every=2)
    swarm.all_hear()
    swarm.die("a")
    swarm.hear("b")
    swarm.restart("a", swarm.nodes["b"].x)
    for _ in range(2):
        for name in NAMES:
            swarm.step(name)
    swarm.pass_time(400.0)
    first = swarm.nodes["a"].rounds[1], swarm.nodes["b"].rounds[1]
    assert first[0] != first[1]
    assert swarm.impatient == set(first)
    end(swarm)


def test_two_that_are_left_of_which_one_has_passed_the_other_by_agree_again() -> None:
    """e waits for a for 400 s, in which nothing arrives; then each would lead itself."""
    swarm = RoundSwarm(NAMES, every=2)
    swarm.all_hear()
    for _ in range(3):
        for name in NAMES:
            swarm.step(name)
    swarm.settle()
    for name in NAMES:
        swarm.step(name)
    for name in "bcd":
        swarm.die(name)
    swarm.pass_time(400.0)
    assert swarm.nodes["e"].core._rounds._passing.counts["a"] > 0
    end(swarm)
    assert len({node.core._rounds._leads for node in swarm.nodes.values()}) == 1


def test_two_leaders_of_which_one_waited_in_vain_for_a_contribution_agree_again() -> None:
    """b has not heard of a, and goes on alone; a has heard where b was before, and waits for it for 300 s."""
    swarm = RoundSwarm("b", every=2)
    swarm.all_hear()
    for _ in range(6):
        swarm.step("b")
    swarm.restart("a", swarm.nodes["b"].x)
    swarm.step("a")
    swarm.cut("b", "a")
    swarm.step("b")
    swarm.settle()
    for name in "ab":
        swarm.step(name)
    swarm.pass_time(400.0)
    assert swarm.nodes["a"].rounds.keys() == {4}
    assert swarm.nodes["a"].rounds[4] != swarm.nodes["b"].rounds[4]
    assert swarm.nodes["a"].rounds[4] in swarm.impatient
    end(swarm)


@pytest.mark.parametrize("victim", NAMES[:3])
def test_a_death_at_every_message(victim: str) -> None:
    """Of a round of three, after any number of messages: the two others apply one result, and go on."""
    for boundary in itertools.count():
        swarm = RoundSwarm(NAMES[:3], every=2, topology="ring")
        swarm.all_hear()
        swarm.settle()
        for _ in range(2):
            for name in NAMES[:3]:
                swarm.step(name)
        for _ in range(boundary):
            if not any(swarm.deliver(*link) for link in sorted(swarm.queues)):
                return  # it was over before
        swarm.die(victim)
        swarm.settle()
        swarm.all_hear()
        swarm.settle()
        for name, node in swarm.nodes.items():
            assert len(node.rounds) == 1, f"{name} has no result after a death at message {boundary}"
        assert_one_result_a_round(swarm)
        end(swarm)


@given(overlaps, topologies, st.integers(1, 7), st.integers(1, 4), st.integers(0, 2**16))
@settings(deadline=None)
def test_without_faults_every_round_has_everybody(
    overlap: str, topology: str, count: int, every: int, seed: int
) -> None:
    every = max(every, 2) if overlap == QUORUM else every  # else it is the leader's to say
    swarm = RoundSwarm("abcdefg"[:count], overlap=overlap, topology=topology, every=every, seed=seed)
    swarm.all_hear()
    swarm.settle()
    settling = SETTLE_STEPS + LANDS_WITHIN if overlap == "delayed" and every == 1 else 0
    for _ in range(4 * (every + settling)):
        for name in swarm.nodes:
            swarm.step(name)
        swarm.settle()
    applied = [node.rounds for node in swarm.nodes.values()]
    assert all(each == applied[0] for each in applied)
    assert len(applied[0]) >= (4 if overlap in STANDING else 3)
    end(swarm)


def test_blocking_rounds_at_every_step_are_synchronous_sgd() -> None:
    """Of momentum, too: the models follow the mean gradient's momentum."""
    swarm = RoundSwarm("abc", overlap="blocking")
    swarm.all_hear()
    swarm.settle()
    model = swarm.nodes["a"].x.copy()
    velocity = np.zeros_like(model)
    own = {name: np.zeros_like(model) for name in "abc"}
    targets = {name: swarm.integers() for name in "abc"}
    for _ in range(30):
        gradient = np.mean([model - targets[name] for name in "abc"], axis=0)
        velocity = 0.9 * velocity + gradient
        model = model - 0.1 * velocity
        for name in "abc":
            own[name] = 0.9 * own[name] + (swarm.nodes[name].x - targets[name])
            swarm.step(name, -0.1 * own[name])
        swarm.settle()
        for name in "abc":
            assert np.allclose(swarm.nodes[name].x, model, rtol=1e-5, atol=1e-2)


def test_hpsgd_hands_in_a_windows_progress_one_window_later() -> None:
    swarm = RoundSwarm("ab", overlap="hpsgd")
    swarm.all_hear()
    swarm.settle()
    start = swarm.nodes["a"].x.copy()
    moves = {"a": np.full_like(start, 2.0), "b": np.full_like(start, 4.0)}
    for name, move in moves.items():
        swarm.step(name, move)
    first = {name: node.x.copy() for name, node in swarm.nodes.items()}
    swarm.settle()  # the round is over; its result waits for the window's end
    for name, node in swarm.nodes.items():
        assert (node.x == first[name]).all()
    agreed = (first["a"] + first["b"]) / 2
    for name, move in moves.items():
        swarm.step(name, move)
    for node in swarm.nodes.values():
        assert (node.x == agreed).all(), "the window's own progress is rolled back"
    swarm.settle()
    for name, move in moves.items():
        swarm.step(name, move)
    for node in swarm.nodes.values():
        assert (node.x == agreed + 3.0).all(), "and is back as the average"


@pytest.mark.parametrize("mode", ["allreduce", "diloco", "diloco:4"])
@pytest.mark.parametrize("apart", ["nobody", "one", "late"])
def test_whole_models_travel_first_unless_all_begin_with_the_same(mode: str, apart: str) -> None:
    swarm = RoundSwarm("ab" if apart == "late" else "abc", 400, mode=mode, codec="sign", every=4)
    if apart == "one":
        swarm.live("c", swarm.nodes["a"].x + (np.arange(400) == 7))
    swarm.all_hear()
    swarm.settle()
    wholes: list[bool] = []
    for number in range(6):
        if number == 2 and apart == "late":
            swarm.live("c", swarm.nodes["a"].x)
            swarm.all_hear()
        for _ in range(4):
            for name in swarm.nodes:
                swarm.step(name, 1e-3 * swarm.integers())
        swarm.settle()
        order = swarm.nodes["a"].core._rounds.order
        assert order is not None
        wholes.append(order.whole)
    assert wholes[0] == (apart == "one")
    assert any(wholes[1:]) == (apart == "late")


@pytest.mark.parametrize("mode", ["allreduce", "diloco", "diloco:3"])
@pytest.mark.parametrize(
    ("codec", "whole", "loses"), [("top_k_2bit", False, 2 / 127), ("sign", False, 2 / 127), ("float32", True, 1e-6)]
)
def test_a_run_ends_with_the_mean_of_the_models_and_without_what_was_lost_before(
    mode: str, codec: str, whole: bool, loses: float
) -> None:
    """All of the model at once, without an outer step; to what int8 loses of the last steps if the codec loses."""
    swarm = RoundSwarm("abc", 400, mode=mode, codec=codec, every=6 if mode == "diloco:3" else 2)
    swarm.all_hear()
    swarm.settle()
    for _ in range(8):
        for name in "abc":
            swarm.step(name, swarm.integers())
        swarm.settle()
    assert all((node.core._lost is not None and node.core._lost.any()) == (not whole) for node in swarm.nodes.values())
    move = swarm.integers()
    for name in "abc":
        swarm.step(name, move + swarm.integers() / 10)
    wanted = np.mean([node.x for node in swarm.nodes.values()], axis=0)
    longest = np.max([np.abs(node.x - wanted).max() for node in swarm.nodes.values()]) + np.abs(move).max()
    end(swarm)
    order = swarm.nodes["a"].core._rounds.order
    assert (order.final, order.whole, order.codec) == (True, whole, "float32" if whole else LAST_CODEC)
    for node in swarm.nodes.values():
        np.testing.assert_allclose(node.x, wanted, rtol=1e-6, atol=loses * longest)


def test_a_lossy_codec_loses_nothing_for_good() -> None:
    """What encoding dropped is contributed later: models that rest are their mean but for what is still to be sent."""
    swarm = RoundSwarm("abc", codec="sign", every=2, size=40)
    swarm.all_hear()
    swarm.settle()
    still = np.zeros(40)
    for _ in range(4):
        for name in "abc":
            swarm.step(name, still)
        swarm.settle()
    for name in "abc":
        swarm.step(name, swarm.integers())
    wanted = np.mean([node.x for node in swarm.nodes.values()], axis=0)
    for _ in range(60):
        for name in "abc":
            swarm.step(name, still)
        swarm.settle()
    assert len(swarm.nodes["a"].rounds) > 20
    unsent = np.mean([node.core._lost for node in swarm.nodes.values()], axis=0)
    for node in swarm.nodes.values():
        assert np.allclose(node.x + unsent, wanted, atol=0.05)
    end(swarm)
    assert np.allclose(swarm.nodes["a"].x, wanted, atol=1.0)  # of thousands: the last round leaves out what is unsent


def test_a_newcomer_enters_at_the_next_round_and_delays_none() -> None:
    swarm = RoundSwarm("bcd", every=2)
    swarm.all_hear()
    swarm.settle()

    def rounds(names: str, count: int) -> None:
        for _ in range(2 * count):
            for name in names:
                swarm.step(name)
            swarm.settle()

    rounds("bcd", 2)
    swarm.restart("a", swarm.nodes["b"].x)  # with the smallest id: it leads from now on
    swarm.all_hear()
    swarm.settle()
    before = len(swarm.nodes["b"].rounds)
    rounds("bcd", 1)
    assert len(swarm.nodes["b"].rounds) == before + 1
    assert swarm.nodes["a"].rounds == {}
    rounds("abcd", 2)
    assert set(swarm.nodes["a"].rounds) == set(list(swarm.nodes["b"].rounds)[-len(swarm.nodes["a"].rounds) :])
    end(swarm)


@pytest.mark.parametrize("seed", range(10))
def test_an_order_for_an_earlier_life_is_not_followed(seed: int) -> None:
    """The leader orders a round of d alone, d restarts, and the leader's next round has the same number."""
    swarm = RoundSwarm("ad", seed=seed)
    swarm.all_hear()
    swarm.settle()
    swarm.finish("d")
    swarm.settle()
    swarm.pass_time(400.0)
    swarm.restart("d", swarm.nodes["a"].x)
    for name in "ad":
        for _ in range(2):
            swarm.step(name)
    swarm.settle()
    assert swarm.nodes["a"].rounds
    assert_one_result_a_round(swarm)
    end(swarm)


def test_fewer_than_min_peers_wait() -> None:
    swarm = RoundSwarm("ab", min_peers=3, overlap="blocking")
    swarm.all_hear()
    for name in "ab":
        swarm.step(name)
    swarm.settle()
    assert all(node.waits for node in swarm.nodes.values())
    swarm.restart("c", swarm.nodes["a"].x)
    swarm.all_hear()
    swarm.step("c")
    swarm.settle()
    assert not any(node.waits for node in swarm.nodes.values())


@pytest.mark.parametrize("overlap", ["blocking", "quorum", "delayed"])
def test_a_lossy_codec_takes_nothing_of_a_lone_members_progress(overlap: str) -> None:
    swarm = RoundSwarm("a", codec="top_k_2bit", overlap=overlap, every=2)
    swarm.settle()
    node = swarm.nodes["a"]
    own = node.x.copy()
    for _ in range(20):
        before = node.x.copy()
        swarm.step("a")
        own += node.x - before
        swarm.settle()
    assert len(node.rounds) > 5
    np.testing.assert_allclose(node.x, own, rtol=0, atol=1e-3)


@pytest.mark.parametrize("overlap", ["blocking", "quorum", "delayed"])
def test_members_beyond_what_one_round_has_take_turns(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "ROSTER_MAX", 3)
    swarm = RoundSwarm("abcde", overlap=overlap, every=2)
    swarm.all_hear()
    swarm.settle()
    for _ in range(60):
        for name, node in swarm.nodes.items():
            if not node.waits:
                swarm.step(name)
        swarm.settle()
    rounds = [len(node.rounds) for node in swarm.nodes.values()]
    assert min(rounds) >= 10
    assert max(rounds) <= 2 * min(rounds), rounds


def test_both_sides_of_a_partition_train_and_meet_again() -> None:
    swarm = RoundSwarm("abcd", codec="int8", every=2)
    swarm.all_hear()
    swarm.settle()
    for _ in range(6):
        for name in "abcd":
            swarm.step(name)
        swarm.settle()
    for side in ("ab", "cd"):
        for name in side:
            swarm.peers(name, set(side))
    swarm.settle()
    for steps, name in ((6, "a"), (6, "b"), (10, "c"), (10, "d")):
        swarm.nodes[name].rounds.clear()  # the sides number their rounds alone
        for _ in range(steps):
            swarm.step(name)
            swarm.settle()
    for node in swarm.nodes.values():
        node.rounds.clear()
    end(swarm)


def test_gossips_messages_mean_nothing_here() -> None:
    swarm = RoundSwarm("ab")
    with pytest.raises(PeerError, match="LinkClosed"):
        swarm.nodes["a"].core.on_message("b", LinkClosed(1), 0.0)


@pytest.mark.parametrize("attempt", [0, 10**6], ids=["of the past", "early"])
def test_more_pieces_than_the_window_has_are_refused(attempt: int) -> None:
    swarm = RoundSwarm("ab")
    many = RoundPieces(1, attempt, tuple(range(WINDOW + 1)), (b"",) * (WINDOW + 1))
    with pytest.raises(PeerError, match=f"{WINDOW + 1} pieces at once"):
        swarm.nodes["a"].core.on_message("b", many, 0.0)


@pytest.mark.one_run_in(3)
@given(st.sampled_from("abcd"), st.integers(1, 12), st.sampled_from(["allreduce", "diloco"]), st.integers(0, 2**16))
@settings(deadline=None, max_examples=6, phases=[Phase.explicit, Phase.generate])
@example("a", 6, "allreduce", 0)
def test_who_restarts_every_five_steps_does_not_starve_the_others(
    victim: str, every: int, mode: str, seed: int
) -> None:
    """A step takes a second. Whoever it is, the one who leads too, the others wait for it at most once, for the first
    round, of which nobody knows how long it takes."""
    swarm = RoundSwarm("abcd", mode=mode, overlap="blocking", every=every, seed=seed)
    swarm.all_hear()
    seconds = 450
    for _ in range(seconds):
        for name in "abcd":
            swarm.step(name)
        swarm.settle()
        swarm.pass_time(1.0)
        swarm.settle()
        if swarm.nodes[victim].steps >= 5:
            swarm.restart(victim, next(iter(swarm.nodes.values())).x)
            swarm.all_hear()
            swarm.settle()
    others = [node.steps for name, node in swarm.nodes.items() if name != victim]
    assert min(others) > (seconds - PATIENCE_FIRST_S) / 2


def until_ordered(swarm: RoundSwarm, member: str) -> RoundBegin:
    """The leader, a, has just ordered a round that `member` has not heard of."""
    for _ in range(100):
        if orders := [each for each in swarm.queues["a", member] if isinstance(each, RoundBegin)]:
            return orders[0]
        assert any(swarm.deliver(*link) for link in swarm.waiting() if link[1] == "a")
    raise AssertionError("no order")


def in_a_round() -> RoundSwarm:
    swarm = RoundSwarm("abc")
    swarm.all_hear()
    swarm.settle()
    for name in "abc":
        swarm.step(name)
    return swarm


def test_a_commit_of_another_attempt_is_not_applied() -> None:
    """What is held is the result of the attempt that was begun, whatever the number of its round."""
    swarm = in_a_round()
    begin = until_ordered(swarm, "b")
    core = swarm.nodes["b"].core
    while core._rounds.phase != RoundPhase.HELD:
        for link in swarm.waiting():
            if core._rounds.phase != RoundPhase.HELD:
                swarm.deliver(*link)
    for attempt in (begin.attempt - 1, begin.attempt + 1):
        swarm.perform("b", core.on_message("a", RoundCommit(begin.round, attempt), swarm.now))
        assert core._rounds.phase == RoundPhase.HELD
        assert not swarm.nodes["b"].rounds
    swarm.perform("b", core.on_message("a", RoundCommit(begin.round, begin.attempt), swarm.now))
    assert swarm.nodes["b"].rounds == {begin.round: begin.attempt}
    end(swarm)


def test_an_order_that_names_another_life_is_not_begun() -> None:
    """The life that it meant has given its contribution away with its death: this one has another."""
    swarm = in_a_round()
    begin = until_ordered(swarm, "b")
    core = swarm.nodes["b"].core
    place = begin.roster.index("b")
    lives = tuple(life + (rank == place) for rank, life in enumerate(begin.lives))
    swarm.perform("b", core.on_message("a", replace(begin, lives=lives), swarm.now))
    assert core._rounds.phase == RoundPhase.READY
    swarm.perform("b", core.on_message("a", begin, swarm.now))
    assert core._rounds.phase == RoundPhase.RUNNING
    end(swarm)


def test_pieces_that_were_lost_with_a_connection_come_when_it_is_back() -> None:
    """Without any timer: the round does not wait for the minute after which pieces are said again."""
    swarm = in_a_round()
    lost = 0
    for _ in range(200):
        for source, target in swarm.waiting():
            if any(isinstance(each, RoundPieces) for each in swarm.queues[source, target]) and lost < 6:
                lost += 1
                swarm.lose(source, target)
                swarm.cut(source, target)
                swarm.cut(target, source)
            swarm.deliver(source, target)
    assert lost == 6
    assert [len(node.rounds) for node in swarm.nodes.values()] == [1, 1, 1]


@given(st.lists(st.sampled_from(RoundPhase), max_size=12))
def test_a_member_goes_only_where_the_table_says(phases: list[RoundPhase]) -> None:
    rounds = in_a_round().nodes["a"].core._rounds
    for phase in phases:
        before = rounds.phase
        if phase in TRANSITIONS[before]:
            rounds._enter(phase)
            assert rounds.phase == phase
        else:
            with pytest.raises(AssertionError, match=f"{before.name} -> {phase.name}"):
                rounds._enter(phase)
            assert rounds.phase == before


def test_every_way_in_the_table_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: set[tuple[RoundPhase, RoundPhase]] = set()
    enter = Rounds._enter

    def seen(rounds: Rounds, phase: RoundPhase) -> None:
        gone.add((rounds.phase, phase))
        enter(rounds, phase)

    monkeypatch.setattr(Rounds, "_enter", seen)
    for victim in NAMES[:3]:
        test_a_death_at_every_message(victim)
    swarm = RoundSwarm("ab")
    swarm.all_hear()
    swarm.settle()
    for name in "ab":
        swarm.step(name, 3e38)  # finite, and the sum is not
    swarm.settle()
    assert gone == {(one, other) for one, following in TRANSITIONS.items() for other in following}


@pytest.mark.parametrize("mode", ["allreduce", "diloco:2"])
def test_who_leads_and_stands_aside_begins_nothing_while_a_commit_is_under_way(mode: str) -> None:
    """The only member that came to the round was told of its commit; its words from before that come twice."""
    swarm = RoundSwarm("abcd", mode=mode, every=2, overlap="delayed")
    swarm.all_hear()
    swarm.settle()
    swarm.finish("b")
    swarm.settle()
    for _ in range(4):
        swarm.now += PATIENCE_FIRST_S / 3
        swarm.perform("a", swarm.nodes["a"].core.on_timer(swarm.now))
    swarm.heal()
    assert swarm.nodes["b"].core.counts["rounds"] == 1
    assert swarm.nodes["b"].core.counts["attempts"] == 1


@pytest.mark.parametrize("reports", [True, False], ids=["and has no contribution", "and never reports"])
def test_who_lives_holds_up_three_rounds_at_most(reports: bool) -> None:
    swarm = RoundSwarm("abcd", overlap="blocking")
    for name in "abc":
        swarm.hear(name)
    if reports:
        swarm.hear("d")
    rounds = swarm.nodes["a"].rounds

    def waits_s() -> float:
        began, before = swarm.now, len(rounds)
        for name in "abc":
            swarm.step(name)
        while len(rounds) == before:
            swarm.settle()
            if len(rounds) == before:
                swarm.pass_time(1.0)
        return swarm.now - began

    if reports:
        swarm.step("d")
        swarm.settle()
        assert waits_s() == 0.0
        for _ in range(MISSES_MAX):
            assert waits_s() >= PATIENCE_MIN_S
    else:
        assert PATIENCE_FIRST_S <= waits_s() <= PATIENCE_FIRST_S + 2 * REPEAT_S
    assert [waits_s() for _ in range(5)] == 5 * [0.0]
    swarm.hear("d")
    swarm.step("d")
    swarm.settle()
    waits_s()
    assert swarm.nodes["d"].rounds.items() <= rounds.items(), "who comes is in the next one"
    assert swarm.nodes["d"].rounds
    assert waits_s() >= PATIENCE_MIN_S, "who was in the last one is waited for again"
