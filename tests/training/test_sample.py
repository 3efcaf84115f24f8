"""What is kept of a large model says how far it has come; of a small one all is kept, and nothing is estimated."""

from __future__ import annotations

import math
import random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.codecs.vector import Layout
from peerd.training.kernels import library
from peerd.training.kernels.passes import PART
from peerd.training.sample import KEPT_MIN, RUN, THIN_MAX, WHOLE_MAX, Sample, _Range, sample_of

Floats = npt.NDArray[np.float32]

ROW = 1024
SMALL_TENSOR, LARGE_TENSOR = 3000, 3 * KEPT_MIN * ROW // 64  # 3 072 rows
LARGE = Layout(
    2 * LARGE_TENSOR + SMALL_TENSOR,
    2 * LARGE_TENSOR + SMALL_TENSOR + 70,
    ((2 * LARGE_TENSOR + SMALL_TENSOR + 60, 2 * LARGE_TENSOR + SMALL_TENSOR + 70),),
    (LARGE_TENSOR, LARGE_TENSOR + SMALL_TENSOR, 2 * LARGE_TENSOR + SMALL_TENSOR),
)
SAMPLE = sample_of(LARGE)
FIRST = slice(0, LARGE_TENSOR)


def moves(kind: str, seed: int) -> Floats:
    """A change of the first tensor, which has rows of ROW."""
    rng = np.random.default_rng(seed)
    change = np.zeros((LARGE_TENSOR // ROW, ROW), np.float32)
    if kind == "all alike":
        change[:] = rng.standard_normal(change.shape)
    elif kind == "heavy tails":
        change[:] = rng.standard_t(3, change.shape)
    elif kind == "some rows":  # as of an embedding
        rows = rng.choice(len(change), len(change) // 20, replace=False)
        change[rows] = rng.standard_normal((len(rows), ROW))
    elif kind == "one column":  # as of a feature that stands out
        change[:, rng.integers(ROW)] = rng.standard_normal(len(change))
    elif kind == "one value of a hundred":
        change[rng.random(change.shape) < 0.01] = 1.0
    else:
        assert kind == "the later the larger"
        change[:] = np.arange(change.size, dtype=np.float32).reshape(change.shape)
    return change.reshape(-1)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("all alike", 0.01),
        ("heavy tails", 0.12),
        ("some rows", 0.12),
        ("one column", 0.25),
        ("one value of a hundred", 0.12),
        ("the later the larger", 0.01),
    ],
)
def test_the_estimate_is_near_whatever_moves(kind: str, error: float) -> None:
    kept = SAMPLE.take(np.zeros(LARGE.total, np.float32))
    ratios = []
    for seed in range(8):
        values = np.zeros(LARGE.total, np.float32)
        values[FIRST] = moves(kind, seed)
        ratios.append(SAMPLE.distance(values, kept) / norm_of_difference(values[: LARGE.parameters]))
        by_range = SAMPLE.squares(values, kept)
        assert by_range[0] > 0
        assert not by_range[1:].any()
    assert max(abs(ratio - 1) for ratio in ratios) < error
    mean_square = sum(ratio**2 for ratio in ratios) / len(ratios)
    assert abs(mean_square - 1) < error, "it errs to either side"


def test_over_all_places_of_one_value_the_estimate_has_no_bias() -> None:
    """One value that moves is missed or counts too much: over a whole tensor both come to what it was, exactly."""
    blocks = SAMPLE.take(np.arange(LARGE.total, dtype=np.float64)).astype(int)
    of_first = np.sort(blocks[blocks < LARGE_TENSOR])
    assert len(of_first) >= KEPT_MIN
    rate = LARGE_TENSOR // len(of_first)
    assert rate <= THIN_MAX
    per_block = np.bincount(of_first // (rate * RUN))
    assert (per_block == RUN).all(), "each block has as many"
    columns = np.bincount(of_first % ROW, minlength=ROW)
    assert columns.min() > 0, "and no column is left out"


def test_small_tensors_and_buffers_are_measured_to_the_bit() -> None:
    values = np.random.default_rng(1).standard_normal(LARGE.total).astype(np.float32)
    kept = SAMPLE.take(values)
    moved = values.copy()
    small, buffers = slice(LARGE_TENSOR, LARGE_TENSOR + SMALL_TENSOR), slice(LARGE.parameters, LARGE.total)
    moved[small] += 1
    moved[buffers] *= 2
    found = np.sqrt(SAMPLE.squares(moved, kept))
    assert found[0] == found[2] == 0
    assert found[1] == pytest.approx(norm_of_difference(moved[small], values[small]))
    assert found[3] == pytest.approx(norm_of_difference(values[buffers]))
    assert SAMPLE.distance(moved, kept) == pytest.approx(found[1]), "buffers are no parameters"


def test_what_corrections_explain_is_no_move() -> None:
    rng = np.random.default_rng(2)
    values = rng.standard_normal(LARGE.total).astype(np.float32)
    values[slice(*LARGE.variances[0])] = 1.0
    correction = rng.standard_normal(LARGE.total).astype(np.float32)
    correction[slice(*LARGE.variances[0])] = -1e6
    kept = SAMPLE.take(values)
    SAMPLE.correct(kept, correction)
    after = values + correction
    after[slice(*LARGE.variances[0])] = 0.1
    assert SAMPLE.squares(after, kept).max() < 1e-10
    other = SAMPLE.take(values)
    norm, length = SAMPLE.refresh_with_sum(other, values, correction)
    cut = LARGE.parameters
    assert math.sqrt(norm) == pytest.approx(norm_of_difference((values + correction)[:cut]))
    assert math.sqrt(length) == pytest.approx(norm_of_difference(correction[:cut]))
    np.testing.assert_array_equal(other, SAMPLE.take(values + correction))


@pytest.mark.parametrize("compiled", [True, False])
@settings(deadline=None)
@given(
    parameters=st.integers(1, 4000), buffers=st.integers(0, 40), ends=st.lists(st.integers(0, 4100), max_size=8),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_of_a_small_model_all_is_kept(
    compiled: bool, parameters: int, buffers: int, ends: list[int], seed: int
) -> None:
    layout = Layout(parameters, parameters + buffers, (), tuple(sorted(ends)))
    sample = Sample(layout, WHOLE_MAX)
    assert sample.is_whole
    assert sample.kept == layout.total <= WHOLE_MAX
    rng = np.random.default_rng(seed)
    values, before, correction = rng.standard_normal((3, layout.total)).astype(np.float32)
    kernels = library.LIBRARY
    try:
        library.LIBRARY = kernels if compiled else None
        kept = sample.take(before)
        np.testing.assert_array_equal(kept, before)
        assert sample.distance(values, kept) == norm_of_difference(values[:parameters], before[:parameters])
        sample.refresh_with_sum(kept, values, correction)
        np.testing.assert_array_equal(kept, values + correction)
    finally:
        library.LIBRARY = kernels


@settings(deadline=None)
@given(
    parameters=st.integers(1, 300_000), buffers=st.integers(0, 40), ends=st.lists(st.integers(0, 300_000), max_size=8)
)
def test_any_model_can_be_sampled(parameters: int, buffers: int, ends: list[int]) -> None:
    sample = Sample(Layout(parameters, parameters + buffers, (), tuple(sorted(ends))), whole_max=0)
    values = np.ones(parameters + buffers, np.float32)
    kept = sample.take(values)
    assert len(kept) == sample.kept
    assert sample.distance(2 * values, kept) == pytest.approx(math.sqrt(parameters))
    assert sample.squares(values, kept).sum() == 0


class Drawing(random.Random):
    """Says of how much it was asked for at once."""

    most = 0

    def randbytes(self, n: int) -> bytes:
        self.most = max(self.most, n)
        return super().randbytes(n)


def test_of_a_range_of_billions_of_values_not_all_is_drawn_at_once() -> None:
    """More than 2**31 bits are not to be had."""
    rng, blocks = Drawing(0), PART + 3
    drawn = _Range(0, blocks * THIN_MAX * RUN, rng, whole=False).runs
    at_once = np.frombuffer(random.Random(0).randbytes(4 * blocks), np.uint32) % THIN_MAX
    assert drawn is not None
    np.testing.assert_array_equal(drawn, np.arange(blocks) * THIN_MAX + at_once)
    assert rng.most == 4 * PART
