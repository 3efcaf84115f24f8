"""Does the trainer still step? Judged beside its own steps: nobody else knows how long one takes.

It reads no clock: `now` comes in, on that of the status.
"""

from __future__ import annotations

import math

from peerd.daemon.trainer_session import TrainerPhase, TrainerStatus

STALL_MIN_S = 10.0
STALL_SHARE = 10.0  # times its slowest step so far: an evaluation now and then is none, if it was seen before


class TrainerWatch:
    """What is known of the pace of one trainer."""

    def __init__(self, status: TrainerStatus) -> None:
        self.status = status
        self.slowest_s = 0.0  # of its steps so far, but for the first, in which things are compiled and loaded
        self.stalled = False
        self._stepped_at: float | None = None
        self._began: float | None = None  # of the step that it is in
        self._goes_on_at = -math.inf

    def goes_on(self, now: float) -> None:
        """All processes may have been stopped until now, as a scheduler does: that time is no part of a step."""
        self._began, self._goes_on_at = None, now

    def look(self, now: float) -> None:
        """Once a second or so, however many steps that is: all that were between two looks count as one."""
        stepped_at, began = self.status.last_step_at, computes_since(self.status)
        began = None if began is None else max(began, self._goes_on_at)
        if stepped_at is not None and stepped_at != self._stepped_at:
            if self._stepped_at is not None and self._began is not None:
                self.slowest_s = max(self.slowest_s, stepped_at - self._began)
            self._stepped_at = stepped_at
        self._began = began
        limit_s = max(STALL_MIN_S, STALL_SHARE * self.slowest_s)
        hangs = began is not None and self.slowest_s > 0 and now - began > limit_s
        died = self.status.phase is TrainerPhase.GONE and stepped_at is not None and now - stepped_at > STALL_MIN_S
        self.stalled = hangs or died


def computes_since(status: TrainerStatus) -> float | None:
    """Since when the trainer is in a step of its own; None: in none so far, or it has ended or waits for the swarm."""
    if status.phase is not TrainerPhase.TRAINING or status.last_step_at is None or status.waits:
        return None
    return max(status.last_step_at, status.released_at)
