"""Where do trainer and daemon meet? One anonymous memory file that both map, with four flat float32 vectors.

    copies[0], copies[1]            the model as the trainer last published it, and the one it publishes to next
    corrections[0], corrections[1]  the daemon adds to one half while the trainer takes the other

Which half is whose is agreed in messages over the Unix socket; the memory itself holds no flag. A memfd has no name,
so a crash leaves nothing behind, and its sealed size means that no other process can make an access fault.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

VECTORS = 4
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0


class SharedMemory:
    """The mapping of one side. `fd` stays open so that it can be passed on."""

    def __init__(self, fd: int, total: int) -> None:
        """Map `fd`; raises ValueError when it is not a sealed file of the right size."""
        size = _size(total)
        if os.fstat(fd).st_size != size or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError(f"the shared memory is not a sealed file of {size} bytes")
        self.fd = fd
        self.total = total
        self._map = mmap.mmap(fd, size)
        self.vectors = np.frombuffer(self._map, dtype=np.float32, count=VECTORS * total).reshape(VECTORS, total)
        vectors = self.vectors
        self.copies: tuple[npt.NDArray[np.float32], ...] = (vectors[0], vectors[1])
        self.corrections: tuple[npt.NDArray[np.float32], ...] = (vectors[2], vectors[3])

    @classmethod
    def create(cls, total: int) -> SharedMemory:
        """A new zeroed memory for a model of `total` values."""
        fd = os.memfd_create("peerd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _size(total))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, total)

    def close_fd(self) -> None:
        """Close the descriptor once it has been passed on; the mapping stays until the last array is gone."""
        os.close(self.fd)


def _size(total: int) -> int:
    return max(1, VECTORS * total) * np.dtype(np.float32).itemsize
