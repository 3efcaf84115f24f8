"""For how much of its time does a node wait for the exchanges that it has begun? A core: `now` comes in.

Whether the line, the partner or the processor takes that time is not told apart: where it is little, more bytes fit,
whatever they would be held up by.
"""

from __future__ import annotations

KEPT = 0.9  # of what was, at each exchange: some ten count


class Waiting:
    """Of one node, over all its links."""

    def __init__(self) -> None:
        self._waited_s = self._passed_s = 0.0
        self._last_end: float | None = None

    def ended(self, said_at: float, now: float) -> None:
        """An exchange that this node had begun, or last said again, at `said_at` is over."""
        if self._last_end is not None:
            kept = KEPT if now > self._last_end else 1.0  # several that end at once are one moment
            self._waited_s = kept * self._waited_s + max(0.0, now - said_at)
            self._passed_s = kept * self._passed_s + max(0.0, now - self._last_end)
        self._last_end = now

    @property
    def share(self) -> float:
        """Of the time, of late; 1 before anything is known, and at most: exchanges over several links add up."""
        return min(1.0, self._waited_s / self._passed_s) if self._passed_s > 0 else 1.0
