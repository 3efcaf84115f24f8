"""Where do whole-model temporaries come from? A few arrays that are used again.

A fresh array of 100 MB costs a page fault every 4 kB, and handing it back to the system holds the interpreter for
milliseconds, which the event loop waits out.
"""

from __future__ import annotations

import numpy as np

from peerd.training.effects import Vector

KEEP = 2  # corrections on their way, or a push and what becomes of it


class Scratch:
    """Arrays of one size and type, lent and returned. Not thread-safe: one thread owns it."""

    def __init__(self) -> None:
        self._free: list[Vector] = []

    def take(self, like: Vector) -> Vector:
        """An array of the shape and dtype of `like`, with any content."""
        while self._free:
            array = self._free.pop()
            if array.shape == like.shape and array.dtype == like.dtype:
                return array
        return np.empty_like(like)

    def give(self, array: Vector) -> None:
        """Return what was taken; the caller keeps no view of it."""
        if len(self._free) < KEEP:
            self._free.append(array)
