"""A correction may not make a variance negative; whatever else it asks for it gets, and numpy and torch agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.model.variances import SHARE_LEFT, bounded, is_variance

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
PAIRS = st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=40)


@given(PAIRS)
def test_nothing_that_was_a_variance_falls_below_a_tenth_and_the_rest_is_as_asked(
    pairs: list[tuple[float, float]],
) -> None:
    before, after = np.array(pairs, np.float32).T
    result = bounded(before, after)
    assert result.dtype == np.float32
    least = np.float32(SHARE_LEFT) * before
    expected = np.where((before >= 0) & (after < least), least, after)
    assert np.array_equal(result, expected)


@given(PAIRS)
def test_numpy_and_torch_give_the_same_bits(pairs: list[tuple[float, float]]) -> None:
    before, after = (np.ascontiguousarray(column) for column in np.array(pairs, np.float32).T)
    ours = bounded(torch.from_numpy(before), torch.from_numpy(after)).numpy()
    assert ours.tobytes() == bounded(before, after).tobytes()


@given(st.floats(0, 2.0**100, width=32), st.floats(2.0**-100, 2.0**100, width=32))
def test_a_target_that_is_asked_for_again_is_reached(start: float, target: float) -> None:
    """All-reduce asks until its average has landed, to the bit."""
    now, wanted = np.array([start], np.float32), np.array([target], np.float32)
    for _ in range(100):
        now = bounded(now, now + (wanted - now))
        if np.array_equal(now, wanted):
            return
    raise AssertionError(f"still at {now} on the way from {start} to {target}")


@pytest.mark.parametrize("name", ["running_var", "bn.running_var", "norm.moving_variance", "var", "var_ema", "EMA_Var"])
def test_names_of_variances(name: str) -> None:
    assert is_variance(name)


@pytest.mark.parametrize("name", ["running_mean", "log_var", "covariance", "var.mean", "variant", "invar", "cov_var"])
def test_names_of_others(name: str) -> None:
    assert not is_variance(name)
