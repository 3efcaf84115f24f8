"""Work that waits or computes, in a thread beside the loop.

Where the system lets none be started (a limit on processes, which a script with many data loaders may reach first), it
waits: a node that ended for that would lose what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from peerd.process.logs import LOGGER

AGAIN_S = 1.0

T = TypeVar("T")


async def in_thread(
    work: Callable[[], T], *, abandon_on_cancel: bool = False, limiter: trio.CapacityLimiter | None = None
) -> T:
    """As `trio.to_thread.run_sync`."""
    began = told = False

    def begun() -> T:
        nonlocal began
        began = True
        return work()

    while True:
        try:
            return await trio.to_thread.run_sync(begun, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
        except RuntimeError as error:
            if began:
                raise
            if not told:
                LOGGER.warning("%s: the system's limit on processes is reached; trying again", error)
            told = True
        await trio.sleep(AGAIN_S)
