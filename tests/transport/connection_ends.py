"""Two ends of one connection, for tests that need both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar, cast

import trio

from peerd.transport.connection import Connection, Transport
from peerd.transport.messages import Message
from peerd.transport.stream import StreamConnection

M = TypeVar("M", bound=Message)


@asynccontextmanager
async def met(
    near: Transport, far: Transport, address: tuple[str, int]
) -> AsyncIterator[tuple[StreamConnection, StreamConnection]]:
    """Yield the ends of a connection between two transports, the second of which listens there."""
    give, taken = trio.open_memory_channel[Connection](1)

    async def accepted(connection: Connection) -> None:
        await give.send(connection)
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        dialled = await near.dial(await nursery.start(far.listen, address, accepted))
        taken_in = await taken.receive()
        assert isinstance(dialled, StreamConnection)
        assert isinstance(taken_in, StreamConnection)
        yield dialled, taken_in
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def joined(
    near: Transport, far: Transport, payload_limit: int
) -> AsyncIterator[tuple[StreamConnection, StreamConnection]]:
    """Yield the ends of an admitted connection between two transports over this machine's network."""
    async with met(near, far, ("127.0.0.1", 0)) as (dialled, taken_in):
        taken_in.admit()
        dialled.payload_limit = taken_in.payload_limit = payload_limit
        yield dialled, taken_in
        await dialled.aclose()
        await taken_in.aclose()


async def receive_a(kind: type[M], connection: Connection) -> M:
    """The next message, which is one of this kind."""
    message = await connection.receive()
    assert isinstance(message, kind)
    return message


async def close_at_once(connection: Connection) -> None:
    # trio's types want a subclass; all that it calls is aclose
    await trio.aclose_forcefully(cast("trio.abc.AsyncResource", connection))


async def nobody(_: Connection) -> None:
    raise AssertionError("nobody was to come")
