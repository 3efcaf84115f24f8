"""Streams of bytes between a relay, its guest and others: made, and joined two by two."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from peerd.transport.ids import Address
from peerd.transport.sending.budget import Budget, BulkTurn
from peerd.transport.tcp import connect, keep_watch

PIECE_BYTES = 256 << 10
BULK_BYTES = 64 << 10  # in a row
QUIET_S = 0.5
LINGER_S = 30.0  # for the other direction, when one has ended: on a busy machine an answer takes seconds


class Toll:
    """What is passed on is counted, and waits for the node's budget."""

    def __init__(self, budget: Budget | None) -> None:
        """Without a budget nothing waits."""
        self.passed_bytes = 0
        self.piece_bytes = PIECE_BYTES if budget is None else min(PIECE_BYTES, budget.piece)
        self.budget = budget

    async def pay(self, count: int) -> None:
        """So many bytes of a stream are about to go on."""
        if (wait_s := self.note(count)) > 0:
            await trio.sleep(wait_s)

    def note(self, count: int) -> float:
        """For how long they would have to wait; datagrams do not, for who is silent is taken for dead."""
        self.passed_bytes += count
        return 0.0 if self.budget is None else self.budget.take(count, trio.current_time())


class _BulkShare:
    """Of a stream while it brings bulk: a slow line takes few at once, so that none is given up as too slow."""

    def __init__(self, budget: Budget | None) -> None:
        self._came = trio.Event()
        self._bulk = BulkTurn(budget, lambda: self._came.set()) if budget is not None else None
        self._bytes = 0  # since it was quiet

    async def comes(self, count: int) -> None:
        """So many bytes are about to go on."""
        self._bytes += count
        if self._bulk is not None and self._bytes > BULK_BYTES and not self._bulk.take():
            self._came = trio.Event()
            await self._came.wait()

    def give(self) -> None:
        """It is quiet, or its other end takes nothing in."""
        self._bytes = 0
        if self._bulk is not None:
            self._bulk.give()


async def splice(
    one: trio.SocketStream, other: trio.SocketStream, toll: Toll | None = None, first: bytes = b""
) -> None:
    """Pass on what comes, both ways, and what has come `first` from `one`, until both have ended; then close them."""

    piece_bytes = PIECE_BYTES if toll is None else toll.piece_bytes

    async def pump(source: trio.SocketStream, sink: trio.SocketStream, some: bytes | bytearray) -> None:
        share = _BulkShare(toll.budget if toll else None)

        async def patiently(act: Callable[[], Awaitable[Any]]) -> Any:
            with trio.move_on_after(QUIET_S):
                return await act()
            share.give()
            return await act()

        try:
            while some or (some := await patiently(partial(source.receive_some, piece_bytes))):
                if len(some) < piece_bytes:  # there is no more: its line is the slower one, or it has all
                    share.give()
                await share.comes(len(some))
                if toll is not None:
                    await toll.pay(len(some))
                left = memoryview(some)
                while left:
                    left = left[await patiently(partial(sink.socket.send, left)) :]
                some = b""
            await sink.send_eof()
            nursery.cancel_scope.deadline = trio.current_time() + LINGER_S
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            nursery.cancel_scope.cancel()
        finally:
            share.give()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump, one, other, first)
            nursery.start_soon(pump, other, one, b"")
    finally:
        one.socket.close()
        other.socket.close()


async def stream_to(address: Address, source: str = "") -> trio.SocketStream:
    """A stream to this IP address, from the local address `source` if one is named. Raises OSError."""
    sock, _ = await connect(address, source)
    try:
        return stream_over(trio.socket.from_stdlib_socket(sock))
    except BaseException:
        sock.close()
        raise


def within(host: str) -> str:
    """At which host this machine itself reaches what is bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def stream_over(sock: trio.socket.SocketType) -> trio.SocketStream:
    """A stream over a connected socket whose other end is missed soon. Raises OSError where it is gone already."""
    keep_watch(sock)
    return trio.SocketStream(sock)
