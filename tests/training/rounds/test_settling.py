"""Rounds beside the training: what differs between members must die out, whatever the optimizer's momentum answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_swarm import RoundSwarm

from peerd.training.effects import StepReport
from peerd.training.modes.allreduce import LANDS_WITHIN, SETTLE_STEPS

MOMENTUM = 0.9
NOISE = 1.0
STEPS = 1500


def spread(curvature: float, round_steps: int, mode: str = "allreduce", *, exchange: bool = True) -> float:
    """How far two members are apart at most, in the second half of a run of SGD with momentum on a noisy parabola.

    Messages are delivered every `round_steps` steps, so that a round takes a few times as long.
    """
    swarm = RoundSwarm("ab", size=4, mode=mode, seed=1)
    if exchange:
        swarm.all_hear()
    velocity = {name: np.zeros(4) for name in "ab"}
    for node in swarm.nodes.values():
        node.x = np.zeros(4)
    apart = 0.0
    for count in range(STEPS):
        for name, node in swarm.nodes.items():
            gradient = curvature * (node.x + NOISE * swarm.rng.normal(size=4))
            velocity[name] = MOMENTUM * velocity[name] - gradient
            swarm.step(name, velocity[name])
        if exchange and count % round_steps == 0:
            for _ in range(3):
                for source, target in ("ab", "ba"):
                    swarm.deliver(source, target)
        if count > STEPS // 2:
            apart = max(apart, float(np.abs(swarm.nodes["a"].x - swarm.nodes["b"].x).max()))
        if apart > 1e6:
            break
    assert not exchange or swarm.nodes["a"].core.counts["rounds"] > 3
    return apart


@pytest.mark.one_run_in(3)
@settings(max_examples=40)
@given(curvature=st.floats(0.01, 1.5), round_steps=st.integers(1, 12))
def test_members_that_go_on_meanwhile_stay_together(curvature: float, round_steps: int) -> None:
    alone = spread(curvature, round_steps, exchange=False)
    assert spread(curvature, round_steps) < 2.5 * alone


@pytest.mark.parametrize("round_steps", [1, 4, 9])
def test_rounds_still_come_as_often_as_that_allows(round_steps: int) -> None:
    swarm = RoundSwarm("ab", seed=1)
    swarm.all_hear()
    for count in range(400):
        for name in "ab":
            swarm.step(name)
        if count % round_steps == 0:
            swarm.settle()
    assert 400 // (24 + 2 * round_steps) <= swarm.nodes["a"].core.counts["rounds"] <= 400 // 20


def test_a_trainer_that_goes_on_from_an_earlier_step_waits_for_nothing() -> None:
    swarm = RoundSwarm("ab", seed=1)
    swarm.all_hear()
    for _ in range(200):
        for name in "ab":
            swarm.step(name)
        swarm.settle()
    before = swarm.nodes["a"].core.counts["rounds"]
    for node in swarm.nodes.values():
        node.steps, node.asked = 3, True
    for _ in range(8):
        for name in "ab":
            swarm.step(name)
        swarm.settle()
    assert swarm.nodes["a"].core.counts["rounds"] > before


@pytest.mark.cases(2)
@pytest.mark.parametrize(("a_s", "b_s"), [(4.0, 2.0), (2.0, 4.0), (10.0, 2.0), (8.0, 5.0)])
def test_members_of_unequal_speed_meet_in_every_round(a_s: float, b_s: float) -> None:
    """The slower one comes later than all patience that a round alone would teach."""
    swarm = RoundSwarm("ab", seed=1)
    swarm.all_hear()
    due = {"a": a_s, "b": b_s}
    while swarm.now < 3000.0:
        name = min(due, key=lambda one: due[one])
        swarm.pass_time(due[name] - swarm.now)
        due[name] += a_s if name == "a" else b_s
        swarm.step(name)
        swarm.settle()
    rounds = [set(node.rounds) for node in swarm.nodes.values()]
    assert len(rounds[0] & rounds[1]) >= 3000 / (24 * max(a_s, b_s) + 30)
    assert len(rounds[0] ^ rounds[1]) <= 2, "at the beginning, before a period was measured"


def test_the_step_after_a_round_is_where_it_landed() -> None:
    swarm = RoundSwarm("ab", seed=1)
    swarm.all_hear()
    core = swarm.nodes["a"].core
    while core.counts["rounds"] < 2:
        for name in "ab":
            swarm.step(name)
        swarm.settle()
    step = swarm.nodes["a"].steps + 7
    core.on_step(StepReport(step, 1.0, 1.0, published=False, finishing=False), swarm.now)
    assert core._settled_at == step + LANDS_WITHIN + SETTLE_STEPS
