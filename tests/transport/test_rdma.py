"""Links over UCX: peers that die or stand still, memory that is never used too early, and lanes that are refused."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import numpy as np
import pytest
import trio
from links import joined
from ucx_here import needs_ucx, upgrade

from peerd.effects import PeerError
from peerd.messages import BulkAnswer, BulkOffer, LinkClosed, ModelSnapshot
from peerd.transport import framing, lane, rdma, stream, ucx
from peerd.transport.link import LinkLost
from peerd.transport.rdma import WINDOW_BYTES, UcxFabric, UcxLane
from peerd.transport.staging import Staging
from peerd.transport.stream import StreamLink
from peerd.transport.tcp import TcpTransport
from peerd.transport.ucx_peers import TAG_BITS

MIB = 1 << 20
LOOPBACK = ("127.0.0.1", 0)
POISON = 0xA5
CANCELLED = -16
TRANSPORTS = {"tcp": "tcp", "shm": "posix,sysv,cma"}
over = pytest.mark.parametrize("transports", TRANSPORTS.values(), ids=TRANSPORTS)
pytestmark = needs_ucx


class Staged(UcxFabric):
    """Copies chunks on their way out, as over RDMA."""

    def open(self, *where):
        lane = super().open(*where)
        lane.staged = True
        return lane


def bulk(size: int, step: int = 0) -> ModelSnapshot:
    return ModelSnapshot(
        step, "c", tuple(bytes([step % 251]) * min(size, 4 * MIB) for _ in range(-(-size // (4 * MIB))))
    )


@asynccontextmanager
async def fabric_of(
    transports: str, kind: type[UcxFabric] = UcxFabric, subnets: Sequence[str] = ()
) -> Iterator[tuple[UcxFabric, TcpTransport]]:
    async with trio.open_nursery() as nursery:
        fabric = kind(ucx.load(), transports, without_rdma=True, subnets=subnets)
        await nursery.start(fabric.run)
        yield fabric, TcpTransport(nursery, fabric)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def linked(near_kit, far_kit):
    """Yield both ends of an upgraded link."""
    async with joined(near_kit[1], far_kit[1], 64 * MIB) as (near, far):
        await upgrade(near, far)
        yield near, far


def run(main: Callable, *args: object, limit_s: float = 60) -> None:
    async def limited() -> None:
        with trio.fail_after(limit_s):
            await main(*args)

    trio.run(limited)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.005)


async def nothing_is_left(*fabrics: UcxFabric) -> None:
    for fabric in fabrics:  # a lane goes with its last operation and its last registered slot
        await until(lambda fabric=fabric: not fabric._lanes)
        await until(lambda fabric=fabric: not fabric.arrivals.throwing and not fabric.endpoints._failed)
        assert not fabric.arrivals._kept


def registered(fabric: UcxFabric) -> int:
    return sum(lane.staging.slots for lane in fabric._lanes.values())


# --------------------------------------------------------------------------------- a peer in a process of its own

PEER = """
import sys, trio
from peerd.messages import ModelSnapshot
from peerd.transport import ucx
from peerd.transport.rdma import WINDOW_BYTES, UcxFabric
from peerd.transport.tcp import TcpTransport

async def main(transports, sends):
    async with trio.open_nursery() as nursery:
        fabric = UcxFabric(ucx.load(), transports, without_rdma=True)
        await nursery.start(fabric.run)

        async def accepted(link):
            link.admit()
            link.payload_limit = 64 << 20
            if not sends:
                while True:
                    await link.receive()
            async with trio.open_nursery() as both:
                both.start_soon(link.receive)
                while link.carrier == "tcp":
                    await trio.sleep(0.001)
                message = ModelSnapshot(0, "c", (bytes(4 << 20),) * 5)
                while True:
                    await link.send(message)

        address = await nursery.start(TcpTransport(nursery, fabric).listen, ("127.0.0.1", 0), accepted)
        print(address[1], flush=True)

trio.run(main, sys.argv[1], sys.argv[2] == "sends")
"""


@contextmanager
def peer(transports: str, does: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A node in another process that sends or receives bulk without end; yields it and its port."""
    process = subprocess.Popen([sys.executable, "-c", PEER, transports, does], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


async def exchange(link, does: str, passed: list[int]) -> LinkLost:
    """Send to a peer that receives, or receive from one that sends, until the link is lost."""
    try:
        while True:
            if does == "sends":
                await link.receive()
            else:
                await link.send(bulk(20 * MIB))
                await link.flushed()
            passed.append(1)
    except LinkLost as lost:
        return lost


@pytest.fixture
def poisoned(monkeypatch):
    """Fill memory as soon as it may be used again, and never use it; yields what was filled."""
    filled: list[np.ndarray] = []

    def free(staging: Staging, slot) -> None:
        pages = np.frombuffer(staging._context.library.ffi.buffer(slot.memory, slot.size), np.uint8)
        pages[:] = POISON
        filled.append(pages)

    monkeypatch.setattr(Staging, "free", free)
    return filled


@over
@pytest.mark.parametrize("does", ["sends", "receives"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_peer_that_dies_or_stands_still_is_lost_and_writes_to_nothing_freed(
    transports, does, end, seed, monkeypatch, poisoned
):
    monkeypatch.setattr(lane, "PATIENCE_S", 0.5)
    monkeypatch.setattr(stream, "PATIENCE_S", 0.5)
    if transports != "tcp" and end == signal.SIGKILL and ucx.load().version < (1, 22):
        pytest.skip("UCX 1.13 aborts when a process dies whose memory it is reading; shared memory is for tests only")
    kind = Staged if seed % 2 else UcxFabric

    async def main():
        with peer(transports, does) as (process, port):
            async with fabric_of(transports, kind) as (fabric, transport):
                link = await transport.dial(("127.0.0.1", port))
                link.payload_limit = 64 * MIB
                assert await link.upgrade() == ""
                of_trial, passed, lost = len(poisoned), [], []

                async def use():
                    lost.append(await exchange(link, does, passed))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(use)
                    await until(lambda: len(passed) > 0)
                    await trio.sleep(random.Random(seed).uniform(0, 0.1))
                    process.send_signal(end)
                assert len(lost) == 1
                await link.aclose()
                if end == signal.SIGSTOP:
                    process.send_signal(signal.SIGCONT)
                if transports == "tcp" or end == signal.SIGSTOP:  # else it stays set aside until the node ends
                    await until(lambda: not fabric._pending)
                await trio.sleep(0.3)
                assert all(bool((pages == POISON).all()) for pages in poisoned)
                assert len(poisoned) > of_trial or (does == "receives" and kind is not Staged)

    run(main)


# --------------------------------------------------------------------------------------------------- memory


@over
@pytest.mark.parametrize("size", [64 << 10, MIB], ids=["64k", "1m"])
def test_smaller_chunks_do_not_pile_up_where_nobody_receives(transports, size):
    async def main():
        async with fabric_of(transports) as near_kit, fabric_of(transports) as far_kit:
            async with linked(near_kit, far_kit) as (near, far):
                await near.send(ModelSnapshot(1, "c", (bytes(size),) * (32 * MIB // size)))
                await trio.sleep(0.3)
                assert near.bytes_sent < WINDOW_BYTES + MIB
                assert len((await far.receive()).chunks) == 32 * MIB // size

    run(main)


@over
@pytest.mark.parametrize("kind", [UcxFabric, Staged], ids=["direct", "staged"])
def test_thousands_of_exchanges_register_no_more_memory_than_ten(transports, kind):
    async def main():
        async with fabric_of(transports, kind) as near_kit, fabric_of(transports, kind) as far_kit:
            async with linked(near_kit, far_kit) as (near, far):
                message = ModelSnapshot(0, "c", (bytes(64 << 10),))

                async def exchanges(count: int) -> None:
                    for _ in range(count):
                        await near.send(message)
                        await far.receive()

                await exchanges(10)
                before = registered(near_kit[0]), registered(far_kit[0])
                assert 0 < sum(before) <= 16
                await exchanges(10_000 if transports == "tcp" and kind is UcxFabric else 1_000)
                assert (registered(near_kit[0]), registered(far_kit[0])) == before
                await near.aclose()
                await far.aclose()
                await nothing_is_left(near_kit[0], far_kit[0])

    run(main, limit_s=240)


@over
def test_chunks_that_are_kept_keep_their_memory_and_outlive_link_and_fabric(transports):
    kept = []

    async def main():
        async with fabric_of(transports) as near_kit, fabric_of(transports) as far_kit:
            async with linked(near_kit, far_kit) as (near, far):
                for step in range(12):
                    await near.send(bulk(4 * MIB, step))
                    kept.append((await far.receive()).chunks[0])
                assert registered(far_kit[0]) >= 12

    run(main)
    for step, chunk in enumerate(kept):
        assert bool((np.frombuffer(chunk, np.uint8) == step).all())


@over
def test_closed_links_leave_nothing(transports):
    async def main():
        async with fabric_of(transports) as near_kit, fabric_of(transports) as far_kit:
            for _ in range(10):
                async with linked(near_kit, far_kit) as (near, far):
                    await near.send(bulk(8 * MIB))
                    await far.receive()
            await nothing_is_left(near_kit[0], far_kit[0])

    run(main)


@pytest.mark.parametrize("refused", ["receive", "send"])
def test_what_ucx_refuses_leaves_nothing(refused, monkeypatch):
    async def main():
        async with fabric_of("tcp", Staged) as near_kit, fabric_of("tcp") as far_kit:
            async with linked(near_kit, far_kit) as (near, far):
                fabric, _ = {"receive": far_kit, "send": near_kit}[refused]

                def fail(*_):
                    raise ucx.UcxError(f"{refused}: the peer is gone")

                monkeypatch.setattr(fabric.context if refused == "send" else fabric.arrivals, refused, fail)
                await near.send(bulk(8 * MIB))
                with pytest.raises(LinkLost):
                    await far.receive()
                await near.aclose()
            await nothing_is_left(near_kit[0], far_kit[0])

    run(main)


def test_a_node_may_end_while_an_offer_is_not_answered():
    async def main():
        async with fabric_of("tcp") as (other, _), trio.open_nursery() as nursery:
            offered = trio.Event()

            async def silent(link):
                offer = await link.receive_any()
                assert isinstance(offer, BulkOffer)
                with other.reserved() as (here, _):
                    lane = other.open(link.remote, here, offer.lane, b"".join(offer.address))
                await trio.sleep(0.1)  # its trial comes to who does not know the lane yet
                offered.set()
                with suppress(LinkLost):
                    await link.receive()
                lane.close(LinkLost("closed here"))

            address = await nursery.start(TcpTransport(nursery).listen, LOOPBACK, silent)
            async with fabric_of("tcp") as (fabric, near):
                link = await near.dial(address)
                with trio.CancelScope() as asking:
                    nursery.start_soon(cancel_after, fabric, offered, asking)
                    await link.upgrade()
            nursery.cancel_scope.cancel()

    async def cancel_after(fabric, offered, asking):
        await offered.wait()
        assert len(fabric.arrivals._kept) == 1
        fabric._end()
        asking.cancel()

    run(main)


@over
def test_what_is_under_way_when_a_node_ends_keeps_its_memory(transports, monkeypatch):
    monkeypatch.setattr(rdma, "END_S", 0.1)

    async def main():
        with peer(transports, "receives") as (process, port):
            async with fabric_of(transports) as (fabric, transport):
                link = await transport.dial(("127.0.0.1", port))
                assert await link.upgrade() == ""
                process.send_signal(signal.SIGSTOP)
                await link.send(bulk(4 * MIB))
                await until(lambda: bool(fabric._pending))
                await trio.aclose_forcefully(link)
            assert rdma._unended[-1] is fabric

    run(main)


def test_memory_that_is_sent_from_can_be_garbage(monkeypatch):
    """Python before 3.12.7 crashes when it collects a memoryview that cffi refers to."""

    async def main():
        async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
            async with linked(near_kit, far_kit) as (near, far):
                seen, send = [], near_kit[0].context.send

                def watched(endpoint, memory, count, tag):
                    seen.append(memory)
                    return send(endpoint, memory, count, tag)

                monkeypatch.setattr(near_kit[0].context, "send", watched)
                await near.send(ModelSnapshot(1, "c", (memoryview(bytearray(MIB)),)))
                await far.receive()
                await near.flushed()
        assert len(seen) == 1
        cycle = [seen.pop()]
        cycle.append(cycle)
        del cycle
        gc.collect()

    run(main)


async def stream_between(near, far) -> None:
    """Send and receive without end, until the link is lost."""

    async def keep(call, *arguments):
        with suppress(LinkLost):
            while True:
                await call(*arguments)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep, near.send, bulk(20 * MIB))
        nursery.start_soon(keep, far.receive)
        nursery.start_soon(keep, near.receive)


@over
@pytest.mark.parametrize("kind", [UcxFabric, Staged], ids=["direct", "staged"])
def test_links_that_are_closed_while_they_move_chunks_leave_nothing(transports, kind):
    chance = random.Random(5)

    async def main():
        async with fabric_of(transports, kind) as near_kit, fabric_of(transports, kind) as far_kit:
            for _ in range(20):
                async with joined(near_kit[1], far_kit[1], 64 * MIB) as (near, far):
                    await upgrade(near, far)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(stream_between, near, far)
                        await trio.sleep(chance.uniform(0, 0.03))
                        await trio.aclose_forcefully(chance.choice([near, far]))
            del near, far  # one has chunks of half a message
            await nothing_is_left(near_kit[0], far_kit[0])

    run(main)


@over
@pytest.mark.parametrize("ends", ["near", "far"])
def test_the_end_of_one_link_leaves_another_between_the_same_nodes_alone(transports, ends):
    async def main():
        async with (
            fabric_of(transports) as one_kit,
            fabric_of(transports) as other_kit,
            joined(one_kit[1], other_kit[1], 64 * MIB) as (near, far),
            joined(other_kit[1], one_kit[1], 64 * MIB) as (kept_near, kept_far),
        ):
            async with trio.open_nursery() as nursery:  # both at once, so that neither comes first at both nodes
                nursery.start_soon(upgrade, near, far)
                nursery.start_soon(upgrade, kept_near, kept_far)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream_between, near, far)
                await trio.sleep(0.03)
                await trio.aclose_forcefully(near if ends == "near" else far)
            for step in range(3):
                await kept_near.send(bulk(8 * MIB, step))
                assert (await kept_far.receive()) == bulk(8 * MIB, step)

    run(main)


def test_upgrades_that_end_halfway_leave_nothing():
    async def main():
        async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:

            async def halfway(delay_s: float) -> None:
                async with joined(near_kit[1], far_kit[1], MIB) as (near, far), trio.open_nursery() as nursery:
                    nursery.start_soon(suppressing, far.receive)
                    nursery.start_soon(suppressing, near.upgrade)
                    await trio.sleep(delay_s)
                    await trio.aclose_forcefully(near)
                    nursery.cancel_scope.cancel()

            async def suppressing(call):
                with suppress(LinkLost):
                    await call()

            await halfway(0.1)
            before = len(os.listdir("/proc/self/fd"))
            for number in range(30):
                await halfway(random.Random(number).uniform(0, 0.01))
            await nothing_is_left(near_kit[0], far_kit[0])
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before)

    run(main)


def test_what_nobody_awaits_is_thrown_away_and_lets_its_sender_go_on():
    async def main():
        async with fabric_of("tcp") as (stranger, _), fabric_of("tcp") as (fabric, _):
            endpoint = stranger.context.connect(fabric._address)
            chunks = [bytes([number]) * MIB for number in range(64)]
            sends = []
            with fabric.reserved() as (number, _):
                for count, chunk in enumerate(chunks):
                    memory = ucx_bytes(stranger, chunk)
                    sends.append((stranger.context.send(endpoint, memory, MIB, number << TAG_BITS | count), memory))
                stranger.wake()
                await trio.sleep(0.3)
                assert len(fabric.arrivals._kept[number].messages) == 2 * WINDOW_BYTES // MIB
            requests = [request for request, _ in sends if request is not None]
            # an error would end all lanes of that endpoint
            await until(lambda: {stranger.context.status(request) for request in requests} == {ucx.OK})
            await nothing_is_left(fabric)

    run(main)


@pytest.mark.parametrize("count", [0, 1], ids=["twice", "too many"])
def test_what_comes_unasked_for_ends_its_link(count):
    async def main():
        async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
            async with linked(near_kit, far_kit) as (near, far):
                lane, chunk = near._lane, ucx_bytes(near_kit[0], bytes(64 << 10))
                for number in range(1024):
                    near_kit[0].context.send(lane.endpoint.handle, chunk, 64 << 10, lane._there | count * number)
                near_kit[0].wake()
                with pytest.raises(LinkLost, match="more chunks came"):
                    await far.receive()

    run(main)


def ucx_bytes(fabric: UcxFabric, data: bytes):
    return fabric.library.ffi.from_buffer(data)


def sockets() -> dict[str, int]:
    """What it is, and its descriptor."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder itself
            found[os.readlink(f"/proc/self/fd/{fd}")] = int(fd)
    return {name: fd for name, fd in found.items() if name.startswith("socket:")}


def cut(since: dict[str, int]) -> None:
    """Break the connections that were made since."""
    for name, fd in sockets().items():
        if name not in since:
            with socket.socket(fileno=os.dup(fd)) as connection, suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("threshold", ["32k", "1m"], ids=["a send fails", "a send is refused"])
def test_where_a_connection_of_ucx_breaks_there_is_another(threshold, monkeypatch):
    monkeypatch.setattr("peerd.transport.upgrade.ANSWER_S", 0.3)
    monkeypatch.setitem(ucx._FIXED, "UCX_RNDV_THRESH", threshold)

    async def main():
        async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:

            async def has_lanes() -> bool:
                async with joined(near_kit[1], far_kit[1], 64 * MIB) as (near, far), trio.open_nursery() as nursery:
                    nursery.start_soon(far.receive)
                    why_not = await near.upgrade()
                    nursery.cancel_scope.cancel()
                return why_not == ""

            async with joined(near_kit[1], far_kit[1], 64 * MIB) as (near, far):
                before = sockets()
                await upgrade(near, far)
                broken = near._lane.endpoint
                cut(before)
                await trio.sleep(0.1)
                await near.send(bulk(MIB))
                with pytest.raises(LinkLost):
                    await far.receive()
            # each end finds out for itself
            assert [await has_lanes() for _ in range(4)][-2:] == [True, True]
            assert near_kit[0].endpoints.to(far_kit[0]._address) is not broken
            await nothing_is_left(near_kit[0], far_kit[0])

    run(main)


@pytest.mark.parametrize("size", [1000, 2 * MIB], ids=["shorter", "longer"])
@pytest.mark.parametrize("late", [False, True], ids=["before its receive", "after it"])
def test_a_chunk_of_another_size_than_was_announced_ends_the_link(size, late, monkeypatch):
    async def main():
        async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
            async with linked(near_kit, far_kit) as (near, far):
                misled, other = near_kit[0].context.send, ucx_bytes(near_kit[0], bytes(size))

                async def send(lane, chunk):
                    await trio.sleep(0.2 if late else 0)
                    misled(lane.endpoint.handle, other, size, lane._there)

                monkeypatch.setattr(UcxLane, "send", send)
                monkeypatch.setattr(UcxLane, "goes_ahead", lambda *_: not late)
                await near.send(ModelSnapshot(1, "c", (bytes(MIB),)))
                await trio.sleep(0 if late else 0.2)
                with pytest.raises(LinkLost, match="announced"):
                    await far.receive()

    run(main)


@over
@pytest.mark.parametrize("size", [100, MIB])
def test_a_chunk_that_comes_before_its_frame_is_read_is_received(transports, size, monkeypatch):
    monkeypatch.setattr(framing, "BESIDE_LEAST", 1)

    async def main():
        async with fabric_of(transports) as near_kit, fabric_of(transports) as far_kit:
            async with linked(near_kit, far_kit) as (near, far):
                for step in range(5):
                    await near.send(bulk(size, step))
                    await trio.sleep(0.05)
                    assert await far.receive() == bulk(size, step)

    run(main, limit_s=10)


def test_a_receive_that_ucx_cancels_by_itself_ends_the_link(monkeypatch):
    async def main():
        async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
            async with linked(near_kit, far_kit) as (near, far):
                received = far_kit[0].context.received

                def cancelled(request):
                    status, size = received(request)
                    return (CANCELLED if status == ucx.OK else status), size

                monkeypatch.setattr(far_kit[0].context, "received", cancelled)
                await near.send(bulk(4 * MIB))
                with pytest.raises(LinkLost, match="cancel"):
                    await far.receive()
            await nothing_is_left(near_kit[0], far_kit[0])

    run(main)


@over
def test_a_chunk_that_is_kept_longer_than_its_link_goes_when_it_is_freed(transports):
    async def main():
        async with fabric_of(transports) as near_kit, fabric_of(transports) as far_kit:
            async with linked(near_kit, far_kit) as (near, far):
                await near.send(bulk(4 * MIB))
                kept = [await far.receive()]
            await nothing_is_left(near_kit[0])
            await until(lambda: registered(far_kit[0]) == 1)
            await trio.to_thread.run_sync(kept.clear)
            await nothing_is_left(far_kit[0])

    run(main)


@pytest.mark.parametrize("whose", ["ours", "theirs"])
@pytest.mark.parametrize("refused", ["lanes", "map", "receive", "send"])
def test_a_lane_that_ucx_refuses_leaves_the_link_on_tcp(refused, whose, monkeypatch):
    async def main():
        async with fabric_of("tcp", Staged) as near_kit, fabric_of("tcp", Staged) as far_kit:
            async with dialled(near_kit[1], far_kit[1]) as (link, taken):
                fabric, _ = near_kit if whose == "ours" else far_kit

                def fail(*_):
                    raise ucx.UcxError(f"{refused}: not here")

                monkeypatch.setattr(fabric.context, refused, fail)
                why_not = await link.upgrade()
                assert why_not == f"{'it says: ' if whose == 'theirs' else ''}{refused}: not here"
                await link.send(LinkClosed(1))
                assert await taken.receive() == LinkClosed(1)
                assert link.carrier == "tcp"
                await link.aclose()
            await nothing_is_left(near_kit[0], far_kit[0])

    run(main)


def test_where_chunks_cannot_be_registered_links_go_on_over_tcp(monkeypatch):
    async def main():
        async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
            register = far_kit[0].context.map

            def limited(memory, size):
                if size > MIB:
                    raise ucx.UcxError("ucp_mem_map: Input/output error")
                return register(memory, size)

            monkeypatch.setattr(far_kit[0].context, "map", limited)
            async with linked(near_kit, far_kit) as (near, far):
                await near.send(bulk(4 * MIB))
                with pytest.raises(LinkLost, match="ucp_mem_map"):
                    await far.receive()
            async with dialled(near_kit[1], far_kit[1]) as (link, _):
                assert await link.upgrade() == "it says: ucp_mem_map: Input/output error"
            async with dialled(far_kit[1], near_kit[1]) as (link, _):
                assert await link.upgrade() == "ucp_mem_map: Input/output error"
            await nothing_is_left(near_kit[0], far_kit[0])

    run(main)


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_lane_that_breaks_before_it_is_used_takes_its_link_along(whose, monkeypatch):
    async def main():
        async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
            async with joined(near_kit[1], far_kit[1], MIB) as (near, far):
                widen = StreamLink.widen

                def broken(link):
                    if link is (near if whose == "ours" else far):
                        link._lane.close(LinkLost("broken"))
                    widen(link)

                monkeypatch.setattr(StreamLink, "widen", broken)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lose, far, "broken" if whose == "theirs" else None)
                    assert await near.upgrade() == ""
                    await lose(near, "broken" if whose == "ours" else None)

    async def lose(link, why):
        with pytest.raises(LinkLost, match=why):
            await link.receive()

    run(main)


def test_a_lane_that_breaks_takes_its_link_along():
    async def main():
        async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
            async with linked(near_kit, far_kit) as (near, far):
                far._lane.close(LinkLost("broken"))
                with pytest.raises(LinkLost, match="broken"):
                    await far.receive()
                with pytest.raises(LinkLost):
                    await near.receive()

    run(main)


def test_where_ucx_fails_links_go_on_over_tcp(monkeypatch):
    async def main():
        async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
            async with linked(near_kit, far_kit) as (near, _):

                def fail():
                    raise ucx.UcxError("ucp_worker_arm: no")

                monkeypatch.setattr(near_kit[0].context, "arm", fail)
                near_kit[0].wake()
                with pytest.raises(LinkLost):
                    await near.receive()
            async with dialled(near_kit[1], far_kit[1]) as (link, _):
                assert "UCX failed here: ucp_worker_arm: no" in await link.upgrade()
                assert link.carrier == "tcp"

    run(main)


# -------------------------------------------------------------------------------------------------- refusals


@asynccontextmanager
async def dialled(near_transport, far_transport, admit=True):
    give, taken = trio.open_memory_channel(1)

    async def accepted(link):
        if admit:
            link.admit()
        try:
            await give.send(await link.receive())
        except PeerError as error:
            await give.send(error)

    async with trio.open_nursery() as nursery:
        address = await nursery.start(far_transport.listen, LOOPBACK, accepted)
        yield await near_transport.dial(address), taken
        nursery.cancel_scope.cancel()


def test_a_peer_without_ucx_says_so_and_the_link_goes_on():
    async def main():
        async with fabric_of("tcp") as (_, near), trio.open_nursery() as nursery:
            async with dialled(near, TcpTransport(nursery)) as (link, taken):
                assert "nothing beside the stream" in await link.upgrade()
                assert link.carrier == "tcp"
                await link.send(LinkClosed(1))
                assert await taken.receive() == LinkClosed(1)

    run(main)


def test_another_version_is_refused():
    async def main():
        async with fabric_of("tcp") as (fabric, near), fabric_of("tcp") as (_, far):
            ours, fabric.version = fabric.version, "UCX 1.9"
            async with dialled(near, far) as (link, _):
                assert await link.upgrade() == f"it has {ours}, not UCX 1.9"

    run(main)


@pytest.mark.parametrize("whose", ["ours", "theirs", "both reach"])
def test_only_peers_in_the_subnets_have_lanes(whose):
    elsewhere, here = ["10.1.0.0/16", "fd00::/8"], ["10.1.0.0/16", "127.0.0.0/8"]

    async def main():
        async with (
            fabric_of("tcp", subnets=elsewhere if whose == "ours" else here) as (_, near),
            fabric_of("tcp", subnets=elsewhere if whose == "theirs" else here) as (_, far),
            dialled(near, far) as (link, _),
        ):
            outside = "127.0.0.1 is in none of rdma_subnets"
            refusals = {"ours": outside, "theirs": f"it says: {outside}", "both reach": ""}
            assert await link.upgrade() == refusals[whose]
            assert link.carrier.startswith("tcp" if whose != "both reach" else "ucx")

    run(main)


def test_an_address_is_looked_for_in_its_subnets_however_it_is_written():
    async def main():
        async with fabric_of("tcp", subnets=["10.1.0.0/16", "fe80::/10"]) as (fabric, _):
            assert all(map(fabric.trusts, ("10.1.255.1", "::ffff:10.1.0.1", "fe80::1%eth0")))
            assert not any(map(fabric.trusts, ("10.2.0.1", "::ffff:10.2.0.1", "fd00::1", "::1")))
        async with fabric_of("tcp") as (fabric, _):
            assert fabric.trusts("10.2.0.1")

    run(main)


def test_what_is_no_rdma_is_refused_unless_asked_for():
    async def main():
        async with fabric_of("tcp") as (_, near), fabric_of("tcp") as (fabric, far):
            fabric.endpoints.without_rdma = False
            async with dialled(near, far) as (link, _):
                assert "no RDMA" in await link.upgrade()
                assert link.carrier == "tcp"

    run(main)


def test_an_offer_before_the_greeting_breaks_the_rules():
    async def main():
        async with fabric_of("tcp") as (_, near), fabric_of("tcp") as (_, far):
            async with dialled(near, far, admit=False) as (link, taken):
                with pytest.raises(LinkLost):
                    await link.upgrade()
                assert "before the greeting" in str(await taken.receive())

    run(main)


def test_an_address_out_of_reach_is_refused_on_both_sides():
    async def main():
        async with fabric_of("tcp") as (_, near), fabric_of("posix,sysv,cma") as (_, far):
            async with dialled(near, far) as (link, _):
                assert "unreachable" in await link.upgrade()
                assert link.carrier == "tcp"

    run(main)


def test_a_peer_that_never_answers_an_offer_keeps_its_link(monkeypatch):
    monkeypatch.setattr("peerd.transport.upgrade.ANSWER_S", 0.2)

    async def main():
        async with fabric_of("tcp") as (_, near), trio.open_nursery() as nursery:

            async def silent(link):
                await trio.sleep(0.5)
                assert isinstance(await link.receive_any(), BulkOffer)
                await link.send(BulkAnswer("late", 0, ()))
                await link.send(await link.receive())

            address = await nursery.start(TcpTransport(nursery).listen, LOOPBACK, silent)
            link = await near.dial(address)
            assert "no answer" in await link.upgrade()
            await link.send(LinkClosed(1))
            assert await link.receive() == LinkClosed(1)
            nursery.cancel_scope.cancel()

    run(main)


# ------------------------------------------------------------------------------------------------------ loading


def test_a_named_library_is_the_only_one_tried():
    with pytest.raises(ucx.UcxError, match=f"{ucx.LIBRARY_VARIABLE}: .*nowhere"):
        ucx.load({ucx.LIBRARY_VARIABLE: "/nowhere/libucp.so"})


def test_another_library_is_told_from_ucx():
    with pytest.raises(ucx.UcxError, match=r"libc\.so\.6 is not UCX's libucp"):
        ucx.load({ucx.LIBRARY_VARIABLE: "libc.so.6"})


@pytest.mark.parametrize("given", [None, "1m"])
def test_the_environment_is_left_as_it_was(given, monkeypatch):
    if given is not None:
        monkeypatch.setenv("UCX_RNDV_THRESH", given)
    before = dict(os.environ)
    ucx.resources(ucx.load())
    assert dict(os.environ) == before


def test_transports_that_are_not_here_are_an_error():
    with pytest.raises(ucx.UcxError, match="ucp_init_version: "):
        ucx.Context(ucx.load(), "no_such_transport")


def test_transports_that_the_user_chose_are_named_in_the_error(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "nonsense")
    with pytest.raises(ucx.UcxError, match="UCX_TLS=nonsense"):
        ucx.resources(ucx.load())
