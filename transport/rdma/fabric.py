"""Connections with their large chunks over UCX: RDMA where there is InfiniBand or RoCE, else what UCX has in its place.

How this works. A connection over TCP (transport/stream.py) is upgraded after its greeting (transport/upgrade.py). One
`UcxFabric` a node owns UCX's only worker and the one task that moves it (`run`): progress, look which operations
have ended, arm, wait for the event descriptor. A channel is two queues of tagged messages, one chunk each, between the
staging memory of both ends; the receiver posts the next ones as soon as it has read which will come.

What UCX has under way belongs to UCX. An operation keeps its slot until UCX says that it has ended, even when its
channel is closed, its peer dead and nobody waits: a receive is cancelled, and its end awaited, before its memory is
used again. UCX tells nothing of a peer that stands still, so each channel has a deadline, like TCP's user timeout.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import trio

from peerd.transport import wire
from peerd.transport.bulk import UNDER_WAY, BulkRefused, nothing, patience_s
from peerd.transport.connection import ConnectionLost
from peerd.transport.messages import Chunk
from peerd.transport.rdma import ucx
from peerd.transport.rdma.peers import COUNTS, TAG_BITS, Arrivals, Endpoint, Endpoints
from peerd.transport.rdma.staging import ROOM_BYTES, Slot, Staging

WINDOW_BYTES = UNDER_WAY * (wire.CHUNK_MAX + ROOM_BYTES)  # in one direction of a channel
TURN_S = 0.004  # of moving before other tasks get a turn
IDLE_CALLS = 16  # that move nothing before waiting: 30 us, in which the other end fills or empties a socket's buffer
TRIAL_BYTES = 64 << 10
ADDRESS_BYTES_MIN, ADDRESS_BYTES_MAX = 16, 16 << 10  # a worker's own id, flags and name, and 100 bytes a port
_TRIAL = COUNTS - 1  # counts no chunk
END_S = 1.0  # for what is under way when the node ends
_unended: list[UcxFabric] = []  # a peer may still write into their memory, so they keep it, as long as the process


@dataclass(slots=True, eq=False)
class _Operation:
    """Something that UCX has under way."""

    request: Any  # None: it ended as it was posted
    channel: UcxChannel
    slot: Slot | None  # None: there is none to free, or no more
    memory: Any  # where it reads or writes, kept alive
    size: int
    queue: deque[_Operation] | None  # None for a trial
    sends: bool = False
    ended: bool = False

    def status(self, context: ucx.Context) -> int:
        """IN_PROGRESS, OK or an error; TRUNCATED: a receive got less or more than it was posted for."""
        if self.request is None:
            return ucx.OK
        if self.sends:
            return context.status(self.request)
        status, size = context.received(self.request)
        return ucx.TRUNCATED if status == ucx.OK and size != self.size else status


class UcxFabric:
    """UCX's worker, its channels, and what is under way."""

    outside = "{} is in none of rdma_subnets"

    def __init__(
        self, library: ucx.Library, transports: str, without_rdma: bool = False, subnets: Iterable[str] = ()
    ) -> None:
        """`transports` as in UCX_TLS; a channel that is not RDMA is refused, unless `without_rdma`.

        With `subnets`, such as 10.1.0.0/16, only peers within have channels. To be called under trio. Raises UcxError.
        """
        self._subnets = [ipaddress.ip_network(subnet) for subnet in subnets]
        self.library = library
        self.version = f"UCX {library.version[0]}.{library.version[1]}"
        self.context = ucx.Context(library, transports)
        self.endpoints = Endpoints(self.context, without_rdma)
        self.arrivals = Arrivals(self.context, 2 * WINDOW_BYTES)
        self._address = self.context.address()
        self._token = trio.lowlevel.current_trio_token()
        self._channels: dict[int, UcxChannel] = {}  # by number
        self._pending: dict[_Operation, None] = {}  # in order
        self._wait: trio.CancelScope | None = None
        self._posted = False
        self.refuses = ""

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Move UCX until cancelled or it fails, then end it; connections that come after are not upgraded."""
        try:
            task_status.started()
            while True:
                self._posted = False
                more = self._progress()
                self._settle()
                self._end_overdue(trio.current_time())
                if more or self._posted or not self.context.arm():
                    await trio.lowlevel.checkpoint()
                    continue
                deadline = min((channel.deadline for channel in self._channels.values()), default=float("inf"))
                with trio.CancelScope(deadline=deadline) as self._wait:
                    await trio.lowlevel.wait_readable(self.context.event_fd)
                self._wait = None
        except ucx.UcxError as error:
            self.refuses = f"UCX failed here: {error}"
        finally:
            self._end()

    def _progress(self) -> bool:
        """Move what can be moved, for about `TURN_S`; say whether something still moved in the end."""
        until = perf_counter() + TURN_S
        idle = 0
        while idle < IDLE_CALLS and perf_counter() < until:
            idle = 0 if self.context.progress() else idle + 1
        return not idle

    def trusts(self, host: str) -> bool:
        """See `Fabric.trusts`."""
        address = ipaddress.ip_address(host.partition("%")[0]) if self._subnets else None
        address = getattr(address, "ipv4_mapped", None) or address  # as a socket of both families shows it
        return address is None or any(address in subnet for subnet in self._subnets)

    @contextmanager
    def reserved(self) -> Iterator[tuple[int, bytes]]:
        """See `Fabric.reserved`."""
        number = secrets.randbits(64 - TAG_BITS)
        self.arrivals.keep(number)
        try:
            yield number, self._address
        finally:
            if number not in self._channels:
                self.arrivals.forget(number)
                self.wake()

    def open(self, remote: str, here: int, there: int, address: bytes) -> UcxChannel:
        """See `Fabric.open`."""
        if not 0 <= there < 1 << 64 - TAG_BITS:
            raise BulkRefused("no channel has such a number")
        if not ADDRESS_BYTES_MIN <= len(address) <= ADDRESS_BYTES_MAX:  # UCX itself believes what is in it
            raise BulkRefused(f"no worker has an address of {len(address)} bytes")
        if self.refuses:
            raise BulkRefused(self.refuses)
        try:
            channel = self._channels[here] = UcxChannel(self, self.endpoints.to(address), remote, here, there)
            channel.try_out()
        except ucx.UcxError as error:
            raise BulkRefused(str(error)) from None
        return channel

    # ------------------------------------------------------------------------------------------------ operations

    def post(self, operation: _Operation) -> None:
        """Watch an operation that was posted."""
        self._pending[operation] = None
        if self._wait is None or self._posted:  # `run` looks again anyway
            self._posted = True
        elif operation.status(self.context) != ucx.IN_PROGRESS or self.context.progress() or not self.context.arm():
            self.wake()  # a receive may have found its message there: no event tells of it
        else:
            self._wait.deadline = min(self._wait.deadline, operation.channel.deadline)

    def wake(self) -> None:
        """Have `run` look again."""
        self._posted = True
        if self._wait is not None:
            self._wait.cancel()

    def wake_from_any_thread(self) -> None:
        """Have `run` look again soon."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self.wake, idempotent=True)

    def _sweep(self) -> None:
        for channel in list(self._channels.values()):
            channel.staging.sweep()
            if channel.over:
                del self._channels[channel.number]
        self.endpoints.sweep()

    def _settle(self) -> None:
        for operation in list(self._pending):
            status = operation.status(self.context)
            if status == ucx.IN_PROGRESS:
                continue
            if operation.request is not None:
                self.context.free(operation.request)
            del self._pending[operation]
            operation.ended = True
            operation.channel.on_ended(operation, status)
        for number in self.arrivals.gather():
            if (channel := self._channels.get(number)) is not None:
                channel.close(ConnectionLost(f"{channel.remote}: closed, more chunks came than it may send"))
        self._sweep()

    def _end_overdue(self, now: float) -> None:
        for channel in [channel for channel in self._channels.values() if channel.deadline <= now]:
            channel.close(ConnectionLost(f"{channel.remote}: closed, it takes nothing in over {channel.name}"))

    def fail(self, endpoint: Endpoint, why: str) -> None:
        """End all channels over an endpoint."""
        self.endpoints.fail(endpoint)
        for channel in [channel for channel in self._channels.values() if channel.endpoint is endpoint]:
            channel.close(ConnectionLost(f"{channel.remote}: connection lost ({channel.name}: {why})"))

    def _end(self) -> None:
        self.refuses = self.refuses or "this node is ending"
        for channel in list(self._channels.values()):
            channel.close(ConnectionLost(f"{channel.remote}: closed here"))
        self.arrivals.close()
        deadline = trio.current_time() + END_S
        while (self._pending or self.arrivals.throwing) and trio.current_time() < deadline:
            self.context.progress()
            self._settle()
        if self._pending or self.arrivals.throwing:
            _unended.append(self)
            return
        for channel in self._channels.values():
            channel.staging.close(whole=True)
        self.context.close()


class UcxChannel:
    """A `BulkChannel` over UCX."""

    checked = True

    def __init__(self, fabric: UcxFabric, endpoint: Endpoint, remote: str, here: int, there: int) -> None:
        rdma = ucx.is_rdma(endpoint.ways)
        self.name = f"{'rdma' if rdma else 'ucx'} {endpoint.ways[0]}"
        self.number = here
        self.endpoint = endpoint
        self.remote = remote
        self.on_close: Callable[[ConnectionLost], None] = nothing
        self.staging = Staging(fabric.context, fabric.wake_from_any_thread)
        self.staged = rdma  # chunks are copied on their way out: over RDMA a peer gets a key to where they lie
        self._fabric, self._context = fabric, fabric.context
        self._there = there << TAG_BITS
        self.lost: ConnectionLost | None = None
        self._trials = 2  # that have not ended: one out, one in
        self._moved = trio.lowlevel.ParkingLot()
        self._sending: deque[_Operation] = deque()
        self._receiving: deque[_Operation] = deque()
        self._expected: deque[int] = deque()  # sizes, not yet posted
        self._sent = self._received = 0  # chunks
        self._under_way: set[_Operation] = set()
        self._heard = trio.current_time()  # when a send has last ended, or the first of some begun

    def __repr__(self) -> str:
        return f"<UcxChannel {self.name} to {self.remote} [{len(self._sending)} out, {len(self._receiving)} in]>"

    @property
    def over(self) -> bool:
        """Whether nothing is left of it."""
        return self.lost is not None and not self._under_way and not self.staging.slots

    @property
    def deadline(self) -> float:
        """When the peer has stood still for too long."""
        if self.lost is not None or not self._sending:
            return float("inf")
        return self._heard + patience_s(_bytes(self._sending))

    # ---------------------------------------------------------------------------------------------------- receiving

    @property
    def ready(self) -> bool:
        """See `BulkChannel.ready`."""
        return self.lost is not None or bool(self._receiving and self._receiving[0].ended)

    def goes_ahead(self, size: int) -> bool:
        """See `BulkChannel.goes_ahead`: it waits at the sender until a receive is posted."""
        return not self._sending or _bytes(self._sending) + size <= WINDOW_BYTES

    def expect(self, sizes: list[int]) -> None:
        """See `BulkChannel.expect`."""
        self._expected += sizes
        self._post_receives()

    async def arrival(self) -> None:
        """See `BulkChannel.arrival`."""
        while not self.ready:
            await self._moved.park()

    def take(self) -> memoryview:
        """See `BulkChannel.take`."""
        self._check_open()
        operation = self._receiving.popleft()
        assert operation.ended, "taken before it is ready"
        assert operation.slot is not None, "a receive has a slot"
        chunk = self.staging.view(operation.slot, operation.size)
        self._post_receives()
        return chunk

    def _post_receives(self) -> None:
        while self.lost is None and self._expected:
            if self._receiving and _bytes(self._receiving) + self._expected[0] > WINDOW_BYTES:
                return
            with self._losing():
                self._receive(self._expected.popleft(), self._received, self._receiving)
                self._received = (self._received + 1) % _TRIAL

    def _receive(self, size: int, count: int, queue: deque[_Operation] | None) -> None:
        slot = self._lend(size)
        with self._freeing(slot):
            request = self._fabric.arrivals.receive(self.number, count, slot.memory, size)
        self._watch(_Operation(request, self, slot, slot.memory, size, queue))

    # ------------------------------------------------------------------------------------------------------ sending

    async def send(self, chunk: Chunk) -> None:
        """See `BulkChannel.send`."""
        while self.lost is None and not self.goes_ahead(len(chunk)):
            await self._moved.park()
        self._check_open()
        with self._losing():
            if not self._sending:
                self._heard = trio.current_time()
            self._send(chunk, self._sent, self._sending)
            self._sent = (self._sent + 1) % _TRIAL
        self._check_open()

    async def drained(self) -> None:
        """See `BulkChannel.drained`."""
        while self.lost is None and self._sending:
            await self._moved.park()

    def _send(self, chunk: Chunk, count: int, queue: deque[_Operation] | None) -> None:
        ffi, size, slot = self._context.library.ffi, len(chunk), None
        # an array between: Python before 3.12.7 crashes when it collects a memoryview that cffi refers to (gh-77894)
        source = np.frombuffer(chunk, np.uint8)
        memory = ffi.from_buffer(source)
        if self.staged:
            slot = self._lend(size)
            # numpy copies without the GIL, so that the maths in other threads goes on
            np.copyto(np.frombuffer(ffi.buffer(slot.memory, size), np.uint8), source)
            memory = slot.memory
        with self._freeing(slot):
            request = self._context.send(self.endpoint.handle, memory, size, self._there | count)
        self.endpoint.sends += 1
        self._watch(_Operation(request, self, slot, memory, size, queue, sends=True))

    # ------------------------------------------------------------------------------------------------------ its life

    def try_out(self) -> None:
        """Send something and expect something. Raises UcxError, and is closed then."""
        try:
            self._receive(TRIAL_BYTES, _TRIAL, None)
            self._send(bytes(TRIAL_BYTES), _TRIAL, None)
        except ucx.UcxError as error:
            self._lose(error)
            raise

    async def tried(self) -> None:
        """See `BulkChannel.tried`."""
        while self.lost is None and self._trials:
            await self._moved.park()
        self._check_open()

    def close(self, lost: ConnectionLost) -> None:
        """See `BulkChannel.close`."""
        if self.lost is not None:
            return
        self.lost = lost
        for operation in self._receiving:
            if operation.ended:
                self._free(operation)
        for operation in self._under_way:  # sends end when the peer throws them away, or with the endpoint
            if not operation.sends:
                self._context.cancel(operation.request)
        for queue in (self._expected, self._receiving, self._sending):
            queue.clear()
        self._fabric.arrivals.forget(self.number)
        self._fabric.wake()
        self.staging.close()
        self._moved.unpark_all()
        on_close, self.on_close = self.on_close, nothing  # of the connection, whose chunks keep slots
        on_close(lost)

    def on_ended(self, operation: _Operation, status: int) -> None:
        """Take note that UCX has ended an operation, so that its memory may be used again."""
        self._under_way.remove(operation)
        self.endpoint.sends -= operation.sends
        kept = operation.queue is self._receiving and self.lost is None and status == ucx.OK
        if not kept:
            self._free(operation)
        if status == ucx.TRUNCATED and not operation.sends:
            self.close(ConnectionLost(f"{self.remote}: closed, a chunk came with another size than was announced"))
        elif status != ucx.OK and operation.sends:
            self._fabric.fail(self.endpoint, str(self._context.library.error(status)))
        elif status != ucx.OK:
            self._lose(self._context.library.error(status))
        elif operation.queue is None:
            self._trials -= 1
        elif operation.queue is self._sending and self.lost is None:
            self._sending.remove(operation)
            self._heard = trio.current_time()
        self._moved.unpark_all()

    def _free(self, operation: _Operation) -> None:
        slot, operation.slot = operation.slot, None
        if slot is not None:
            self.staging.free(slot)

    def _watch(self, operation: _Operation) -> None:
        self._under_way.add(operation)
        if operation.queue is not None:
            operation.queue.append(operation)
        self._fabric.post(operation)

    def _check_open(self) -> None:
        if self.lost is not None:
            raise ConnectionLost(*self.lost.args)

    def _lend(self, size: int) -> Slot:
        try:
            return self.staging.lend(size)
        except ucx.UcxError as error:  # a trial is smaller: without this the next channel would break as soon
            self._fabric.refuses = str(error)
            raise

    @contextmanager
    def _freeing(self, slot: Slot | None) -> Iterator[None]:
        """Take the slot back of an operation that UCX refuses."""
        try:
            yield
        except ucx.UcxError:
            if slot is not None:
                self.staging.free(slot)
            raise

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Close when UCX refuses."""
        try:
            yield
        except ucx.UcxError as error:
            self._lose(error)

    def _lose(self, error: ucx.UcxError) -> None:
        """Close because of what UCX says, with all others over a broken endpoint."""
        if error.broken:
            self._fabric.fail(self.endpoint, str(error))
        else:
            self.close(ConnectionLost(f"{self.remote}: connection lost ({self.name}: {error})"))


def _bytes(operations: deque[_Operation]) -> int:
    return sum(operation.size for operation in operations)
