"""What a leader makes of what members say and rounds cost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from round_swarm import RoundSwarm

from peerd.training.codecs.concentration import CONCENTRATED
from peerd.training.mode_settings import ModeSettings
from peerd.training.modes import settings_of
from peerd.training.rounds.choice import COST_MAX, DENSE, EVERY_MAX, EVERY_MIN, SPARSE, Choice
from peerd.training.rounds.words import Hearer
from peerd.transport.errors import PeerError
from peerd.transport.messages import RoundBegin

seconds = st.floats(1e-3, 1e3)


@given(st.lists(st.floats(0.01, CONCENTRATED - 0.01), min_size=3, max_size=9))
def test_fewer_than_half_of_the_members_choose_no_codec(honest: list[float]) -> None:
    choice = Choice(0)
    lies = [1.0] * ((len(honest) - 1) // 2)
    for _ in range(20):
        assert choice.codec([*honest, *lies]) == DENSE
    steep = [1 - share for share in honest]
    for _ in range(20):
        chosen = choice.codec([*steep, *[0.01] * len(lies)])
    assert chosen == SPARSE
    for told in ([], [0.0], [math.nan, -1.0, 2.0, math.inf]):
        assert choice.codec(told) == SPARSE, "who says nothing changes nothing"


@given(seconds, seconds, st.sampled_from([SPARSE, DENSE, "float32"]))
def test_a_round_takes_no_longer_than_the_steps_before_it(step_s: float, round_s: float, codec: str) -> None:
    choice, now = Choice(0), 0.0
    every = choice.every(codec)
    for _ in range(20):
        now += every * step_s
        choice.begins(now, usual=True)
        every = choice.every(codec)
        now += round_s
        choice.committed(0.0, now)
    least = EVERY_MIN.get(codec, 2)
    assert least <= every <= EVERY_MAX
    if every < EVERY_MAX:
        assert round_s <= COST_MAX * every * step_s * 1.001
    if every > least:
        assert (every - 1) * step_s * COST_MAX < round_s * 1.001, "nor do steps wait for rounds in vain"


def test_an_attempt_in_vain_says_nothing_of_steps() -> None:
    choice, now = Choice(0), 0.0
    for _ in range(8):
        choice.begins(now, usual=True)
        every = choice.every(SPARSE)
        choice.begins(now + 50.0, usual=True)  # again, without somebody
        choice.committed(0.0, now + 50.5)
        now += 50.5 + every * 0.25
    assert choice.every(SPARSE) == 2


def test_a_round_of_whole_models_is_not_what_rounds_cost_and_a_new_leader_goes_on_from_the_last_order() -> None:
    choice = Choice(17)
    assert choice.every(DENSE) == 17
    choice.begins(0.0, usual=False)
    choice.committed(0.0, 100.0)
    for number in range(4):
        choice.begins(101.0 + 2 * number, usual=True)
        choice.committed(0.0, 101.5 + 2 * number)
        assert choice.every(SPARSE) <= 17
    assert choice.every(SPARSE) <= 3


def trained() -> RoundSwarm:
    settings = settings_of("allreduce", ModeSettings())
    swarm = RoundSwarm("abc", 400, codec=settings.codec, overlap=settings.overlap, every=settings.every, robust=True)
    swarm.all_hear()
    swarm.settle()
    return swarm


def test_what_works_in_rounds_counts_them_before_the_first() -> None:
    """`peerd status` names by it what a mode counts in."""
    assert {name: node.core.counts.get("rounds") for name, node in trained().nodes.items()} == dict.fromkeys("abc", 0)


def step_all(swarm: RoundSwarm, move: np.ndarray[tuple[int], np.dtype[np.float64]], times: int = 60) -> None:
    for _ in range(times):
        for name in sorted(swarm.nodes):
            swarm.step(name, move * (1 + 0.1 * swarm.rng.random()))
        swarm.now += 1.0
        swarm.settle()


@pytest.mark.parametrize(("kind", "codec"), [("few", SPARSE), ("all", DENSE)])
def test_members_are_told_the_codec_by_what_they_learn(kind: str, codec: str) -> None:
    swarm = trained()
    move = np.ones(400)
    if kind == "few":
        move[8:] = 0.01
    step_all(swarm, move)
    for node in swarm.nodes.values():
        assert node.core.counts[f"rounds_{codec}"] >= 8
        assert node.core.counts[f"rounds_{codec}"] >= node.core.counts["rounds"] - 1


@pytest.mark.parametrize("codec", [settings_of("allreduce", ModeSettings()).codec, "int8", SPARSE])
@pytest.mark.parametrize("overlap", ["quorum", "blocking", "delayed"])
def test_a_lone_members_model_is_what_its_steps_have_made_of_it(codec: str, overlap: str) -> None:
    """Nothing travels, so nothing need be lost: by a lossy codec digits ended ten points below training alone."""
    swarm = RoundSwarm("a", 400, codec=codec, overlap=overlap, every=0 if codec == "auto" else 3)
    swarm.settle()
    node = swarm.nodes["a"]
    expected = node.x.copy()
    for _ in range(40):
        if not node.waits:
            move = swarm.rng.standard_normal(400)
            expected += move
            swarm.step("a", move)
        swarm.now += 1.0
        swarm.settle()
    swarm.finish("a")
    assert node.core.counts["rounds"] >= 2
    assert np.allclose(node.x[:300], expected[:300], rtol=1e-5, atol=1e-4)


def test_what_one_bit_a_value_loses_stays_in_the_members_own_model() -> None:
    """And the mean of all is where their steps have brought it."""
    swarm = trained()
    expected = np.mean([node.x.copy() for node in swarm.nodes.values()], axis=0)
    for _ in range(40):
        for name, node in swarm.nodes.items():
            if not node.waits:
                move = swarm.rng.standard_normal(400)
                expected += move / 3
                swarm.step(name, move)
        swarm.now += 1.0
        swarm.settle()
    models = [node.x for node in swarm.nodes.values()]
    assert swarm.nodes["a"].core.counts[f"rounds_{DENSE}"] > 5
    assert not np.allclose(models[0], models[1], atol=1e-3), "each keeps what it could not say"
    assert np.allclose(np.mean(models, axis=0)[:300], expected[:300], atol=1e-3)


def test_who_is_told_an_order_that_no_leader_gives_says_so() -> None:
    chosen, hearer = settings_of("allreduce", ModeSettings()), Hearer("b", 0, 0, [()])
    begin = RoundBegin(1, 1 << 16, SPARSE, "ring", False, False, ("a", "b"), (1, 2), waited=(0.0, 0.0))
    hearer.check_order(replace(begin, every=EVERY_MAX), chosen, differences=True)
    for every in (-1, EVERY_MAX + 1, 1 << 40):
        with pytest.raises(PeerError, match="steps to the next round"):
            hearer.check_order(replace(begin, every=every), chosen, differences=True)
    with pytest.raises(PeerError, match="2 steps to the next round"):
        hearer.check_order(replace(begin, every=2), replace(chosen, every=5), differences=True)


@pytest.mark.parametrize(("overlap", "comes_at"), [("blocking", 1250), ("quorum", 1235)])
def test_who_begins_at_a_late_step_comes_when_the_others_do_or_at_once(overlap: str, comes_at: int) -> None:
    """Its trainer stands by the number of a run from step 0; where no round is due it is let go."""
    swarm = RoundSwarm("ab", 40, codec="int8", overlap=overlap, every=50, seed=1)
    swarm.all_hear()
    swarm.settle()
    node = swarm.nodes["b"]
    node.steps = 1234
    for _ in range(comes_at - 1234):
        assert not node.waits
        swarm.step("b")
    assert node.waits
    assert node.steps == comes_at
