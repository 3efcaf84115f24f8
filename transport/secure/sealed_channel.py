"""A `BulkChannel` over another one: each chunk is one record (records.py), in the order in which they are sent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from peerd.transport.bulk import UNDER_WAY, BulkChannel
from peerd.transport.connection import ConnectionLost
from peerd.transport.messages import Chunk
from peerd.transport.secure.pages import HUGE_BYTES, Mappings
from peerd.transport.secure.records import OVERHEAD_BYTES, RECORD_MAX, Opener, Sealer, Secrets


class SealedChannel:
    """One end of it."""

    checked = False

    def __init__(self, channel: BulkChannel, secrets: Secrets) -> None:
        """`secrets` seal nothing else."""
        self.name = channel.name
        self._channel = channel
        self._sealer, self._opener = Sealer(secrets.sending), Opener(secrets.receiving)
        self._records = Mappings(RECORD_MAX + OVERHEAD_BYTES, UNDER_WAY)

    @property
    def on_close(self) -> Callable[[ConnectionLost], None]:
        """See `BulkChannel`."""
        return self._channel.on_close

    @on_close.setter
    def on_close(self, told: Callable[[ConnectionLost], None]) -> None:
        self._channel.on_close = told

    @property
    def lost(self) -> ConnectionLost | None:
        """See `BulkChannel`."""
        return self._channel.lost

    @property
    def ready(self) -> bool:
        """See `BulkChannel`."""
        return self._channel.ready

    def goes_ahead(self, size: int) -> bool:
        """See `BulkChannel`."""
        return self._channel.goes_ahead(size + OVERHEAD_BYTES)

    def expect(self, sizes: list[int]) -> None:
        """See `BulkChannel`."""
        self._channel.expect([size + OVERHEAD_BYTES for size in sizes])

    async def arrival(self) -> None:
        """See `BulkChannel`."""
        await self._channel.arrival()

    def take(self) -> memoryview:
        """See `BulkChannel`. Raises PeerError where the seal is broken."""
        record = self._channel.take()
        chunk = np.empty(len(record) - OVERHEAD_BYTES, np.uint8).data
        self._opener.open(record, chunk)
        return chunk

    async def send(self, chunk: Chunk) -> None:
        """See `BulkChannel`."""
        size = len(chunk) + OVERHEAD_BYTES
        try:
            record = np.empty(size, np.uint8).data if size < HUGE_BYTES else self._records.lend()[:size]
        except OSError as error:
            raise ConnectionLost(f"no memory for chunks: {error.strerror}") from None
        self._sealer.seal(chunk, record)
        await self._channel.send(record)

    async def drained(self) -> None:
        """See `BulkChannel`."""
        await self._channel.drained()

    async def tried(self) -> None:
        """See `BulkChannel`."""
        await self._channel.tried()

    def close(self, lost: ConnectionLost) -> None:
        """See `BulkChannel`."""
        self._channel.close(lost)
