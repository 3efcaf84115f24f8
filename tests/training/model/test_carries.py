"""A bfloat16 weight and its carry are a float32 value to the bit, by kernels as by torch's operations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.kernels import library
from peerd.training.model.carries import add, carry_type, joined, split

LARGEST = float(torch.finfo(torch.bfloat16).max)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda value: abs(value) <= LARGEST)
odd = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.0, 1 - 2**-24, -1 + 2**-9, LARGEST, -LARGEST])
values = st.lists(floats | odd, min_size=1, max_size=40).map(lambda found: torch.tensor(found, dtype=torch.float32))
by_both = pytest.mark.parametrize("compiled", [True, False])


@contextmanager
def means(*, compiled: bool) -> Iterator[None]:
    """By kernels, where there are any, or without."""
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(library, "LIBRARY", None)
        yield


def parted(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.empty_like(exact, dtype=torch.bfloat16)
    carry = torch.zeros(len(exact), dtype=torch.int16)
    split(exact, weights, carry)
    return weights, carry


def bits(*tensors: torch.Tensor) -> list[bytes]:
    return [tensor.view(torch.int16).numpy().tobytes() for tensor in tensors]


@by_both
@given(exact=values)
def test_both_halves_are_the_value_to_the_bit(compiled: bool, exact: torch.Tensor) -> None:
    with means(compiled=compiled):
        weights, carry = parted(exact)
        assert bits(joined(weights, carry)) == bits(exact)
    nearest = exact.bfloat16()
    off = (weights.double() - exact.double()).abs()
    assert bool((off == (nearest.double() - exact.double()).abs()).all()), "the nearest, but for ties"


@by_both
@given(data=st.data(), exact=values)
def test_weights_that_were_set_to_zero_are_next_to_none(
    compiled: bool, data: st.DataObject, exact: torch.Tensor
) -> None:
    with means(compiled=compiled):
        weights, carry = parted(exact)
        weights.zero_()
        if data.draw(st.booleans()):
            weights.neg_()
        found = joined(weights, carry)
    assert bool((found.abs() < 2.0**-130).all())


@by_both
def test_what_is_not_finite_is_not_made_finite_by_a_carry(compiled: bool) -> None:
    with means(compiled=compiled):
        weights, carry = parted(torch.tensor([1 - 2**-20, -1 + 2**-20, 1.0 - 2**-20]))
        weights.copy_(torch.tensor([float("inf"), float("-inf"), float("nan")]))
        found = joined(weights, carry)
    assert found.tolist()[:2] == [float("inf"), float("-inf")]
    assert math.isnan(found[2])


@given(values, st.data())
def test_kernels_and_torch_do_the_same(exact: torch.Tensor, data: st.DataObject) -> None:
    count = len(exact)
    draw = st.lists(floats, min_size=count, max_size=count)
    steps, delta, base = (torch.tensor(data.draw(draw), dtype=torch.float32) for _ in range(3))
    found, first = [], data.draw(st.sampled_from([1.0, float("nan"), float("inf")]))
    for compiled in (True, False):
        with means(compiled=compiled):
            weights, carry = parted(exact)
            was = base.bfloat16()
            weights += (steps / 1e3).bfloat16()  # the optimizer's
            weights[0] = first
            add(delta / 4, weights, carry, was)
            found.append(bits(weights, carry, was, joined(weights, carry)))
    assert found[0] == found[1]


@by_both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_corrections_add_up_and_the_base_moves_as_the_weights_do(compiled: bool, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    exact = torch.from_numpy(rng.standard_normal(1000).astype(np.float32))
    weights = exact.to(dtype)
    carry, base, expected = torch.zeros(1000, dtype=carry_type(dtype)), weights.clone(), weights.double()
    with means(compiled=compiled):
        for _ in range(200):
            delta = torch.from_numpy((1e-5 * rng.standard_normal(1000)).astype(np.float32))
            add(delta, weights, carry, base)
            expected += delta.double()
        torch.testing.assert_close(joined(weights, carry).double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(weights, base)
    assert float((weights.double() - expected).abs().max()) <= 4 * 2.0**-8 / 2 + 1e-5
    assert not math.isclose(float((weights - exact.to(dtype)).abs().max()), 0.0), "some were moved"


@given(st.lists(st.tuples(*[st.floats(-65504, 65504, width=16)] * 2, st.floats(-2e5, 2e5, width=32)), min_size=1))
def test_a_correction_beyond_float16_is_carried_and_leaves_finite_weights(found: list[tuple[float, ...]]) -> None:
    held, was, moves = (torch.tensor(each) for each in zip(*found, strict=True))
    weights, base, carry = held.half(), was.half(), torch.zeros(len(held))
    for delta in (moves, -moves):
        add(delta, weights, carry, base)
        assert bool(weights.isfinite().all())
        assert bool(base.isfinite().all()), "what a rollback would bring back"
    assert joined(weights, carry).tolist() == (held + moves - moves).tolist()
