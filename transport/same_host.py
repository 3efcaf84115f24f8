"""Connections within one host: large chunks go through memory that both ends map, copied once.

How this works. Each end of a connection has a memory file for what it sends, and tells the other where to open it: as a
descriptor of its process. Only a process of the same user, in the same namespaces, does; others stay on TCP. Processes
of one user trust each other: they could read each other's memory anyway. A chunk is copied into the first free slot
before its frame goes into the stream, so it is there whenever its frame is, and nobody waits for it or is woken. It is
read where it lies. The receiver notes in the memory itself how many chunks it has taken, which bounds what lies there
unread, and which slots are free again: those of which the last view is gone. Of a message that is longer than the
slots, whose receiver keeps all chunks until the last has come, it copies the later ones, and frees their slots at once.

There are no checksums: the bytes are never on a line. Nobody reads what is being written: the receiver learns of a
chunk by its frame, and the sender takes a slot only after it has seen that the receiver is done with it.

Nor are they sealed where the connection is. Who else can open the memory is a process of the same user, which could as
well read the model in either daemon, or take its key. Where the memory is, and the 62 random bits that are in it, came
over the sealed stream, from who had proved to be a member: nobody can have another memory taken for it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import socket
import stat
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio

from peerd.transport import sealed_file, wire
from peerd.transport.bulk import UNDER_WAY, ZERO_COPY_CHUNKS_MAX, BulkRefused, nothing, patience_s
from peerd.transport.connection import ConnectionLost
from peerd.transport.errors import cause
from peerd.transport.messages import Chunk

SLOT_BYTES = wire.CHUNK_MAX
SLOTS = ZERO_COPY_CHUNKS_MAX + UNDER_WAY  # 64 MiB a direction at most; for what is unread there are always some
UNREAD_BYTES = UNDER_WAY * SLOT_BYTES  # that lie in the memory and were not taken yet
LOOK_MIN_S, LOOK_MAX_S = 0.0002, 0.005  # between two looks whether there is room again: as long as a chunk takes

_NUMBER, _TAKEN, _ORDER = 0, 1, 8  # words of the head: whose memory, chunks taken, then the slots of chunks in order
_FREED = _ORDER + SLOTS  # then, for each slot, the number of the last chunk that was there and is not needed any more
_HEAD_BYTES = mmap.PAGESIZE
_SIZE = _HEAD_BYTES + SLOTS * SLOT_BYTES


class _Memory:
    """What both ends of one direction see."""

    def __init__(self, fd: int) -> None:
        """Map a file. Raises ValueError when it is not one of these, OSError when there is no room."""
        self.pages = sealed_file.mapped(fd, _SIZE)
        self.head: npt.NDArray[np.uint64] = np.frombuffer(self.pages, np.uint64, _FREED + SLOTS)
        self.order, self.freed = self.head[_ORDER:_FREED], self.head[_FREED:]

    def slot(self, slot: int, size: int) -> npt.NDArray[np.uint8]:
        """The beginning of a slot, an object of its own."""
        return np.frombuffer(self.pages, np.uint8, size, _HEAD_BYTES + slot * SLOT_BYTES)


class Outgoing:
    """The sender's end of a memory, which it has made."""

    def __init__(self) -> None:
        """Raises OSError when there can be none."""
        self.number = secrets.randbits(62)
        self.fd = sealed_file.create(_SIZE)
        try:
            self._memory = _Memory(self.fd)
        except BaseException:
            os.close(self.fd)
            raise
        self._memory.head[_NUMBER] = self.number
        self._placed = 0
        self._unread: deque[int] = deque()  # sizes
        self._given = np.zeros(SLOTS, np.uint64)  # to which chunk each slot was given last

    @property
    def taken(self) -> int:
        """How many chunks the receiver has taken."""
        return int(self._memory.head[_TAKEN])

    def has_room(self, size: int) -> bool:
        """Whether a chunk of `size` bytes may be placed now."""
        taken = self.taken
        while self._unread and self._placed - len(self._unread) < taken:
            self._unread.popleft()
        return (not self._unread or sum(self._unread) + size <= UNREAD_BYTES) and bool(self._free().any())

    def place(self, chunk: Chunk) -> None:
        """Copy a chunk, for which there is room."""
        slot = int(self._free().argmax())
        self._placed += 1
        self._given[slot] = self._placed
        # numpy copies without the GIL, so that the maths in other threads goes on
        np.copyto(self._memory.slot(slot, len(chunk)), np.frombuffer(chunk, np.uint8))
        self._memory.order[self._placed % SLOTS] = slot
        self._unread.append(len(chunk))

    def close(self) -> None:
        """Let nobody else open it. The memory ends with its last view."""
        os.close(self.fd)

    def _free(self) -> npt.NDArray[np.bool_]:
        return np.equal(self._given, self._memory.freed)


class Incoming:
    """The receiver's end of a memory that the sender has made."""

    def __init__(self, number: int, address: bytes) -> None:
        """Map what is at `address`. Raises OSError, or ValueError when it has another number or is no such memory."""
        process, descriptor = map(int, address.split())
        found = os.open(f"/proc/{process}/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)  # which has no effect on it
        try:
            stated = os.fstat(found)
            if not stat.S_ISREG(stated.st_mode) or stated.st_uid != os.geteuid():
                raise ValueError("not memory of this user")
            fd = os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._memory = _Memory(fd)
            finally:
                os.close(fd)
        finally:
            os.close(found)
        if int(self._memory.head[_NUMBER]) != number:
            raise ValueError("another memory")
        self._taken = 0
        self._views: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}

    def take(self, size: int) -> memoryview:
        """Return the next chunk, to be read only. Raises ValueError when the sender names no slot."""
        count = self._taken + 1
        slot = int(self._memory.order[count % SLOTS])
        if slot >= SLOTS:
            raise ValueError(f"there is no slot {slot}")
        self._taken = count
        self._memory.head[_TAKEN] = count
        chunk = self._memory.slot(slot, size)
        if len(self._views) >= ZERO_COPY_CHUNKS_MAX:
            copied = chunk.copy()
            self._memory.freed[slot] = count
            return copied.data
        chunk.flags.writeable = False
        self._views[count] = weakref.ref(chunk, _freeing(self._memory, self._views, slot, count))
        return chunk.data


def _freeing(
    memory: _Memory, views: dict[int, weakref.ref[npt.NDArray[np.uint8]]], slot: int, count: int
) -> Callable[[object], None]:
    def free(_: object) -> None:  # in any thread
        memory.freed[slot] = count
        del views[count]

    return free


class SameHost:
    """The `Fabric` of nodes that run on one host."""

    refuses = ""
    outside = ""  # nobody expects it with another host

    def __init__(self) -> None:
        """Raises OSError where the kernel does not tell enough."""
        places = [Path("/proc/sys/kernel/random/boot_id").read_text(), str(os.geteuid())]
        places += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
        self.version = f"shm 1 {hashlib.sha256(''.join(places).encode()).hexdigest()[:16]}"
        self._reserved: dict[int, Outgoing] = {}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `Fabric.run`: nothing moves by itself."""
        await trio.lowlevel.checkpoint()
        task_status.started()

    def trusts(self, host: str) -> bool:
        """See `Fabric.trusts`: an address of this host."""
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.bind((host, 0))
        except (OSError, ValueError):
            return False
        return True

    @contextmanager
    def reserved(self) -> Iterator[tuple[int, bytes]]:
        """See `Fabric.reserved`."""
        try:
            memory = Outgoing()
        except OSError as error:
            raise BulkRefused(f"no shared memory: {cause(error)}") from None
        self._reserved[memory.number] = memory
        try:
            yield memory.number, f"{os.getpid()} {memory.fd}".encode()
        finally:
            if self._reserved.pop(memory.number, None) is not None:
                memory.close()

    def open(self, remote: str, here: int, there: int, address: bytes) -> SharedMemoryChannel:
        """See `Fabric.open`."""
        try:
            theirs = Incoming(there, address)
        except (OSError, ValueError) as error:
            raise BulkRefused(f"its memory cannot be opened: {cause(error)}") from None
        return SharedMemoryChannel(remote, self._reserved.pop(here), theirs)


class SharedMemoryChannel:
    """A `BulkChannel` through shared memory."""

    name = "shm"
    checked = False
    ready = True

    def __init__(self, remote: str, ours: Outgoing, theirs: Incoming) -> None:
        self.remote = remote
        self.on_close: Callable[[ConnectionLost], None] = nothing
        self._ours = ours
        self._theirs = theirs
        self._expected: deque[int] = deque()
        self.lost: ConnectionLost | None = None

    def __repr__(self) -> str:
        return f"<SharedMemoryChannel to {self.remote}>"

    def goes_ahead(self, size: int) -> bool:
        """See `BulkChannel.goes_ahead`."""
        return self._ours.has_room(size)

    def expect(self, sizes: list[int]) -> None:
        """See `BulkChannel.expect`."""
        self._expected += sizes

    async def arrival(self) -> None:
        """See `BulkChannel.arrival`."""
        await trio.lowlevel.checkpoint()

    def take(self) -> memoryview:
        """See `BulkChannel.take`."""
        self._check_open()
        try:
            return self._theirs.take(self._expected.popleft())
        except ValueError as error:
            self.close(ConnectionLost(f"{self.remote}: closed, it broke the rules: {error}"))
            self._check_open()
            raise

    async def send(self, chunk: Chunk) -> None:
        """See `BulkChannel.send`."""
        if not self._ours.has_room(len(chunk)):
            await self._room(len(chunk))
        self._check_open()
        self._ours.place(chunk)

    async def drained(self) -> None:
        """See `BulkChannel.drained`: what was sent lies there already."""

    async def tried(self) -> None:
        """See `BulkChannel.tried`: whoever has opened both directions has tried them."""
        await trio.lowlevel.checkpoint()
        self._check_open()

    def close(self, lost: ConnectionLost) -> None:
        """See `BulkChannel.close`."""
        if self.lost is not None:
            return
        self.lost = lost
        self._ours.close()
        on_close, self.on_close = self.on_close, nothing  # of the connection, which has this: no cycle keeps the memory
        on_close(lost)

    async def _room(self, size: int) -> None:
        """Look again and again: the receiver wakes nobody. One that takes nothing is given up."""
        look_s, taken, since = LOOK_MIN_S, self._ours.taken, trio.current_time()
        while self.lost is None and not self._ours.has_room(size):
            await trio.sleep(look_s)
            look_s = min(2 * look_s, LOOK_MAX_S)
            if self._ours.taken != taken:
                taken, since = self._ours.taken, trio.current_time()
            elif trio.current_time() > since + patience_s(UNREAD_BYTES):
                self.close(ConnectionLost(f"{self.remote}: closed, it takes nothing in over {self.name}"))

    def _check_open(self) -> None:
        if self.lost is not None:
            raise ConnectionLost(*self.lost.args)
