"""Who comes no closer at the end of a run is not waited for; who does is, however long news takes to cross a swarm."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from peerd.training.flush import PARTED_MAX, WINDOW, Progress


@given(st.floats(1e-3, 1e3), st.floats(0.5, 0.97))
def test_who_comes_closer_is_waited_for(distance: float, contraction: float) -> None:
    progress = Progress()
    for _ in range(10 * WINDOW):
        progress.note(distance, agree=False)
        distance *= contraction ** (1 / WINDOW * 2)
        assert not progress.is_stuck


@given(st.integers(0, 1000))
def test_who_says_something_else_each_time_is_not(seed: int) -> None:
    noise, progress = random.Random(seed), Progress()
    for _ in range(64 * WINDOW):
        progress.note(noise.uniform(0.5, 1.5), agree=False)
        if progress.is_stuck:
            return
    raise AssertionError("never stuck")


def test_news_that_takes_two_apart_again_is_no_lie() -> None:
    progress = Progress()
    for _ in range(5 * WINDOW):
        progress.note(1e-6, agree=True)
    distance = 1.0
    for _ in range(5 * WINDOW):
        progress.note(distance, agree=False)
        distance *= 0.98
    assert not progress.is_stuck


@given(st.integers(1, WINDOW - 1))
def test_who_agrees_and_does_not_in_turn_is_not_waited_for_without_end(apart: int) -> None:
    """Two that lie, each while the other says that it is near, would keep a run from its end."""
    progress = Progress()
    for _ in range(PARTED_MAX + 2):
        for _ in range(apart):
            progress.note(1.0, agree=False)
        progress.note(1e-6, agree=True)
    assert progress.is_stuck
    progress.note(1.0, agree=False)
    assert progress.is_stuck
