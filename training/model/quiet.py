"""Which steps of a trainer does its mode want to hear of? Numbers that the mode gives, and the trainer decides by."""

from __future__ import annotations

import math
from dataclasses import dataclass

NEVER = 1 << 61
"""More steps than any run has."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """Until when a trainer has nothing to say: a report that comes all the same changes nothing.

    It publishes a copy of its model, and says so, after a step later than `rest_until` that ends further than `change`
    from the last copy, an L2 norm over the parameters, and after each from step `copy_step` on. It reports each step,
    copy or not, from step `step` on. Where the learning rate changes meanwhile, `change` follows it.
    Where the mode has a barrier, it waits there from step `stand_step` on.
    """

    change: float = math.inf
    rest_until: int = 0
    copy_step: int = NEVER
    step: int = NEVER
    stand_step: int = 0

    def wants_copy(self, change: float, step: int) -> bool:
        """Whether this step, which ends so far from the last copy, brings a new one."""
        return (change > self.change and step > self.rest_until) or step >= self.copy_step

    def at_rate(self, ratio: float) -> Quiet:
        """The same, now that the learning rate is `ratio` times what it was."""
        return Quiet(self.change * ratio, self.rest_until, self.copy_step, self.step, self.stand_step)

    def stands_at(self, step: int, barrier: int) -> bool:
        """Whether the trainer waits for the swarm after this step, where its mode has this barrier."""
        return barrier > 0 and step % barrier == 0 and step >= self.stand_step

    def wants_report(self, step: int) -> bool:
        """Whether the mode hears of this step though it brings none."""
        return step >= self.step


EVERY_STEP = Quiet(step=0)
"""Each step is news, however little it changed; none brings a copy by itself."""
