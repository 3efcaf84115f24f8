"""Whose model is the swarm's? Honest ones are taken and far ones not, while most of those who are asked are honest."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.node.donors import ASK_AGAIN_S, ASK_SOON_S, RequestLimit
from peerd.node.second_opinion import CLOSE, FAR, REJECTED_MAX, WITNESSES, SecondOpinion, is_credible
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
def test_one_half_of_a_model_that_is_far_is_enough(seed: int, witnesses: int, part: int) -> None:
    offered, *others = honest(np.random.default_rng(seed), 1.0, 1 + witnesses)
    offered = offered.copy()
    offered[part] += 1e3
    assert not is_credible(offered, others)


@given(st.integers(0, 2**32), st.integers(0, 1))
def test_of_two_models_nobody_can_say_which_is_the_swarms(seed: int, witnesses: int) -> None:
    rng = np.random.default_rng(seed)
    offered, *others = honest(rng, 1.0, 1 + witnesses)
    assert is_credible(1e6 * offered, others)


def test_models_that_agree_to_the_bit_let_one_in_that_has_trained_on() -> None:
    same = np.ones((2, WIDTH))
    assert is_credible(same * (1 + CLOSE / 2), [same] * 3)
    assert not is_credible(same * (1 + 2 * CLOSE), [same] * 3)


def answers(opinion: SecondOpinion, sent: list[tuple[str, SketchRequest]], values: float) -> None:
    for witness, request in sent:
        opinion.heard(witness, ModelSketch(request.seed, packed(np.full((2, WIDTH), values))))


@given(st.integers(0, 99), st.lists(st.tuples(st.sampled_from(GIVERS), st.floats(0, 30)), min_size=1, max_size=40))
def test_whoever_is_asked_may_be_and_is_no_donor(seed: int, donors: list[tuple[str, float]]) -> None:
    opinion, limits, now = SecondOpinion(Random(seed)), {id: RequestLimit() for id in GIVERS}, 0.0
    seeds: set[bytes] = set()
    for donor, pause_s in donors:
        now += pause_s
        sent = opinion.ask(donor, GIVERS, now)
        assert len({witness for witness, _ in sent}) == len(sent) in (0, WITNESSES)
        assert donor not in dict(sent)
        assert all(limits[witness].admits("me", now) for witness, _ in sent)
        assert len({request.seed for _, request in sent}) <= 1
        assert not seeds & {request.seed for _, request in sent}, "another round, other signs"
        seeds |= {request.seed for _, request in sent}
        assert opinion.waits(donor) == (len(sent) > 0 or opinion.waits(donor))
        answers(opinion, sent, 1.0)
        assert not opinion.waits(donor)
    assert sum(map(len, seeds)) == 16 * len(seeds)


def test_a_model_is_compared_with_what_was_said_when_it_was_asked_for() -> None:
    opinion = SecondOpinion(Random(1))
    answers(opinion, opinion.ask("m00", GIVERS, 0.0), 1.0)
    assert opinion.ask("m00", GIVERS, 5.0) == []
    answers(opinion, opinion.ask("m01", GIVERS, 60.0), 5.0)
    assert opinion.seed("m00") != opinion.seed("m01")
    assert opinion.accepts("m00", np.full((2, WIDTH), 1.0))
    assert opinion.accepts("m01", np.full((2, WIDTH), 5.0))
    assert not opinion.accepts("m00", np.full((2, WIDTH), 5.0))
    assert not opinion.accepts("m01", np.full((2, WIDTH), 1.0))


def test_who_rejects_a_model_asks_the_next_donor_and_not_the_same_members_again_at_once() -> None:
    opinion = SecondOpinion(Random(1))
    answers(opinion, opinion.ask("m00", GIVERS, 0.0), 1.0)
    assert opinion.ask("m01", GIVERS, 0.1) == []
    assert not opinion.waits("m01")
    assert not opinion.accepts("m01", np.zeros((2, WIDTH)))
    assert opinion.ask("m02", GIVERS, ASK_SOON_S) != []
    assert opinion.ask("m03", GIVERS, ASK_SOON_S + ASK_AGAIN_S / 2) == []


def test_what_nobody_asked_for_is_dropped_and_what_is_no_sketch_is_an_offence() -> None:
    opinion = SecondOpinion(Random(1))
    sent = opinion.ask("m00", GIVERS[:4], 0.0)
    (first, request), *_ = sent
    opinion.heard("m00", ModelSketch(request.seed, bytes(8 * WIDTH)))
    opinion.heard(first, ModelSketch(b"another", bytes(3)))
    opinion.heard("stranger", ModelSketch(request.seed, bytes(3)))
    assert opinion.waits("m00")
    with pytest.raises(PeerError, match="3 bytes"):
        opinion.heard(first, ModelSketch(request.seed, bytes(3)))
    answers(opinion, sent, 1.0)
    assert not opinion.accepts("m00", np.zeros((2, WIDTH)))


def test_a_witness_that_becomes_the_donor_does_not_speak_for_itself() -> None:
    opinion = SecondOpinion(Random(1))
    sent = opinion.ask("a", ["a", "b", "c", "d"], 0.0)
    values = {"b": 100.0, "c": 1.0, "d": 1.0}
    for witness, request in sent:
        answers(opinion, [(witness, request)], values[witness])
    assert opinion.ask("b", ["b"], 0.1) == []
    assert not opinion.accepts("b", np.full((2, WIDTH), 100.0))
    assert opinion.accepts("a", np.full((2, WIDTH), 1.0))


def test_who_finds_nobody_credible_takes_what_there_is_in_the_end() -> None:
    opinion = SecondOpinion(Random(1))
    answers(opinion, opinion.ask("m00", GIVERS, 0.0), 1.0)
    far = np.zeros((2, WIDTH))
    assert [opinion.accepts("m00", far) for _ in range(REJECTED_MAX + 1)] == [False] * REJECTED_MAX + [True]
