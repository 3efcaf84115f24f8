"""Who is ended by `kill`, or with its terminal, takes down first what it has begun."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def kill_cleans_up() -> Iterator[None]:
    """Meanwhile both raise SystemExit, as Ctrl-C raises KeyboardInterrupt; its code is 128 and the signal's number.

    In another thread than the first, which gets no signals, nothing changes.
    """

    def end(number: int, _: object) -> None:
        for known in ENDING:
            signal.signal(known, signal.SIG_IGN)  # once is enough: a second one would cut the cleaning up short
        raise SystemExit(128 + number)

    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
