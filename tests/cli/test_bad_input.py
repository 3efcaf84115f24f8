"""What a user gets wrong, and what an attacker sends: one clear line, the right exit code, the others unharmed."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import trio
import zstandard
from machine import PATIENCE_S, Machine, Node
from scripts import TRAIN

from peerd.messages import Delta, Hello, LinkOpen, Message, ModelSnapshot
from peerd.supervisor import die_with_parent
from peerd.training.squeeze import ZSTD
from peerd.transport.hello import greet
from peerd.transport.link import Link, LinkLost
from peerd.transport.tcp import TcpTransport


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine() as machine:
        yield machine


def refusals(machine: Machine, commands: dict[str, list[str]], **environment: str) -> dict[str, str]:
    """The one line that each command says; all run at once."""
    running = {
        key: subprocess.Popen(
            [sys.executable, "-m", "peerd.cli.main", *arguments],
            env={**machine.environment, **environment},
            cwd=machine.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        for key, arguments in commands.items()
    }
    lines = {}
    for key, process in running.items():
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1, (key, process.returncode, out, err)
        ours = [line for line in err.splitlines() if line.startswith("peerd: ")]
        assert len(ours) == 1, (key, err)
        assert not out, (key, out)
        assert err.splitlines() == ours, (key, err)
        lines[key] = ours[0].removeprefix("peerd: ")
    return lines


def test_wrong_settings(machine: Machine) -> None:
    def config(text: str) -> str:
        return str(machine.script(f"{abs(hash(text))}.toml", text))

    start = ["start", "--bind", "127.0.0.1:0"]
    said = refusals(
        machine,
        {
            "did you mean 'trigger'?": [*start, "--config", config('trigerr = "always"')],
            "view must be a whole number, not 'three'": [*start, "--config", config('view = "three"')],
            "join must be a list of strings, not 7": [*start, "--config", config("join = 7")],
            "Invalid value (at line 1": [*start, "--config", config("view = = 3")],
            "No such file": [*start, "--config", "nosuch.toml"],
            "write one of: change:0.05": [*start, "--trigger", "chnge:0.05"],
            "trigger 'change:nan' is not one": [*start, "--trigger", "change:nan"],
            "did you mean 'int8'?": [*start, "--codec", "int9"],
            "bind: '127.0.0.1:99999' is not HOST:PORT": ["start", "--bind", "127.0.0.1:99999"],
            "cannot listen on 192.0.2.1:0": ["start", "--bind", "192.0.2.1:0"],  # TEST-NET: nobody's address
            "join: '10.0.0.5:7x' is not HOST:PORT": [*start, "--join", "10.0.0.5:7x"],
            "cannot resolve nosuch.invalid:7946": [*start, "--join", "nosuch.invalid"],
            "name: 'a/b' must be": [*start, "--name", "a/b"],
            "view: 0 must be at least 1": [*start, "--view", "0"],
            "no such script: nosuch.py": [*start, "nosuch.py"],
            "no such command or task: digit": [*start, "digit"],
            "--nosuch is neither an option": [*start, "--nosuch"],
            "no peerd node runs here": ["members"],
            "no node called 'x' runs here": ["leave", "--name", "x"],
        },
    )
    for expected, line in said.items():
        assert expected in line


def test_wrong_places(machine: Machine) -> None:
    a = machine.start("a")
    port = a.address.rsplit(":")[1]
    file = machine.script("file", "")
    foreign = machine.path / "foreign"
    (foreign / "peerd").mkdir(parents=True)
    start = ["start", "--bind", "127.0.0.1:0", "--name"]
    said = refusals(
        machine,
        {
            "port in use: 127.0.0.1:": ["start", "--name", "b", "--bind", f"127.0.0.1:{port}"],
            "a node already runs with the state folder": [*start, "a"],
            "cannot join 127.0.0.1:1": ["join", "--name", "a", "127.0.0.1:1"],
            "this node has no model yet": ["export", "--name", "a", "m.safetensors"],
        },
    )
    said |= refusals(
        machine,
        {"a node called 'a' runs here already": [*start, "a"]},
        XDG_STATE_HOME=str(machine.path / "elsewhere"),
    )
    said |= refusals(machine, {"Not a directory; choose another with state_dir": [*start, "b"]}, XDG_STATE_HOME=str(file))
    said |= refusals(machine, {"file/peerd/b.sock: Not a directory": [*start, "b"]}, XDG_RUNTIME_DIR=str(file))
    deep = str(machine.path / ("x" * 100))
    said |= refusals(machine, {"AF_UNIX path too long": [*start, "b"]}, XDG_RUNTIME_DIR=deep)
    if os.getuid() == 0:
        os.chown(foreign / "peerd", 65534, 65534)
        said |= refusals(machine, {"belongs to another user": [*start, "b"]}, XDG_RUNTIME_DIR=str(foreign))
    for expected, line in said.items():
        assert expected in line
    assert a.members() == {"a": "alive"}


def test_a_script_that_dies_at_import(machine: Machine) -> None:
    node = machine.start("n", machine.script("dies.py", "print('mine')\nimport nosuchmodule\n"))
    assert node.end() == 1
    lines = node.log.splitlines()
    assert "mine" in lines
    assert "ModuleNotFoundError: No module named 'nosuchmodule'" in lines
    assert lines[-1].startswith("peerd: dies.py exited with code 1 before it called peerd.attach")
    assert node.log.count("Traceback") == 1  # the script's own
    assert not node.socket.exists()


# ------------------------------------------------------------------------------------------- a swarm, and who harms it


def test_a_swarm_is_unharmed(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    a = machine.start("a", script)
    a.trains()

    # another swarm, and another model: refused with the field that differs
    other_swarm = machine.start("s", "--swarm", "other", join=a)
    assert other_swarm.end() == 1
    assert other_swarm.log.splitlines()[-1] == (
        f"peerd: {a.address} refused this node: its swarm is 'peerd', ours 'other'"
    )
    other_model = machine.start("m", script, join=a, HIDDEN="17")
    sick = machine.start("sick", script, join=a, NAN="1", SEED="1")
    assert other_model.end() == 1
    assert other_model.log.splitlines()[-1] == (
        f"peerd: {a.address} refused this node: its model is '0.weight float32 16x4', ours '0.weight float32 17x4'"
    )

    # a NaN every 50 steps: rolled back, and never sent on
    sick.says("the model is not finite", times=2)
    assert sick.ask("status")["trainer"]["rollbacks"] >= 2
    assert_well(a, sick)

    # garbage on every port
    for garbage in garbages():
        throw(a, garbage)
    assert_well(a, sick)
    trio.run(bomb, a)
    assert_well(a, sick)
    throw_locally(a)
    assert_well(a, sick)
    assert "Traceback" not in machine.logs()
    for node in (a, sick):
        node.signal(signal.SIGINT)
        assert node.end() == 0


def assert_well(*nodes: Node) -> None:
    """They train and exchange, their models are finite, and they see each other."""
    for node in nodes:
        node.sees(**{other.name: "alive" for other in nodes})
        before = node.ask("status")
        node.eventually(lambda node=node, before=before: node.ask("status")["exchanges"] > before["exchanges"])  # type: ignore[misc]
        node.trains(beyond=before["trainer"]["step"])
        assert node.ask("status")["trainer"]["loss"] is not None
        assert node.ask("status")["consensus_distance"] < 1.0


def frame(kind: int, header: bytes = b"", payload_length: int = 0, header_length: int | None = None) -> bytes:
    """A frame with a right checksum, whatever else is wrong."""
    length = len(header) if header_length is None else header_length
    fixed = struct.pack("<4sBBHIIQ4x", b"PEER", 1, kind, 0, length, payload_length, 0)
    return fixed + struct.pack("<I", zlib.crc32(header, zlib.crc32(fixed))) + header


def garbages() -> list[bytes]:
    return [
        b"",
        b"\0",
        os.urandom(5000),
        b"GET /status HTTP/1.1\r\nHost: node\r\nUser-Agent: a-scanner\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(508),  # a TLS ClientHello
        frame(Hello.KIND, header_length=0xFFFFFFFF),
        frame(Hello.KIND, header_length=65536),  # announced, never sent
        frame(Hello.KIND, b"\xdf\xff\xff\xff\xff"),  # a map of 4 billion
        frame(Hello.KIND, b"\x91" * 60000),  # lists in lists
        frame(255, payload_length=0xFFFFFFFF),
        frame(ModelSnapshot.KIND, msgpack.packb([[1 << 62], 0, "float32"])),
        frame(ModelSnapshot.KIND, msgpack.packb([[4 << 20] * 10000, 0, "float32"])),
    ]


def throw(node: Node, garbage: bytes) -> None:
    host, port = node.address.split(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(garbage)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.sendto(garbage, (host, int(port)))


def throw_locally(node: Node) -> None:
    """At the control socket, as a broken program of the same user would."""

    def packed(*messages: object) -> bytes:
        bodies = [msgpack.packb(message) for message in messages]
        return b"".join(struct.pack("<I", len(body)) + body for body in bodies)

    attach = {"kind": "attach", "pid": 1, "signature": "x", "tensors": ["w float32 1"], "parameters": 1, "total": 1}
    for garbage in (
        b"\xff" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        packed([1]),
        packed({"kind": ["status"]}),
        packed({"kind": "nosuch"}),
        packed({"kind": "join", "address": "x:y:z"}),
        packed({"kind": "attach"}),
        packed(attach),
    ):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(str(node.socket))
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass


async def bomb(node: Node) -> None:
    """As a stranger that has opened a link: chunks that decompress to a gigabyte, or to nothing sensible."""
    host, port = node.address.split(":")
    swollen = bytes([ZSTD]) + zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30))
    delta = Delta(7, 1, "sign", 0.1, wants_answer=True, finishing=False, chunks=(swollen,))
    hello = Hello(1, "peerd", "", "stranger", "stranger", 1, "127.0.0.1", 9, "gossip", "", ())
    memory = memory_bytes(node.process.pid)
    for message in (
        delta,
        replace(delta, codec="float32"),
        replace(delta, codec="no such codec"),
        replace(delta, chunks=(b"",)),
        replace(delta, chunks=(swollen[:1000],)),
        replace(delta, chunks=()),
        replace(delta, gain=float("nan")),
        replace(delta, gain=-1e30),
        replace(delta, seq=1 << 60),
        ModelSnapshot(1 << 60, "float32", (swollen,)),
    ):
        async with trio.open_nursery() as nursery:
            link = await TcpTransport(nursery).dial((host, int(port)))
            await greet(link, hello)
            await offer(link, LinkOpen(7))
            await offer(link, message)
            with suppress(LinkLost), trio.move_on_after(1.0):  # it may hang up; it never answers on this connection
                await link.receive()
            await link.aclose()
            nursery.cancel_scope.cancel()
    assert memory_bytes(node.process.pid) < memory + (256 << 20)


async def offer(link: Link, message: Message) -> None:
    with suppress(LinkLost):
        await link.send(message)


def memory_bytes(pid: int) -> int:
    """The most that a process has ever held."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10
