"""Gradients in rounds: one mean, one model to the bit, whoever dies, comes or parts; and nobody waits for ever."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gradient_swarm import MOMENTUM, GradientSwarm
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from weather import NAMES, Lives, names, weather_settings

from peerd.training.codecs import CODECS
from peerd.training.counts import COUNT_END, FIRST_MAX
from peerd.training.effects import Become, Vector
from peerd.training.mode_settings import ModeSettings
from peerd.training.modes import check_given, check_options
from peerd.training.rounds.lengths import FAR, LIMIT
from peerd.training.rounds.weights import CAP, are_weights, capped, scales
from peerd.transport.errors import PeerError, UserError
from peerd.transport.messages import RoundCommit, RoundPhase

topologies = st.sampled_from(["auto", "ring", "tree", "halving"])


@given(st.integers(1, 5), topologies, st.integers(0, 2**16))
@settings(deadline=None, max_examples=15)
def test_all_step_by_the_mean_of_all_from_the_first_step_on(count: int, topology: str, seed: int) -> None:
    swarm = GradientSwarm("abcde"[:count], topology=topology, seed=seed)
    for step in range(1, 6):
        for name in swarm.nodes:
            swarm.step(name)
        swarm.settle()
        assert [node.steps for node in swarm.nodes.values()] == [step] * count
        swarm.one_model()
        order = swarm.nodes["a"].core._rounds.order
        assert len(order.roster) == count
        assert scales(order.weights) == [1.0] * count, "the gradients of the first step count, too"
    swarm.end()
    swarm.one_model()


def change_plan(swarm: GradientSwarm) -> None:
    """Another plan: each member's next core, of the same mode; what was meant under the last one is dropped."""
    for queue in swarm.queues.values():
        queue.clear()
    for name, node in sorted(swarm.nodes.items()):
        last, node.core = node.core, swarm.make(name, swarm.layout, random.Random(swarm.lives), node._values)
        node.core.succeeds(last)
        swarm.perform(name, node.core.on_peers(node.heard, swarm.now))


def with_a_newcomer(swarm: GradientSwarm) -> None:
    swarm.live("a", swarm.first_model() + 1)  # it leads from now on
    swarm.all_hear()
    swarm.settle()


@pytest.mark.parametrize("newcomer", [False, True])
def test_after_a_change_of_the_plan_every_gradient_of_who_was_there_counts(*, newcomer: bool) -> None:
    swarm = GradientSwarm("bcd")
    swarm.train(3, drawn(swarm))
    change_plan(swarm)
    if newcomer:
        with_a_newcomer(swarm)
    for step in range(4, 7):
        swarm.train(1, drawn(swarm))
        order = swarm.nodes["b"].core._rounds.order
        counting = dict(zip(order.roster, scales(order.weights), strict=True))
        assert [counting[name] for name in "bcd"] == [1.0] * 3
        assert {node.steps for node in swarm.nodes.values()} == {step}
        swarm.one_model()
    taken = {name: node.core.counts["models_taken_over"] for name, node in swarm.nodes.items()}
    assert taken == {"b": 0, "c": 0, "d": 0, **({"a": 1} if newcomer else {})}


def test_who_has_taken_a_model_over_as_the_plan_changes_gives_no_gradient_of_its_former_one() -> None:
    swarm = GradientSwarm("bcd")
    swarm.train(3, drawn(swarm))
    with_a_newcomer(swarm)
    for name in "abcd":
        swarm.step(name)
    node = swarm.nodes["a"]
    while node.core._outdated is None:
        swarm.deliver(*swarm.waiting()[0])
    last = node.core
    change_plan(swarm)
    assert node.core is not last
    assert (node.core._outdated, node.core._basis) == (last._outdated, last._basis) == (3, last._rounds._agreed)
    assert node.core._rounds._agreed == last._rounds._agreed > 0


@given(st.lists(st.floats(0.1, 1e6), min_size=2, max_size=5), st.integers(0, 2**16))
@settings(deadline=None, max_examples=15)
def test_the_mean_is_weighted_by_samples(samples: list[float], seed: int) -> None:
    swarm = GradientSwarm("abcde"[: len(samples)], seed=seed)
    swarm.samples = dict(zip(swarm.nodes, samples, strict=True))
    swarm.train(3, lambda name: swarm.integers() / 1000)
    swarm.one_model()
    assert swarm.nodes["a"].core._rounds.order.weights == capped(samples)


@given(st.lists(st.sampled_from([1.0, 3.0, 0.99 * FAR]), min_size=2, max_size=5), st.integers(0, 2**16))
@settings(deadline=None, max_examples=15)
def test_the_mean_is_exact_where_gradients_are_as_long_as_they_vary(times: list[float], seed: int) -> None:
    swarm = GradientSwarm("abcde"[: len(times)], seed=seed, robust=True)
    long = dict(zip(swarm.nodes, times, strict=True))
    swarm.train(3, lambda name: long[name] * np.ones(9, np.float32))  # of one direction: no mean is longer
    swarm.one_model()
    assert swarm.nodes["a"].core.counts["rounds_shortened"] == 0


def test_who_says_a_small_length_of_a_huge_gradient_makes_no_mean_longer_than_the_others_allow() -> None:
    swarm = GradientSwarm("abcd", codec="bfloat16", robust=True)
    swarm.train(2, drawn(swarm))
    liar, victim = swarm.nodes["d"].core._rounds, swarm.nodes["b"]
    measured = liar.measured
    liar.measured = lambda lengths: measured((1.0, 0.0))
    momentum = victim.x[-9:].copy()
    for name in "abcd":
        swarm.step(name, (1e6 if name == "d" else 0.1) * np.ones(9, np.float32))
    swarm.settle()
    mean = victim.x[-9:] - MOMENTUM * momentum
    assert np.linalg.norm(mean) <= LIMIT * 100 * 3 * (1 + 1e-6)
    assert [node.core.counts["rounds_shortened"] for node in swarm.nodes.values()] == [1] * 4
    swarm.one_model()


@pytest.mark.parametrize("limit", [-2.0, math.nan, math.inf])
def test_no_leader_says_that_a_mean_has_a_length_that_is_none(limit: float) -> None:
    swarm = GradientSwarm("ab")
    swarm.train(1, drawn(swarm))
    for name in "ab":
        swarm.step(name)
    core = swarm.nodes["b"].core
    while core._rounds.phase != RoundPhase.HELD:
        swarm.deliver(*swarm.waiting()[0])
    with pytest.raises(PeerError, match="long"):
        core.on_message("a", RoundCommit(core._rounds.order.round, core._rounds.order.attempt, limit), 0.0)


@given(st.lists(st.floats(), max_size=8))
def test_weights_are_capped_and_known_again(said: list[float]) -> None:
    weights = capped(said)
    assert are_weights(weights, len(said))
    counting = sorted(weight for weight in weights if weight > 0)
    assert all(weight <= CAP * counting[len(counting) // 2] for weight in counting)
    assert not counting or max(scales(weights)) == 1.0


def test_flags_say_which_tensors_anybody_used() -> None:
    swarm = GradientSwarm("abc")
    before = swarm.nodes["a"].x.copy()
    swarm.unused = {"a": {0, 1}, "b": {0}, "c": {0}}
    swarm.train(3, lambda name: swarm.integers() / 1000)
    swarm.one_model()
    first, second, *_ = swarm.layout.tensors
    moved = swarm.nodes["a"].x != before
    assert not moved[:first].any(), "nobody used it: it has no step, and no momentum"
    assert moved[first:second].any(), "who did not use it takes the others' mean, its own part zeros"


def test_one_gradient_that_is_not_finite_makes_all_skip() -> None:
    swarm = GradientSwarm("abc")
    swarm.train(2, lambda name: swarm.integers() / 1000)
    swarm.spoils = {"b"}
    models = [node.x[: swarm.layout.parameters].tobytes() for node in swarm.nodes.values()]
    swarm.train(1, lambda name: swarm.integers() / 1000)
    assert [node.skipped for node in swarm.nodes.values()] == [1, 1, 1]
    assert [node.x[: swarm.layout.parameters].tobytes() for node in swarm.nodes.values()] == models
    swarm.spoils = set()
    swarm.train(2, lambda name: swarm.integers() / 1000)
    swarm.one_model()


def test_who_joins_has_the_models_bits_and_its_first_gradient_counts_nothing() -> None:
    swarm = GradientSwarm("bcd")
    swarm.train(3, lambda name: swarm.integers() / 1000)
    stale = swarm.nodes["b"].x.copy()
    stale[swarm.layout.parameters :] = 0  # as old as can be, without momentum
    swarm.train(2, lambda name: swarm.integers() / 1000)
    swarm.live("a", stale)  # it leads from now on
    swarm.all_hear()
    swarm.settle()
    swarm.train(1, lambda name: swarm.integers() / 1000)
    swarm.one_model()
    order = swarm.nodes["a"].core._rounds.order
    assert dict(zip(order.roster, order.weights, strict=True)) == {"a": 0.0, "b": 1.0, "c": 1.0, "d": 1.0}
    assert {node.steps for node in swarm.nodes.values()} == {6}
    swarm.train(1, lambda name: swarm.integers() / 1000)
    assert scales(swarm.nodes["a"].core._rounds.order.weights) == [1.0] * 4
    swarm.one_model()


@pytest.mark.parametrize("codec", ["float32", "int8"])
@given(
    topologies, st.integers(0, 2**16), st.lists(st.floats(0.1, 1e6), min_size=3, max_size=3),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=40),
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_gradients_come_in_parts_while_rounds_are_under_way(
    codec: str, topology: str, seed: int, samples: list[float], parts: list[tuple[str, int, int, bool]]
) -> None:
    """A pass that fails is followed by another; what comes after a part of the sum is there counts, to the bit."""
    swarm = GradientSwarm("abc", topology=topology, codec=codec, seed=seed, robust=bool(seed % 2))
    swarm.samples = dict(zip("abc", samples, strict=True))
    for name, first, deliveries, fails in parts:
        swarm.part(name, first, anew=fails and first < 4)
        for _ in range(deliveries):
            if links := swarm.waiting():
                swarm.deliver(*links[int(swarm.rng.integers(len(links)))])
    swarm.train(2, drawn(swarm))
    swarm.one_model()
    swarm.end()
    swarm.one_model()


def test_a_part_is_summed_while_the_backward_passes_are_under_way() -> None:
    swarm = GradientSwarm("abc")
    swarm.train(2, drawn(swarm))
    for name in "abc":
        swarm.part(name, 5)
    swarm.settle()
    size = len(swarm.nodes["a"].memory)
    done = [[part.complete for part in node.core._rounds._attempt._collective._parts] for node in swarm.nodes.values()]
    starts = [part.start for part in swarm.nodes["a"].core._rounds._attempt._collective._parts]
    assert size > 9
    assert done[0] == done[1] == done[2]
    assert [is_done for start, is_done in zip(starts, done[0], strict=True) if 5 <= start < 9] == [True]
    assert sum(done[0]) == 1
    swarm.train(1, drawn(swarm))
    swarm.one_model()
    assert swarm.nodes["a"].core.counts["attempts"] == 4, "the first one gave the model of one to all"


def test_a_value_that_is_not_finite_late_makes_all_skip_and_who_ends_within_a_pass_holds_up_nobody() -> None:
    swarm = GradientSwarm("abc")
    swarm.train(2, drawn(swarm))
    swarm.spoils = {"b"}
    for name in "abc":
        swarm.part(name, 4)
    swarm.settle()
    swarm.train(1, drawn(swarm))
    assert [node.skipped for node in swarm.nodes.values()] == [1, 1, 1]
    attempts = swarm.nodes["a"].core.counts["attempts"]
    swarm.spoils = set("abc")
    for name in "abc":
        swarm.part(name, 4)
    swarm.settle()
    for name in "abc":
        swarm.step(name)
        swarm.settle()
    assert [node.skipped for node in swarm.nodes.values()] == [2, 2, 2]
    assert swarm.nodes["a"].core.counts["attempts"] == attempts + 1, "no other attempt is needed for that"
    swarm.spoils = set()
    for name in "abc":
        swarm.part(name, 4)
    swarm.settle()
    swarm.finish("b")
    swarm.settle()
    for _ in range(2):
        for name in "ac":
            swarm.step(name)
        swarm.settle()
    assert [swarm.nodes[name].steps for name in "ac"] == [6, 6]
    swarm.end()
    swarm.one_model()


@pytest.mark.parametrize("names", ["abc", "abcde"])
@pytest.mark.parametrize("tries", [1, 4])
def test_passes_that_fail_on_all_cost_one_more_attempt_and_leave_nobody_out(names: str, tries: int) -> None:
    """Each after the others have heard of the last, as backward passes end at different times."""
    swarm = GradientSwarm(names, robust=True)
    swarm.train(2, drawn(swarm))
    attempts = swarm.nodes["a"].core.counts["attempts"]
    for name in names:
        swarm.part(name, 4)
    swarm.settle()
    for _ in range(tries):
        for name in names:
            swarm.part(name, 6, anew=True)
            swarm.settle()
    for name in names:
        swarm.step(name)
        swarm.settle()
    order = swarm.nodes["a"].core._rounds.order
    assert sorted(order.roster) == sorted(names)
    assert [node.steps for node in swarm.nodes.values()] == [3] * len(names)
    assert swarm.nodes["a"].core.counts["attempts"] == attempts + 2
    assert not any(node.core.counts["members_set_aside"] for node in swarm.nodes.values())
    swarm.one_model()


def test_who_takes_over_a_model_within_a_pass_that_fails_has_no_gradient_of_it_in_the_next_one_either() -> None:
    swarm = GradientSwarm("abc")
    swarm.train(2, drawn(swarm))
    for name, side in (("a", "ab"), ("b", "ab"), ("c", "c")):
        swarm.peers(name, set(side))
    swarm.settle()
    for name in "abc":
        swarm.step(name)
    swarm.settle()
    swarm.heal()
    for name in "ab":
        swarm.step(name)
    swarm.part("c", 5)
    swarm.settle()
    assert [type(effect) for effect in swarm.nodes["c"].late] == [Become]
    swarm.part("c", 5, anew=True)
    swarm.step("c")
    swarm.settle()
    order = swarm.nodes["c"].core._rounds.order
    assert dict(zip(order.roster, order.weights, strict=True)) == {"a": 1.0, "b": 1.0, "c": 0.0}
    swarm.one_model()


@pytest.mark.parametrize("limit", [0.0, 1e-9, 1e9])
def test_who_says_that_it_has_applied_what_nobody_can_have_sets_no_limit(limit: float) -> None:
    swarm = GradientSwarm("abc", robust=True)
    swarm.train(2, drawn(swarm))
    for name in "abc":
        swarm.step(name)
    leader, liar = swarm.nodes["a"].core, swarm.nodes["c"].core
    while leader._rounds.phase != RoundPhase.HELD:
        swarm.deliver(*swarm.waiting()[0])
    attempt = leader._rounds.order.attempt
    said = replace(liar._rounds._report(0.0), agreed=attempt, limit=limit, phase=RoundPhase.IDLE)
    swarm.perform("a", leader.on_message("c", said, swarm.now))
    swarm.settle()
    assert leader._rounds._limit == swarm.nodes["b"].core._rounds._limit != limit
    assert [node.core.counts["rounds_shortened"] for node in swarm.nodes.values()] == [0] * 3
    with pytest.raises(PeerError, match="long"):
        leader.on_message("c", replace(said, limit=-3.0), swarm.now)


def test_who_missed_a_commit_has_its_leaders_limit_whatever_another_says_to_have_applied() -> None:
    swarm = GradientSwarm("abc", robust=True)
    swarm.train(2, drawn(swarm))
    for name in "abc":
        swarm.step(name)
    leader, liar, late = (swarm.nodes[name].core for name in "acb")
    while not any(isinstance(said, RoundCommit) for said in swarm.queues["a", "b"]):
        swarm.deliver(*swarm.waiting()[0])
    swarm.lose("a", "b")
    said = replace(liar._rounds._report(0.0), agreed=leader._rounds._agreed, limit=1e-9, phase=RoundPhase.IDLE)
    swarm.perform("a", leader.on_message("c", said, swarm.now))
    swarm.lose("a", "b")
    assert late._rounds.phase == RoundPhase.HELD
    swarm.cut("a", "b")
    swarm.settle()
    assert late._rounds._agreed == leader._rounds._agreed
    assert late._rounds._limit == leader._rounds._limit > 1e-9


def drawn(swarm: GradientSwarm) -> Callable[[str], Vector]:
    return lambda name: swarm.integers() / 1000


def at_messages(event: str) -> None:
    """A step of all in whose middle something happens to one: before the first message, a later one, ..."""
    for boundary in itertools.count(0, 4):
        swarm = GradientSwarm("abc", seed=boundary, robust=True)
        swarm.train(2, drawn(swarm))
        victim = "abc"[boundary // 4 % 3]
        for name in "abc":
            swarm.step(name)
        for _ in range(boundary):
            if not (links := swarm.waiting()):
                return
            swarm.deliver(*links[boundary % len(links)])
        model = swarm.nodes[victim].x
        if event == "dies":
            swarm.die(victim)
            swarm.settle()
            swarm.all_hear()
        elif event == "restarts":
            swarm.restart(victim, model)
        elif event == "trainer lost":
            swarm.nodes[victim].waits = False
            swarm.perform(victim, swarm.nodes[victim].core.on_trainer_lost(swarm.now))
        else:
            for other in sorted({*"abc"} - {victim}):
                swarm.cut(victim, other)
                swarm.cut(other, victim)
        swarm.train(2, drawn(swarm))
        swarm.one_model()
        swarm.end()
        swarm.one_model()


@pytest.mark.cases(1)
@pytest.mark.parametrize("event", ["dies", "restarts", "trainer lost", "loses its connections"])
def test_at_any_message_of_a_step(event: str) -> None:
    at_messages(event)


def test_who_is_left_alone_trains_on_at_once() -> None:
    swarm = GradientSwarm("ab")
    swarm.train(2, lambda name: swarm.integers() / 1000)
    for name in "ab":
        swarm.step(name)
    swarm.die("b")
    swarm.hear("a")
    assert not swarm.nodes["a"].waits
    for _ in range(5):
        swarm.step("a")
        assert not swarm.nodes["a"].waits
    assert swarm.now == 0


@pytest.mark.parametrize(
    ("small", "large"),
    [("ab", "cd"), ("a", "bcd"), ("d", "abc")],
    ids=["as large, and further on", "larger", "larger, and leads"],
)
def test_both_sides_of_a_partition_train_and_the_larger_one_stays(small: str, large: str) -> None:
    """However far the smaller one says it is; where they are as large, the one that is further on."""
    swarm = GradientSwarm("abcd")
    swarm.train(2, lambda name: swarm.integers() / 1000)
    for side in (small, large):
        for name in side:
            swarm.peers(name, set(side))
    swarm.settle()
    for _ in range(3):
        for name in "abcd":
            swarm.step(name)
        swarm.settle()
    for name in large if len(small) == len(large) else small:
        swarm.step(name)
    swarm.settle()
    kept = swarm.nodes[large[0]].x[: swarm.layout.parameters].copy()
    swarm.heal()
    sources = []
    for name in "abcd":
        swarm.step(name, np.zeros(swarm.layout.parameters))
    for core in (node.core for node in swarm.nodes.values()):
        taken = core._take_over
        core._take_over = lambda *told, taken=taken: sources.append(told) or taken(*told)  # type: ignore[func-returns-value]
    swarm.settle()
    swarm.one_model()
    assert len(sources) == len(small)
    assert all((values[: swarm.layout.parameters] == kept).all() or np.isnan(values).all() for values, _ in sources)
    swarm.end()
    swarm.one_model()


def test_who_ends_early_has_the_last_model_in_the_end() -> None:
    swarm = GradientSwarm("abc")
    swarm.train(2, lambda name: swarm.integers() / 1000)
    swarm.finish("a")
    swarm.settle()
    for _ in range(4):
        for name in "bc":
            swarm.step(name)
        swarm.settle()
    assert [node.steps for node in swarm.nodes.values()] == [2, 6, 6]
    swarm.end()
    assert {node.steps for node in swarm.nodes.values()} == {6}
    swarm.one_model()


@settings(max_examples=60, deadline=None, print_blob=True)
@given(who=st.sampled_from("abc"), until=st.integers(0, 80), seed=st.integers(0, 2**16))
def test_who_ends_while_it_waits_for_a_mean_has_the_others_model_in_the_end(who: str, until: int, seed: int) -> None:
    """They step by that mean, of which its gradient is a part."""
    swarm = GradientSwarm("abc", seed=seed)
    for _ in range(3):
        for name in "abc":
            swarm.step(name)
        swarm.settle()
    for name in "abc":
        swarm.step(name)
    for turn in range(until):
        if lines := swarm.waiting():
            swarm.deliver(*lines[turn % len(lines)])
    swarm.nodes[who].waits = False
    swarm.finish(who)
    swarm.come_to(lambda name: name == who or not swarm.nodes[name].waits, lambda name: None)
    swarm.end()
    swarm.one_model()


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("who", ["a", "b", "c"])
def test_who_ends_before_it_steps_by_a_mean_has_the_others_model_in_the_end(
    who: str, *, change: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = GradientSwarm("abc", seed=3)
    go_on = swarm._go_on

    def interrupted(name: str, mean: Vector) -> None:
        if name == who and swarm.nodes[name].steps == 1:
            swarm.nodes[name].waits = False
        else:
            go_on(name, mean)

    monkeypatch.setattr(swarm, "_go_on", interrupted)
    for _ in range(2):
        for name in "abc":
            swarm.step(name)
        swarm.settle()
    assert swarm.nodes[who].steps == 1
    if change:
        for name, node in swarm.nodes.items():
            last = node.core
            node.core = swarm.make(name, swarm.layout, random.Random(name), node._values)
            node.core.succeeds(last)
        for name in "abc":
            swarm.hear(name)
        swarm.settle()
    swarm.end()
    swarm.one_model()


@pytest.mark.one_run_in(3)
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("codec", "robust"), [*((codec, False) for codec in sorted(CODECS)), ("top_k", True), ("top_k_3", True)]
)
def test_what_a_lossy_codec_drops_is_given_later(codec: str, robust: bool) -> None:
    swarm = GradientSwarm("abc", codec=codec, parameters=40, seed=1, robust=robust)
    gradients = {name: swarm.integers() for name in "abc"}
    start = swarm.nodes["a"].x[:40].copy()
    steps = 400
    for _ in range(4):
        swarm.train(steps // 4, lambda name: gradients[name] / 1000)
    swarm.one_model()
    gone = (start - swarm.nodes["a"].x[:40]) * (1 - 0.5) / 0.25 / steps
    mean = np.mean(list(gradients.values()), axis=0)
    assert np.linalg.norm(gone - mean) < 0.06 * np.linalg.norm(mean)


class AnyWeather(Lives):
    """Anything may happen, in any order; then calm comes, and all hold one model."""

    swarm: GradientSwarm

    @initialize(
        seed=st.integers(0, 2**16),
        topology=topologies,
        codec=st.sampled_from(["float32", "int8"]),
        robust=st.booleans(),
    )
    def start(self, seed: int, topology: str, codec: str, robust: bool = False) -> None:
        self.swarm = GradientSwarm(NAMES, seed=seed, topology=topology, codec=codec, robust=robust)
        self.rng = np.random.default_rng(seed)

    @rule(name=names, first=st.integers(1, 9), anew=st.booleans())
    def part_of_a_pass(self, name: str, first: int, anew: bool) -> None:
        if name in self.swarm.nodes:
            self.swarm.part(name, first, anew=anew)

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        self.swarm.heal()
        for name in self.swarm.nodes:
            self.swarm.begin_again(name)
        self.swarm.train(2, lambda name: self.swarm.integers() / 1000)
        self.swarm.one_model()
        self.swarm.end()
        self.swarm.one_model()


def test_in_any_weather() -> None:
    run_state_machine_as_test(AnyWeather, settings=weather_settings(10))


def test_who_has_stepped_takes_over_the_model_that_it_has_stepped_from() -> None:
    weather = AnyWeather()
    weather.start(seed=0, topology="auto", codec="float32")
    weather.die(name="a")
    weather.restart(donor="a", name="b")
    weather.local_steps(count=1, name="c", scale=0.0)
    weather.time_passes(name="a", seconds=400.0)
    weather.restart(donor="a", name="a")
    weather.local_steps(count=1, name="b", scale=0.0)
    weather.teardown()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_in_much_weather() -> None:
    run_state_machine_as_test(AnyWeather, settings=weather_settings(1500))


def test_orders_that_no_leader_gives_are_refused() -> None:
    swarm = GradientSwarm("ab")
    swarm.train(1, lambda name: swarm.integers() / 1000)
    core = swarm.nodes["b"].core
    order = core._rounds.order
    for change in (
        {"weights": ()}, {"weights": (1.0, -1.0)}, {"weights": (1.0, float("nan"))}, {"weights": (1.0,)},
        {"source": "a"}, {"whole": True, "codec": "float32", "source": "z"}, {"weights": (1.0, 1.0, 1.0)},
    ):  # fmt: skip
        told = replace(order, **{"lengths": (), "round": order.round + 1, "attempt": order.attempt + 1, **change})
        with pytest.raises(PeerError):
            core.on_message("a", told, 0.0)


@pytest.mark.parametrize("who", ["leader", "member"])
def test_no_member_goes_on_from_a_step_after_which_no_other_can_be_said(who: str) -> None:
    """It could not report any more, nor could its next life, which had a checkpoint of that step."""
    swarm = GradientSwarm("abc")
    swarm.train(1, lambda name: swarm.integers() / 1000)
    leader, member = swarm.nodes["a"].core, swarm.nodes["b"].core
    order, report = member._rounds.order, member._rounds._report(0.0)
    for step in (FIRST_MAX, COUNT_END - 1):
        refused = pytest.raises(PeerError, match="step") if step > FIRST_MAX else nullcontext()
        with refused:
            if who == "member":
                leader.on_message("b", replace(report, step=step), 0.0)
            else:
                whole: Any = {"whole": True, "codec": "float32", "source": "a", "weights": (), "lengths": ()}
                told = replace(order, **whole, step=step, round=order.round + 1, attempt=order.attempt + 1)
                member.on_message("a", told, 0.0)


def test_what_has_no_effect_with_gradients_is_refused() -> None:
    check_options("allreduce", ModeSettings(topology="ring", exchange="gradients"))
    with pytest.raises(UserError, match=r"exchange gradients: not with mode gossip; modes that do so: .*allreduce"):
        check_options("gossip", ModeSettings(exchange="gradients"))
    with pytest.raises(UserError, match="not one of weights, gradients"):
        check_options("allreduce", ModeSettings(exchange="both"))
    with pytest.raises(UserError, match="overlap: without effect in mode allreduce with gradients"):
        check_given("allreduce", ["overlap", "codec"], "gradients")
