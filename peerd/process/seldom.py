"""What was said a moment ago, and need not be said again: others bring it about as often as they like. A core."""

from __future__ import annotations

import math

SAID_EVERY_S = 60.0
REMEMBERED_MAX = 8192


class Seldom:
    """Lines of one kind, each by what it is about."""

    def __init__(self, every_s: float = SAID_EVERY_S) -> None:
        self._every_s = every_s
        self._said_at: dict[tuple[str, ...], float] = {}

    def is_news(self, *line: str, now: float) -> bool:
        """Whether it is to be said; then it is taken for said."""
        if now - self._said_at.get(line, -math.inf) < self._every_s:
            return False
        if len(self._said_at) >= REMEMBERED_MAX:
            self._said_at.clear()
        self._said_at[line] = now
        return True
