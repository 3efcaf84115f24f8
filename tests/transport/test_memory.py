"""What can go wrong in a memory network, on purpose: cuts, resets after so many bytes, lost datagrams."""

from __future__ import annotations

from contextlib import asynccontextmanager
from random import Random

import pytest
import trio
import trio.testing

from peerd.messages import LinkClosed, ModelSnapshot, Nack
from peerd.transport import stream
from peerd.transport.framing import frames
from peerd.transport.link import LinkLost
from peerd.transport.memory import MemoryNetwork

BULK = ModelSnapshot(1, "float32", (bytes(30_000), bytes(30_000)))


@asynccontextmanager
async def linked(seed=0):
    """Yield a network of hosts a and b, and both ends of a link between them."""
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery, Random(seed))
        give, taken = trio.open_memory_channel(9)

        async def accepted(link):
            await give.send(link)
            await trio.sleep_forever()

        address = await nursery.start(network.transport("b").listen, ("b", 1), accepted)
        near = await network.transport("a").dial(address)
        yield network, near, await taken.receive()
        nursery.cancel_scope.cancel()


def virtually(main, *args):
    return trio.run(main, *args, clock=trio.testing.MockClock(autojump_threshold=0))


async def cut_and_heal():
    async with linked() as (network, near, far):
        network.cut("b", "a")
        for use in (near.receive, far.receive):
            with pytest.raises(LinkLost, match="connection reset"):
                await use()
        with pytest.raises(LinkLost, match="cannot reach b:1: no route to host"):
            await network.transport("a").dial(("b", 1))
        network.heal("a", "b")
        again = await network.transport("a").dial(("b", 1))
        await again.aclose()


def test_a_cut_breaks_links_and_forbids_new_ones_until_healed():
    virtually(cut_and_heal)


async def receive_until_lost(link):
    found = []
    try:
        while True:
            found.append(await link.receive())
    except LinkLost:
        return found


@pytest.mark.parametrize("count", [1, 31, 32, 33, 30_100, 60_100])
def test_a_reset_after_any_byte_loses_the_message_whole(count):
    async def main():
        async with linked() as (network, near, far):
            await near.send(LinkClosed(1))
            assert await far.receive() == LinkClosed(1)
            network.reset("a", "b", after_bytes=count)
            await near.send(BULK)
            assert await receive_until_lost(far) == []
            assert far.bytes_received == len(b"".join(frames(LinkClosed(1)))) + count
            with pytest.raises(LinkLost):
                await near.receive()

    virtually(main)


def test_a_stopped_reader_is_given_up_in_virtual_time():
    async def main():
        async with linked() as (_, near, far):
            await near.send(ModelSnapshot(1, "float32", (bytes(4 << 20),)))
            began = trio.current_time()
            with pytest.raises(LinkLost):
                await near.receive()
            waited = trio.current_time() - began
            assert waited == pytest.approx(stream.PATIENCE_S + (4 << 20) / stream.SLOWEST_RATE, rel=0.01)
            far.payload_limit = 1 << 30
            assert await receive_until_lost(far) == []

    virtually(main)


def test_a_peer_that_stops_in_the_middle_is_given_up():
    async def main():
        async with linked() as (_, near, far):
            near._stream.send_some([b"".join(frames(LinkClosed(1)))[:20]])
            began = trio.current_time()
            for _ in range(3):  # coming back often does not help the peer
                with trio.move_on_after(4):
                    with pytest.raises(LinkLost, match="stopped in the middle"):
                        await far.receive()
            assert trio.current_time() - began == pytest.approx(stream.PATIENCE_S, rel=0.01)

    virtually(main)


def test_the_seed_decides_which_datagrams_are_lost():
    async def arrived(seed):
        async with trio.open_nursery() as nursery:
            network = MemoryNetwork(nursery, Random(seed))
            network.datagram_loss = 0.5
            one, other = await network.bind(("a", 0)), await network.bind(("b", 7))
            for seq in range(40):
                await one.send(("b", 7), Nack(seq, "a"))
            found = []
            with trio.move_on_after(1):
                while True:
                    found.append((await other.receive())[0].seq)
            return found

    first = virtually(arrived, 1)
    assert 10 < len(first) < 30
    assert virtually(arrived, 1) == first
    assert virtually(arrived, 2) != first


def test_a_full_inbox_loses_datagrams():
    async def main():
        async with trio.open_nursery() as nursery:
            network = MemoryNetwork(nursery)
            one, other = await network.bind(("a", 0)), await network.bind(("b", 7))
            for seq in range(2000):
                await one.send(other.address, Nack(seq, "a"))
            assert (await other.receive())[0] == Nack(0, "a")
            assert other._inbox.statistics().current_buffer_used < 1100

    virtually(main)


def test_a_link_nobody_accepts_ends_with_the_listener():
    async def main():
        async with trio.open_nursery() as nursery:
            network = MemoryNetwork(nursery)
            address, links = network.open_listener(("b", 1))
            near = await network.transport("a").dial(address)
            links.receive_nowait().drop(LinkLost("gone"))
            with pytest.raises(LinkLost, match="closed by the peer"):
                await near.receive()

    virtually(main)
