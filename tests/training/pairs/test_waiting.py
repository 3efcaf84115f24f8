"""The share of its time that a node waits for its exchanges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.pairs.waiting import Waiting
from peerd.training.trigger import SILENCE_MAX_S

seconds = st.floats(0, 1e6)


def test_before_two_exchanges_nothing_is_known_which_counts_as_much() -> None:
    waiting = Waiting()
    assert waiting.share == 1.0
    waiting.ended(1.0, 2.0)
    assert waiting.share == 1.0


@given(st.lists(st.tuples(seconds, seconds), max_size=40))
def test_it_is_between_none_and_all_of_the_time(pauses: list[tuple[float, float]]) -> None:
    waiting, now = Waiting(), 0.0
    for passes, takes in pauses:
        now += passes
        waiting.ended(now - takes, now)
        assert 0.0 <= waiting.share <= 1.0


@given(st.floats(1e-3, SILENCE_MAX_S), st.floats(0, 1), st.floats(0, 1))
def test_it_is_what_it_has_been_of_late(every_s: float, once: float, since: float) -> None:
    waiting, now = Waiting(), 0.0
    for share in [once] * 60 + [since] * 60:
        now += every_s
        waiting.ended(now - share * every_s, now)
    assert waiting.share == pytest.approx(since, abs=0.01)


@given(st.floats(0.3, 1), st.floats(100, 1e6))
def test_a_pause_is_soon_forgotten(share: float, pause_s: float) -> None:
    waiting, now = Waiting(), 0.0
    for number in range(100):
        now += pause_s if number == 60 else 10.0
        waiting.ended(now - 10.0 * share, now)
        assert waiting.share > 0.1 or number in (0, 60)


@given(st.floats(1, 1e4))
def test_a_line_that_is_never_free_is_none(takes: float) -> None:
    waiting, now = Waiting(), 0.0
    for _ in range(3):
        now += takes
        waiting.ended(now - takes, now)
    assert waiting.share == pytest.approx(1.0)


@given(st.integers(2, 5), st.floats(0.01, 0.2))
def test_exchanges_over_several_links_add_up(links: int, takes: float) -> None:
    waiting, now = Waiting(), 0.0
    for _ in range(60):
        now += 1.0
        for _ in range(links):
            waiting.ended(now - takes, now)
    assert waiting.share == pytest.approx(links * takes, rel=0.01)
