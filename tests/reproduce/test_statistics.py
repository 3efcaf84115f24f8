"""Means, intervals and ranks: against tables, and by their own laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.reproduce.statistics import estimate, spearman, student

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20)


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)]
)
def test_students_quantiles_are_those_of_the_tables(freedom: int, t: float) -> None:
    assert student(freedom) == pytest.approx(t, abs=1e-3)


def test_the_interval_of_a_textbooks_sample() -> None:
    found = estimate([4.0, 5.0, 6.0, 7.0, 8.0])  # s = 1.5811, t = 2.776
    assert (found.mean, found.count) == (6.0, 5)
    assert found.high - 6.0 == 6.0 - found.low == pytest.approx(2.776 * 1.58114 / math.sqrt(5), abs=1e-3)


def test_one_seed_says_nothing_of_the_spread() -> None:
    assert (estimate([3.0]).low, estimate([3.0]).high) == (-math.inf, math.inf)


@given(VALUES, st.floats(0.1, 100), st.floats(-1e6, 1e6))
def test_an_interval_moves_and_grows_with_its_values(values: list[float], scale: float, shift: float) -> None:
    before, after = estimate(values), estimate([scale * value + shift for value in values])
    slack = 1e-6 * (1 + abs(shift) + scale * max(map(abs, values)))
    assert after.mean == pytest.approx(scale * before.mean + shift, abs=slack)
    assert after.high - after.low == pytest.approx(scale * (before.high - before.low), abs=slack * 100)
    assert before.low <= before.mean <= before.high


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20, unique=True))
def test_ranks_hear_the_order_alone(values: list[float]) -> None:
    ordered = sorted(values)
    grown = [float(place**3) for place in range(len(values))]
    assert spearman(ordered, grown) == pytest.approx(1)
    assert spearman(ordered, grown[::-1]) == pytest.approx(-1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=20))
def test_equal_values_share_their_rank(pairs: list[tuple[int, int]]) -> None:
    first, second = ([float(pair[at]) for pair in pairs] for at in (0, 1))
    ranks = np.array([[sum(o < v for o in of) + (of.count(v) + 1) / 2 for v in of] for of in (first, second)])
    if min(len(set(first)), len(set(second))) == 1:
        assert math.isnan(spearman(first, second))
    else:
        assert spearman(first, second) == pytest.approx(float(np.corrcoef(ranks)[0, 1]))
