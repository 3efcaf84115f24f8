"""In which order, and where, does the heavy maths run? In one worker thread at a time, in the order of the events.

The mode and the replica belong to this lane: encoding, decoding and merging a model of 25 million values takes tens of
milliseconds, which must not stall the loop that answers probes. One lane a node, not one a link: all links read and
correct the same model, and the arithmetic beneath spreads over cores by itself where there are many.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from peerd.effects import Apply, Effect
from peerd.replica import Replica
from peerd.training.modes import Mode

NICE = 10
"""The worker yields to the event loop and to the training where cores are scarce: it takes a tenth of what they get."""
NICE_MOST = 19


@dataclass(frozen=True, slots=True)
class HandOver:
    """The trainer should take this half of the corrections."""

    half: int


Job = Callable[[float], list[Effect]]
"""Gets the time at which it starts, on the loop's clock."""


class Lane:
    """The serial worker of one node, once its model is known."""

    def __init__(self, perform: Callable[[list[Effect | HandOver]], Awaitable[None]]) -> None:
        """`perform` gets what a job asked for, on the loop; corrections are added to the replica before it."""
        self.mode: Mode | None = None
        self.replica: Replica | None = None
        self._perform = perform
        self._nice = min(NICE_MOST, os.getpriority(os.PRIO_PROCESS, 0) + NICE)  # of one that is nice itself, too
        self._post, self._posted = trio.open_memory_channel[Callable[[], Awaitable[None]]](math.inf)

    async def run(self) -> None:
        """Work until cancelled."""
        async for item in self._posted:
            await item()

    def post(self, job: Job) -> None:
        """Run the job after all earlier ones; its errors are bugs."""

        async def item() -> None:
            await self._do(job)

        self._post.send_nowait(item)

    async def call(self, job: Job) -> None:
        """Run the job after all earlier ones and wait for it; what it raises is raised here."""
        done = trio.Event()
        failure: list[Exception] = []

        async def item() -> None:
            try:
                await self._do(job)
            except Exception as error:  # handed to the waiting task, whose business it is
                failure.append(error)
            finally:
                done.set()

        self._post.send_nowait(item)
        await done.wait()
        if failure:
            raise failure[0]

    async def _do(self, job: Job) -> None:
        await self._perform(await trio.to_thread.run_sync(self._work, job, trio.current_time()))

    def _work(self, job: Job, now: float) -> list[Effect | HandOver]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)  # of this thread alone, on Linux
        effects: list[Effect | HandOver] = []
        for effect in job(now):
            if isinstance(effect, Apply):
                if self.replica is not None:
                    self.replica.add(effect.correction)
            else:
                effects.append(effect)
        half = self.replica.hand_over() if self.replica is not None else None
        return effects if half is None else [*effects, HandOver(half)]
