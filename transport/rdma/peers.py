"""What does UCX's worker know of its peers? One endpoint for each, and what came from them before it was awaited.

One endpoint to a peer's worker, however many channels lead there, for as long as it works. UCX pairs the endpoints of
two workers in the order in which they were made: with one for each channel, two nodes that dial at once get theirs
crossed, and the end of one channel takes another along. And closing by force while something is sent crashes UCX 1.22
over tcp. So a channel that ends leaves its endpoint as it is, and the other end throws away what nobody there awaits,
which ends the sends. What is kept of a peer's messages is bounded, too. That a peer has gone shows when its endpoint is
used: one that is not stays until the node ends.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from peerd.transport.rdma.staging import LEAST_BYTES
from peerd.transport.rdma.ucx import IN_PROGRESS, Context, UcxError, is_rdma

TAG_BITS = 24  # of a tag count the chunks of a channel, the others are its number
COUNTS = 1 << TAG_BITS


@dataclass(slots=True, eq=False)
class Endpoint:
    """The way to one peer's worker."""

    handle: Any
    guarded: bool  # whether UCX tells when it breaks
    address: bytes
    ways: list[str]
    sends: int = 0  # under way


class Endpoints:
    """One endpoint to each worker."""

    def __init__(self, context: Context, without_rdma: bool) -> None:
        """`without_rdma`: whatever else UCX has is taken, too."""
        self.without_rdma = without_rdma
        self._context = context
        self._working: dict[bytes, Endpoint] = {}
        self._failed: list[Endpoint] = []
        self._closing: list[Any] = []  # requests

    def to(self, address: bytes) -> Endpoint:
        """Return the endpoint to the worker at `address`. Raises UcxError."""
        endpoint = self._working.get(address)
        if endpoint is None:
            handle, guarded = self._connected(address)
            endpoint = self._working[address] = Endpoint(handle, guarded, address, [])
        if not endpoint.ways:
            endpoint.ways = self._context.channels(endpoint.handle)
        ways = endpoint.ways
        if not ways or not (is_rdma(ways) or self.without_rdma):
            raise UcxError(f"UCX would take {', '.join(ways) or 'nothing known'}, which is no RDMA")
        return endpoint

    def _connected(self, address: bytes) -> tuple[Any, bool]:
        try:
            return self._context.connect(address), True
        except UcxError:
            if not self.without_rdma:
                raise
        return self._context.connect(address, guarded=False), False

    def fail(self, endpoint: Endpoint) -> None:
        """Use it no more: there will be another, if its peer lives."""
        if self._working.get(endpoint.address) is endpoint:
            del self._working[endpoint.address]
            self._failed.append(endpoint)

    def sweep(self) -> None:
        """Close those that failed, as soon as nothing is sent over them."""
        for endpoint in [endpoint for endpoint in self._failed if not endpoint.sends]:
            self._failed.remove(endpoint)
            with suppress(UcxError):  # it has ended by itself
                if (request := self._context.disconnect(endpoint.handle, endpoint.guarded)) is not None:
                    self._closing.append(request)
        self._closing = in_progress(self._context, self._closing)


@dataclass(slots=True)
class _Kept:
    """What came for one channel."""

    messages: dict[int, tuple[Any, int]] = field(default_factory=dict)  # by count, each with its size
    bytes: int = 0


class Arrivals:
    """What came for channels that are open, or about to be, and is not awaited yet."""

    def __init__(self, context: Context, most_bytes: int) -> None:
        """`most_bytes` are kept for a channel, a short message counting as `LEAST_BYTES`."""
        self._context = context
        self._most_bytes = most_bytes
        self._kept: dict[int, _Kept] = {}  # by channel
        self._thrown: list[Any] = []  # requests

    @property
    def throwing(self) -> bool:
        """Whether UCX still has something under way that nobody awaits."""
        return bool(self._thrown)

    def keep(self, number: int) -> None:
        """Keep what comes for a channel from now on."""
        self._kept[number] = _Kept()

    def forget(self, number: int) -> None:
        """Throw away what came for a channel, and what is yet to come."""
        for message, _ in self._kept.pop(number, _Kept()).messages.values():
            self._throw(message)

    def close(self) -> None:
        """Forget all channels: UCX ends."""
        for number in list(self._kept):
            self.forget(number)

    def receive(self, number: int, count: int, memory: Any, size: int) -> Any:
        """Post a receive of the message with this count. Raises UcxError, also when it came with another size."""
        kept = self._kept[number]
        message, came = kept.messages.pop(count, (None, size))
        if message is not None:
            kept.bytes -= _weight(came)
        if came != size:
            self._throw(message)
            raise UcxError(f"a chunk of {came} bytes where {size} were announced")
        if message is None:
            return self._context.receive(memory, size, number << TAG_BITS | count)
        return self._context.receive_found(message, memory, size)

    def gather(self) -> list[int]:
        """Take what has come; return the channels for which more came than is kept, or something twice."""
        overrun = []
        while (found := self._context.find()) is not None:
            message, tag, size = found
            number, count = divmod(tag, COUNTS)
            kept = self._kept.get(number)
            if kept is None:
                self._throw(message)
            elif count in kept.messages or kept.bytes + _weight(size) > self._most_bytes:
                self._throw(message)
                overrun.append(number)
            else:
                kept.messages[count] = (message, size)
                kept.bytes += _weight(size)
        self._thrown = in_progress(self._context, self._thrown)
        return overrun

    def _throw(self, message: Any) -> None:
        with suppress(UcxError):  # it is longer than nothing
            if (request := self._context.receive_found(message, self._context.library.ffi.NULL, 0)) is not None:
                self._thrown.append(request)


def _weight(size: int) -> int:
    return max(size, LEAST_BYTES)


def in_progress(context: Context, requests: list[Any]) -> list[Any]:
    """Free those that have ended; return the others."""
    going = []
    for request in requests:
        if context.status(request) == IN_PROGRESS:
            going.append(request)
        else:
            context.free(request)
    return going
