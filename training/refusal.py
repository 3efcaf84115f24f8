"""For how long is a peer refused? Shortly at first, and longer each time that follows soon. A core: `now` comes in."""

from __future__ import annotations

import math
from dataclasses import dataclass

REFUSED_S = 600.0  # the first time; each refusal that follows within the length of the last one is twice as long
REFUSED_MAX_S = 86_400.0


@dataclass(slots=True)
class Refusal:
    """Of one peer: the last one, or none yet."""

    length_s: float = 0.0
    until: float = -math.inf

    def begin(self, now: float) -> float:
        """Refuse it from now on; for how many seconds."""
        self.length_s = REFUSED_S if self.is_past(now) else min(REFUSED_MAX_S, 2 * self.length_s)
        self.until = now + self.length_s
        return self.length_s

    def left_s(self, now: float) -> float:
        """For how many seconds from now; 0: it is heard."""
        return max(0.0, self.until - now)

    def is_past(self, now: float) -> bool:
        """Whether it has no say in how long the next one is."""
        return now >= self.until + self.length_s
