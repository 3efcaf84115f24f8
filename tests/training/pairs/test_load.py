"""The share of its time that a node waits for its exchanges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.pairs.load import Load

seconds = st.floats(0, 1e6)


def test_before_two_exchanges_nothing_is_known_and_there_is_no_room() -> None:
    load = Load()
    assert load.share == 1.0
    load.note(1.0, 2.0)
    assert load.share == 1.0


@given(st.lists(st.tuples(seconds, seconds), max_size=40))
def test_a_share_is_one(pauses: list[tuple[float, float]]) -> None:
    load, now = Load(), 0.0
    for passes, takes in pauses:
        now += passes
        load.note(now - takes, now)
        assert 0.0 <= load.share <= 1.0


@given(st.floats(1e-3, 1e3), st.floats(0, 1), st.floats(0, 1))
def test_it_is_what_it_has_been_of_late(every_s: float, once: float, since: float) -> None:
    load, now = Load(), 0.0
    for share in [once] * 60 + [since] * 60:
        now += every_s
        load.note(now - share * every_s, now)
    assert load.share == pytest.approx(since, abs=0.01)


@given(st.integers(2, 5), st.floats(0.01, 1))
def test_exchanges_over_several_links_add_up(links: int, takes: float) -> None:
    load, now = Load(), 0.0
    for _ in range(60):
        now += 1.0
        for _ in range(links):
            load.note(now - takes, now)
    assert load.share == pytest.approx(min(1.0, links * takes), rel=0.3)
