"""How do several processes of one user change the same files? One after the other, each within moments."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S, LOOK_S = 10.0, 0.01  # what is done under a lock takes some writes to the disk


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that is this file. Raises OSError, one that says so where another process does not let go."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise OSError(error.errno, f"another process holds {path.name} (is a node stopped?)") from None
                time.sleep(LOOK_S)
        yield
    finally:
        os.close(lock)
