"""How pieces without loss travel: nothing is copied where that can be, and nothing damaged is taken."""

from __future__ import annotations

import numpy as np
import pytest

from peerd.effects import PeerError
from peerd.training.codecs import NotFinite
from peerd.training.modes.attempt import ExactPacking


def test_float32_values_travel_as_they_are() -> None:
    values = np.array([1.5, -0.0, 3e38, 1e-45], np.float32)
    payload = ExactPacking().pack(7, values)
    assert bytes(payload) == values.astype("<f4").tobytes()
    assert np.shares_memory(np.frombuffer(payload, np.uint8), values)
    assert ExactPacking().unpack(7, payload, 4).tobytes() == values.tobytes()


def test_wider_values_become_what_the_others_unpack() -> None:
    values = np.array([1 / 3, 1e-3])
    payload = ExactPacking().pack(0, values)
    assert (ExactPacking().unpack(0, payload, 2) == values).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_neither_leaves_nor_enters(wrong: float) -> None:
    values = np.array([1.0, wrong], np.float32)
    with pytest.raises(NotFinite):
        ExactPacking().pack(0, values)
    with pytest.raises(PeerError, match="not finite"):
        ExactPacking().unpack(0, values.tobytes(), 2)


def test_a_piece_of_another_length_is_refused() -> None:
    with pytest.raises(PeerError, match="12 bytes where 8 are due"):
        ExactPacking().unpack(0, bytes(12), 2)
