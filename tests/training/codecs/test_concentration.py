"""How concentrated is a node's own progress?"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.codecs.concentration import SAMPLE, Concentration, concentration
from peerd.training.codecs.vector import Layout


def layout_of(parameters: int, buffers: int = 0) -> Layout:
    return Layout(parameters, parameters + buffers)


@given(st.integers(1, 5000), st.integers(0, 2**16), st.floats(1e-6, 1e6))
def test_the_share_of_the_largest_is_a_share_and_has_no_scale(count: int, seed: int, scale: float) -> None:
    values = np.random.default_rng(seed).standard_t(3, count).astype(np.float32)
    share = concentration(values)
    most = math.ceil(0.02 * count)
    assert most / count - 1e-6 <= share <= 1 + 1e-6, "no less than as many of equal ones have"
    assert concentration(scale * values) == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize("values", [[], [0.0], [0.0] * 100, [math.inf, 1.0], [math.nan, 1.0]])
def test_what_has_not_moved_or_is_not_finite_says_nothing(values: list[float]) -> None:
    assert concentration(np.array(values, np.float32)) == 0.0


def test_a_large_model_is_sampled_over_its_parameters_and_buffers_do_not_count() -> None:
    layout = layout_of(10 * SAMPLE, 1000)
    measured = Concentration(layout)
    measured.begins(np.zeros(layout.total, np.float32))
    values = np.ones(layout.total, np.float32)
    values[layout.parameters :] = 1e9
    assert measured.of(values) == pytest.approx(0.02, rel=1e-2)
    values[: layout.parameters : 100] = 1000.0  # 1 % of them: all of the energy
    assert measured.of(values) > 0.9


@given(st.integers(0, 2**16), st.integers(1, 6))
def test_what_others_add_to_the_model_is_none_of_its_own_steps(seed: int, exchanges: int) -> None:
    """A correction by the largest values alone would look as if few values were all that it learns."""
    rng, layout = np.random.default_rng(seed), layout_of(1000, 10)
    model = rng.standard_normal(layout.total, np.float32)
    measured, own = Concentration(layout), np.zeros(layout.total, np.float32)
    measured.corrected(model)  # before there is anything to count from
    measured.begins(model)
    for _ in range(exchanges):
        step = rng.standard_t(3, layout.total).astype(np.float32)
        correction = np.zeros(layout.total, np.float32)
        correction[rng.integers(0, layout.total, 20)] = 1000.0
        own += step
        model += step + correction
        measured.corrected(correction)
        assert measured.of(model) == pytest.approx(concentration(own[: layout.parameters]), abs=0.02)
