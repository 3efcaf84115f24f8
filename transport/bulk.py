"""What may carry large chunks beside a stream: one channel a connection, made by what a node has that is faster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import trio

from peerd.transport.connection import ConnectionLost
from peerd.transport.messages import Chunk

PATIENCE_S = 10.0  # without anything coming through, as TCP's user timeout
ZERO_COPY_CHUNKS_MAX = 12
"""Chunks that are read where they lie: as many as a rank of a ring has at a time (benchmarks/allreduce.py). Later ones
of a long message, whose receiver keeps all until the last has come, are copied: so a channel's memory is bounded."""
UNDER_WAY = 4  # the largest chunks in one direction: some move while others are copied or checked; a ring's window
BULK_RATE_MIN = 16 << 20  # bytes a second that it moves at the very least


class BulkRefused(Exception):
    """There can be no channel to this peer; the text is the reason, in a few words."""


class BulkChannel(Protocol):
    """Moves chunks in order, each whole. Who waits for it is woken by `close`."""

    name: str  # of the carrier, as people are shown it
    checked: bool  # whether chunks need a checksum: not what is never on a line
    on_close: Callable[[ConnectionLost], None]  # told why

    @property
    def lost(self) -> ConnectionLost | None:
        """Why it was closed."""

    @property
    def ready(self) -> bool:
        """Whether `take` would return or raise at once."""

    def goes_ahead(self, size: int) -> bool:
        """Whether a chunk of `size` bytes may be sent before the frames that tell of it, and `send` will not wait."""

    def expect(self, sizes: list[int]) -> None:
        """Say which chunks come next."""

    async def arrival(self) -> None:
        """Wait until `ready`. Safe to cancel."""

    def take(self) -> memoryview:
        """Return the next chunk; raises ConnectionLost once closed, PeerError for what nobody can have sent."""

    async def send(self, chunk: Chunk) -> None:
        """Send a chunk, waiting while too much is under way; it must not change before `drained`.

        Raises ConnectionLost once closed: what is under way then may still arrive, changed even (hence its checksum).
        """

    async def drained(self) -> None:
        """Wait until the network has taken all, or never will."""

    async def tried(self) -> None:
        """Wait until something has passed in both directions. Raises ConnectionLost once closed."""

    def close(self, lost: ConnectionLost) -> None:
        """End at once. The first call decides what is raised; memory stays set aside as long as it may be written."""


class Fabric(Protocol):
    """What a node has that is faster than a stream to some of its peers."""

    version: str  # its kind and number, then perhaps a place; two that differ do not understand each other
    refuses: str  # why there are no more channels; "" while there are
    outside: str  # why an address that it does not trust has no channel, with a {} for it; "": no matter

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Move what is under way until cancelled, having said that it is `started`."""

    def trusts(self, host: str) -> bool:
        """Whether a peer at this address may have a channel."""

    def reserved(self) -> AbstractContextManager[tuple[int, bytes]]:
        """Yield the number of a channel to come, which no peer can guess, and where a peer finds it.

        It may be opened within; then it stays. Raises BulkRefused.
        """

    def open(self, remote: str, here: int, there: int, address: bytes) -> BulkChannel:
        """Make a channel between number `here` and number `there` at `address`. Raises BulkRefused."""


def nothing(_: ConnectionLost) -> None:
    """Stand in for `BulkChannel.on_close` where nobody is to be told."""


def patience_s(size: int) -> float:
    """Return how long to wait for `size` bytes of which nothing is heard."""
    return PATIENCE_S + size / BULK_RATE_MIN
