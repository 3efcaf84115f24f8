"""The command line: one file a verb, each a thin client of a daemon's control socket."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from peerd.process.ending import ENDING
from peerd.transport.errors import UserError

INTERRUPTED = "peerd: interrupted\n"
INTERRUPTED_CODE = 128 + signal.SIGINT


class Interrupted(UserError):
    """The user pressed Ctrl-C where there is something to say of what becomes of the work."""


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
def interrupts_end_at_once(undo: Callable[[], None] | None = None) -> Iterator[None]:
    """For imports: an exception that passes through torch's aborts the process.

    What was begun before is `undo`ne first, also for those signals of ENDING that would raise an exception.
    """
    held = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    taken = [number for number in ENDING if undo is not None and callable(held[number])]
    if held[signal.SIGINT] is signal.default_int_handler:  # not ignored, as behind nohup; nor somebody else's
        taken.append(signal.SIGINT)

    def end(number: int, _: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)  # once is enough
        if number == signal.SIGINT:
            os.write(2, INTERRUPTED.encode())
        if undo is not None:
            undo()
        os._exit(128 + number)

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, held[number])
