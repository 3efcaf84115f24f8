"""Where do trainer and daemon meet? One anonymous memory file that both map: a page of numbers, float32 vectors.

    board                           what each says of itself without a message (board.py)
    copies[0], copies[1]            the model as the trainer last published it, and the one it publishes to next
    corrections[0], corrections[1]  the daemon adds to one half while the trainer takes the other
    gradient                        where gradients are exchanged: the trainer's, then what it goes on with

Which half is whose is agreed in messages over the Unix socket; which copy is whose stands on the board.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from peerd.local.board import PAGE_BYTES, Board
from peerd.transport import sealed_file

VECTORS = 4


class SharedMemory:
    """The mapping of one side. `fd` stays open so that it can be passed on."""

    def __init__(self, fd: int, total: int, gradients: int = 0) -> None:
        """Map `fd`; raises ValueError when it is not a sealed file of the right size."""
        self._map = sealed_file.mapped(fd, _size(total, gradients))
        self.fd = fd
        self.total = total
        self.vectors = np.frombuffer(self._map, dtype=np.float32, count=VECTORS * total, offset=PAGE_BYTES)
        self.vectors = self.vectors.reshape(VECTORS, total)
        self.gradient: npt.NDArray[np.float32] = np.frombuffer(
            self._map, dtype=np.float32, count=gradients, offset=PAGE_BYTES + self.vectors.nbytes
        )
        self.board = Board(memoryview(self._map)[:PAGE_BYTES])
        vectors = self.vectors
        self.copies: tuple[npt.NDArray[np.float32], ...] = (vectors[0], vectors[1])
        self.corrections: tuple[npt.NDArray[np.float32], ...] = (vectors[2], vectors[3])

    @classmethod
    def create(cls, total: int, gradients: int = 0) -> SharedMemory:
        """A new zeroed memory for a model of `total` values, and `gradients` where these are exchanged."""
        return cls(sealed_file.create(_size(total, gradients)), total, gradients)

    def close_fd(self) -> None:
        """Close the descriptor once it has been passed on; the mapping stays until the last array is gone.

        Harmless when closed.
        """
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _size(total: int, gradients: int) -> int:
    return PAGE_BYTES + max(1, VECTORS * total + gradients) * np.dtype(np.float32).itemsize
