"""How fast are 16 MiB messages between two processes: our connection, over what it has, beside raw blocking sockets.

    python benchmarks/datapath.py [--messages 64] [--rounds 5] [--format json]

They are timed in turn, in the same run, because differences between runs are noise; the best and the median are shown,
and the median of each round's ratio to our connection over TCP, as the machine's speed changes from round to round.
Our connection checks what is on a line: the "checked" blocking sockets do, too, with the same checksum. Sealed ones are
checked by their seals; TLS is that of Python's `ssl` over blocking sockets. The receiver tells how long it took from
the first byte wanted, or the first message received, to the last one. CPU is that of both processes meanwhile. Where
there is no UCX its rows are missing. Beside the paths, the CPU that a handshake costs both ends together.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import numpy as np
import trio

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "transport"))
from certificates import Authority, TestCredentials

from peerd.process.allocator import keep_freed_chunks
from peerd.transport.bulk import Fabric
from peerd.transport.connection import Connection
from peerd.transport.framing import payload_checksum
from peerd.transport.messages import ModelRequest, ModelSnapshot
from peerd.transport.rdma import ucx
from peerd.transport.rdma.fabric import UcxFabric
from peerd.transport.same_host import SameHost
from peerd.transport.tcp import TcpTransport

CHUNK_BYTES = 4 << 20
CHUNKS = 4

Timed = tuple[float, float]  # seconds, and seconds of CPU of both processes


def in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Run `work(pipe)` in a forked process; return its pid and what it writes to."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        work(writing)
        os._exit(0)
    os.close(writing)
    return pid, reading


def payload() -> list[memoryview]:
    values = np.random.default_rng(0).integers(0, 256, CHUNK_BYTES * CHUNKS, dtype=np.uint8)
    return [values[start : start + CHUNK_BYTES].data for start in range(0, len(values), CHUNK_BYTES)]


# ------------------------------------------------------------------------------------------------ blocking sockets


def blocking(messages: int, checked: bool = False, tls: bool = False) -> Timed:
    listener = socket.create_server(("127.0.0.1", 0))
    certified, dialler = credentials()

    def receive(pipe: int) -> None:
        connection, _ = listener.accept()
        if tls:
            connection = certified.context(server=True).wrap_socket(connection, server_side=True)
        buffer = memoryview(bytearray(CHUNK_BYTES * CHUNKS))
        os.write(pipe, b"+")
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(messages):
            got = 0
            while got < len(buffer):
                got += connection.recv_into(buffer[got:])
            if checked:
                payload_checksum(buffer)
        os.write(pipe, f"{time.perf_counter() - began} {time.process_time() - cpu}".encode())

    pid, pipe = in_child(receive)
    chunks = payload()
    with socket.create_connection(listener.getsockname()) as plain:
        connection = dialler.context(server=False).wrap_socket(plain) if tls else plain
        os.read(pipe, 1)
        cpu = time.process_time()
        for _ in range(messages):
            for chunk in chunks:
                if checked:
                    payload_checksum(chunk)
                connection.sendall(chunk)
        told = os.read(pipe, 100)
        cpu = time.process_time() - cpu
    listener.close()
    os.close(pipe)
    os.waitpid(pid, 0)
    elapsed, theirs = map(float, told.split())
    return elapsed, cpu + theirs


# -------------------------------------------------------------------------------------------------- our connection


Make = Callable[[], Fabric] | None


@cache
def credentials() -> tuple[TestCredentials, TestCredentials]:
    """Those of both ends."""
    authority = Authority()
    return TestCredentials(authority), TestCredentials(authority)


def linked(messages: int, make: Make = None, sealed: bool = False) -> Timed:
    """With chunks over what `make` makes; without it, over TCP."""
    ours, theirs = credentials() if sealed else (None, None)
    pid, pipe = in_child(lambda writing: trio.run(receive_linked, messages, writing, make, theirs))
    port = int(os.read(pipe, 100))
    found = trio.run(send_linked, messages, port, pipe, make, ours)
    os.close(pipe)
    os.waitpid(pid, 0)
    return found


async def transport(nursery: trio.Nursery, make: Make, own: TestCredentials | None) -> TcpTransport:
    fabrics = [] if make is None else [make()]
    for fabric in fabrics:
        await nursery.start(fabric.run)
    return TcpTransport(nursery, *fabrics, credentials=own)


async def receive_linked(messages: int, pipe: int, make: Make, own: TestCredentials | None) -> None:
    async def accepted(connection: Connection) -> None:
        await connection.shake_hands()
        connection.payload_limit = CHUNK_BYTES * CHUNKS
        connection.admit()
        await connection.send(ModelRequest())
        await connection.receive()  # what is sent first is not timed
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(messages):
            await connection.receive()
        os.write(pipe, f"{time.perf_counter() - began} {time.process_time() - cpu}".encode())
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        listen = (await transport(nursery, make, own)).listen
        address = await nursery.start(listen, ("127.0.0.1", 0), accepted)
        os.write(pipe, str(address[1]).encode())


async def send_linked(messages: int, port: int, pipe: int, make: Make, own: TestCredentials | None) -> Timed:
    message = ModelSnapshot(0, "float32", tuple(payload()))
    async with trio.open_nursery() as nursery:
        connection = await (await transport(nursery, make, own)).dial(("127.0.0.1", port))
        await connection.receive()
        if why_not := await connection.upgrade():
            sys.exit(why_not)
        assert (connection.carrier != "tcp") == (make is not None)
        await connection.send(message)
        await connection.flushed()
        cpu = time.process_time()
        for _ in range(messages):
            await connection.send(message)
        told = await trio.to_thread.run_sync(os.read, pipe, 100)
        cpu = time.process_time() - cpu
        await connection.aclose()
        nursery.cancel_scope.cancel()
    elapsed, theirs = map(float, told.split())
    return elapsed, cpu + theirs


# ------------------------------------------------------------------------------------------------------------ main


def paths() -> dict[str, Callable[[int], Timed]]:
    found: dict[str, Callable[[int], Timed]] = {
        "blocking sockets": blocking,
        "the same, checked": partial(blocking, checked=True),
        "TLS of ssl": partial(blocking, tls=True),
        "peerd link": linked,
        "peerd link, sealed": partial(linked, sealed=True),
        "peerd over shm": partial(linked, make=SameHost),
        "the same, sealed": partial(linked, make=SameHost, sealed=True),
    }
    with suppress(ucx.UcxError):
        library = ucx.load()
        for name, transports in (("tcp", "tcp"), ("shm", "posix,sysv,cma")):
            over_ucx = partial(UcxFabric, library, transports, without_rdma=True)
            found[f"peerd over UCX {name}"] = partial(linked, make=over_ucx)
            found[f"the same, sealed ({name})"] = partial(linked, make=over_ucx, sealed=True)
    return found


async def handshake_s(count: int = 50) -> float:
    """Seconds of CPU that one costs, both ends in this process, with the connection around it."""
    ours, theirs = credentials()

    async def accepted(connection: Connection) -> None:
        await connection.shake_hands()
        await connection.send(ModelRequest())

    async with trio.open_nursery() as nursery:
        address = await nursery.start(TcpTransport(nursery, credentials=theirs).listen, ("127.0.0.1", 0), accepted)
        cpu = time.process_time()
        for _ in range(count):
            connection = await TcpTransport(nursery, credentials=ours).dial(address)
            await connection.receive()
            await connection.aclose()
        cpu = time.process_time() - cpu
        nursery.cancel_scope.cancel()
    return cpu / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=64, help="16 MiB messages a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args()
    keep_freed_chunks()  # as the daemon does
    gigabytes = options.messages * CHUNKS * CHUNK_BYTES / 1e9
    rates: dict[str, list[float]] = {name: [] for name in paths()}
    cpu: dict[str, list[float]] = {name: [] for name in rates}
    for _ in range(options.rounds):
        for name, path in paths().items():
            elapsed, busy = path(options.messages)
            rates[name].append(gigabytes / elapsed)
            cpu[name].append(busy / gigabytes)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    costs = {name: statistics.median(found) for name, found in cpu.items()}
    connection = rates["peerd link"]
    ratios = {
        name: statistics.median(rate / beside for rate, beside in zip(found, connection, strict=True))
        for name, found in rates.items()
    }
    handshake = trio.run(handshake_s)
    if options.format == "json":
        said = {"gb_per_s": rates, "median_gb_per_s": medians, "of_link": ratios, "cpu_s_per_gb": costs}
        said["handshake_cpu_s"] = handshake
        json.dump(said, sys.stdout)
        print()
        return
    print(f"{'path':<24}{'median GB/s':>12}{'best GB/s':>12}{'of the connection':>12}{'CPU s/GB':>12}")
    for name, found in rates.items():
        print(f"{name:<24}{medians[name]:>12.2f}{max(found):>12.2f}{ratios[name]:>12.2f}{costs[name]:>12.2f}")
    print(f"a handshake: {1e3 * handshake:.1f} ms of CPU, both ends together")


if __name__ == "__main__":
    main()
