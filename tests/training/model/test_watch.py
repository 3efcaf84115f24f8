"""When a trainer looks at its model: soon enough for the limit, and hardly ever where nothing is near."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.model.watch import LOOK_EVERY, STEPS_UNSEEN, ChangeWatch

LIMIT = 1.0


class Trainer:
    """A model of one number a step; a look takes `cost_s`, a step `step_s`."""

    def __init__(self, step_s: float = 0.1, cost_s: float = 0.001) -> None:
        self.watch = ChangeWatch()
        self.now = 0.0
        self.looks = 0
        self.change = 0.0
        self._step_s, self._cost_s = step_s, cost_s

    def step(self, change: float, limit: float, lr: float = 1.0) -> bool:
        """Whether it finds itself beyond the limit, and has published."""
        self.now += self._step_s
        self.change = change
        if not self.watch.step(limit, lr, self.now):
            return False
        self.looks += 1
        self.now += self._cost_s
        self.watch.looked(change, self.now - self._cost_s, self.now)
        if change <= limit:
            return False
        self.watch.copied()
        return True


def steps_until_published(trainer: Trainer, limit: float, speed: float, power: float) -> int:
    for steps in range(1, 100_000):
        if trainer.step(speed * steps**power, limit):
            return steps
    raise AssertionError("never")


@given(
    limit=st.floats(1e-3, 1e3), needed=st.integers(2, 300), power=st.sampled_from([0.5, 0.7, 1.0]), seed=st.integers()
)
def test_a_change_that_grows_as_training_does_is_seen_in_time(
    limit: float, needed: int, power: float, seed: int
) -> None:
    """A random walk or a straight way: at the first step beyond the limit, or one after it."""
    trainer = Trainer(step_s=1e-9)  # no look for its time
    speed = limit / needed**power
    for _ in range(3):  # the first from nothing, the others from the speed of the one before
        taken = steps_until_published(trainer, limit, speed, power)
        assert needed <= taken <= needed + 2
    assert trainer.looks <= 3 * (2 + 4 * math.log2(needed))


@given(before=st.floats(1e-3, 1.0), after=st.floats(1e-3, 1.0))
def test_however_the_speed_changes_the_steps_at_most_double(before: float, after: float) -> None:
    trainer = Trainer(step_s=1e-9)
    slow, changes = random.Random(0).randrange(1, 50), [0.0]
    while True:
        changes.append(changes[-1] + (before * 1e-3 if len(changes) <= slow else after))
        if trainer.step(changes[-1], LIMIT):
            break
    first_beyond = next(steps for steps, change in enumerate(changes) if change > LIMIT)
    assert len(changes) - 1 <= max(2 * first_beyond, 2 * STEPS_UNSEEN)


def test_a_learning_rate_that_rises_is_known() -> None:
    trainer = Trainer(step_s=1e-9)
    change = 0.0
    for _ in range(20):
        change += 1e-4
        assert not trainer.step(change, 1.0, lr=1e-4)
    change += 0.5  # the end of a warm-up: five thousand times the rate
    assert not trainer.step(change, 1.0, lr=0.5)
    assert trainer.step(change + 0.5, 1.0, lr=0.5)


def test_where_there_is_no_limit_looks_take_a_thousandth_of_the_time() -> None:
    trainer = Trainer(step_s=0.01, cost_s=0.002)
    for _ in range(20_000):
        trainer.step(1e-3, math.inf)
    assert trainer.looks <= 1 + trainer.now / (LOOK_EVERY * 0.002)
    assert trainer.looks >= 0.9 * trainer.now / (LOOK_EVERY * 0.002), "a model that is not finite is found"


def test_a_model_that_stands_still_is_not_looked_at_for_ever() -> None:
    trainer = Trainer(step_s=1e-9)
    for _ in range(10_000):
        trainer.step(0.0, 1.0)
    assert trainer.looks < 20


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_limit_that_is_passed_already_is_seen_at_once(limit: float) -> None:
    trainer = Trainer()
    trainer.step(0.5, 10.0)
    assert trainer.step(0.6, limit)


def test_a_model_that_stood_still_or_was_rolled_back_is_looked_at_again() -> None:
    for change in (0.0, math.nan):
        trainer = Trainer(step_s=1e-9)
        trainer.step(change, LIMIT)
        trainer.watch.copied()
        looks = [trainer.step(2.0, LIMIT) for _ in range(2 * STEPS_UNSEEN)]
        assert any(looks), "a speed of nothing foretells nothing"
