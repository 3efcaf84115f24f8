"""The words between a node's processes: any split gives the same messages, garbage is refused, descriptors travel."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.daemon import control
from peerd.local import local_socket
from peerd.local.being_written import leftovers
from peerd.local.local_socket import (
    MESSAGE_BYTES_MAX,
    LocalSocket,
    find_node,
    pack,
    request,
    running_nodes,
    socket_path,
    take,
)
from peerd.transport.errors import UserError

PRINTED = settings(deadline=None, print_blob=True)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
messages = st.dictionaries(st.text(max_size=9), values, max_size=4)


def take_all(buffer: bytearray) -> list[dict[str, Any]]:
    found = []
    while (message := take(buffer)) is not None:
        found.append(message)
    return found


def client_of(
    kind: type[socket.socket], listening: socket.socket, path: Path, monkeypatch: pytest.MonkeyPatch
) -> LocalSocket:
    """Connected by a socket of this kind to the one that listens at `path` from now on."""
    listening.bind(str(path))
    listening.listen()
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", kind)
        return LocalSocket(path)


def test_what_has_come_is_not_lost_to_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: list[bool] = []

    class Interrupted(socket.socket):
        def settimeout(self, value: float | None) -> None:
            super().settimeout(value)
            if value is None and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt

    with socket.socket(socket.AF_UNIX) as listening:
        client = client_of(Interrupted, listening, tmp_path / "s", monkeypatch)
        with listening.accept()[0] as daemon:
            daemon.sendall(pack({"kind": "first"}) + pack({"kind": "second"}))
            with pytest.raises(KeyboardInterrupt):
                client.receive(1.0)
            assert [client.receive(0), client.receive(0), client.receive(0)] == [
                {"kind": "first"}, {"kind": "second"}, None,
            ]  # fmt: skip
        for _ in range(2):
            with pytest.raises(EOFError):
                client.receive(1.0)
        client.close()


def test_ctrl_c_leaves_no_limit_on_what_is_sent_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(socket.socket):
        def settimeout(self, value: float | None) -> None:
            super().settimeout(value)
            if value is not None:
                raise KeyboardInterrupt

    with socket.socket(socket.AF_UNIX) as listening:
        client = client_of(Interrupted, listening, tmp_path / "s", monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            client.receive(0)
        assert client._socket.gettimeout() is None
        client.close()


# ------------------------------------------------------------------------------------------------------------- bytes


@PRINTED
@given(st.lists(messages, min_size=1, max_size=3))
def test_any_split_gives_the_same_messages(sent: list[dict[str, Any]]) -> None:
    stream = b"".join(map(pack, sent))
    for position in range(len(stream) + 1):
        buffer = bytearray(stream[:position])
        got = take_all(buffer)
        buffer += stream[position:]
        got += take_all(buffer)
        assert got == sent
        assert not buffer


@PRINTED
@given(st.binary(max_size=100))
def test_garbage_is_a_message_or_a_value_error(body: bytes) -> None:
    for stream in (body, struct.pack("<I", len(body)) + body):
        buffer = bytearray(stream)
        try:
            message = take(buffer)
        except ValueError:
            continue
        assert message is None or isinstance(message, dict)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xc0", b"\x91\xc0", b"\xc1", b"\x81\x01\x01", b"\x80\x80", b"\x91" * 3000, b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xd9\x01\xff",
    ],
    ids=["empty", "nil", "array", "reserved", "integer key", "two", "nested", "huge map", "not UTF-8"],
)  # fmt: skip
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="local message"):
        take(bytearray(struct.pack("<I", len(body)) + body))


def test_an_oversized_message_is_refused_before_it_is_awaited() -> None:
    with pytest.raises(ValueError, match=f"over the limit of {MESSAGE_BYTES_MAX}"):
        take(bytearray(struct.pack("<I", MESSAGE_BYTES_MAX + 1)))
    assert take(bytearray(struct.pack("<I", MESSAGE_BYTES_MAX))) is None


def test_an_oversized_message_is_not_sent() -> None:
    with pytest.raises(ValueError, match=f"over the limit of {MESSAGE_BYTES_MAX}"):
        pack({"kind": "x" * MESSAGE_BYTES_MAX})


def test_a_model_of_very_many_tensors_fits_a_message() -> None:
    attach = {
        "kind": "attach",
        "tensors": [f"blocks.{index}.attention.query.weight float32 64x64" for index in range(10**5)],
    }
    assert take(bytearray(pack(attach))) == attach


# ------------------------------------------------------------------------------------------------------------- nodes


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "peerd").mkdir(mode=0o700)
    return tmp_path


def listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(socket_path(name)))
    listener.listen()
    return listener


def test_nodes_are_found_by_whether_they_answer(runtime: Path) -> None:
    with pytest.raises(UserError, match="no peerd node runs here"):
        find_node(None)
    listen("dead").close()
    with listen("one"):
        assert running_nodes() == ["one"]
        assert find_node(None) == find_node("one") == runtime / "peerd" / "one.sock"
        with pytest.raises(UserError, match=r"running: one; start it with: peerd start train\.py --name 'dead'"):
            find_node("dead")
        with pytest.raises(UserError, match="the node's name is empty: give --name or PEERD_NAME one"):
            find_node("")
        with listen("two"), pytest.raises(UserError, match="several nodes run here: one, two"):
            find_node(None)


async def test_a_lack_of_descriptors_makes_no_process_a_dead_one(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    local = control.LocalConnection(trio.socket.from_stdlib_socket(ours))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with theirs, subprocess.Popen(["sleep", "60"]) as writer:
        (tmp_path / f"tmp-{writer.pid}-7").mkdir()
        paths = list(tmp_path.iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            gone = local.has_lost_its_process()
            with patch.object(Path, "glob", lambda *_: paths):
                left = leftovers(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            writer.kill()
    ours.close()
    assert not gone
    assert not left


def test_a_node_that_is_not_there_is_a_user_error(runtime: Path) -> None:
    with pytest.raises(UserError, match="the node 'nobody' has ended"):
        request(runtime / "nobody.sock", "status")


def test_a_node_that_is_stopped_is_told_from_one_that_takes_its_time(runtime: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(local_socket, "LOOK_EVERY_S", 0.1)
    path = runtime / "node.sock"
    node = "import os, signal, socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()"
    stopped = subprocess.Popen(
        [sys.executable, "-c", f"{node}; print(flush=True); os.kill(os.getpid(), signal.SIGSTOP)", path],
        stdout=subprocess.PIPE,
    )
    try:
        assert stopped.stdout is not None
        stopped.stdout.readline()
        with pytest.raises(UserError, match=f"process {stopped.pid} is stopped"):
            request(path, "status")
    finally:
        stopped.kill()
        stopped.communicate()


def test_a_node_that_answers_nobody_holds_no_other_up(runtime: Path) -> None:
    """One that is stopped: whoever looks which nodes run fills its queue."""
    path = socket_path("one")
    with listen("one"), ExitStack() as stack:
        full = 0
        while not full:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            full = waiting.connect_ex(str(path))
        assert full == errno.EAGAIN
        assert running_nodes() == ["one"]
        with pytest.raises(UserError, match="answers nobody: if its process is stopped, kill -CONT lets it"):
            request(path, "status")


async def test_an_answer_may_take_its_time(runtime: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(local_socket, "LOOK_EVERY_S", 0.01)
    path = socket_path("node")
    await serving(path, lambda: request(path, "slow"))


async def test_an_answer_is_awaited_where_no_descriptor_is_left_to_see_whether_one_comes(
    runtime: Path, monkeypatch: Any
) -> None:
    looks = []

    def lacks(pid: int) -> list[bytes]:
        looks.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(local_socket, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(local_socket, "process_fields", lacks)
    path = socket_path("node")
    await serving(path, lambda: request(path, "slow"))
    assert looks


# ------------------------------------------------------------------------------------------- both ends, in one process


async def serving(path: Path, ask: Any, attach: Any = None) -> None:
    """Run the blocking function `ask` against a control socket at `path`."""

    async def echo(message: dict[str, Any]) -> dict[str, Any]:
        return message

    async def unhappy(_: dict[str, Any]) -> dict[str, Any]:
        raise UserError("say please")

    async def broken(_: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("bug")

    async def slow(_: dict[str, Any]) -> dict[str, Any]:
        await trio.sleep(0.2)
        return {}

    verbs: dict[str, control.Verb] = {"echo": echo, "unhappy": unhappy, "broken": broken, "slow": slow}

    async with trio.open_nursery() as nursery:
        await nursery.start(control.serve, path, verbs, attach)
        assert path.stat().st_mode & 0o777 == 0o600
        await trio.to_thread.run_sync(ask)
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_a_request_gets_its_answer_or_one_line(runtime: Path) -> None:
    path = socket_path("node")

    def ask() -> None:
        assert request(path, "echo", a=1, b=["x"]) == {"kind": "echo", "a": 1, "b": ["x"]}
        with pytest.raises(UserError, match=r"^say please$"):
            request(path, "unhappy")
        with pytest.raises(UserError, match=r"^the daemon failed to answer: KeyError\('bug'\)"):
            request(path, "broken")
        with pytest.raises(UserError, match="does not know 'dance'"):
            request(path, "dance")
        with pytest.raises(UserError, match=r"^echo: 'a\\udcff' is not UTF-8$"):
            request(path, "echo", a="a\udcff")
        with pytest.raises(UserError, match=r"^echo: a number is too large$"):
            request(path, "echo", a=1 << 64)

    await serving(path, ask)


async def test_several_requests_in_any_pieces_on_one_connection(runtime: Path) -> None:
    path = socket_path("node")

    def ask() -> None:
        client = LocalSocket(path)
        stream = pack({"kind": "echo", "n": 1}) + pack({"kind": "echo", "n": 2})
        for byte in stream:
            client._socket.sendall(bytes([byte]))
        assert [client.receive(), client.receive()] == [{"kind": "echo", "n": 1}, {"kind": "echo", "n": 2}]
        assert client.receive(timeout_s=0) is None
        assert client.receive(timeout_s=0.01) is None
        client.close()
        client.close()

    await serving(path, ask)


async def test_an_answer_goes_out_although_the_verb_ends_the_daemon(runtime: Path) -> None:
    """`peerd leave` of a node that has nothing to hand over."""
    path = socket_path("node")
    answers: list[dict[str, Any]] = []
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:

            async def leave(_: dict[str, Any]) -> dict[str, Any]:
                nursery.cancel_scope.cancel()
                return {"leaving": "node"}

            def ask() -> None:
                answers.append(request(path, "leave"))

            await nursery.start(control.serve, path, {"leave": leave}, None)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(ask)
    assert answers == [{"leaving": "node"}]


async def test_a_connection_outlives_the_serving_and_ends_with_the_process(runtime: Path) -> None:
    """`peerd leave` waits for it; that the process's end closes it, the nodes' tests show."""
    path = socket_path("node")
    clients: list[LocalSocket] = []

    def ask() -> None:
        clients.append(LocalSocket(path))
        assert clients[0].ask("echo") == {"kind": "echo"}

    await serving(path, ask)
    assert not clients[0].ends(timeout_s=0.1)
    clients[0].close()


async def test_garbage_ends_its_connection_only(runtime: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = socket_path("node")

    def ask() -> None:
        client = LocalSocket(path)
        client._socket.sendall(b"\xff" * 10)
        with pytest.raises(EOFError):
            client.receive()
        client.close()
        assert request(path, "echo") == {"kind": "echo"}

    await serving(path, ask)


async def test_descriptors_travel_with_an_attach_and_are_closed(runtime: Path) -> None:
    path = socket_path("node")
    seen: list[tuple[dict[str, Any], bytes]] = []
    given: list[int] = []

    async def attach(connection: control.LocalConnection, message: dict[str, Any]) -> None:
        (fd,) = connection.fds
        given.append(fd)
        seen.append((message, os.pread(fd, 100, 0)))
        await connection.send({"kind": "welcome", "tensors": "x" * 300_000})  # more than a socket buffer

    def ask() -> None:
        fd = os.memfd_create("passed")
        os.write(fd, b"shared")
        client = LocalSocket(path)
        client.send({"kind": "attach", "tensors": ["t" * 300] * 1000}, fds=(fd,))
        os.close(fd)
        welcome = client.receive()
        assert welcome is not None
        assert len(welcome["tensors"]) == 300_000
        with pytest.raises(EOFError):
            client.receive()
        client.close()

    await serving(path, ask, attach)
    assert seen == [({"kind": "attach", "tensors": ["t" * 300] * 1000}, b"shared")]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(given[0])


def test_an_answer_that_ends_the_connection_is_read_however_soon_it_comes(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_fds = socket.send_fds

    def send_and_be_refused(client: socket.socket, *content: Any) -> int:
        sent = send_fds(client, *content)
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        connection.sendall(pack({"error": "another model"}))
        connection.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_be_refused)
    with listen("one") as listener:
        client = LocalSocket(socket_path("one"))
        client.send({"kind": "attach"}, fds=(0,))
        assert client.receive() == {"error": "another model"}
        client.close()


async def test_a_folder_of_another_user_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises((UserError, ExceptionGroup)) as failure:
        await serving(socket_path("node"), lambda: None)
    assert "belongs to another user" in repr(failure.value)


@pytest.mark.parametrize("mode", [0o701, 0o720, 0o755, 0o777])
async def test_a_folder_that_is_open_to_others_is_refused_by_both_ends(runtime: Path, mode: int) -> None:
    (runtime / "peerd").chmod(mode)
    said = rf"open to other users \(mode {mode:o}\); chmod 700 {runtime}/peerd"
    with pytest.raises(UserError, match=said):
        find_node(None)
    with pytest.RaisesGroup(pytest.RaisesExc(UserError, match=said), flatten_subgroups=True):
        await serving(socket_path("node"), lambda: None)


@pytest.mark.parametrize("target", ["mine", "nothing"])
async def test_a_link_in_the_folders_place_is_refused_by_both_ends(runtime: Path, target: str) -> None:
    (runtime / "mine").mkdir(mode=0o700)
    (runtime / "peerd").rmdir()
    (runtime / "peerd").symlink_to(runtime / target)
    said = "is a symbolic link; remove it, or set XDG_RUNTIME_DIR to a folder of your own"
    with pytest.raises(UserError, match=said):
        find_node(None)
    with pytest.RaisesGroup(pytest.RaisesExc(UserError, match=said), flatten_subgroups=True):
        await serving(socket_path("node"), lambda: None)
    assert not list((runtime / "mine").iterdir())


@pytest.mark.parametrize("times", [1, control.FOLDER_TRIES])
async def test_a_folder_that_another_node_takes_away_is_made_again(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A node that fails to start removes the folders that it has made, between another one's making it and binding."""
    looked = 0

    def look() -> list[str]:
        nonlocal looked
        looked += 1
        if looked <= times:
            (runtime / "peerd").rmdir()
        return []

    monkeypatch.setattr(control, "running_nodes", look)
    path = socket_path("node")
    if times < control.FOLDER_TRIES:
        async with trio.open_nursery() as nursery:
            await nursery.start(control.serve, path, {}, None)
            assert path.is_socket()
            nursery.cancel_scope.cancel()
        assert looked == times + 1
    else:
        with pytest.raises(UserError, match="No such file or directory"):
            control._listen(path)


async def test_two_that_begin_at_once_are_private_and_leave_the_umask_as_it_was(runtime: Path) -> None:
    """It is the whole process's: one that waited for the other put the other's back in place of what was there."""
    before = os.umask(0o022)
    try:
        async with trio.open_nursery() as nursery:
            paths = [socket_path(name) for name in ("one", "two")]
            for path in paths:
                nursery.start_soon(control.serve, path, {}, None)  # type: ignore[arg-type]
            await trio.testing.wait_all_tasks_blocked()
            assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]
            nursery.cancel_scope.cancel()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


async def test_a_file_in_the_folders_place_is_refused(runtime: Path) -> None:
    (runtime / "peerd").rmdir()
    (runtime / "peerd").touch()
    with pytest.RaisesGroup(pytest.RaisesExc(UserError, match="is not a folder"), flatten_subgroups=True):
        await serving(socket_path("node"), lambda: None)


def test_another_users_folder_is_not_asked(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("one"):
        assert running_nodes() == ["one"]
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(UserError, match="belongs to another user"):
            find_node("one")


async def test_a_process_without_descriptors_goes_on_serving(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, failures = socket_path("node"), [errno.EMFILE, errno.ECONNABORTED]
    with trio.socket.socket() as any_one:
        kind: Any = type(any_one)
    accept = kind.accept

    async def fails(self: Any) -> Any:
        if failures:
            raise OSError(failures.pop(), "as the system says it")
        return await accept(self)

    async def echo(_: dict[str, Any]) -> dict[str, Any]:
        return {"there": True}

    monkeypatch.setattr(kind, "accept", fails)
    async with trio.open_nursery() as nursery:
        await nursery.start(control.serve, path, {"echo": echo}, None)
        assert await trio.to_thread.run_sync(request, path, "echo") == {"there": True}
        nursery.cancel_scope.cancel()


async def test_a_socket_whose_folder_went_is_made_again(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its user logs out: the folder goes, and perhaps cannot be made again for a while."""
    monkeypatch.setattr(control, "LOOK_EVERY_S", 0.05)
    path = socket_path("node")

    async def echo(message: dict[str, Any]) -> dict[str, Any]:
        return message

    async def answers() -> bool:
        with suppress(UserError):
            return bool(await trio.to_thread.run_sync(request, path, "echo"))
        return False

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(control.serve, path, {"echo": echo}, None)
            for in_the_way in (False, True):
                assert await answers()
                shutil.rmtree(runtime / "peerd")
                if in_the_way:
                    (runtime / "peerd").touch()
                    await trio.sleep(0.3)
                    (runtime / "peerd").unlink()
                while not await answers():
                    await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
    assert not path.exists()
