"""What can go wrong in a memory network, on purpose: cuts, resets after so many bytes, lost datagrams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio
import trio.testing
from connection_ends import met

from peerd.transport import patience
from peerd.transport.connection import Connection, ConnectionLost
from peerd.transport.framing import frames
from peerd.transport.memory import MemoryNetwork
from peerd.transport.messages import LinkClosed, Message, ModelSnapshot, Nack
from peerd.transport.stream import StreamConnection

pytestmark = pytest.mark.trio(clock="autojump")

BULK = ModelSnapshot(1, "float32", (bytes(30_000), bytes(30_000)))


@asynccontextmanager
async def linked(seed: int = 0) -> AsyncIterator[tuple[MemoryNetwork, StreamConnection, StreamConnection]]:
    """Yield a network of hosts a and b, and both ends of a connection between them."""
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery, Random(seed))
        async with met(network.transport("a"), network.transport("b"), ("b", 1)) as (near, far):
            yield network, near, far
        nursery.cancel_scope.cancel()


async def test_a_cut_breaks_links_and_forbids_new_ones_until_healed() -> None:
    async with linked() as (network, near, far):
        network.cut("b", "a")
        for use in (near.receive, far.receive):
            with pytest.raises(ConnectionLost, match="connection reset"):
                await use()
        with pytest.raises(ConnectionLost, match="cannot reach b:1: no route to host"):
            await network.transport("a").dial(("b", 1))
        network.heal("a", "b")
        again = await network.transport("a").dial(("b", 1))
        await again.aclose()


async def receive_until_lost(connection: Connection) -> list[Message]:
    found = []
    try:
        while True:
            found.append(await connection.receive())
    except ConnectionLost:
        return found


@pytest.mark.parametrize("count", [1, 31, 32, 33, 30_100, 60_100])
async def test_a_reset_after_any_byte_loses_the_message_whole(count: int) -> None:
    async with linked() as (network, near, far):
        await near.send(LinkClosed(1))
        assert await far.receive() == LinkClosed(1)
        network.reset("a", "b", after_bytes=count)
        await near.send(BULK)
        assert await receive_until_lost(far) == []
        assert far.bytes_received == len(b"".join(frames(LinkClosed(1)))) + count
        with pytest.raises(ConnectionLost):
            await near.receive()


async def test_a_stopped_reader_is_given_up_in_virtual_time() -> None:
    async with linked() as (_, near, far):
        await near.send(ModelSnapshot(1, "float32", (bytes(4 << 20),)))
        began = trio.current_time()
        with pytest.raises(ConnectionLost):
            await near.receive()
        waited = trio.current_time() - began
        assert waited == pytest.approx(patience.PATIENCE_S + (4 << 20) / patience.SLOWEST_RATE, rel=0.01)
        far.payload_limit = 1 << 30
        assert await receive_until_lost(far) == []


async def test_no_memory_to_send_with_ends_that_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What seals a chunk takes some; the task that sends is in the daemon's own nursery."""

    def no_memory(_: object) -> int:
        raise MemoryError

    async with linked() as (network, near, far):
        monkeypatch.setattr(near._stream, "send_some", no_memory)
        await near.send(BULK)
        with pytest.raises(ConnectionLost, match="b:1: closed, no memory to send"):
            await near.receive()
        assert await receive_until_lost(far) == []
        again = await network.transport("a").dial(("b", 1))
        await again.aclose()


async def test_a_peer_that_stops_in_the_middle_is_given_up() -> None:
    async with linked() as (_, near, far):
        near._stream.send_some([b"".join(frames(LinkClosed(1)))[:20]])
        began = trio.current_time()
        for _ in range(3):  # coming back often does not help the peer
            with trio.move_on_after(4):
                with pytest.raises(ConnectionLost, match="stopped in the middle"):
                    await far.receive()
        assert trio.current_time() - began == pytest.approx(patience.PATIENCE_S, rel=0.01)


async def test_the_seed_decides_which_datagrams_are_lost() -> None:
    async def arrived(seed: int) -> list[int]:
        async with trio.open_nursery() as nursery:
            network = MemoryNetwork(nursery, Random(seed))
            network.datagram_loss = 0.5
            one, other = await network.bind(("a", 0)), await network.bind(("b", 7))
            for seq in range(40):
                await one.send(("b", 7), Nack(seq, "a"))
            found: list[int] = []
            with trio.move_on_after(1):
                while True:
                    message, _ = await other.receive()
                    assert isinstance(message, Nack)
                    found.append(message.seq)
            return found

    first = await arrived(1)
    assert 10 < len(first) < 30
    assert await arrived(1) == first
    assert await arrived(2) != first


async def test_a_full_inbox_loses_datagrams() -> None:
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        one, other = await network.bind(("a", 0)), await network.bind(("b", 7))
        for seq in range(2000):
            await one.send(other.address, Nack(seq, "a"))
        assert (await other.receive())[0] == Nack(0, "a")
        assert other._inbox.statistics().current_buffer_used < 1100


async def test_a_link_nobody_accepts_ends_with_the_listener() -> None:
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        address, connections = network.open_listener(("b", 1))
        near = await network.transport("a").dial(address)
        connections.receive_nowait().drop(ConnectionLost("gone"))
        with pytest.raises(ConnectionLost, match="closed by the peer"):
            await near.receive()
