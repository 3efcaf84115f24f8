"""How does a task behave as a process? One thread where peers share a machine, an even pace, errors in one line."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch

from peerd.transport.errors import UserError


def run(main: Callable[[], None]) -> None:
    """Run a task's main: what the user can mend ends it with one line and status 1."""
    if "PEERD_PEERS" in os.environ:
        # Several trainers share this machine. By default each starts a thread a core, and they wait for one another.
        torch.set_num_threads(1)
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")


class Pace:
    """Lets a step begin at most every `seconds`; time lost to a slow step is not made up for."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic()

    def wait(self) -> None:
        """Sleep until the next step may begin."""
        pause = self._next - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        self._next = time.monotonic() + self._seconds
