"""For how much of its time does a node wait for the exchanges that it has begun? A core: `now` comes in.

Whether the line, the partner or the processor takes that time is not told apart: where it is little, more bytes fit,
whatever they would be held up by.
"""

from __future__ import annotations

from peerd.training.trigger import SILENCE_MAX_S

KEPT = 0.9  # of what was, at each exchange: some ten count


class Waiting:
    """Of one node, over all its links."""

    def __init__(self) -> None:
        self._waited_s = self._passed_s = 0.0
        self._last_end: float | None = None

    def ended(self, began_at: float, now: float) -> None:
        """An exchange that this node had begun then is over."""
        if self._last_end is not None:
            waited_s = max(0.0, now - began_at)
            # a node that trains is never silent for longer: the rest was a pause, and says nothing of the line
            passed_s = min(max(0.0, now - self._last_end), SILENCE_MAX_S + waited_s)
            kept = KEPT if passed_s else 1.0  # several that end at once are one moment
            self._waited_s = kept * self._waited_s + waited_s
            self._passed_s = kept * self._passed_s + passed_s
        self._last_end = now

    @property
    def share(self) -> float:
        """Of the time, of late; 1 before anything is known, and at most: exchanges over several links add up."""
        return min(1.0, self._waited_s / self._passed_s) if self._passed_s > 0 else 1.0
