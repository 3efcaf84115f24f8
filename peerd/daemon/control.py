"""How do the command line and the trainer reach the daemon? The server side of the node's Unix socket.

The socket is private to the user (0600, and the peer's uid is checked), for whoever can write to it owns the model.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from peerd.daemon.cures import told_of_own
from peerd.local.local_socket import NodeStarts, check_private, credentials, pack, process_fields, running_nodes, take
from peerd.process.logs import LOGGER
from peerd.transport.errors import UserError

FOLDER_TRIES = 5  # to make the sockets' folder, and bind in it
PAUSE_S = 0.1  # with no descriptor left, until another attempt
LOOK_EVERY_S = 1.0  # whether the socket is still where it was
ANSWER_S = 3.0  # for an answer to be taken: a command line reads at once, one that is stopped must not hold the end up

ANY = ""  # a verb of this name answers what no other does

Answer = dict[str, Any]
Verb = Callable[[dict[str, Any]], Awaitable[Answer]]


class LocalConnection:
    """One accepted connection."""

    def __init__(self, connection: trio.socket.SocketType) -> None:
        """Wrap an accepted socket."""
        self._socket = connection
        self._buffer = bytearray()
        self._sending = trio.Lock()
        self._pid = credentials(connection)[0]
        self._began: bytes | None = None
        with suppress(OSError):
            self._began = _began(self._pid)
        self.fds: list[int] = []

    def has_lost_its_process(self) -> bool:
        """Whether the one that connected is gone: a helper that it forked may keep the connection open."""
        with suppress(OSError):  # no descriptor is left to find it out
            return self._began is not None and _began(self._pid) != self._began
        return False

    def cut(self) -> None:
        """End it for all who hold it; `receive` then finds the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None at the end. Raises ValueError for bytes that are no message."""
        while (message := take(self._buffer)) is None:
            try:
                data, ancillary, _, _ = await self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(4 * 4))
            except OSError:
                return None
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                    self.fds.extend(fds)
            if not data:
                return None
            self._buffer += data
        return message

    async def send(self, message: dict[str, Any]) -> None:
        """Send; a connection that is gone shows itself in `receive`."""
        data = memoryview(pack(message))
        async with self._sending:
            try:
                while data:
                    data = data[await self._socket.send(data) :]
            except OSError:
                return

    def close_fds(self) -> None:
        """Close descriptors that nobody took."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


async def serve(
    path: Path,
    verbs: dict[str, Verb],
    attach: Callable[[LocalConnection, dict[str, Any]], Awaitable[None]],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer requests on the socket at `path` until cancelled; the path is removed at the end. Raises UserError."""
    listener = _listen(path)
    try:
        async with trio.open_nursery() as nursery:
            task_status.started()
            is_told = False
            while True:
                if (connection := await _accepted(listener)) is not None:
                    nursery.start_soon(_converse, connection, verbs, attach, nursery)
                elif not os.path.lexists(path):  # as when the user has logged out, and the folder went with that
                    try:
                        again = _listen(path)
                    except UserError as error:
                        if not is_told:
                            LOGGER.warning("nobody can reach this node, nor its script if it dies: %s", error)
                        is_told = True
                    else:
                        LOGGER.info("the control socket %s was gone, and is made again", path)
                        listener.close()
                        listener, is_told = again, False
    finally:
        listener.close()
        path.unlink(missing_ok=True)


async def _accepted(listener: trio.socket.SocketType) -> trio.socket.SocketType | None:
    """Who has come within LOOK_EVERY_S."""
    with trio.move_on_after(LOOK_EVERY_S):
        try:
            connection, _ = await listener.accept()
            return connection
        except OSError:  # no descriptors are left, or whoever asked is gone
            await trio.sleep(PAUSE_S)
    return None


def _check_free(path: Path) -> None:
    """No node of this name runs here, with another state folder, whose lock it holds. Raises UserError."""
    if path.stem in running_nodes():
        raise UserError(f"a node called {path.stem!r} runs here already; give this one another --name")


def _listen(path: Path) -> trio.socket.SocketType:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        for tries_left in reversed(range(FOLDER_TRIES)):
            try:
                _bind(listener, path)
                break
            except FileNotFoundError:  # another node, which failed to start, took the folder that it had made away
                if not tries_left:
                    raise
        listener.listen(64)
    except OSError as error:
        listener.close()
        cure = "set XDG_RUNTIME_DIR to a folder that you may write to"
        if error.errno is None:  # Python's own word, of a path that is too long: the kernel was not asked
            cure = "set XDG_RUNTIME_DIR to a shorter folder"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            cure = "let it open more files (ulimit -n)"
        raise UserError(f"control socket {path}: {error.strerror or error}; {cure}") from None
    except UserError:
        listener.close()
        raise
    return trio.socket.from_stdlib_socket(listener)


def _bind(listener: socket.socket, path: Path) -> None:
    with suppress(FileExistsError):  # what is there instead of a folder is told below
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(path.parent)
    _check_free(path)
    path.unlink(missing_ok=True)
    mask = os.umask(0o177)  # of the whole process: nobody else has a turn meanwhile
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)


async def _converse(
    connection: trio.socket.SocketType,
    verbs: dict[str, Verb],
    attach: Callable[[LocalConnection, dict[str, Any]], Awaitable[None]],
    nursery: trio.Nursery,
) -> None:
    local = LocalConnection(connection)
    try:
        if _uid(connection) not in (0, os.getuid()):
            return
        while (message := await local.receive()) is not None:
            if message.get("kind") == "attach":
                await attach(local, message)
                return
            watch = trio.CancelScope()
            with trio.CancelScope() as asked:
                nursery.start_soon(_watch_asker, connection, asked, watch)
                try:
                    said = await _answer(verbs, message)
                finally:
                    watch.cancel()
            if asked.cancelled_caught:
                return
            with trio.move_on_after(ANSWER_S, shield=True) as patience:  # a lone node has left before this task runs
                await local.send(said)
            if patience.cancelled_caught:
                return
    except ValueError as error:
        LOGGER.warning("a local process was cut off: %s", error)
    except trio.Cancelled:
        # left open, for the kernel to close with the process: `peerd leave` waits for that, not for a promise of it
        connection.detach()
        raise
    finally:
        local.close_fds()
        connection.close()


async def _watch_asker(connection: trio.socket.SocketType, asked: trio.CancelScope, watch: trio.CancelScope) -> None:
    """Cancel what is `asked` when the connection ends before the answer, until `watch` is cancelled."""
    with watch:
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            more = await connection.recv(1, socket.MSG_PEEK)
        except OSError:
            more = b""
        if not more:
            asked.cancel()


async def _answer(verbs: dict[str, Verb], message: dict[str, Any]) -> Answer:
    verb = verbs.get(str(message.get("kind")), verbs.get(ANY))
    if verb is None:
        return {"error": f"this daemon does not know {message.get('kind')!r}"}
    try:
        return await verb(message)
    except NodeStarts as error:
        return {"error": str(error), "starts": True}
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:  # a bug in a question must not end the training that it asks about
        if (told := told_of_own(error)) is not None:
            return {"error": told}
        LOGGER.exception("the verb %s failed", message["kind"])
        return {"error": f"the daemon failed to answer: {error!r}; its log has the details"}


def _uid(connection: trio.socket.SocketType) -> int:
    return credentials(connection)[1]


def _began(pid: int) -> bytes | None:
    """When a process was started, which tells it from a later one of its number; None for none and for zombies.

    Raises OSError where that cannot be found out.
    """
    fields = process_fields(pid)
    return fields[19] if fields and fields[0] not in (b"Z", b"X") else None
