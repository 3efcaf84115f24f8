"""What does the daemon know of its node's model? The last published copy, and the corrections not yet in it.

The trainer owns the model while it runs; afterwards the daemon does, and goes on as a member with it. Everything here
is called from the mode's lane, one call at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peerd.effects import Vector
from peerd.shared_memory import SharedMemory


class Replica:
    """The model as it stands, read and corrected through the shared memory."""

    def __init__(self, memory: SharedMemory) -> None:
        """Begin with what the trainer published to copies[0]."""
        self._memory = memory
        self._values = np.empty(memory.total, np.float32)
        self._current = 0
        self._handed: int | None = None  # the half that the trainer was told to take
        self._filling = 0
        self._filled = False
        self._owned_here = False  # no trainer (any more): corrections go straight into the copy

    @property
    def spare_copy(self) -> int:
        """The copy that the trainer may publish to."""
        return 1 - self._current

    @property
    def has_corrections(self) -> bool:
        """Whether the trainer has not yet taken all of them."""
        return self._filled or self._handed is not None

    def values(self) -> Vector:
        """The model with every correction so far, shape (total,); the array is used again by the next call."""
        values = self._values
        np.copyto(values, self._memory.copies[self._current])
        if self._handed is not None:
            values += self._memory.corrections[self._handed]
        if self._filled:
            values += self._memory.corrections[self._filling]
        return values

    def add(self, correction: Vector) -> None:
        """Have the model corrected."""
        if self._owned_here:
            _add(self._memory.copies[self._current], correction)
        else:
            _add(self._memory.corrections[self._filling], correction)
            self._filled = True

    def hand_over(self) -> int | None:
        """The half that the trainer should take now; None when it has one or there is none."""
        if self._owned_here or not self._filled or self._handed is not None:
            return None
        self._handed, self._filling, self._filled = self._filling, 1 - self._filling, False
        return self._handed

    def taken(self, half: int) -> None:
        """The trainer has added `half`; the last published copy gets it too, to stay the model's past."""
        if half != self._handed:
            return
        corrections = self._memory.corrections[half]
        _add(self._memory.copies[self._current], corrections)
        corrections[:] = 0
        self._handed = None

    def published(self, copy: int) -> None:
        """The trainer's model, with all it has taken, is now in `copy`."""
        self._current = copy

    def owned_here(self) -> None:
        """The trainer is gone: the copy and what it had not taken are the model now."""
        for half in (self._handed, self._filling if self._filled else None):
            if half is not None:
                _add(self._memory.copies[self._current], self._memory.corrections[half])
                self._memory.corrections[half][:] = 0
        self._handed, self._filled, self._owned_here = None, False, True

    def load(self, values: Vector) -> int:
        """Replace the model by `values`; returns the copy that the trainer must load."""
        np.copyto(self._memory.copies[self._current], values)
        return self._current


def _add(target: npt.NDArray[np.float32], values: Vector) -> None:
    np.add(target, values, out=target)
