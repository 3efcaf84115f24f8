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


def test_what_another_lends_for_an_event_is_taken_first_and_not_kept() -> None:
    scratch, like, spares = Scratch(), np.zeros(8, np.float32), [np.zeros(8, np.float32) for _ in range(2)]
    scratch.spares = lambda: spares
    taken = [scratch.take_for_event(like) for _ in range(3)]
    assert taken[0] is spares[0]
    assert taken[1] is spares[1]
    assert all(taken[2] is not spare for spare in spares)
    for array in taken:
        scratch.give(array)
    assert scratch.take(like) is taken[2]
    assert scratch.take_for_event(like) is spares[0]
