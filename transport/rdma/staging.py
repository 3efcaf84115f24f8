"""Where do chunks lie while UCX moves them? In memory of their own, registered once, lent again and again to one peer.

Whoever holds a key of registered memory may read and write it, past every check. So it is never the weights, nor
anything beside them, but a mapping that holds one chunk; and no two peers ever get keys of the same one: a `Staging`
belongs to one connection, and its mappings are unregistered when that ends. A chunk goes out through one copy
(over RDMA; where there are no keys it is sent from where it lies); one that comes in is handed on where it lies, and
its pages are free again when the last view of them is gone; when many have views already, it is copied.

Views die in any thread, UCX is called in one: `free` only takes note, and the next `lend`, `sweep` or `close` acts;
after the end it asks for a `sweep`.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from peerd.transport import wire
from peerd.transport.bulk import UNDER_WAY, ZERO_COPY_CHUNKS_MAX
from peerd.transport.rdma.ucx import Context, UcxError
from peerd.transport.secure.pages import mapped

SPARE_BYTES = (ZERO_COPY_CHUNKS_MAX + 2 * UNDER_WAY) * wire.CHUNK_MAX  # as much as is read and on its way at a time
LEAST_BYTES = 64 << 10
ROOM_BYTES = 4 << 10  # beyond a power of two, for the seal of a chunk


@dataclass(slots=True, eq=False)
class Slot:
    """Registered pages."""

    size: int
    memory: Any  # the address, keeping the pages
    mapped: Any


class Staging:
    """The pages of one connection."""

    def __init__(self, context: Context, wake: Callable[[], None]) -> None:
        """`wake`, called in any thread, has `sweep` called for what is freed after the end."""
        self._context = context
        self._wake = wake
        self._slots: set[Slot] = set()
        self._spare: dict[int, list[Slot]] = {}
        self._spare_bytes = 0
        self._freed: deque[Slot] = deque()
        self._viewed: set[Slot] = set()
        self._closed = False

    def lend(self, size: int) -> Slot:
        """Return a slot of `size` bytes or more, for `free` to take back. Raises UcxError."""
        self.sweep()
        whole = max(LEAST_BYTES, 1 << (size - ROOM_BYTES - 1).bit_length()) + ROOM_BYTES
        spare = self._spare.get(whole)
        if not spare:
            return self._registered(whole)
        self._spare_bytes -= whole
        return spare.pop()

    def free(self, slot: Slot) -> None:
        """Take a slot back; in any thread."""
        self._freed.append(slot)
        if self._closed:
            self._wake()

    def view(self, slot: Slot, size: int) -> memoryview:
        """Hand on the beginning of a slot, which is freed with the last view of it; a copy when many have views."""
        ffi = self._context.library.ffi
        if len(self._viewed) >= ZERO_COPY_CHUNKS_MAX:
            copied = np.frombuffer(ffi.buffer(slot.memory, size), np.uint8).copy()
            self.free(slot)
            return copied.data

        def free(_: Any) -> None:
            self._viewed.discard(slot)
            self.free(slot)

        self._viewed.add(slot)
        return memoryview(ffi.buffer(ffi.gc(ffi.cast("char *", slot.memory), free), size))

    def sweep(self) -> None:
        """Take note of what was freed."""
        while self._freed:
            slot = self._freed.popleft()
            if self._closed or self._spare_bytes + slot.size > SPARE_BYTES:
                self._unregister(slot)
            else:
                self._spare.setdefault(slot.size, []).append(slot)
                self._spare_bytes += slot.size

    def close(self, whole: bool = False) -> None:
        """Unregister what is not lent, and the rest when it is freed; the `whole` at once when UCX itself ends."""
        self._closed = True
        self.sweep()
        for slot in list(self._slots) if whole else [slot for spares in self._spare.values() for slot in spares]:
            self._unregister(slot)
        self._spare.clear()

    @property
    def slots(self) -> int:
        """How many are registered."""
        return len(self._slots)

    def _registered(self, size: int) -> Slot:
        try:
            pages = mapped(size)
            pages.madvise(mmap.MADV_DONTFORK)  # a copy on write would part them from what a device knows
        except OSError as error:
            raise UcxError(f"no memory for chunks: {error.strerror}") from None
        memory = self._context.library.ffi.from_buffer(pages, require_writable=True)
        slot = Slot(size, memory, self._context.map(memory, size))
        self._slots.add(slot)
        return slot

    def _unregister(self, slot: Slot) -> None:
        if slot in self._slots:
            self._slots.remove(slot)
            self._context.unmap(slot.mapped)
