"""Which texts are numbers: what any other program's command line would take, and nothing that is Python's alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.plain_numbers import count, number, whole

OTHERS = ["", " 5", "5 ", "5\n", "+5", "1_0", "\u0665", "\uff15", "\u00b2", "0x1f", "five", "1,5", "--5", "5.5.5", "."]


@pytest.mark.parametrize("text", [*OTHERS, "5.0", "5e0"])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole number"):
        whole(text)
    assert count(text) == 0


@pytest.mark.parametrize("text", [*OTHERS, "nan", "inf", "-inf", "infinity", "1e999", "1e", "e5", "1e1_0"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        number(text)


@pytest.mark.parametrize("digits", [101, 4301, 10**5])
def test_a_whole_number_that_is_too_long_to_be_shown(digits: int) -> None:
    with pytest.raises(ValueError, match=r"^9{20}\.\.\. is too large a number$"):
        whole("9" * digits)
    assert count("9" * digits) == 0


@given(st.integers())
def test_whole_numbers_as_they_are_printed(value: int) -> None:
    assert whole(str(value)) == value
    assert count(str(value), 7) == (value if 1 <= value <= 7 else 0)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_as_they_are_printed(value: float) -> None:
    assert number(repr(value)) == value
    assert math.isclose(number(f"{value:.6e}"), value, rel_tol=1e-6, abs_tol=1e-300)


@given(st.text(alphabet="0123456789.eE-+_ \u0665nif", max_size=6))
def test_what_is_taken_is_what_python_takes(text: str) -> None:
    try:
        value = number(text)
    except ValueError:
        return
    assert value == float(text)
