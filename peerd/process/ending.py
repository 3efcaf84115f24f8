"""Who is ended by `kill`, or with its terminal, takes down first what it has begun."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def kill_cleans_up() -> Iterator[None]:
    """Meanwhile each of ENDING that would end the process raises SystemExit (128 and its number) in the main thread.

    What is ignored, as SIGHUP behind nohup, or somebody's already stays so. Call it in the main thread.
    """
    before = {number: signal.getsignal(number) for number in ENDING}

    def end(number: int, _: object) -> None:
        for known in ENDING:
            signal.signal(known, signal.SIG_IGN)  # once is enough: a second one would cut the cleaning up short
        raise SystemExit(128 + number)

    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # set by what is not Python
                signal.signal(number, handler)
