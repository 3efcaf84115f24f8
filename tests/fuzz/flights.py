"""A handshake between two ends in memory, and a hand that touches what they say to each other."""

from __future__ import annotations

import types
from collections.abc import Generator, Sequence

from peerd.transport.connection import ConnectionLost
from peerd.transport.errors import PeerError
from peerd.transport.messages import Chunk
from peerd.transport.secure.credentials import Credentials
from peerd.transport.secure.handshake import shake_hands

FLIGHT_BYTES = 2048  # more than any end says


class Flight:
    """One end of a handshake, a stream under it, and the touches on what it says: how, where (2 bytes), with what."""

    name, host, checked, midway = "flight", "", True, False
    bytes_sent = bytes_received = 0

    def __init__(self, touches: list[bytes]) -> None:
        self.identity: str | None = None
        self.over = False
        self._touches = touches
        self._comes = bytearray()
        self._sent = 0

    @classmethod
    def between(cls, dialler: Credentials, acceptor: Credentials, touches: list[bytes]) -> list[Flight]:
        """Two, until both are done, or wait for each other."""
        ends = [cls([touch for touch in touches if touch[0] % 2 == number]) for number in range(2)]
        ends[0]._other, ends[1]._other = reversed(ends)
        tasks = [end._shake(who, dialled=end is ends[0]) for end, who in zip(ends, (dialler, acceptor), strict=True)]
        while not all(end.over for end in ends):
            before = [end._sent for end in ends]
            for end, task in zip(ends, tasks, strict=True):
                if not end.over:
                    try:
                        task.send(None)
                    except StopIteration:
                        end.over = True
            if before == [end._sent for end in ends]:
                for end in ends:
                    end._ended = True
        return ends

    _other: Flight
    _ended = False

    async def _shake(self, credentials: Credentials, *, dialled: bool) -> None:
        try:
            sealed = await shake_hands(self, "the other end", credentials, dialled=dialled)
            self.identity = sealed.identity
        except (PeerError, ConnectionLost):
            pass

    def send_some(self, pieces: Sequence[Chunk]) -> int:
        said = bytearray(b"".join(pieces))
        begins, self._sent = self._sent, self._sent + len(said)
        for touch in self._touches:
            at = int.from_bytes(touch[1:3], "big") - begins
            if 0 <= at < len(said):
                said[at] ^= touch[3] or 1
                if touch[0] == 2:
                    del said[at:]
        self._other._comes += said
        return self._sent - begins

    def receive_some(self, buffer: memoryview) -> int:
        if not self._comes and not (self._ended or self._other.over):
            raise BlockingIOError
        count = min(len(buffer), len(self._comes))
        buffer[:count] = self._comes[:count]
        del self._comes[:count]
        return count

    async def wait_sendable(self) -> None:
        raise AssertionError

    async def wait_receivable(self, due: int = 1) -> None:
        await _turn()

    def close(self) -> None:
        raise AssertionError


@types.coroutine
def _turn() -> Generator[None, None, None]:
    yield
