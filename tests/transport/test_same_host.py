"""Bulk within one host: nothing is overwritten while it is read, nothing is left behind, and who may map it."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import trio
from connection_ends import joined, receive_a
from hypothesis import given, settings
from hypothesis import strategies as st
from ucx_here import upgrade

from peerd.transport import bulk, same_host, sealed_file, stream
from peerd.transport.bulk import ZERO_COPY_CHUNKS_MAX, BulkRefused, Fabric
from peerd.transport.connection import ConnectionLost
from peerd.transport.messages import BulkAnswer, BulkOffer, ModelSnapshot
from peerd.transport.same_host import SLOTS, UNREAD_BYTES, Incoming, Outgoing, SameHost
from peerd.transport.stream import StreamConnection
from peerd.transport.tcp import TcpTransport

MIB = 1 << 20


def address_of(ours: Outgoing) -> bytes:
    return f"{os.getpid()} {ours.fd}".encode()


@contextmanager
def pair() -> Iterator[tuple[Outgoing, Incoming]]:
    ours = Outgoing()
    try:
        yield ours, Incoming(ours.number, address_of(ours))
    finally:
        ours.close()


def chunk(count: int, size: int) -> bytes:
    """Different for each count, at every byte."""
    return np.random.default_rng(count).bytes(size)


def taken_bytes(ours: Outgoing) -> int:
    """What the file holds in memory."""
    return os.fstat(ours.fd).st_blocks * 512


# ---------------------------------------------------------------------------------------------------- the memory


@settings(deadline=None)
@given(st.data())
def test_a_chunk_stays_as_it_was_sent_until_its_last_view_is_gone(data: st.DataObject) -> None:
    with pair() as (ours, theirs):
        sent: list[int] = []
        taken = 0
        held: dict[int, memoryview] = {}
        for _ in range(data.draw(st.integers(1, 60), "steps")):
            step = data.draw(st.sampled_from(["place", "take", "drop", "part"]))
            size = data.draw(st.sampled_from([1, 5000, 70_000]))
            if step == "place" and ours.has_room(size):
                ours.place(chunk(len(sent), size))
                sent.append(size)
            elif step == "take" and taken < len(sent):
                held[taken] = theirs.take(sent[taken])
                taken += 1
            elif step == "drop" and held:
                del held[data.draw(st.sampled_from(sorted(held)))]
            elif step == "part" and held:  # a view of a part keeps the whole, through numpy too
                count = data.draw(st.sampled_from(sorted(held)))
                held[count] = np.frombuffer(held[count], np.uint8).data[:]
            for count, view in held.items():
                assert view == chunk(count, sent[count])


def test_what_is_not_taken_is_bounded_and_what_is_taken_is_not() -> None:
    with pair() as (ours, theirs):
        kept = []
        for round_ in range(20):
            placed = 0
            while ours.has_room(4 * MIB):
                ours.place(bytes([round_]) * (4 * MIB))
                placed += 1
            assert placed == UNREAD_BYTES // (4 * MIB)
            kept += [(round_, theirs.take(4 * MIB)) for _ in range(placed)]
        assert len(kept) > SLOTS
        assert all(view[:1] == view[-1:] == bytes([round_]) for round_, view in kept)


def test_small_chunks_have_room_beside_many_that_are_kept() -> None:
    with pair() as (ours, theirs):
        kept = []
        for count in range(3 * SLOTS):
            assert ours.has_room(70_000)
            ours.place(chunk(count, 70_000))
            kept.append(theirs.take(70_000))
        assert all(view == chunk(count, 70_000) for count, view in enumerate(kept))
        placed = 0
        while ours.has_room(70_000):
            ours.place(bytes(70_000))
            placed += 1
        assert placed >= SLOTS - ZERO_COPY_CHUNKS_MAX


def test_the_longest_chunk_has_room_where_nothing_lies() -> None:
    with pair() as (ours, _):
        assert ours.has_room(same_host.SLOT_BYTES)


def test_thousands_of_exchanges_take_one_slot() -> None:
    with pair() as (ours, theirs):
        for count in range(10_000):
            ours.place(bytes([count % 251]) * 70_000)
            assert theirs.take(70_000)[-1] == count % 251
        assert taken_bytes(ours) <= 70_000 + 2 * 4096 + same_host._HEAD_BYTES


def test_a_view_is_read_only_and_outlives_both_ends() -> None:
    with pair() as (ours, theirs):
        ours.place(b"x" * 5000)
        view = theirs.take(5000)
    gone = weakref.ref(theirs)
    del ours, theirs
    assert gone() is None
    assert view == b"x" * 5000
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1


def test_a_sender_that_names_no_slot_is_found_out() -> None:
    with pair() as (ours, theirs):
        ours.place(b"x")
        ours._memory.order[1] = same_host.SLOTS
        with pytest.raises(ValueError, match=f"no slot {same_host.SLOTS}"):
            theirs.take(1)


# ---------------------------------------------------------------------------------------------------- who maps it


def test_only_a_memory_with_the_number_that_was_told_is_mapped() -> None:
    with pair() as (ours, _):
        with pytest.raises(ValueError, match="another memory"):
            Incoming(ours.number + 1, address_of(ours))
    with pytest.raises(FileNotFoundError):
        Incoming(ours.number, address_of(ours))  # it is closed


@pytest.mark.parametrize("address", [b"", b"1", b"x y", b"1 2 3", b"-1 0", b"9" * 5000 + b" 1"])
def test_an_address_that_is_none_is_refused(address: bytes) -> None:
    with pytest.raises((ValueError, OSError)):
        Incoming(1, address)


def test_another_file_is_not_opened_or_not_mapped(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    plain = (tmp_path / "plain").open("wb+")
    os.truncate(plain.fileno(), same_host._SIZE)
    sealed = sealed_file.create(4096)
    for fd, says in ((read_end, "not memory"), (plain.fileno(), "not a sealed file"), (sealed, "not a sealed file")):
        with pytest.raises(ValueError, match=says):
            Incoming(1, f"{os.getpid()} {fd}".encode())
    for fd in (read_end, write_end, sealed):
        os.close(fd)
    plain.close()


def test_memory_of_another_user_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (ours, _):
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(ValueError, match="not memory of this user"):
            Incoming(ours.number, address_of(ours))


def test_addresses_of_this_host_and_of_others() -> None:
    here = SameHost()
    assert here.trusts("127.0.0.1")
    assert not any(map(here.trusts, ("192.0.2.1", "2001:db8::1", "fe80::1%nowhere")))


# ---------------------------------------------------------------------------------------------------- connections


@asynccontextmanager
async def linked(
    near_fabrics: Sequence[Fabric], far_fabrics: Sequence[Fabric]
) -> AsyncIterator[tuple[StreamConnection, StreamConnection]]:
    """Yield both ends of a connection."""
    async with trio.open_nursery() as nursery:
        near, far = TcpTransport(nursery, *near_fabrics), TcpTransport(nursery, *far_fabrics)
        async with joined(near, far, 256 * MIB) as ends:
            yield ends
        nursery.cancel_scope.cancel()


async def answered(near: StreamConnection, far: StreamConnection) -> str:
    """Offer, while the other end receives."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(far.receive)
        why_not = await near.upgrade()
        nursery.cancel_scope.cancel()
    return why_not


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_memories() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:peerd" in line for line in maps)


async def test_a_message_longer_than_what_may_lie_unread_arrives_whole() -> None:
    async with linked([SameHost()], [SameHost()]) as (near, far):
        await upgrade(near, far)
        message = ModelSnapshot(1, "c", tuple(chunk(count, 4 * MIB) for count in range(24)))
        await near.send(message)
        assert await far.receive() == message
        assert far.bytes_received == near.bytes_sent > 96 * MIB


async def test_closed_links_leave_neither_files_nor_memory() -> None:
    async def one() -> None:
        async with linked([SameHost()], [SameHost()]) as (near, far):
            await upgrade(near, far)
            await near.send(ModelSnapshot(1, "c", (bytes(MIB),)))
            await far.receive()

    await one()
    before = open_files(), mapped_memories()
    for _ in range(10):
        await one()
    assert (open_files(), mapped_memories()) == before


async def test_nodes_that_do_not_share_all_stay_on_tcp_and_keep_no_memory() -> None:
    elsewhere = SameHost()
    elsewhere.version = "shm 1 elsewhere"
    for theirs, says in (
        ([elsewhere], "it is of another user, or in other namespaces"),
        ([], "it has nothing beside"),
    ):
        async with linked([SameHost()], theirs) as (near, far):
            before = open_files(), mapped_memories()
            assert says in await answered(near, far)
            assert near.carrier == far.carrier == "tcp"
            assert (open_files(), mapped_memories()) == before


async def test_another_host_is_offered_nothing_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SameHost, "trusts", lambda *_: False)
    async with linked([SameHost()], [SameHost()]) as (near, _):
        assert await near.upgrade() == ""
        assert near.carrier == "tcp"


async def test_after_a_refusal_the_next_is_offered() -> None:
    elsewhere = SameHost()
    elsewhere.version = "shm 1 elsewhere"
    async with linked([elsewhere, SameHost()], [SameHost()]) as (near, far):
        await upgrade(near, far)
        assert near.carrier == far.carrier == "shm"


@pytest.mark.parametrize("whose", ["near", "far"])
async def test_who_cannot_open_the_other_s_memory_stays_on_tcp(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    near_fabric, far_fabric = SameHost(), SameHost()
    unlucky = near_fabric if whose == "near" else far_fabric

    def refuse(*_: object) -> None:
        raise BulkRefused("its memory cannot be opened: no")

    monkeypatch.setattr(unlucky, "open", refuse)
    async with linked([near_fabric, SameHost()], [far_fabric]) as (near, far):
        assert "cannot be opened" in await answered(near, far)
        await near.send(ModelSnapshot(1, "c", (bytes(MIB),)))
        assert (await receive_a(ModelSnapshot, far)).chunks == (bytes(MIB),)
        assert near.carrier == "tcp"
        assert not near_fabric._reserved
        assert not far_fabric._reserved


@pytest.mark.parametrize("free", range(8))
async def test_without_descriptors_links_stay_on_tcp(free: int) -> None:
    async with linked([SameHost()], [SameHost()]) as (near, far):
        before = open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest + 1 - before)]  # no gaps below
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() - 1 + free, hard))
        try:
            why_not = await answered(near, far)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in fillers:
                os.close(fd)
        await near.send(ModelSnapshot(1, "c", (bytes(MIB),)))
        assert (await receive_a(ModelSnapshot, far)).chunks == (bytes(MIB),)
        if near.carrier == "tcp":
            assert open_files() <= before + 3, "the acceptor may have its end already"
            assert free < 7 or why_not
        else:
            assert why_not == ""
            assert free > 3


async def test_without_room_to_map_links_stay_on_tcp_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked([SameHost()], [SameHost()]) as (near, far):
        before = open_files()

        def full(*_: object) -> None:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(sealed_file, "mapped", full)
        assert await answered(near, far) == "no shared memory: Cannot allocate memory"
        assert near.carrier == "tcp"
        assert open_files() == before


@pytest.mark.parametrize("theirs", [[], [SameHost]], ids=["nothing", "shm"])
async def test_an_offer_of_any_version_is_answered(theirs: list[type[SameHost]]) -> None:
    async with linked([], [make() for make in theirs]) as (near, far):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(far.receive)
            for version in ("", "shm", "shm 1", "\0", "中" * 85):
                await near.send(BulkOffer(version, 1, ()))
                answer = await near.receive_any()
                assert isinstance(answer, BulkAnswer)
                assert answer.refusal
            nursery.cancel_scope.cancel()


async def test_a_host_that_is_not_trusted_is_not_told_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SameHost, "trusts", lambda *_: False)
    fabric = SameHost()
    async with linked([], [fabric]) as (near, far):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(far.receive)
            for version in ("UCX 1.22", fabric.version):
                await near.send(BulkOffer(version, 1, ()))
                answer = await near.receive_any()
                assert isinstance(answer, BulkAnswer)
                assert "shm" not in answer.refusal
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("chunks", [12, 600])
@pytest.mark.trio(limit_s=9)
async def test_a_receiver_that_holds_one_message_while_the_next_comes_stops_nobody(chunks: int) -> None:
    async with linked([SameHost()], [SameHost()]) as (near, far):
        await upgrade(near, far)
        held = []
        for number in range(4):
            message = ModelSnapshot(number, "c", (bytes([number]) * (64 << 10),) * chunks)
            await near.send(message)
            held.append(await receive_a(ModelSnapshot, far))
        for number, message in enumerate(held):
            assert all(each == bytes([number]) * (64 << 10) for each in message.chunks)


# --------------------------------------------------------------------------------- a peer in a process of its own

PEER = """
import sys, trio
from peerd.transport.messages import ModelSnapshot
from peerd.transport.same_host import SameHost
from peerd.transport.stream import StreamConnection
from peerd.transport.tcp import TcpTransport

async def main(sends):
    async with trio.open_nursery() as nursery:
        async def accepted(connection):
            connection.admit()
            connection.payload_limit = 64 << 20
            async with trio.open_nursery() as both:
                async def send():
                    while connection.carrier == "tcp":
                        await trio.sleep(0.001)
                    while True:
                        await connection.send(ModelSnapshot(0, "c", tuple(bytes([n]) * (4 << 20) for n in range(5))))
                if sends:
                    both.start_soon(send)
                while True:
                    await connection.receive()

        address = await nursery.start(TcpTransport(nursery, SameHost()).listen, ("127.0.0.1", 0), accepted)
        print(address[1], flush=True)

trio.run(main, sys.argv[1] == "sends")
"""


@contextmanager
def peer(does: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A node in another process that sends or receives bulk without end; yields it and its port."""
    process = subprocess.Popen([sys.executable, "-c", PEER, does], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def intact(message: ModelSnapshot) -> bool:
    return all((np.frombuffer(each, np.uint8) == number).all() for number, each in enumerate(message.chunks))


@pytest.mark.cases(2)
@pytest.mark.parametrize("does", ["sends", "receives"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_peer_that_dies_or_stands_still_is_lost_and_what_came_stays(
    does: str, end: signal.Signals, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "PATIENCE_S", 0.5)
    monkeypatch.setattr(stream, "PATIENCE_S", 0.5)

    async def note_incarnation(
        process: subprocess.Popen[str], port: int, kept: list[ModelSnapshot | None], lost: list[ConnectionLost]
    ) -> None:
        async with trio.open_nursery() as nursery:
            connection = await TcpTransport(nursery, SameHost()).dial(("127.0.0.1", port))
            connection.payload_limit = 64 * MIB
            assert await connection.upgrade() == ""
            assert connection.carrier == "shm"

            async def use() -> None:
                try:
                    while True:
                        if does == "sends":
                            kept[:] = [*kept[-1:], await receive_a(ModelSnapshot, connection)]
                        else:
                            await connection.send(ModelSnapshot(0, "c", (bytes(4 * MIB),) * 5))
                            kept.append(None)
                except ConnectionLost as error:
                    lost.append(error)

            async with trio.open_nursery() as users:
                users.start_soon(use)
                while not kept:
                    await trio.sleep(0.005)
                await trio.sleep(random.Random(seed).uniform(0, 0.1))
                process.send_signal(end)
                if end == signal.SIGSTOP and does == "sends":  # nothing is due of it: membership finds that out
                    await trio.sleep(0.3)
                    process.kill()
            assert len(lost) == 1
            assert all(intact(message) for message in kept if message is not None)
            await connection.aclose()
            nursery.cancel_scope.cancel()

    gc.collect()  # what earlier tests have left
    before = open_files(), mapped_memories()
    kept: list[ModelSnapshot | None] = []
    lost: list[ConnectionLost] = []
    with peer(does) as (process, port):
        await note_incarnation(process, port, kept, lost)
    kept.clear()
    lost.clear()
    gc.collect()  # tracebacks
    assert (open_files(), mapped_memories()) == before
