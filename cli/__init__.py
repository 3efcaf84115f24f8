"""The command line: one file a verb, each a thin client of a daemon's control socket."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from peerd.process.ending import ENDING

INTERRUPTED = "peerd: interrupted\n"
INTERRUPTED_CODE = 128 + signal.SIGINT


def run() -> None:
    """The entry point: an interrupt is a line while the verbs are imported, too."""
    try:
        with interrupts_end_at_once():
            from peerd.cli import main
        main.run()
    except KeyboardInterrupt:
        sys.stderr.write(INTERRUPTED)
        sys.exit(INTERRUPTED_CODE)


@contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """For imports, of which nothing has to be undone: an exception that passes through torch's aborts the process."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as behind nohup; or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """For imports beside which something has to be undone: what comes meanwhile comes when they are over."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    for number in before:
        if before[number] not in (signal.SIG_IGN, None):  # as behind nohup; or set by what is not Python
            signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, INTERRUPTED.encode())
    os._exit(INTERRUPTED_CODE)
