"""Connections over UCX: peers that die or stand still, memory never used too early, and channels that are refused."""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from connection_ends import close_at_once, joined, receive_a
from ucx_here import needs_ucx, upgrade

from peerd.transport import bulk, framing, stream
from peerd.transport.bulk import BulkRefused
from peerd.transport.connection import Connection, ConnectionLost, Transport
from peerd.transport.errors import PeerError
from peerd.transport.messages import BulkAnswer, BulkOffer, Chunk, LinkClosed, Message, ModelSnapshot
from peerd.transport.rdma import fabric as ucx_fabric
from peerd.transport.rdma import ucx
from peerd.transport.rdma.fabric import WINDOW_BYTES, UcxChannel, UcxFabric
from peerd.transport.rdma.peers import TAG_BITS
from peerd.transport.rdma.staging import Slot, Staging
from peerd.transport.stream import StreamConnection
from peerd.transport.tcp import TcpTransport

MIB = 1 << 20
LOOPBACK = ("127.0.0.1", 0)
POISON = 0xA5
CANCELLED = -16
TRANSPORTS = {"tcp": "tcp", "shm": "posix,sysv,cma"}
over = pytest.mark.parametrize("transports", TRANSPORTS.values(), ids=TRANSPORTS)
pytestmark = needs_ucx
Kit = tuple[UcxFabric, TcpTransport]


class Staged(UcxFabric):
    """Copies chunks on their way out, as over RDMA."""

    def open(self, *where: Any) -> UcxChannel:
        channel = super().open(*where)
        channel.staged = True
        return channel


def big(size: int, step: int = 0) -> ModelSnapshot:
    return ModelSnapshot(
        step, "c", tuple(bytes([step % 251]) * min(size, 4 * MIB) for _ in range(-(-size // (4 * MIB))))
    )


@asynccontextmanager
async def fabric_of(
    transports: str, kind: type[UcxFabric] = UcxFabric, subnets: Sequence[str] = ()
) -> AsyncIterator[Kit]:
    async with trio.open_nursery() as nursery:
        fabric = kind(ucx.load(), transports, without_rdma=True, subnets=subnets)
        await nursery.start(fabric.run)
        yield fabric, TcpTransport(nursery, fabric)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def linked(near_kit: Kit, far_kit: Kit) -> AsyncIterator[tuple[StreamConnection, StreamConnection]]:
    """Yield both ends of an upgraded connection."""
    async with joined(near_kit[1], far_kit[1], 64 * MIB) as (near, far):
        await upgrade(near, far)
        yield near, far


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.005)


async def nothing_is_left(*fabrics: UcxFabric) -> None:
    def has_no_channel(fabric: UcxFabric) -> bool:
        return not fabric._channels

    def is_quiet(fabric: UcxFabric) -> bool:
        return not fabric.arrivals.throwing and not fabric.endpoints._failed

    for fabric in fabrics:  # a channel goes with its last operation and its last registered slot
        await until(partial(has_no_channel, fabric))
        await until(partial(is_quiet, fabric))
        assert not fabric.arrivals._kept


def registered(fabric: UcxFabric) -> int:
    return sum(channel.staging.slots for channel in fabric._channels.values())


# --------------------------------------------------------------------------------- a peer in a process of its own

PEER = """
import sys, trio
from peerd.transport.messages import ModelSnapshot
from peerd.transport.rdma import fabric as ucx_fabric
from peerd.transport.rdma import ucx
from peerd.transport.rdma.fabric import WINDOW_BYTES, UcxFabric
from peerd.transport.tcp import TcpTransport

async def main(transports, sends):
    async with trio.open_nursery() as nursery:
        fabric = UcxFabric(ucx.load(), transports, without_rdma=True)
        await nursery.start(fabric.run)

        async def accepted(connection):
            connection.admit()
            connection.payload_limit = 64 << 20
            if not sends:
                while True:
                    await connection.receive()
            async with trio.open_nursery() as both:
                both.start_soon(connection.receive)
                while connection.carrier == "tcp":
                    await trio.sleep(0.001)
                message = ModelSnapshot(0, "c", (bytes(4 << 20),) * 5)
                while True:
                    await connection.send(message)

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


async def exchange(connection: StreamConnection, does: str, passed: list[int]) -> ConnectionLost:
    """Send to a peer that receives, or receive from one that sends, until the connection is lost."""
    try:
        while True:
            if does == "sends":
                await connection.receive()
            else:
                await connection.send(big(20 * MIB))
                await connection.flushed()
            passed.append(1)
    except ConnectionLost as lost:
        return lost


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[npt.NDArray[np.uint8]]:
    """Fill memory as soon as it may be used again, and never use it; yields what was filled."""
    filled: list[npt.NDArray[np.uint8]] = []

    def free(staging: Staging, slot: Slot) -> None:
        pages = np.frombuffer(staging._context.library.ffi.buffer(slot.memory, slot.size), np.uint8)
        pages[:] = POISON
        filled.append(pages)

    monkeypatch.setattr(Staging, "free", free)
    return filled


def in_huge_pages(pages: Any, size: int) -> int:
    """How many bytes of a mapping the kernel keeps in huge pages, when all of it is in use."""

    def now() -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

    before = now()
    np.frombuffer(pages, np.uint8, size)[:] = 1
    return now() - before


async def test_a_chunk_with_its_seal_lies_in_huge_pages() -> None:
    plain = mmap.mmap(-1, 4 * MIB, mmap.MAP_PRIVATE)
    plain.madvise(mmap.MADV_HUGEPAGE)
    if in_huge_pages(plain, 4 * MIB) < 4 * MIB:
        pytest.skip("this kernel gives out no huge pages, or has none left")
    async with fabric_of(TRANSPORTS["tcp"]) as (fabric, _):
        staging = Staging(fabric.context, lambda: None)
        slots = [staging.lend(4 * MIB + 16) for _ in range(4)]
        ffi = fabric.context.library.ffi
        assert all(in_huge_pages(ffi.buffer(slot.memory, slot.size), slot.size) >= 4 * MIB for slot in slots)
        for slot in slots:
            staging.free(slot)
        staging.close()


@pytest.mark.cases(4)
@over
@pytest.mark.parametrize("does", ["sends", "receives"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_peer_that_dies_or_stands_still_is_lost_and_writes_to_nothing_freed(
    transports: str,
    does: str,
    end: signal.Signals,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    poisoned: list[npt.NDArray[np.uint8]],
) -> None:
    monkeypatch.setattr(bulk, "PATIENCE_S", 0.5)
    monkeypatch.setattr(stream, "PATIENCE_S", 0.5)
    if transports != "tcp" and end == signal.SIGKILL and ucx.load().version < (1, 22):
        pytest.skip("UCX 1.13 aborts when a process dies whose memory it is reading; shared memory is for tests only")
    kind = Staged if seed % 2 else UcxFabric
    with peer(transports, does) as (process, port):
        async with fabric_of(transports, kind) as (fabric, transport):
            connection = await transport.dial(("127.0.0.1", port))
            assert isinstance(connection, StreamConnection)
            connection.payload_limit = 64 * MIB
            assert await connection.upgrade() == ""
            of_trial = len(poisoned)
            passed: list[int] = []
            lost: list[ConnectionLost] = []

            async def use() -> None:
                lost.append(await exchange(connection, does, passed))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(use)
                await until(lambda: len(passed) > 0)
                await trio.sleep(random.Random(seed).uniform(0, 0.1))
                process.send_signal(end)
                await trio.sleep(0.1)
                while end == signal.SIGSTOP and does == "sends" and not lost and not connection._midway:
                    process.send_signal(signal.SIGCONT)  # it stood between two messages, as who has no more to say
                    await trio.sleep(0.01)
                    process.send_signal(end)
                    await trio.sleep(0.1)
            assert len(lost) == 1
            await connection.aclose()
            if end == signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
            if transports == "tcp" or end == signal.SIGSTOP:  # else it stays set aside until the node ends
                await until(lambda: not fabric._pending)
            await trio.sleep(0.3)
            assert all(bool((pages == POISON).all()) for pages in poisoned)
            assert len(poisoned) > of_trial or (does == "receives" and kind is not Staged)


# --------------------------------------------------------------------------------------------------- memory


@over
@pytest.mark.parametrize("size", [64 << 10, MIB], ids=["64k", "1m"])
async def test_smaller_chunks_do_not_pile_up_where_nobody_receives(transports: str, size: int) -> None:
    async with fabric_of(transports) as near_kit, fabric_of(transports) as far_kit:
        async with linked(near_kit, far_kit) as (near, far):
            await near.send(ModelSnapshot(1, "c", (bytes(size),) * (32 * MIB // size)))
            await trio.sleep(0.3)
            assert near.bytes_sent < WINDOW_BYTES + MIB
            assert len((await receive_a(ModelSnapshot, far)).chunks) == 32 * MIB // size


@pytest.mark.one_run_in(3)
@over
@pytest.mark.parametrize("kind", [UcxFabric, Staged], ids=["direct", "staged"])
@pytest.mark.trio(limit_s=240)
async def test_thousands_of_exchanges_register_no_more_memory_than_ten(transports: str, kind: type[UcxFabric]) -> None:
    async with fabric_of(transports, kind) as near_kit, fabric_of(transports, kind) as far_kit:
        async with linked(near_kit, far_kit) as (near, far):
            message = ModelSnapshot(0, "c", (bytes(64 << 10),))

            async def exchanges(count: int) -> None:
                for _ in range(count):
                    await near.send(message)
                    await far.receive()

            for count in (10, 4_000 if transports == "tcp" and kind is UcxFabric else 1_000):
                await exchanges(count)  # a slot more where the next is sent before this one's is seen to be free
                assert 0 < registered(near_kit[0]) + registered(far_kit[0]) <= 16
            await near.aclose()
            await far.aclose()
            await nothing_is_left(near_kit[0], far_kit[0])


@over
async def test_chunks_that_are_kept_keep_their_memory_and_outlive_link_and_fabric(transports: str) -> None:
    kept = []
    async with fabric_of(transports) as near_kit, fabric_of(transports) as far_kit:
        async with linked(near_kit, far_kit) as (near, far):
            for step in range(12):
                await near.send(big(4 * MIB, step))
                kept.append((await receive_a(ModelSnapshot, far)).chunks[0])
            assert registered(far_kit[0]) >= 12
    for step, chunk in enumerate(kept):
        assert bool((np.frombuffer(chunk, np.uint8) == step).all())


@over
async def test_closed_links_leave_nothing(transports: str) -> None:
    async with fabric_of(transports) as near_kit, fabric_of(transports) as far_kit:
        for _ in range(10):
            async with linked(near_kit, far_kit) as (near, far):
                await near.send(big(8 * MIB))
                await far.receive()
        await nothing_is_left(near_kit[0], far_kit[0])


@pytest.mark.parametrize("refused", ["receive", "send"])
async def test_what_ucx_refuses_leaves_nothing(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fabric_of("tcp", Staged) as near_kit, fabric_of("tcp") as far_kit:
        async with linked(near_kit, far_kit) as (near, far):
            fabric, _ = {"receive": far_kit, "send": near_kit}[refused]

            def fail(*_: object) -> None:
                raise ucx.UcxError(f"{refused}: the peer is gone")

            monkeypatch.setattr(fabric.context if refused == "send" else fabric.arrivals, refused, fail)
            await near.send(big(8 * MIB))
            with pytest.raises(ConnectionLost):
                await far.receive()
            await near.aclose()
        await nothing_is_left(near_kit[0], far_kit[0])


async def test_a_node_may_end_while_an_offer_is_not_answered() -> None:

    async def cancel_after(fabric: UcxFabric, offered: trio.Event, asking: trio.CancelScope) -> None:
        await offered.wait()
        assert len(fabric.arrivals._kept) == 1
        fabric._end()
        asking.cancel()

    async with fabric_of("tcp") as (other, _), trio.open_nursery() as nursery:
        offered = trio.Event()

        async def silent(connection: StreamConnection) -> None:
            offer = await connection.receive_any()
            assert isinstance(offer, BulkOffer)
            with other.reserved() as (here, _):
                channel = other.open(connection.remote, here, offer.channel, b"".join(offer.address))
            await trio.sleep(0.1)  # its trial comes to who does not know the channel yet
            offered.set()
            with suppress(ConnectionLost):
                await connection.receive()
            channel.close(ConnectionLost("closed here"))

        address = await nursery.start(TcpTransport(nursery).listen, LOOPBACK, silent)
        async with fabric_of("tcp") as (fabric, near):
            connection = await near.dial(address)
            with trio.CancelScope() as asking:
                nursery.start_soon(cancel_after, fabric, offered, asking)
                await connection.upgrade()
        nursery.cancel_scope.cancel()


@over
async def test_what_is_under_way_when_a_node_ends_keeps_its_memory(
    transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_fabric, "END_S", 0.1)
    with peer(transports, "receives") as (process, port):
        async with fabric_of(transports) as (fabric, transport):
            connection = await transport.dial(("127.0.0.1", port))
            assert await connection.upgrade() == ""
            process.send_signal(signal.SIGSTOP)
            await connection.send(big(4 * MIB))
            await until(lambda: bool(fabric._pending))
            await close_at_once(connection)
        assert ucx_fabric._unended[-1] is fabric


async def test_memory_that_is_sent_from_can_be_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python before 3.12.7 crashes when it collects a memoryview that cffi refers to."""
    async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
        async with linked(near_kit, far_kit) as (near, far):
            seen, send = [], near_kit[0].context.send

            def watched(endpoint: object, memory: Any, count: int, tag: int) -> object:
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


async def stream_between(near: StreamConnection, far: StreamConnection) -> None:
    """Send and receive without end, until the connection is lost."""

    async def keep(call: Callable[..., Awaitable[object]], *arguments: object) -> None:
        with suppress(ConnectionLost):
            while True:
                await call(*arguments)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep, near.send, big(20 * MIB))
        nursery.start_soon(keep, far.receive)
        nursery.start_soon(keep, near.receive)


@over
@pytest.mark.parametrize("kind", [UcxFabric, Staged], ids=["direct", "staged"])
async def test_links_that_are_closed_while_they_move_chunks_leave_nothing(
    transports: str, kind: type[UcxFabric]
) -> None:
    chance = random.Random(5)
    async with fabric_of(transports, kind) as near_kit, fabric_of(transports, kind) as far_kit:
        for _ in range(20):
            async with joined(near_kit[1], far_kit[1], 64 * MIB) as (near, far):
                await upgrade(near, far)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stream_between, near, far)
                    await trio.sleep(chance.uniform(0, 0.03))
                    await close_at_once(chance.choice([near, far]))
        del near, far  # one has chunks of half a message
        await nothing_is_left(near_kit[0], far_kit[0])


@over
@pytest.mark.parametrize("ends", ["near", "far"])
async def test_the_end_of_one_link_leaves_another_between_the_same_nodes_alone(transports: str, ends: str) -> None:
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
            await close_at_once(near if ends == "near" else far)
        for step in range(3):
            await kept_near.send(big(8 * MIB, step))
            assert (await kept_far.receive()) == big(8 * MIB, step)


async def test_upgrades_that_end_halfway_leave_nothing() -> None:
    async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:

        async def halfway(delay_s: float) -> None:
            async with joined(near_kit[1], far_kit[1], MIB) as (near, far), trio.open_nursery() as nursery:
                nursery.start_soon(suppressing, far.receive)
                nursery.start_soon(suppressing, near.upgrade)
                await trio.sleep(delay_s)
                await close_at_once(near)
                nursery.cancel_scope.cancel()

        async def suppressing(call: Callable[..., Awaitable[object]]) -> None:
            with suppress(ConnectionLost):
                await call()

        await halfway(0.1)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(30):
            await halfway(random.Random(number).uniform(0, 0.01))
        await nothing_is_left(near_kit[0], far_kit[0])
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_what_nobody_awaits_is_thrown_away_and_lets_its_sender_go_on() -> None:
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
        # an error would end all channels of that endpoint
        await until(lambda: {stranger.context.status(request) for request in requests} == {ucx.OK})
        await nothing_is_left(fabric)


@pytest.mark.parametrize("count", [0, 1], ids=["twice", "too many"])
async def test_what_comes_unasked_for_ends_its_link(count: int) -> None:
    async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
        async with linked(near_kit, far_kit) as (near, far):
            channel, chunk = near._channel, ucx_bytes(near_kit[0], bytes(64 << 10))
            assert isinstance(channel, UcxChannel)
            for number in range(1024):
                near_kit[0].context.send(channel.endpoint.handle, chunk, 64 << 10, channel._there | count * number)
            near_kit[0].wake()
            with pytest.raises(ConnectionLost, match="more chunks came"):
                await far.receive()


def ucx_bytes(fabric: UcxFabric, data: bytes) -> Any:
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
async def test_where_a_connection_of_ucx_breaks_there_is_another(
    threshold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerd.transport.upgrade.ANSWER_S", 0.3)
    monkeypatch.setitem(ucx._FIXED, "UCX_RNDV_THRESH", threshold)
    async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:

        async def has_channels() -> bool:
            async with joined(near_kit[1], far_kit[1], 64 * MIB) as (near, far), trio.open_nursery() as nursery:
                nursery.start_soon(far.receive)
                why_not = await near.upgrade()
                nursery.cancel_scope.cancel()
            return why_not == ""

        async with joined(near_kit[1], far_kit[1], 64 * MIB) as (near, far):
            before = sockets()
            await upgrade(near, far)
            assert isinstance(near._channel, UcxChannel)
            broken = near._channel.endpoint
            cut(before)
            await trio.sleep(0.1)
            await near.send(big(MIB))
            with pytest.raises(ConnectionLost):
                await far.receive()
        # each end finds out for itself
        assert [await has_channels() for _ in range(4)][-2:] == [True, True]
        assert near_kit[0].endpoints.to(far_kit[0]._address) is not broken
        await nothing_is_left(near_kit[0], far_kit[0])


@pytest.mark.parametrize("size", [1000, 2 * MIB], ids=["shorter", "longer"])
@pytest.mark.parametrize("late", [False, True], ids=["before its receive", "after it"])
async def test_a_chunk_of_another_size_than_was_announced_ends_the_link(
    size: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
        async with linked(near_kit, far_kit) as (near, far):
            misled, other = near_kit[0].context.send, ucx_bytes(near_kit[0], bytes(size))

            async def send(channel: UcxChannel, chunk: Chunk) -> None:
                await trio.sleep(0.2 if late else 0)
                misled(channel.endpoint.handle, other, size, channel._there)

            monkeypatch.setattr(UcxChannel, "send", send)
            monkeypatch.setattr(UcxChannel, "goes_ahead", lambda *_: not late)
            await near.send(ModelSnapshot(1, "c", (bytes(MIB),)))
            await trio.sleep(0 if late else 0.2)
            with pytest.raises(ConnectionLost, match="announced"):
                await far.receive()


@over
@pytest.mark.parametrize("size", [100, MIB])
@pytest.mark.trio(limit_s=10)
async def test_a_chunk_that_comes_before_its_frame_is_read_is_received(
    transports: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "OUT_OF_BAND_MIN", 1)
    async with fabric_of(transports) as near_kit, fabric_of(transports) as far_kit:
        async with linked(near_kit, far_kit) as (near, far):
            for step in range(5):
                await near.send(big(size, step))
                await trio.sleep(0.05)
                assert await far.receive() == big(size, step)


async def test_a_receive_that_ucx_cancels_by_itself_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
        async with linked(near_kit, far_kit) as (near, far):
            received = far_kit[0].context.received

            def cancelled(request: object) -> tuple[int, int]:
                status, size = received(request)
                return (CANCELLED if status == ucx.OK else status), size

            monkeypatch.setattr(far_kit[0].context, "received", cancelled)
            await near.send(big(4 * MIB))
            with pytest.raises(ConnectionLost, match="cancel"):
                await far.receive()
        await nothing_is_left(near_kit[0], far_kit[0])


@over
async def test_a_chunk_that_is_kept_longer_than_its_link_goes_when_it_is_freed(transports: str) -> None:
    async with fabric_of(transports) as near_kit, fabric_of(transports) as far_kit:
        async with linked(near_kit, far_kit) as (near, far):
            await near.send(big(4 * MIB))
            kept = [await far.receive()]
        await nothing_is_left(near_kit[0])
        await until(lambda: registered(far_kit[0]) == 1)
        await trio.to_thread.run_sync(kept.clear)
        await nothing_is_left(far_kit[0])


@pytest.mark.parametrize("whose", ["ours", "theirs"])
@pytest.mark.parametrize("refused", ["channels", "map", "receive", "send"])
async def test_a_channel_that_ucx_refuses_leaves_the_link_on_tcp(
    refused: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fabric_of("tcp", Staged) as near_kit, fabric_of("tcp", Staged) as far_kit:
        async with dialled(near_kit[1], far_kit[1]) as (connection, taken):
            fabric, _ = near_kit if whose == "ours" else far_kit

            def fail(*_: object) -> None:
                raise ucx.UcxError(f"{refused}: not here")

            monkeypatch.setattr(fabric.context, refused, fail)
            why_not = await connection.upgrade()
            assert why_not == f"{'it says: ' if whose == 'theirs' else ''}{refused}: not here"
            await connection.send(LinkClosed(1))
            assert await taken.receive() == LinkClosed(1)
            assert connection.carrier == "tcp"
            await connection.aclose()
        await nothing_is_left(near_kit[0], far_kit[0])


async def test_where_chunks_cannot_be_registered_links_go_on_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
        register = far_kit[0].context.map

        def limited(memory: Any, size: int) -> object:
            if size > MIB:
                raise ucx.UcxError("ucp_mem_map: Input/output error")
            return register(memory, size)

        monkeypatch.setattr(far_kit[0].context, "map", limited)
        async with linked(near_kit, far_kit) as (near, far):
            await near.send(big(4 * MIB))
            with pytest.raises(ConnectionLost, match="ucp_mem_map"):
                await far.receive()
        async with dialled(near_kit[1], far_kit[1]) as (connection, _):
            assert await connection.upgrade() == "it says: ucp_mem_map: Input/output error"
        async with dialled(far_kit[1], near_kit[1]) as (connection, _):
            assert await connection.upgrade() == "ucp_mem_map: Input/output error"
        await nothing_is_left(near_kit[0], far_kit[0])


@pytest.mark.parametrize("whose", ["ours", "theirs"])
async def test_a_channel_that_breaks_before_it_is_used_takes_its_link_along(
    whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def lose(connection: StreamConnection, why: str | None) -> None:
        with pytest.raises(ConnectionLost, match=why):
            await connection.receive()

    async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
        async with joined(near_kit[1], far_kit[1], MIB) as (near, far):
            enable_send = StreamConnection.enable_send

            def broken(connection: StreamConnection) -> None:
                if connection is (near if whose == "ours" else far):
                    assert connection._channel is not None
                    connection._channel.close(ConnectionLost("broken"))
                enable_send(connection)

            monkeypatch.setattr(StreamConnection, "enable_send", broken)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lose, far, "broken" if whose == "theirs" else None)
                assert await near.upgrade() == ""
                await lose(near, "broken" if whose == "ours" else None)


async def test_a_channel_that_breaks_takes_its_link_along() -> None:
    async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
        async with linked(near_kit, far_kit) as (near, far):
            assert far._channel is not None
            far._channel.close(ConnectionLost("broken"))
            with pytest.raises(ConnectionLost, match="broken"):
                await far.receive()
            with pytest.raises(ConnectionLost):
                await near.receive()


async def test_where_ucx_fails_links_go_on_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fabric_of("tcp") as near_kit, fabric_of("tcp") as far_kit:
        async with linked(near_kit, far_kit) as (near, _):

            def fail() -> None:
                raise ucx.UcxError("ucp_worker_arm: no")

            monkeypatch.setattr(near_kit[0].context, "arm", fail)
            near_kit[0].wake()
            with pytest.raises(ConnectionLost):
                await near.receive()
        async with dialled(near_kit[1], far_kit[1]) as (connection, _):
            assert "UCX failed here: ucp_worker_arm: no" in await connection.upgrade()
            assert connection.carrier == "tcp"


# -------------------------------------------------------------------------------------------------- refusals


@asynccontextmanager
async def dialled(
    near_transport: Transport, far_transport: Transport, admit: bool = True
) -> AsyncIterator[tuple[StreamConnection, trio.MemoryReceiveChannel[Message | PeerError]]]:
    give, taken = trio.open_memory_channel[Message | PeerError](1)

    async def accepted(connection: Connection) -> None:
        if admit:
            connection.admit()
        try:
            await give.send(await connection.receive())
        except PeerError as error:
            await give.send(error)

    async with trio.open_nursery() as nursery:
        address = await nursery.start(far_transport.listen, LOOPBACK, accepted)
        connection = await near_transport.dial(address)
        assert isinstance(connection, StreamConnection)
        yield connection, taken
        nursery.cancel_scope.cancel()


async def test_a_peer_without_ucx_says_so_and_the_link_goes_on() -> None:
    async with fabric_of("tcp") as (_, near), trio.open_nursery() as nursery:
        async with dialled(near, TcpTransport(nursery)) as (connection, taken):
            assert "nothing beside the stream" in await connection.upgrade()
            assert connection.carrier == "tcp"
            await connection.send(LinkClosed(1))
            assert await taken.receive() == LinkClosed(1)


async def test_another_version_is_refused() -> None:
    async with fabric_of("tcp") as (fabric, near), fabric_of("tcp") as (_, far):
        ours, fabric.version = fabric.version, "UCX 1.9"
        async with dialled(near, far) as (connection, _):
            assert await connection.upgrade() == f"it has {ours}, not UCX 1.9"


@pytest.mark.parametrize("whose", ["ours", "theirs", "both reach"])
async def test_only_peers_in_the_subnets_have_channels(whose: str) -> None:
    elsewhere, here = ["10.1.0.0/16", "fd00::/8"], ["10.1.0.0/16", "127.0.0.0/8"]
    async with (
        fabric_of("tcp", subnets=elsewhere if whose == "ours" else here) as (_, near),
        fabric_of("tcp", subnets=elsewhere if whose == "theirs" else here) as (_, far),
        dialled(near, far) as (connection, _),
    ):
        outside = "127.0.0.1 is in none of rdma_subnets"
        refusals = {"ours": outside, "theirs": f"it says: {outside}", "both reach": ""}
        assert await connection.upgrade() == refusals[whose]
        assert connection.carrier.startswith("tcp" if whose != "both reach" else "ucx")


async def test_an_address_is_looked_for_in_its_subnets_however_it_is_written() -> None:
    async with fabric_of("tcp", subnets=["10.1.0.0/16", "fe80::/10"]) as (fabric, _):
        assert all(map(fabric.trusts, ("10.1.255.1", "::ffff:10.1.0.1", "fe80::1%eth0")))
        assert not any(map(fabric.trusts, ("10.2.0.1", "::ffff:10.2.0.1", "fd00::1", "::1")))
    async with fabric_of("tcp") as (fabric, _):
        assert fabric.trusts("10.2.0.1")


async def test_what_is_no_rdma_is_refused_unless_asked_for() -> None:
    async with fabric_of("tcp") as (_, near), fabric_of("tcp") as (fabric, far):
        fabric.endpoints.without_rdma = False
        async with dialled(near, far) as (connection, _):
            assert "no RDMA" in await connection.upgrade()
            assert connection.carrier == "tcp"


async def test_an_offer_before_the_greeting_breaks_the_rules() -> None:
    async with fabric_of("tcp") as (_, near), fabric_of("tcp") as (_, far):
        async with dialled(near, far, admit=False) as (connection, taken):
            with pytest.raises(ConnectionLost):
                await connection.upgrade()
            assert "before the greeting" in str(await taken.receive())


async def test_an_address_out_of_reach_is_refused_on_both_sides() -> None:
    async with fabric_of("tcp") as (_, near), fabric_of("posix,sysv,cma") as (_, far):
        async with dialled(near, far) as (connection, _):
            assert "unreachable" in await connection.upgrade()
            assert connection.carrier == "tcp"


async def test_an_address_that_cannot_be_one_never_reaches_ucx() -> None:
    async with fabric_of("tcp") as (fabric, _):
        for address in (b"", b"short", bytes(1 << 20)):
            with fabric.reserved() as (here, _), pytest.raises(BulkRefused, match="no worker has an address"):
                fabric.open("peer", here, 1, address)


async def test_a_peer_that_never_answers_an_offer_keeps_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.transport.upgrade.ANSWER_S", 0.2)
    async with fabric_of("tcp") as (_, near), trio.open_nursery() as nursery:

        async def silent(connection: StreamConnection) -> None:
            await trio.sleep(0.5)
            assert isinstance(await connection.receive_any(), BulkOffer)
            await connection.send(BulkAnswer("late", 0, ()))
            await connection.send(await connection.receive())

        address = await nursery.start(TcpTransport(nursery).listen, LOOPBACK, silent)
        connection = await near.dial(address)
        assert "no answer" in await connection.upgrade()
        await connection.send(LinkClosed(1))
        assert await connection.receive() == LinkClosed(1)
        nursery.cancel_scope.cancel()


# ------------------------------------------------------------------------------------------------------ loading


def test_a_named_library_is_the_only_one_tried() -> None:
    with pytest.raises(ucx.UcxError, match=f"{ucx.LIBRARY_VARIABLE}: .*nowhere"):
        ucx.load({ucx.LIBRARY_VARIABLE: "/nowhere/libucp.so"})


def test_another_library_is_told_from_ucx() -> None:
    with pytest.raises(ucx.UcxError, match=r"libc\.so\.6 is not UCX's libucp"):
        ucx.load({ucx.LIBRARY_VARIABLE: "libc.so.6"})


@pytest.mark.parametrize("given", [None, "1m"])
def test_the_environment_is_left_as_it_was(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if given is not None:
        monkeypatch.setenv("UCX_RNDV_THRESH", given)
    before = dict(os.environ)
    ucx.resources(ucx.load())
    assert dict(os.environ) == before


def test_transports_that_are_not_here_are_an_error() -> None:
    with pytest.raises(ucx.UcxError, match="ucp_init_version: "):
        ucx.Context(ucx.load(), "no_such_transport")


def test_transports_that_the_user_chose_are_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "nonsense")
    with pytest.raises(ucx.UcxError, match="UCX_TLS=nonsense"):
        ucx.resources(ucx.load())
