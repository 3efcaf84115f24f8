"""Whose model is the swarm's? Honest ones are taken and far ones not, while most of those who are asked are honest."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.node.donors import ASK_AGAIN_S, ASK_SOON_S, RequestLimit
from peerd.node.second_opinion import CLOSE, FAR, REJECTED_MAX, SKETCH_S, WITNESSES, SecondOpinion, is_credible
from peerd.training.sketch import WIDTH, Sketch, packed
from peerd.transport.errors import PeerError
from peerd.transport.messages import ModelSketch, SketchRequest

GIVERS = [f"m{number:02}" for number in range(12)]


def honest(rng: np.random.Generator, spread: float, count: int) -> list[Sketch]:
    """Of models that are all as far from each other, within a fifth."""
    centre = 10.0 * rng.standard_normal((2, WIDTH))
    found = []
    for _ in range(count):
        apart = rng.standard_normal((2, WIDTH))
        found.append(centre + spread * apart / np.linalg.norm(apart, axis=1, keepdims=True) * rng.uniform(0.9, 1.1))
    return found


lies = st.sampled_from(["together", "anywhere", "huge", "no number", "the centre"])
SPREADS = st.sampled_from([0.0, 1e-3, 1.0, 100.0])


def lying(how: str, rng: np.random.Generator, around: Sketch, number: int) -> Sketch:
    if how == "together":
        return around + 1e4 * np.ones_like(around)
    if how == "huge":
        return np.full_like(around, 1e38 * (number + 1))
    if how == "no number":
        return np.full_like(around, [np.nan, np.inf][number % 2])
    return around if how == "the centre" else around + 1e4 * rng.standard_normal(around.shape)


@given(st.integers(0, 2**32), SPREADS, st.integers(2, WITNESSES), lies, st.data())
def test_an_honest_model_is_taken_and_a_far_one_is_not_while_fewer_than_half_lie(
    seed: int, spread: float, witnesses: int, how: str, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    liars = data.draw(st.integers(0, witnesses // 2), "liars")
    models = honest(rng, spread, 1 + witnesses - liars)
    offered, *others = models
    others += [lying(how, rng, offered, number) for number in range(liars)]
    assert is_credible(offered, others)
    if liars + 1 <= witnesses // 2:  # one more lies: who is asked for a model
        length = np.linalg.norm(offered, axis=1, keepdims=True)
        away = rng.standard_normal(offered.shape)
        away *= (1.5 * max(2.5 * FAR * spread, CLOSE * float(length.max()))) / np.linalg.norm(
            away, axis=1, keepdims=True
        )
        assert not is_credible(offered + away, models[1:] + others[len(models) - 1 :]), (spread, liars)


@given(st.integers(0, 2**32), st.integers(2, WITNESSES), st.sampled_from([0, 1]))
def test_a_part_of_a_model_that_is_far_is_enough(seed: int, witnesses: int, part: int) -> None:
    offered, *others = honest(np.random.default_rng(seed), 1.0, 1 + witnesses)
    offered = offered.copy()
    offered[part] += 1e3
    assert not is_credible(offered, others)


@given(st.integers(0, 2**32), st.integers(0, 1))
def test_of_two_models_nobody_can_say_which_is_the_swarms(seed: int, witnesses: int) -> None:
    rng = np.random.default_rng(seed)
    offered, *others = honest(rng, 1.0, 1 + witnesses)
    assert is_credible(1e6 * offered, others)


@given(st.integers(0, 2**32), st.integers(2, WITNESSES))
def test_an_optimizers_state_may_change_wholly_but_not_grow(seed: int, witnesses: int) -> None:
    """Members that agree to the bit, and a donor that is a step ahead."""
    rng = np.random.default_rng(seed)
    same = rng.standard_normal((2, WIDTH))
    ahead, huge = same.copy(), same.copy()
    ahead[1] += 0.9 * np.linalg.norm(same[1]) * np.eye(1, WIDTH)[0]
    huge[1] *= 10.0
    assert is_credible(ahead, [same] * witnesses)
    assert not is_credible(huge, [same] * witnesses)
    nothing = same.copy()
    nothing[1] = 0.0
    assert is_credible(nothing + np.array([[0.0], [1e-6]]), [nothing] * witnesses), "statistics that have just begun"


def test_models_that_agree_to_the_bit_let_one_in_that_has_trained_on() -> None:
    same = np.ones((2, WIDTH))
    assert is_credible(same * (1 + CLOSE / 2), [same] * 3)
    assert not is_credible(same * (1 + 2 * CLOSE), [same] * 3)


PROMISE = b"promise"


def asked(opinion: SecondOpinion, donor: str, givers: list[str], now: float) -> list[tuple[str, SketchRequest]]:
    """A donor is asked, and promises its model."""
    opinion.donor_asked(donor)
    return opinion.ask(donor, PROMISE, givers, now)


def answers(opinion: SecondOpinion, sent: list[tuple[str, SketchRequest]], values: float) -> None:
    for witness, request in sent:
        opinion.heard(witness, ModelSketch(request.seed, packed(np.full((2, WIDTH), values))))


@given(st.integers(0, 99), st.lists(st.tuples(st.sampled_from(GIVERS), st.floats(0, 30)), min_size=1, max_size=40))
def test_whoever_is_asked_may_be_and_is_no_donor(seed: int, donors: list[tuple[str, float]]) -> None:
    opinion, limits, now = SecondOpinion(Random(seed)), {id: RequestLimit(ASK_SOON_S) for id in GIVERS}, 0.0
    seeds: set[bytes] = set()
    for donor, pause_s in donors:
        now += pause_s
        can = opinion.can_ask(now)
        sent = asked(opinion, donor, GIVERS, now)
        assert len({witness for witness, _ in sent}) == len(sent) == (WITNESSES if can else 0)
        assert donor not in dict(sent)
        assert all(limits[witness].admits("me", now) for witness, _ in sent)
        drawn = {request.seed for _, request in sent}
        assert len(drawn) == can
        assert not seeds & drawn, "another model, other signs"
        seeds |= drawn
        if can:
            assert opinion.waits(donor, now, now, 1)
            answers(opinion, sent, 1.0)
            assert not opinion.waits(donor, now, now, 1 << 38)
            assert not opinion.lacks(donor)
            assert drawn == {opinion.seed(donor, PROMISE)}


@given(st.integers(1, 12), st.integers(0, WITNESSES), st.floats(0, 20), st.floats(0, 20))
def test_two_others_are_waited_for_longer_than_all(members: int, answer: int, took_s: float, waited_s: float) -> None:
    opinion = SecondOpinion(Random(1))
    sent = asked(opinion, "m00", GIVERS[:members], 0.0)
    answers(opinion, sent[:answer], 1.0)
    until_s = ASK_SOON_S if answer >= 2 or len(sent) < 2 else ASK_AGAIN_S
    waits = answer < len(sent) and took_s + waited_s < took_s + until_s
    assert opinion.waits("m00", took_s, took_s + waited_s, 1) == waits
    assert bool(opinion.lacks("m00")) == (answer < 2 <= len(sent))


@given(st.integers(0, WITNESSES - 1), st.sampled_from([0.0, 60.0, 1e4]))
def test_all_have_the_time_to_sketch_a_large_model(answer: int, took_s: float) -> None:
    """From when they were asked: it may come at once, as the newcomer's own does, or by a slow line."""
    opinion, values = SecondOpinion(Random(1)), 70 * 10**9
    answers(opinion, asked(opinion, "m00", GIVERS, 5.0)[:answer], 1.0)
    came_at = 5.0 + took_s
    enough = max(5.0 + SKETCH_S * values, came_at + (ASK_SOON_S if answer >= 2 else ASK_AGAIN_S))
    assert opinion.waits("m00", came_at, enough - 0.1, values)
    assert not opinion.waits("m00", came_at, enough, values)


def test_each_model_is_compared_with_what_was_said_when_it_was_promised() -> None:
    opinion = SecondOpinion(Random(1))
    answers(opinion, asked(opinion, "m00", GIVERS, 0.0), 1.0)
    answers(opinion, asked(opinion, "m01", GIVERS, 60.0), 5.0)
    assert opinion.accepts("m00", np.full((2, WIDTH), 1.0))
    assert opinion.accepts("m01", np.full((2, WIDTH), 5.0))
    assert not opinion.accepts("m00", np.full((2, WIDTH), 5.0))
    assert not opinion.accepts("m01", np.full((2, WIDTH), 1.0))
    answers(opinion, asked(opinion, "m00", GIVERS, 3600.0), 9.0)
    assert opinion.accepts("m00", np.full((2, WIDTH), 9.0)), "it was asked again"


def test_what_was_not_promised_or_too_soon_is_not_taken() -> None:
    opinion = SecondOpinion(Random(1))
    with pytest.raises(PeerError, match="promised"):
        opinion.seed("m00", PROMISE)
    asked(opinion, "m00", GIVERS, 0.0)
    with pytest.raises(PeerError, match="promised"):
        opinion.seed("m00", b"another")
    opinion.donor_asked("m00")
    assert opinion.ask("m00", b"another", GIVERS, ASK_SOON_S / 2) == []
    assert asked(opinion, "m01", GIVERS, ASK_SOON_S / 2) == []
    opinion.seed("m00", PROMISE)
    with pytest.raises(PeerError, match="promised"):
        opinion.seed("m01", PROMISE)


def test_a_donor_that_promises_for_ever_is_heard_once() -> None:
    opinion = SecondOpinion(Random(1))
    assert opinion.ask("m00", PROMISE, GIVERS, 0.0) == [], "it was not asked"
    assert asked(opinion, "m00", GIVERS, 0.0)
    assert not any(opinion.ask("m00", PROMISE, GIVERS, float(now)) for now in range(1, 60))
    assert opinion.can_ask(60.0)
    assert asked(opinion, "m01", GIVERS, 60.0)


def test_what_nobody_asked_for_is_dropped_and_what_is_no_sketch_is_an_offence() -> None:
    opinion = SecondOpinion(Random(1))
    sent = asked(opinion, "m00", GIVERS[:4], 0.0)
    (first, request), *_ = sent
    opinion.heard("m00", ModelSketch(request.seed, bytes(8 * WIDTH)))
    opinion.heard(first, ModelSketch(b"another", bytes(3)))
    opinion.heard("stranger", ModelSketch(request.seed, bytes(3)))
    assert opinion.waits("m00", 0.0, 0.0, 1)
    with pytest.raises(PeerError, match="3 bytes"):
        opinion.heard(first, ModelSketch(request.seed, bytes(3)))
    answers(opinion, sent, 1.0)
    assert not opinion.accepts("m00", np.zeros((2, WIDTH)))


def test_who_finds_nobody_credible_takes_what_there_is_in_the_end() -> None:
    opinion = SecondOpinion(Random(1))
    answers(opinion, asked(opinion, "m00", GIVERS, 0.0), 1.0)
    far = np.zeros((2, WIDTH))
    assert [opinion.accepts("m00", far) for _ in range(REJECTED_MAX + 1)] == [False] * REJECTED_MAX + [True]
