"""Memory that is lent is nobody else's while somebody looks at any part of it, and is used again after that."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from peerd.transport.secure.pages import HUGE_BYTES, Mappings, mapped


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=60), st.integers(0, 4))
def test_what_is_lent_is_not_lent_to_another(events: list[int | None], spare_max: int) -> None:
    lender = Mappings(64, spare_max)
    held: list[tuple[memoryview, int]] = []
    for number, event in enumerate(events):
        if event is None:
            view = lender.lend()
            assert len(view) == 64
            view[:] = bytes([number]) * 64
            held.append((view[8:24], number))  # a part keeps the whole
            del view
        elif event < len(held):
            held.pop(event)
        assert all(bytes(view) == bytes([number]) * 16 for view, number in held)
        assert len(lender._spare) <= spare_max


def test_what_came_back_last_is_lent_first() -> None:
    lender = Mappings(HUGE_BYTES + 20, 2)
    first, second = lender.lend(), lender.lend()
    second[:4] = b"last"
    del first
    array = np.frombuffer(second, np.uint8)
    del second
    assert bytes(lender.lend()[:4]) != b"last"
    del array
    assert bytes(lender.lend()[:4]) == b"last"


def test_a_mapping_has_room_for_whole_huge_pages() -> None:
    for size in (1, 4096, HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 1, 2 * HUGE_BYTES):
        assert len(mapped(size)) >= size
    assert len(mapped(HUGE_BYTES + 1)) % HUGE_BYTES == 0
