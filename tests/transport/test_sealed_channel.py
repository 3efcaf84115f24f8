"""Chunks beside a sealed connection: whoever carries them sees and changes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import trio

from peerd.transport.bulk import nothing
from peerd.transport.connection import ConnectionLost
from peerd.transport.errors import PeerError
from peerd.transport.messages import Chunk
from peerd.transport.secure.records import OVERHEAD_BYTES, RECORD_MAX, SHARE_BYTES, Secrets
from peerd.transport.secure.sealed_channel import SealedChannel

SIZES = (65_536, 99_999, 1 << 20, (2 << 20) - 21, (2 << 20) - 20, RECORD_MAX)  # some in records that are lent
SHARES = b"d" * SHARE_BYTES, b"a" * SHARE_BYTES


class Carried:
    """A `BulkChannel` that keeps what it is given."""

    name, checked, ready = "carried", True, True
    lost: ConnectionLost | None = None
    on_close: Callable[[ConnectionLost], None] = staticmethod(nothing)

    def __init__(self) -> None:
        self.chunks: deque[bytes] = deque()
        self.expected: list[int] = []

    def goes_ahead(self, size: int) -> bool:
        return size < 1000

    def expect(self, sizes: list[int]) -> None:
        self.expected += sizes

    async def arrival(self) -> None:
        raise NotImplementedError

    def take(self) -> memoryview:
        return memoryview(self.chunks.popleft())

    async def send(self, chunk: Chunk) -> None:
        self.chunks.append(bytes(chunk))

    async def drained(self) -> None:
        raise NotImplementedError

    async def tried(self) -> None:
        raise NotImplementedError

    def close(self, lost: ConnectionLost) -> None:
        self.lost = lost


def both_ends(carried: Carried) -> tuple[SealedChannel, SealedChannel]:
    near, far = (SealedChannel(carried, Secrets.of("bulk", *SHARES, dialled=dialled)) for dialled in (True, False))
    return near, far


def test_chunks_come_as_they_were_sent_and_are_seen_by_nobody() -> None:
    carried = Carried()
    near, far = both_ends(carried)
    sent = [bytes([number]) * size for number, size in enumerate(SIZES)]
    far.expect([len(chunk) for chunk in sent])
    for chunk in sent:
        trio.run(near.send, chunk)
    assert [len(record) for record in carried.chunks] == carried.expected
    assert not any(chunk[:64] in record for chunk, record in zip(sent, carried.chunks, strict=True))
    assert [bytes(far.take()) for _ in sent] == sent
    assert (near.goes_ahead(1000 - OVERHEAD_BYTES - 1), near.goes_ahead(1000 - OVERHEAD_BYTES)) == (True, False)


@pytest.mark.parametrize("change", ["a bit", "the order", "the way"])
def test_what_was_changed_on_its_way_is_refused(change: str) -> None:
    carried = Carried()
    near, far = both_ends(carried)
    for chunk in (b"1" * 70_000, b"2" * 70_000):
        trio.run(near.send, chunk)
    if change == "the order":
        carried.chunks.rotate()
    if change == "a bit":
        carried.chunks[0] = carried.chunks[0][:-1] + bytes([carried.chunks[0][-1] ^ 1])
    with pytest.raises(PeerError, match="a seal is broken"):
        (near if change == "the way" else far).take()
