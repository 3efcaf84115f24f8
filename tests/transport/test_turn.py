"""How long one task that moves bytes has the loop."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from peerd.transport.turn import TURN_S, Turn


def turns(moves: list[tuple[int, float]], most: int) -> int:
    """How often others get theirs, where each move of so many bytes takes so many seconds."""
    clock, given = MockClock(), 0
    checkpoint = trio.lowlevel.checkpoint

    async def counted() -> None:
        nonlocal given
        given += 1
        await checkpoint()

    async def scenario() -> None:
        turn = Turn()
        turn.begins()
        for count, seconds in moves:
            clock.jump(seconds)
            await turn.moved(count, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio.lowlevel, "checkpoint", counted)
        trio.run(scenario, clock=clock)
    return given


def test_a_turn_ends_after_so_many_bytes() -> None:
    assert turns([(10, 0.0)] * 100, most=1000) == 1
    assert turns([(10, 0.0)] * 99, most=1000) == 0
    assert turns([(1000, 0.0)] * 5, most=1000) == 5


def test_a_turn_ends_after_so_long_however_few_bytes_that_were() -> None:
    assert turns([(1, TURN_S / 4 * 1.01)] * 8, most=1 << 30) == 2
    assert turns([(1, 10 * TURN_S)] * 3, most=1 << 30) == 3
