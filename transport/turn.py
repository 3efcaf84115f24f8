"""For how long does one task have the loop? Until it waits, or has moved so many bytes, or has taken so long for them.

Bytes alone do not say how long they take: memory that no program has touched yet comes at a tenth of the usual speed on
some machines, and other threads may hold the interpreter.
"""

from __future__ import annotations

import trio

TURN_S = 2e-3
"""What the loop's other tasks may wait for one that moves bytes."""


class Turn:
    """Of one task that moves bytes."""

    def __init__(self) -> None:
        self._moved = 0
        self._began_at = float("-inf")

    def begins(self) -> None:
        """It has just waited for something."""
        self._moved, self._began_at = 0, trio.current_time()

    async def moved(self, count: int, most: int) -> None:
        """So many bytes more, of `most` in a turn: others get theirs if this one is over."""
        self._moved += count
        if self._moved >= most or trio.current_time() - self._began_at >= TURN_S:
            await trio.lowlevel.checkpoint()
            self.begins()
