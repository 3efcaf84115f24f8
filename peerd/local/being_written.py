"""Which checkpoint is being written, and by which process? Its temporary folder bears the process's number."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peerd.local.local_socket import process_fields

LAST = "last"
"""What is being written where all that a process still has to write is meant, from before it begins."""


@contextmanager
def being_written(folder: Path, what: int | str) -> Iterator[Path]:
    """The empty temporary folder of this process for a step, or LAST; gone afterwards. Raises OSError."""
    temporary = folder / f"tmp-{os.getpid()}-{what}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.mkdir(mode=0o700)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_writing(folder: Path, pid: int) -> bool:
    """Whether process `pid` writes a checkpoint in `folder`, as far as that can be seen."""
    try:
        return _lives(pid) and any(folder.glob(f"tmp-{pid}-*"))
    except OSError:
        return False


def leftovers(folder: Path) -> list[Path]:
    """What processes that are gone, or this one, began and did not end.

    Another one that lives may have let go of its daemon before it writes its last.
    """
    return [path for path in folder.glob("tmp-*") if not _others(path.name.split("-")[1])]


def _others(pid: str) -> bool:
    return pid.isdecimal() and int(pid) != os.getpid() and _lives(int(pid))


def _lives(pid: int) -> bool:
    """One that has ended, and whose parent does not ask for it, does nothing any more."""
    try:
        return process_fields(pid)[:1] not in ([], [b"Z"], [b"X"])
    except OSError:  # what cannot be found out takes nobody's checkpoint away
        return True
