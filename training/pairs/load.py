"""How much of its time does a node wait for the exchanges that it has begun? A core: `now` comes in.

Whether the line, the partner or the processor takes that time is not told apart: where it is little there is room for
more bytes, whatever they would be held up by.
"""

from __future__ import annotations

FORGET = 0.9  # of what was is kept with each exchange: some ten count


class Load:
    """Of one node, over all its links."""

    def __init__(self) -> None:
        self._waited_s = self._passed_s = 0.0
        self._last_end: float | None = None

    def note(self, began_at: float, now: float) -> None:
        """An exchange that this node had begun then is over."""
        if self._last_end is not None:
            self._waited_s = FORGET * self._waited_s + max(0.0, now - began_at)
            self._passed_s = FORGET * self._passed_s + max(0.0, now - self._last_end)
        self._last_end = now

    @property
    def share(self) -> float:
        """Of the time, of late; 1 before anything is known, and at most: exchanges over several links add up."""
        return min(1.0, self._waited_s / self._passed_s) if self._passed_s > 0 else 1.0
