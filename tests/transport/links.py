"""Two ends of one link, for tests that need both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from peerd.transport.link import Link, Transport


@asynccontextmanager
async def joined(near: Transport, far: Transport, payload_limit: int) -> AsyncIterator[tuple[Link, Link]]:
    """Yield the ends of an admitted link between two transports over this machine's network."""
    give, taken = trio.open_memory_channel[Link](1)

    async def accepted(link: Link) -> None:
        link.admit()
        await give.send(link)
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        address = await nursery.start(far.listen, ("127.0.0.1", 0), accepted)
        dialled = await near.dial(address)
        taken_in = await taken.receive()
        dialled.payload_limit = taken_in.payload_limit = payload_limit
        yield dialled, taken_in
        await dialled.aclose()
        await taken_in.aclose()
        nursery.cancel_scope.cancel()
