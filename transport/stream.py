"""One connection over any stream of bytes: who reads, who writes, and for how long anyone waits.

Tasks. Receiving is done by the task that calls `receive`. Sending is done by one sender task for each connection
(`run_sender`), which the carrier starts: in the nursery of the transport for a connection that was dialled, in the
connection's own nursery for one that was accepted (`serve`). It ends when the connection is closed or lost.

Out of band. After an upgrade (transport/upgrade.py) large chunks travel over a `BulkChannel`; all the rest, their
checksums too, stays on the stream, which decides alone whether the connection lives.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from peerd.transport import upgrade
from peerd.transport.bulk import BulkChannel, Fabric, patience_s
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.errors import Blameless, Encrypted, PeerError
from peerd.transport.framing import FrameReader, frames
from peerd.transport.ids import NodeId
from peerd.transport.messages import NO_TLS, BulkAnswer, BulkOffer, Chunk, Message
from peerd.transport.patience import GREETING_DEADLINE_S, PATIENCE_S, SLOWEST_RATE
from peerd.transport.sending.budget import Budget
from peerd.transport.sending.send_queue import OutOfBand, Piece, SendQueue
from peerd.transport.turn import Turn

YIELD_BYTES = 1 << 20  # moved without waiting before other tasks get a turn: with its checksum about 1 ms
YIELD_SEALED = 4 << 20  # the same where records are sealed or opened: below 2 ms, and a turn finds a cold cache
YIELD_UNCHECKED = 16 << 20  # the same of chunks without a checksum, even if all of them are copied
FLUSH_S = 1.0  # given to what is queued when a connection is closed
NEAR_S = 0.02  # a chunk beside the stream that comes so soon is waited for alone: 7 % less processor time over UCX
LATE_S = 0.5  # given to a chunk beside the stream when the stream has ended
STALLED_S = 1.0  # a peer that takes in nothing for so long has no turn of the budget's
PIECES_MAX = 64  # buffers in one call to the socket


class ByteStream(Protocol):
    """A connection that never waits by itself: it raises BlockingIOError, or ConnectionLost when it is gone."""

    name: str  # of the carrier
    host: str  # see `Connection`

    @property
    def checked(self) -> bool:
        """Whether chunks need a checksum: not where a seal tells of every change."""

    @property
    def bytes_sent(self) -> int:
        """Counted at the socket."""

    @property
    def bytes_received(self) -> int:
        """Counted at the socket."""

    @property
    def midway(self) -> bool:
        """Whether something has come that is of no use before the rest of it has."""

    def send_some(self, pieces: Sequence[Chunk]) -> int:
        """Send the beginning of what `pieces` are together; return how many bytes.

        It may raise BlockingIOError having sent some: what is given next must begin with the same bytes.
        """

    def receive_some(self, buffer: memoryview) -> int:
        """Fill the beginning of `buffer`; return how many bytes, 0 when the peer has closed.

        Raises PeerError for what nobody can have sent.
        """

    async def wait_sendable(self) -> None:
        """Wait until `send_some` may get somewhere."""

    async def wait_receivable(self, due: int = 1) -> None:
        """Wait until `receive_some` may get somewhere; so many bytes are to come at least, so it may wait for more."""

    def close(self) -> None:
        """Close at once; who waits gets ConnectionLost."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """What came of a handshake."""

    stream: ByteStream
    identity: NodeId  # of who is at the other end
    seal_bulk: Callable[[BulkChannel], BulkChannel]


ShakeHands = Callable[[ByteStream], Awaitable[Sealed]]
"""Seals a stream. Raises Refused, PeerError or ConnectionLost."""


class StreamConnection:
    """A `Connection` over a `ByteStream`."""

    def __init__(
        self,
        stream: ByteStream,
        remote: str,
        admitted: Callable[[], None] = lambda: None,
        fabrics: Sequence[Fabric] = (),
        shake_hands: ShakeHands | None = None,
        budget: Budget | None = None,
    ) -> None:
        """`fabrics`, the best first, may carry large chunks once the connection is upgraded.

        Where it is to `shake_hands`, nothing is sent or received before that. What goes over the stream waits for the
        `budget`.
        """
        self.identity: NodeId | None = None
        self.remote = remote
        self.host = stream.host
        self.admitted = False
        self.bytes_measured = 0
        self.on_bulk: Callable[[int], None] = _told_nobody
        self.upgrades_refused: Callable[[], Awaitable[str]] = _not_refused
        self._shake_hands = shake_hands
        self._seal_bulk: Callable[[BulkChannel], BulkChannel] | None = None
        self._bulk_sent = self._bulk_received = 0  # bytes, beside the stream
        self._count_admitted = admitted
        self._fabrics = fabrics
        self._channel: BulkChannel | None = None
        self._stream = stream
        self._send_queue = SendQueue(budget)
        self._budget = budget
        self._granted = 0  # bytes that the budget has let go, and that have not gone
        self._patience = trio.CancelScope()  # with the peer, while something is sent
        self._reader = FrameReader()
        self._lost: ConnectionLost | None = None
        self._waited_frame, self._waited_s = -1, 0.0  # how long was waited for the frame under way
        self._bulk_size, self._bulk_waited_s = 0, 0.0  # the same of the bulk message under way
        self._yield_bytes = YIELD_BYTES
        self._turn = Turn()  # of who receives
        self._waited = False  # for something since the last message

    def __repr__(self) -> str:
        return f"<StreamConnection to {self.remote} [{self.bytes_sent} B sent, {self.bytes_received} B received]>"

    @property
    def bytes_sent(self) -> int:
        """See `Connection.bytes_sent`."""
        return self._stream.bytes_sent + self._bulk_sent

    @property
    def bytes_received(self) -> int:
        """See `Connection.bytes_received`."""
        return self._stream.bytes_received + self._bulk_received

    @property
    def payload_limit(self) -> int:
        """Most bytes of chunks in one received message."""
        return self._reader.payload_limit

    @payload_limit.setter
    def payload_limit(self, limit: int) -> None:
        self._reader.payload_limit = limit

    @property
    def carrier(self) -> str:
        """What bulk that is sent from now on travels over."""
        return self._channel.name if self._channel is not None and self._send_queue.out_of_band else self._stream.name

    async def shake_hands(self) -> None:
        """See `Connection.shake_hands`."""
        try:
            await trio.lowlevel.checkpoint()
            if self._shake_hands is None:
                return
            with trio.fail_after(GREETING_DEADLINE_S):
                sealed = await self._shake_hands(self._stream)
        except trio.TooSlowError:
            self.drop(ConnectionLost(f"{self.remote}: closed, it was silent"))
            raise Blameless(f"{self.remote}: no handshake within {GREETING_DEADLINE_S:g} s") from None
        except BaseException:
            self.drop(ConnectionLost(f"{self.remote}: closed, no handshake"))
            raise
        self._stream, self.identity, self._seal_bulk = sealed.stream, sealed.identity, sealed.seal_bulk
        self._reader.checked = self._send_queue.checked = self._stream.checked
        self._yield_bytes = YIELD_SEALED
        self._shake_hands = None

    def admit(self) -> None:
        """See `Connection.admit`."""
        self.admitted = True
        self._count_admitted()

    async def send(self, message: Message) -> None:
        """Queue `message`; see `Connection.send`."""
        assert self._shake_hands is None, "not in the clear"
        await self._send_queue.put(message)

    async def flushed(self) -> None:
        """See `Connection.flushed`."""
        await self._send_queue.flushed()
        if self._channel is not None:
            await self._channel.drained()

    async def receive(self) -> Message:
        """Return the next message; see `Connection.receive`."""
        while True:
            message = await self.receive_any()
            if isinstance(message, BulkOffer):
                why_not = await self.upgrades_refused()
                answer = upgrade.refusal(why_not) if why_not else upgrade.answer(self, self._fabrics, message)
                await self.send(answer)
            elif not isinstance(message, BulkAnswer):
                return message
            elif self._channel is not None:
                self.enable_send()  # the dialler has tried it

    async def upgrade(self) -> str:
        """See `Connection.upgrade`."""
        await trio.lowlevel.checkpoint()
        return await upgrade.ask(self, self._fabrics)

    def enable_receive(self, channel: BulkChannel) -> None:
        """Let chunks come over `channel` from now on."""
        assert self._channel is None, "one channel a connection"
        if channel.checked and self._seal_bulk is not None:  # what needs no checksum is seen by nobody either
            channel = self._seal_bulk(channel)
        self._channel = channel
        self._reader.out_of_band, self._reader.out_of_band_checked = True, channel.checked

    def enable_send(self) -> None:
        """Let large chunks go over the channel from now on; the connection lives no longer than it."""
        assert self._channel is not None, "there is a channel"
        if self._channel.lost is not None:
            self.drop(self._channel.lost)
        self._channel.on_close = self.drop
        self._send_queue.out_of_band, self._send_queue.out_of_band_checked = True, self._channel.checked

    @property
    def has_channel(self) -> bool:
        """Whether chunks may come over a channel."""
        return self._channel is not None

    async def receive_any(self) -> Message:
        """Return the next message, those between the two ends of the connection too."""
        assert self._shake_hands is None, "not in the clear"
        if not self._waited:
            await trio.lowlevel.checkpoint()
            self._turn.begins()
        self._waited = False
        if self._lost is not None:
            raise ConnectionLost(*self._lost.args)
        try:
            while (message := self._next_message()) is None:
                if self._channel is not None and (announced := self._reader.take_announced()):
                    self._channel.expect(announced)
                if self._channel is not None and self._reader.out_of_band_due:
                    await self._fill_out_of_band(self._channel)
                else:
                    await self._fill()
        except PeerError as error:
            if isinstance(error, Encrypted):  # it understands no message, but this
                with suppress(BlockingIOError, ConnectionLost):
                    self._stream.send_some([b"".join(map(bytes, frames(NO_TLS)))])
            self.drop(ConnectionLost(f"{self.remote}: closed, it broke the rules"))
            raise type(error)(f"{self.remote}: {error}") from None
        except MemoryError:  # a limit on this process: what the peer sends is no larger than it may be
            self.drop(ConnectionLost(f"{self.remote}: closed, no memory for what it sends"))
            raise Blameless(f"{self.remote}: this node has no memory for what it sends") from None
        except ConnectionLost as lost:
            raise self._dropped(lost) from None
        return message

    def _next_message(self) -> Message | None:
        message = self._reader.next_message()
        if (size := self._reader.bulk_size) != self._bulk_size:
            self._bulk_size, self._bulk_waited_s = size, 0.0
            self.on_bulk(size)
        return message

    async def aclose(self) -> None:
        """Close, after flushing for a second at most; when cancelled, at once."""
        try:
            with trio.move_on_after(FLUSH_S):
                await trio.lowlevel.checkpoint()
                await self.flushed()
        finally:
            self.drop(ConnectionLost(f"{self.remote}: closed here"))

    async def run_sender(self) -> None:
        """Send what is queued, until the connection is closed or lost. The carrier's business."""
        try:
            while pieces := await self._send_queue.take():
                with trio.fail_after(_patience_s(sum(map(len, pieces)))) as self._patience:
                    await self._write(pieces)
        except trio.TooSlowError:
            self.drop(ConnectionLost(f"{self.remote}: closed, it takes in less than {SLOWEST_RATE} bytes a second"))
        except ConnectionLost as lost:
            # not closed: what the peer sent before it went, a Refuse perhaps, can still be received
            self._send_queue.close(ConnectionLost(*lost.args))  # without its traceback, which has the chunks
        except MemoryError:  # this task is the daemon's, and would end it
            self.drop(ConnectionLost(f"{self.remote}: closed, no memory to send"))
        except BaseException:
            self.drop(ConnectionLost(f"{self.remote}: closed here"))
            raise

    def drop(self, lost: ConnectionLost) -> None:
        """Close at once, losing what is queued; from now on `send` and `receive` raise the first `lost`."""
        self._dropped(lost)

    def _dropped(self, lost: ConnectionLost) -> ConnectionLost:
        lost = self._lost = self._lost or ConnectionLost(
            *lost.args
        )  # a traceback has the connection, and chunks of half a message
        self._send_queue.close(lost)
        self.on_bulk = _told_nobody  # it knows this connection: half a message would stay until that cycle is collected
        if self._channel is not None:
            self._channel.close(lost)
        self._stream.close()
        return ConnectionLost(*lost.args)

    async def _write(self, pieces: list[Piece]) -> None:
        ready: list[Chunk] = []  # for one write: what is beside the stream already needs no wake-up of its own
        out_of_band = 0
        for piece in pieces:
            if isinstance(piece, OutOfBand):
                assert self._channel is not None, "no chunk travels beside before the upgrade"
                if not self._channel.goes_ahead(len(piece)):
                    await self._write_stream(ready)
                    ready = []
                await self._channel.send(piece.chunk)
                self._bulk_sent += len(piece)
                out_of_band += len(piece)
            else:
                ready.append(piece)
        await self._write_stream(ready)
        if out_of_band >= YIELD_BYTES:  # it may have been copied
            await trio.lowlevel.checkpoint()

    async def _write_stream(self, pieces: list[Chunk]) -> None:
        first, turn = 0, Turn()
        turn.begins()
        while first < len(pieces):
            batch = pieces[first : first + PIECES_MAX]
            if self._budget is not None:
                batch = await self._afford(self._budget, batch)
            try:
                sent = self._stream.send_some(batch)
            except BlockingIOError:
                await self._wait_sendable()
                turn.begins()
                continue
            self._granted = max(0, self._granted - sent)
            first = _advance(pieces, first, sent)
            await turn.moved(sent, self._yield_bytes)

    async def _wait_sendable(self) -> None:
        if self._budget is not None:
            with trio.move_on_after(STALLED_S):
                await self._stream.wait_sendable()
                return
            self._send_queue.give_turn()
        await self._stream.wait_sendable()

    async def _afford(self, budget: Budget, pieces: list[Chunk]) -> list[Chunk]:
        """The beginning of `pieces` that may go now, waiting for it; the peer is not blamed for that."""
        wanted = min(budget.piece, sum(map(len, pieces)))
        if self._granted < wanted:
            wait_s = budget.take(wanted - self._granted, trio.current_time())
            self._granted = wanted
            if wait_s:
                budget.waited_s += wait_s
                self._patience.deadline += wait_s
                await trio.sleep(wait_s)
        return _beginning(pieces, self._granted)

    async def _fill(self) -> None:
        """Receive some bytes; a wait within a message is limited, one between messages is not."""
        try:
            count = self._stream.receive_some(self._reader.buffer())
        except BlockingIOError:
            await self._wait_receivable()
            self._turn.begins()
            self._waited = True
            return
        if not count:
            where = " in the middle of a message" if self._midway else ""
            raise ConnectionLost(f"{self.remote}: closed by the peer{where}")
        self._reader.received(count)
        await self._turn.moved(count, self._yield_bytes)

    @property
    def _midway(self) -> bool:
        return self._reader.midway or self._stream.midway

    async def _wait_receivable(self) -> None:
        if not self._midway:
            await self._stream.wait_receivable()
            return
        wait = partial(self._stream.wait_receivable, self._reader.chunk_due or 1)
        await self._wait_midway(wait, _patience_s(self._reader.frame_size))

    async def _wait_midway(self, wait: Callable[[], Awaitable[None]], patience: float) -> None:
        # only waiting counts, so that a caller who comes back late does not blame the peer. Frame by frame, and for
        # all of a bulk message: a peer that brings each frame at the last moment would never end
        if self._waited_frame != self._reader.frames:
            self._waited_frame, self._waited_s = self._reader.frames, 0.0
        began = trio.current_time()
        try:
            left_s = patience - self._waited_s
            if self._bulk_size:
                left_s = min(left_s, _patience_s(self._bulk_size) - self._bulk_waited_s)
            with trio.fail_after(max(0.0, left_s)):
                await wait()
        except trio.TooSlowError:
            raise ConnectionLost(f"{self.remote}: closed, it stopped in the middle of a message") from None
        finally:
            waited_s = trio.current_time() - began
            self._waited_s += waited_s
            self._bulk_waited_s += waited_s

    async def _fill_out_of_band(self, channel: BulkChannel) -> None:
        """Receive the chunk that is due beside the stream."""
        if not channel.ready:
            with trio.move_on_after(NEAR_S):
                await channel.arrival()
        if not channel.ready:
            await self._wait_midway(partial(self._wait_out_of_band, channel), patience_s(self._reader.out_of_band_due))
        chunk = channel.take()
        self._bulk_received += len(chunk)
        self._reader.received_out_of_band(chunk)
        await self._turn.moved(len(chunk), YIELD_BYTES if channel.checked else YIELD_UNCHECKED)

    async def _wait_out_of_band(self, channel: BulkChannel) -> None:
        """Wait for a chunk that is late, and look meanwhile whether the stream lives."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_ahead, channel)
            await channel.arrival()
            nursery.cancel_scope.cancel()

    async def _read_ahead(self, channel: BulkChannel) -> None:
        """Keep what comes in the stream meanwhile, as far as there is room; when it has ended, so has the channel."""
        try:
            while len(buffer := self._reader.buffer()):
                try:
                    count = self._stream.receive_some(buffer)
                except BlockingIOError:
                    await self._stream.wait_receivable()
                    continue
                if not count:
                    raise ConnectionLost(f"{self.remote}: closed by the peer in the middle of a message")
                self._reader.received(count)
        except ConnectionLost as lost:
            await trio.sleep(LATE_S)  # the other carrier may be slower
            channel.close(ConnectionLost(*lost.args))
        except PeerError as error:
            channel.close(ConnectionLost(f"{self.remote}: {error}"))


async def serve(connection: StreamConnection, accepted: Callable[[Connection], Awaitable[None]]) -> None:
    """Run `accepted` over a connection from its first byte to its last; what the peer did wrong ends here."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run_sender)
            try:
                await accepted(connection)
            finally:
                await connection.aclose()
    except* (PeerError, ConnectionLost):
        pass  # `accepted` has logged what is worth it; this connection is closed, the daemon goes on


def _told_nobody(_: int) -> None:
    """Stand in for `StreamConnection.on_bulk`."""


async def _not_refused() -> str:
    """Stand in for `StreamConnection.upgrades_refused`."""
    return ""


def _patience_s(size: int) -> float:
    return PATIENCE_S + size / SLOWEST_RATE


def _beginning(pieces: list[Chunk], count: int) -> list[Chunk]:
    """The first so many bytes of them."""
    beginning: list[Chunk] = []
    for piece in pieces:
        if count <= 0:
            break
        beginning.append(piece if len(piece) <= count else memoryview(piece)[:count])
        count -= len(piece)
    return beginning


def _advance(pieces: list[Chunk], first: int, sent: int) -> int:
    """Return the first piece that is not yet sent whole, cut to what is left of it."""
    while sent:
        piece = pieces[first]
        if sent < len(piece):
            pieces[first] = memoryview(piece)[sent:]
            return first
        sent -= len(piece)
        first += 1
    return first
