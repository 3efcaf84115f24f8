"""Where does freed memory go? Blocks of a chunk's size stay in the process, for the next chunk.

glibc gives the end of the heap back after every few of them, and the kernel clears the same pages again: a sixth of
the processor time of a ring all-reduce of 100 MB (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
MAPPED_MIN = 32 << 20  # bytes; the most that glibc allows, and more than the largest chunk
KEPT_MAX = 128 << 20  # free bytes at the end of the heap, above which it shrinks


def keep_freed_chunks() -> None:
    """Have malloc reuse them; does nothing where it is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, MAPPED_MIN)
        mallopt(_TRIM_THRESHOLD, KEPT_MAX)
