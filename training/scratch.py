"""Where do whole-model temporaries come from? A few arrays that are used again.

A fresh array of 100 MB costs a page fault every 4 kB, and handing it back to the system holds the interpreter for
milliseconds, which the event loop waits out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from peerd.training.effects import Sliced, Vector

KEEP = 2  # corrections on their way, or a push and what becomes of it


class Scratch:
    """Arrays of one size and type, lent and returned. Not thread-safe: one thread owns it."""

    def __init__(self) -> None:
        self.spares: Callable[[], list[Vector]] = list
        """Somebody else's arrays that are free until the end of an event."""
        self._free: list[Vector] = []
        self._borrowed: list[Vector] = []

    def take_for_event(self, like: Sliced) -> Vector:
        """The same as `take`, for what comes back before the next event: a correction, which leaves in an Apply."""
        for spare in self.spares():
            if not any(spare is one for one in self._borrowed):
                self._borrowed.append(spare)
                return spare
        return self.take(like)

    def event_over(self) -> None:
        """All that was taken for the last event has come back, or is lost by an error: who lent it has it again."""
        self._borrowed.clear()

    def take(self, like: Sliced) -> Vector:
        """An array of the shape and dtype of `like`, with any content."""
        while self._free:
            array = self._free.pop()
            if array.shape == like.shape and array.dtype == like.dtype:
                return array
        return np.empty(like.shape, like.dtype)

    def give(self, array: Vector) -> None:
        """Return what was taken; the caller keeps no view of it."""
        borrowed = [one for one in self._borrowed if one is not array]
        if len(borrowed) < len(self._borrowed):
            self._borrowed = borrowed
        elif len(self._free) < KEEP:
            self._free.append(array)


class Lent:
    """Memory for one array at a time, of which parts may be anywhere: the same again once the last view is gone.

    Pieces of a round wait for peers that may be slow, or stopped, long after the round: what they hold must stay.
    """

    def __init__(self) -> None:
        self._memory: Any = memoryview(b"")
        self._lent: Callable[[], Vector | None] = lambda: None

    def take(self, like: Vector) -> Vector:
        """An array of the shape and dtype of `like`, with any content."""
        if self._lent() is not None or self._memory.nbytes != like.nbytes:
            self._memory = np.empty(like.nbytes, np.uint8).data
        array: Vector = np.frombuffer(self._memory, like.dtype)  # an object of its own, which all its views hold
        self._lent = weakref.ref(array)
        return array
