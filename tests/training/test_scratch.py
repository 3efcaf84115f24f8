"""Memory that is lent again, and when: not while anybody has a view of a part of it."""

from __future__ import annotations

import numpy as np

from peerd.training.scratch import Lent, Scratch


def test_memory_is_the_same_again_once_the_last_view_is_gone() -> None:
    lent = Lent()
    array = lent.take(np.zeros(8, np.float32))
    assert (array.shape, array.dtype.char, array.flags.writeable) == ((8,), "f", True)
    piece = array[2:4].view(np.uint8).data  # as it waits for a peer
    del array
    other = lent.take(np.zeros(8, np.float32))
    assert not np.shares_memory(other, np.frombuffer(piece, np.uint8))
    del piece
    at = other.ctypes.data
    del other
    assert lent.take(np.zeros(8, np.float32)).ctypes.data == at


def test_memory_of_another_size_or_type_is_another() -> None:
    lent = Lent()
    assert lent.take(np.zeros(8, np.float32)).shape == (8,)
    assert lent.take(np.zeros(9, np.float32)).shape == (9,)
    assert lent.take(np.zeros(9)).dtype == np.float64


def test_a_correction_is_made_in_the_memory_that_another_lends_one_at_a_time() -> None:
    scratch, like, spare = Scratch(), np.zeros(8, np.float32), np.zeros(8, np.float32)
    scratch.spare = lambda: spare
    first, second = scratch.take_for_correction(like), scratch.take_for_correction(like)
    assert first is spare
    assert second is not spare
    scratch.give(first)
    scratch.give(second)
    assert scratch.take(like) is second, "what is another's is not kept"
    assert scratch.take_for_correction(like) is spare
