"""Memory that two processes map: an anonymous file of a size that nobody can change any more.

A memfd has no name, so a crash leaves nothing behind, and its sealed size means that no other process can make an
access fault.
"""

from __future__ import annotations

import fcntl
import mmap
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0


def create(size: int) -> int:
    """Return the descriptor of a new one of `size` zeros; only what is written takes memory. Raises OSError."""
    fd = os.memfd_create("peerd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def mapped(fd: int, size: int) -> mmap.mmap:
    """Map the whole of one. Raises ValueError for anything but a sealed file of `size` bytes, OSError without room."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # no kind of file that can be sealed
        sealed = False
    if not sealed or os.fstat(fd).st_size != size:
        raise ValueError(f"the shared memory is not a sealed file of {size} bytes")
    return mmap.mmap(fd, size)
