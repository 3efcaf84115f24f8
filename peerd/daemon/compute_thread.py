"""In which order, and where, does the maths run? In the order of the events, in one worker thread at a time.

The mode and the model's copy belong to it: encoding, decoding and merging a model of 25 million values takes tens of
milliseconds, which must not stall the loop that answers probes. One thread a node, not one a link: all links read and
correct the same model, and the pieces of a large one are done by several (training/kernels/cores.py).

What is short is done on the loop: the interpreter, which the thread would hold anyway, takes most of it, and where
trainers keep all cores busy each way to the thread and back waits for a core twice.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import trio

from peerd.process.niceness import yield_to_others
from peerd.process.threads import in_thread

Event = TypeVar("Event")
Effects = TypeVar("Effects")


@dataclass(slots=True, eq=False)
class _Item(Generic[Event, Effects]):
    event: Event
    done: trio.Event | None = None  # of one who waits
    effects: Effects | None = None
    failure: Exception | None = None


class ComputeThread(Generic[Event, Effects]):
    """The queue of one node's events, and the thread that handles them."""

    def __init__(
        self,
        handle: Callable[[Event, float], Effects],
        perform: Callable[[Effects], Awaitable[None]],
        forgiven: Callable[[Event, Exception], bool] = lambda event, error: False,
        is_short: Callable[[], bool] = lambda: False,
    ) -> None:
        """`handle` computes, in the thread, or on the loop where that `is_short`; `perform` does what comes of it.

        An error of an event that nobody waits for ends the node, unless it is `forgiven`.
        """
        self._handle = handle
        self._perform = perform
        self._forgiven = forgiven
        self._is_short = is_short
        self._limiter = trio.CapacityLimiter(1)  # its own: whoever hangs in trio's common threads holds up no maths
        self._post, self._posted = trio.open_memory_channel[_Item[Event, Effects]](math.inf)
        self._under_way: tuple[_Item[Event, Effects], float] | None = None  # and since when
        self._replaceable: _Item[Event, Effects] | None = None  # waits, and a later one of its type takes its place

    async def run(self) -> None:
        """Work until cancelled."""
        async for item in self._posted:
            await self._do(item)

    @property
    def waiting(self) -> int:
        """How many events wait."""
        return self._posted.statistics().current_buffer_used

    def post(self, event: Event) -> None:
        """Handle the event after all earlier ones; its errors are bugs, which end the node or are `forgiven`.

        One that `is_superseded` takes the place of such a one that was posted last, if it still waits.
        """
        is_superseded = getattr(event, "is_superseded", None)  # None: of another kind, and in nobody's way
        if is_superseded and self._replaceable is not None:
            self._replaceable.event = event
            return
        item: _Item[Event, Effects] = _Item(event)
        if is_superseded is not None:
            self._replaceable = item if is_superseded else None
        self._post.send_nowait(item)

    async def call(self, event: Event) -> Effects:
        """Handle the event after all earlier ones; what came of it, once that is done. Raises what it raises."""
        done = trio.Event()
        item: _Item[Event, Effects] = _Item(event, done)
        self._post.send_nowait(item)
        await done.wait()
        if item.failure is not None:
            raise item.failure
        assert item.effects is not None, "done, and it did not fail"
        return item.effects

    async def _do(self, item: _Item[Event, Effects]) -> None:
        if item is self._replaceable:
            self._replaceable = None
        try:
            self._under_way = item, trio.current_time()
            if self._is_short():
                self._work()
            else:
                await in_thread(self._work_nicely, limiter=self._limiter)
            assert item.effects is not None, "done, and it did not fail"
            await self._perform(item.effects)
        except Exception as error:
            if item.done is None:
                if self._forgiven(item.event, error):
                    return
                raise
            item.failure = error  # the business of the task that waits
        if item.done is not None:  # not after a cancellation: then there is no result, and who waits is cancelled too
            item.done.set()

    def _work_nicely(self) -> None:
        yield_to_others()
        self._work()

    def _work(self) -> None:
        assert self._under_way is not None, "it is told of before"
        item, now = self._under_way
        item.effects = self._handle(item.event, now)
