"""What does the daemon know of its node's model? The last published copy, and the corrections not yet in it.

The trainer owns the model while it runs; afterwards the daemon does, and goes on as a member with it. Everything here
is called from the compute thread, one call at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from peerd.local.board import Board
from peerd.local.shared_memory import SharedMemory
from peerd.training.effects import Vector
from peerd.training.kernels.passes import correct
from peerd.training.model.quiet import Quiet
from peerd.training.model.variances import bounded


class ModelCopy:
    """The model as it stands, read and corrected through the shared memory."""

    def __init__(
        self,
        memory: SharedMemory,
        variances: Iterable[tuple[int, int]] = (),
        padding: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Begin with what the trainer published to copies[0].

        `variances` says where running variances are, as start and stop: a correction leaves a tenth of them at least,
        here as in the trainer (training/model/variances.py). `padding` says which rows no correction moves while they
        are zeros (training/model/padding.py).
        """
        self.step = 0
        """Of the last published copy: the trainer may be further."""
        self._memory = memory
        self._variances = [slice(start, stop) for start, stop in variances]
        self._padding = [slice(start, stop) for start, stop in padding]
        self._values: npt.NDArray[np.float32] | None = None  # what `values` gave last
        self._current = 0
        self._apart = False  # the trainer may read the copy as it is: what it has not yet taken is not added there
        self._offered: int | None = None  # the buffer that the trainer was told to take
        self._filling = 0
        self._filled = False
        self._owned_here = False  # no trainer (any more): corrections go straight into the copy

    @property
    def total(self) -> int:
        """Values of the model."""
        return self._memory.total

    @property
    def gradient(self) -> npt.NDArray[np.float32]:
        """The trainer's, while it waits with it; it goes on with what stands here then."""
        return self._memory.gradient

    @property
    def waiting(self) -> list[int]:
        """The buffers of corrections that the trainer has not yet taken, the older one first."""
        filled = [self._filling] if self._filled else []
        return filled if self._offered is None else [self._offered, *filled]

    def values(self) -> Vector:
        """The model with every correction so far, shape (total,); the array is used again by the next call."""
        if self._values is None:
            self._values = np.empty(self._memory.total, np.float32)
        np.copyto(self._values, self._memory.copies[self._current])
        for buffer in self.waiting if self._apart else ():
            self._correct(self._values, self._memory.corrections[buffer])
        return self._values

    def look(self) -> Vector:
        """The same, to be read only, and only until the model is corrected: mostly no copy."""
        if self._apart and self.waiting:
            return self.values()
        self._values = None
        values = self._memory.copies[self._current].view()
        values.flags.writeable = False
        return values

    def spares(self) -> list[Vector]:
        """Memory that nobody needs until the end of an event; a correction in the first of it `add` need not copy."""
        filling = [] if self._filled else [self._filling]
        free = filling if self._offered is not None else [*filling, 1 - self._filling]
        return [self._memory.corrections[buffer] for buffer in free]

    def add(self, correction: Vector) -> None:
        """Have the model corrected."""
        copy, filling = self._memory.copies[self._current], self._memory.corrections[self._filling]
        assert not (self._filled and correction is filling), "what is made there is the first of its event"
        zeros = [where for where in self._padding if not copy[where].any()]
        if not self._apart:
            self._correct(copy, correction)
        owed = self._untaken if self._owned_here else filling
        if self._owned_here or self._filled:
            correct(owed, correction)
        else:
            if correction is not filling:
                np.copyto(filling, correction)
            self._filled = True
        for where in zeros:
            copy[where] = owed[where] = 0

    def drain(self) -> int | None:
        """The buffer that the trainer should take now; None when it has one or there is none."""
        if self._owned_here or not self._filled or self._offered is not None:
            return None
        self._offered, self._filling, self._filled = self._filling, 1 - self._filling, False
        return self._offered

    def taken(self, buffer: int) -> None:
        """The trainer has added `buffer`; the last published copy gets it too, to stay the model's past."""
        if buffer != self._offered:
            return
        if self._apart:
            self._correct(self._memory.copies[self._current], self._memory.corrections[buffer])
        self._offered = None
        if not self._filled:
            self._filling = buffer  # the other one may never be needed, and take no memory

    def published(self, copy: int, step: int, *, apart: bool = False) -> None:
        """The trainer's model after `step`, with all it has taken, is now in `copy`.

        What it has not taken stays `apart` for a mode that must see the trainer's model to the bit: the trainer adds
        the sum of what came meanwhile, where `look` shows one correction after the other.
        """
        if copy == self._current:
            return  # said twice: a trainer writes the one that is not read
        self._current, self.step, self._apart = copy, step, apart
        for buffer in () if apart else self.waiting:
            self._correct(self._memory.copies[copy], self._memory.corrections[buffer])

    def is_shared_with(self, board: Board) -> bool:
        """Whether the trainer behind this board has the same memory: it may be another's, who has only just come."""
        return self._memory.board is board

    def be_quiet(self, quiet: Quiet) -> None:
        """Tell the trainer which steps are news, and then that it may write the other copy: never by older numbers."""
        self._memory.board.be_quiet(quiet)
        self._memory.board.reads(self._current)

    def owned_here(self) -> None:
        """The trainer is gone: the copy and what it had not taken are the model now."""
        if self._owned_here:
            return
        self._untaken[:] = 0
        for buffer in self.waiting:
            if self._apart:
                self._correct(self._memory.copies[self._current], self._memory.corrections[buffer])
            np.add(self._untaken, self._memory.corrections[buffer], out=self._untaken)
        self._offered, self._filled, self._owned_here, self._apart = None, False, True, False

    def take_over(self, before: ModelCopy) -> None:
        """Go on from the trainer's own model, with what came since the last trainer took something."""
        if before._owned_here and before._untaken.any():
            self.add(before._untaken)

    @property
    def _untaken(self) -> npt.NDArray[np.float32]:
        """The other copy: nobody writes it once the trainer is gone."""
        return self._memory.copies[1 - self._current]

    def load(self, values: Vector, step: int) -> int:
        """Replace the model by `values`, of this step; returns the copy that the trainer must load."""
        np.copyto(self._memory.copies[self._current], values)
        self.step, self._apart = step, not self._owned_here
        return self._current

    def _correct(self, model: npt.NDArray[np.float32], correction: Vector) -> None:
        before = [model[where].copy() for where in self._variances]
        correct(model, correction)
        for where, values in zip(self._variances, before, strict=True):
            model[where] = bounded(values, model[where])
