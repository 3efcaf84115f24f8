"""Do a few numbers of two models tell how far apart they are, wherever the difference lies?"""

from __future__ import annotations

from threading import Barrier
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.training import sketch as sketch_module
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.kernels.cores import spread
from peerd.training.sketch import BLOCK, TOGETHER, WIDTH, packed, sketch, unpacked

SEEDS = st.binary(min_size=16, max_size=16)
LONG = 2 * BLOCK + 1000


def difference(where: str, count: int, rng: np.random.Generator) -> Vector:
    """Of two models, of some length."""
    drawn = rng.standard_normal(count).astype(np.float32)
    apart = np.zeros(count, np.float32)
    places = {"all": slice(None), "a column": slice(0, None, 512), "a run": slice(count // 3, count // 3 + 700)}[where]
    apart[places] = np.abs(drawn[places]) if where == "a column" else drawn[places]
    return apart


@pytest.mark.cases(2)
@pytest.mark.parametrize("where", ["all", "a column", "a run"])
@pytest.mark.parametrize("count", [3 * WIDTH * 512, LONG])
@given(seed=SEEDS, number=st.integers(0, 99))
def test_two_sketches_are_as_far_apart_as_the_models(where: str, count: int, seed: bytes, number: int) -> None:
    rng = np.random.default_rng(number)
    layout = Layout(count, count)
    model = rng.standard_normal(count).astype(np.float32)
    apart = difference(where, count, rng)
    found = np.linalg.norm(sketch(model + apart, layout, seed)[0] - sketch(model, layout, seed)[0])
    assert 0.5 < found / np.linalg.norm(apart) < 1.7, "more than five standard deviations"


@given(SEEDS, st.integers(1, 300), st.integers(0, 300), st.sampled_from([np.float32, np.float64]))
def test_parameters_and_all_else_are_told_apart(
    seed: bytes, parameters: int, others: int, dtype: type[np.floating]
) -> None:
    layout = Layout(parameters, parameters + others)
    values = np.arange(layout.total, dtype=dtype)
    whole, of_parameters = sketch(values, layout, seed), values.copy()
    of_parameters[parameters:] = 0.0
    found = sketch(of_parameters, layout, seed)
    np.testing.assert_array_equal(found[0], whole[0])
    assert not found[1].any()


@given(SEEDS, st.sampled_from([WIDTH, BLOCK - 1, BLOCK, BLOCK + 1, LONG]))
def test_each_value_counts_once_with_a_sign(seed: bytes, count: int) -> None:
    layout = Layout(count, count)
    rng = np.random.default_rng(count)
    for place in (0, count - 1, *rng.integers(0, count, 3)):
        one = np.zeros(count, np.float32)
        one[place] = 3.0
        assert sorted(np.abs(sketch(one, layout, seed)).ravel())[-2:] == [0.0, 3.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_model_that_is_not_finite_has_a_sketch_that_is_not(bad: float) -> None:
    values = np.full(3 * WIDTH, bad, np.float32)
    assert not np.isfinite(sketch(values, Layout(len(values), len(values)), bytes(16))[0]).any()


def test_another_seed_draws_other_signs() -> None:
    layout, ones = Layout(LONG, LONG), np.ones(LONG, np.float32)
    first, again, other = (sketch(ones, layout, seed)[0] for seed in (b"a" * 16, b"a" * 16, b"b" * 16))
    np.testing.assert_array_equal(first, again)
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.6


def test_signs_are_the_same_for_ever() -> None:
    """Members of two versions compare what they made by one seed."""
    found = sketch(np.arange(1.0, 101.0), Layout(90, 100), bytes(range(16)))
    assert [found[0].sum(), found[1].sum(), found[0][0], found[0][29]] == FIRST


@pytest.mark.parametrize("count", [1, BLOCK + 1, LONG])
def test_threads_make_the_same_bits_as_block_after_block(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_module, "TOGETHER", 2)
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    rows = np.zeros((WIDTH, WIDTH))
    for first in range(0, count, BLOCK):
        signs = sketch_module._signs(bytes(16), first)[: count - first]
        padded = np.zeros(BLOCK, np.float32)
        padded[: len(signs)] = signs * values[first : first + BLOCK]
        rows += padded.reshape(-1, WIDTH, WIDTH).sum(axis=0, dtype=np.float64)
    expected = np.sum([np.roll(row, shift) for shift, row in enumerate(rows)], axis=0)
    for threads in (1, 3):
        with spread(threads, lambda: None):
            np.testing.assert_array_equal(sketch(values, Layout(count, count), bytes(16))[0], expected)


def test_a_large_model_is_sketched_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member trains on meanwhile, and who asked waits."""
    meet, signs_of = Barrier(2), sketch_module._signs

    def signs(seed: bytes, first: int) -> Any:
        if first < 2 * BLOCK:
            meet.wait(60)
        return signs_of(seed, first)

    monkeypatch.setattr(sketch_module, "_signs", signs)
    assert TOGETHER > 1
    with spread(2, lambda: None):
        sketch(np.ones(LONG, np.float32), Layout(LONG, LONG), bytes(16))


@given(st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=2 * WIDTH, max_size=2 * WIDTH))
def test_a_sketch_travels_as_it_is(values: list[float]) -> None:
    there = np.array(values).reshape(2, WIDTH)
    np.testing.assert_array_equal(unpacked(packed(there)), there)
    assert len(packed(there)) <= 512


@pytest.mark.parametrize("size", [0, 4, 8 * WIDTH - 1, 8 * WIDTH + 4, 16 * WIDTH])
def test_what_is_no_sketch_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"buffer|reshape"):
        unpacked(bytes(size))


FIRST = [325.0, -9.0, -1.0, -60.0]
