"""Memory for whole chunks: in huge pages, and used again while a cache still holds it."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import numpy as np

HUGE_BYTES = 2 << 20


def mapped(size: int) -> mmap.mmap:
    """Return a private mapping of `size` bytes or more, of which as many as make whole huge pages lie in such.

    Raises OSError: there is no memory.
    """
    huge = size // HUGE_BYTES * HUGE_BYTES
    # Linux puts a mapping where huge pages fit only if it is a whole number of them
    pages = mmap.mmap(-1, huge + HUGE_BYTES if 0 < huge < size else size, mmap.MAP_PRIVATE)
    if huge:
        with suppress(OSError):  # a kernel may have no huge pages
            pages.madvise(mmap.MADV_HUGEPAGE, 0, huge)
    return pages


class Mappings:
    """Mappings of one size, lent again and again, the last that came back first."""

    def __init__(self, size: int, spare_max: int) -> None:
        """At most so many wait to be lent."""
        self._size = size
        self._spare_max = spare_max
        self._spare: list[mmap.mmap] = []

    def lend(self) -> memoryview:
        """Return one, which comes back with the last view of it, in any thread. Raises OSError."""
        pages = self._spare.pop() if self._spare else mapped(self._size)
        whole = np.frombuffer(pages, np.uint8)
        weakref.finalize(whole, self._take_back, pages).atexit = False
        return whole.data[: self._size]

    def _take_back(self, pages: mmap.mmap) -> None:
        if len(self._spare) < self._spare_max:
            self._spare.append(pages)
