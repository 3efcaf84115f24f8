"""What waits to be sent on one connection: two bounded queues, of which one overtakes the other between two frames."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import trio

from peerd.transport import framing, wire
from peerd.transport.connection import ConnectionLost
from peerd.transport.messages import Chunk, Chunks, Message, SpeedSample
from peerd.transport.sending.budget import Budget, BulkTurn

QUEUE_MESSAGES = 64
QUEUE_BULK = 1  # bulk messages waiting behind the one being sent
BATCH_BYTES = 1 << 20  # frames are gathered for one write up to this: an urgent message waits for little more
BATCH_PIECES = 62  # a frame has two pieces at most, and one call takes 64 (IOV_MAX is 1024; more gains nothing)


class OutOfBand:
    """A chunk that travels beside the stream."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk

    def __len__(self) -> int:
        return len(self.chunk)


Piece = Chunk | OutOfBand


class _Waiting(NamedTuple):
    head: bytes
    chunks: Chunks
    bulk: bool
    out_of_band: bool
    takes_turn: bool  # of the budget's


class _Queue:
    """Encoded messages in the order of their `send` calls."""

    def __init__(self) -> None:
        self.messages: deque[_Waiting] = deque()
        self.bulk = 0
        self.turn = trio.Lock()  # first come, first served, also among those who wait for room
        self.room = trio.lowlevel.ParkingLot()

    def full(self, bulk: bool) -> bool:
        return len(self.messages) >= QUEUE_MESSAGES or (bulk and self.bulk >= QUEUE_BULK)


class SendQueue:
    """The queue between `send` and the sender task; it holds references to chunks, never copies."""

    def __init__(self, budget: Budget | None) -> None:
        """With a `budget` bulk waits for a turn of those that it is for."""
        self.checked = True  # whether chunks in the stream have checksums
        self.out_of_band = False  # whether large chunks of what is put from now on travel beside the stream
        self.out_of_band_checked = True  # whether they have checksums there
        self._urgent, self._ordered = _Queue(), _Queue()
        self._is_out_of_band = False  # the bulk message being sent
        self._chunks: Iterator[Chunk] = iter(())  # what is left of the bulk message being sent
        self._lost: ConnectionLost | None = None
        self._work = trio.lowlevel.ParkingLot()  # the sender task, waiting for messages
        self._flushed = trio.lowlevel.ParkingLot()
        self._idle = True  # the sender task has sent all that was here
        self._turn = None if budget is None else BulkTurn(budget, self._work.unpark_all)
        self._in_bulk = self._bulk_ends = False  # it is used; all that it was for has been taken

    async def put(self, message: Message) -> None:
        """Queue a message, waiting for room; raises ConnectionLost once closed."""
        header, chunks = wire.encode(message)
        bulk = wire.is_bulk(message.KIND)
        queue = self._urgent if wire.is_urgent(message.KIND) else self._ordered
        if not queue.turn.locked() and not queue.full(bulk):
            self._append(queue, message.KIND, header, chunks, bulk)
            return
        async with queue.turn:
            while self._lost is None and queue.full(bulk):
                await queue.room.park()
            self._append(queue, message.KIND, header, chunks, bulk)

    async def take(self) -> list[Piece]:
        """Return the pieces of the next frames, waiting for some; empty once closed. For the sender task only."""
        while self._lost is None:
            if self._turn is not None and self._bulk_ends:  # and sent
                self._turn.give()
                self._in_bulk = self._bulk_ends = False
            pieces = self._gather()
            if pieces:
                return pieces
            if self._bulk_ends:
                continue
            if not self._ordered.messages:  # else one waits for its turn
                self._idle = True
                self._flushed.unpark_all()
            await self._work.park()
        return []

    async def flushed(self) -> None:
        """Wait until everything was sent, or cannot be."""
        while self._lost is None and not self._idle:
            await self._flushed.park()

    def give_turn(self) -> None:
        """The peer takes in nothing: what is left of the message waits for it alone, and holds up nobody's."""
        if self._turn is not None:
            self._turn.give()

    def close(self, lost: ConnectionLost) -> None:
        """Drop what waits; whoever waits is told `lost`. The first call decides the text."""
        self._lost = self._lost or lost
        self._chunks = iter(())
        self.give_turn()
        for queue in (self._urgent, self._ordered):
            queue.messages.clear()
            queue.room.unpark_all()
        self._work.unpark_all()
        self._flushed.unpark_all()

    def _append(self, queue: _Queue, kind: int, header: bytes, chunks: Chunks, bulk: bool) -> None:
        if self._lost is not None:
            raise ConnectionLost(*self._lost.args)
        out_of_band = self.out_of_band and any(len(chunk) >= framing.OUT_OF_BAND_MIN for chunk in chunks)
        counted = bulk and not out_of_band and kind != SpeedSample.KIND  # what is measured must come at once
        takes_turn = counted and self._turn is not None
        head = framing.head_frame(kind, header, out_of_band)
        queue.messages.append(_Waiting(head, chunks, bulk, out_of_band, takes_turn))
        queue.bulk += bulk
        self._idle = False
        self._work.unpark_all()

    def _gather(self) -> list[Piece]:
        pieces: list[Piece] = []
        size = 0
        while size < BATCH_BYTES and len(pieces) < BATCH_PIECES:
            frame = self._next_frame()
            if not frame:
                break
            pieces += frame
            size += sum(map(len, frame))
        return pieces

    def _next_frame(self) -> tuple[Piece, ...]:
        if self._urgent.messages:
            return (self._pop(self._urgent).head,)
        chunk = next(self._chunks, None)
        if chunk is not None and self._is_out_of_band and len(chunk) >= framing.OUT_OF_BAND_MIN:
            return (OutOfBand(chunk), framing.chunk_frame(chunk, out_of_band=True, checked=self.out_of_band_checked))
        if chunk is not None:
            frame = framing.chunk_frame(chunk, checked=self.checked)
            return (frame, chunk) if len(chunk) else (frame,)
        if self._in_bulk:
            self._bulk_ends = True
            return ()
        if self._ordered.messages:
            if self._turn is not None and self._ordered.messages[0].takes_turn:
                if not self._turn.take():
                    return ()
                self._in_bulk = True
            message = self._pop(self._ordered)
            self._chunks, self._is_out_of_band = iter(message.chunks), message.out_of_band
            return (message.head,)
        return ()

    def _pop(self, queue: _Queue) -> _Waiting:
        message = queue.messages.popleft()
        queue.bulk -= message.bulk
        queue.room.unpark_all()
        return message
