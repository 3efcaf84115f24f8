"""What a script says of a step: whatever it is, the daemon gets numbers, and the script goes on."""

from __future__ import annotations

import decimal
import fractions
import math
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.trainer.figures import SAMPLES_MAX, clean

numbers = st.one_of(
    st.integers(-(2**53), 2**53),
    st.floats(-(2.0**53), 2.0**53, width=32),
    st.booleans(),
)
AS: list[Any] = [
    lambda number: number,
    np.float64,
    np.array,
    lambda number: np.array([number]),
    lambda number: torch.tensor(float(number), dtype=torch.float64),
    lambda number: torch.tensor([[float(number)]], dtype=torch.float64),
    lambda number: torch.tensor(float(number), dtype=torch.float64, requires_grad=True),
    lambda number: fractions.Fraction(number),
    lambda number: decimal.Decimal(number),
]


class Hostile:
    def __float__(self) -> float:
        raise RuntimeError("not today")


no_numbers = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(numbers, max_size=2),
    st.dictionaries(st.text(max_size=2), numbers, max_size=2),
    st.complex_numbers(),
    st.builds(Hostile),
    st.just(10**400),
    st.sampled_from(
        [torch.zeros(3), torch.zeros(0), torch.zeros(2, device="meta"), np.zeros(2), np.complex64(1j), dict]
    ),
    st.just(torch.zeros((), device="meta")),
)
names = st.text(st.characters(), max_size=5)


@given(numbers, st.sampled_from(AS))
def test_what_is_one_number_is_taken_whatever_holds_it(number: float, held_by: Any) -> None:
    taken = clean(held_by(number), held_by(abs(int(number))), {"m": held_by(number)})
    assert taken.loss == float(number)
    assert taken.samples == abs(int(number))
    assert type(taken.loss) is float
    assert type(taken.samples) is int
    assert taken.metrics == {"m": float(number)}
    assert taken.left_out == {}


@given(no_numbers, names)
def test_what_is_no_number_is_left_out_and_named(value: Any, name: str) -> None:
    taken = clean(value, value, {name: value})
    assert (taken.loss, taken.samples, taken.metrics) == (None, 0, {})
    described = [f"metric {name!r}", *([] if value is None else ["loss", "samples"])]
    assert set(taken.left_out) == set(described)
    assert all(why.startswith("it should be one number, but is of type ") for why in taken.left_out.values())


@given(st.one_of(numbers, no_numbers, st.floats()), st.one_of(numbers, no_numbers, st.floats()), st.data())
def test_whatever_comes_can_be_sent(loss: Any, samples: Any, data: st.DataObject) -> None:
    metrics = data.draw(st.dictionaries(names, st.one_of(numbers, no_numbers, st.floats()), max_size=3))
    taken = clean(loss, samples, metrics)
    msgpack.packb([taken.samples, taken.metrics])
    assert 0 <= taken.samples <= SAMPLES_MAX
    assert all(type(name) is str and type(number) is float for name, number in taken.metrics.items())
    assert all("\n" not in line for line in taken.left_out.values())


@pytest.mark.parametrize("held_by", [float, np.float32, lambda number: torch.tensor(number, dtype=torch.bfloat16)])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_arrives_as_such(number: float, held_by: Any) -> None:
    taken = clean(held_by(number), held_by(number), {})
    assert taken.loss is not None
    assert not math.isfinite(taken.loss)
    assert taken.samples == 0
    assert taken.left_out == {"samples": f"it is {number:g}, and should count samples"}


def test_what_is_left_out_is_told_in_plain_words() -> None:
    assert clean(None, 0, {"a": "0.5", "b": torch.zeros(3), "c": None}).left_out == {
        "metric 'a'": "it should be one number, but is of type str",
        "metric 'b'": "it should be one number, but is of type Tensor and has the shape (3,)",
        "metric 'c'": "it should be one number, but is of type NoneType",
    }
