"""When is a file or a folder on the disk? After this, whatever the power does. Files are for this user alone."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import count
from pathlib import Path

from peerd.transport.errors import UserError


def flush(path: Path) -> None:
    """Wait until the disk has the content of a file, or the names in a folder. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def put_aside(folder: Path) -> Path | None:
    """Give a folder a name that nothing has, and return that; None: there is no such folder. Raises UserError."""
    if not os.path.lexists(folder):
        return None
    aside = next(
        aside for number in count(1) if not os.path.lexists(aside := folder.with_name(f"{folder.name}-{number}"))
    )
    try:
        folder.rename(aside)
        flush(folder.parent)
    except OSError as error:
        with suppress(OSError):  # a disk that fails may have given it its name
            aside.rename(folder)
        raise UserError(f"cannot put {folder} aside: {error.strerror}") from None
    return aside


def write(path: Path, text: str) -> None:
    """Make a private file, whatever the umask; one that was there, open to others perhaps, goes. Raises OSError."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)


def read(path: Path, most: int) -> bytes:
    """A private file's first `most` bytes. It is made private again: a backup that was put back has any mode."""
    with path.open("rb") as file:
        with suppress(OSError):  # a file system without modes
            os.fchmod(file.fileno(), 0o600)
        return file.read(most)


def replace(path: Path, text: str) -> None:
    """Give a private file new content, all of it or none, on the disk when this returns. Raises OSError."""
    temporary = path.with_suffix(".tmp")
    try:
        write(temporary, text)
        flush(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)
