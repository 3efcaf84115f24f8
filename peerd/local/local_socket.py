"""How do processes of one machine talk to their daemon? msgpack maps with a length before each, on a Unix socket.

The same framing serves a trainer's session and the command line; the first map of a connection says which it is.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack

from peerd.transport.errors import UserError

LOOK_EVERY_S = 2.0  # whether a daemon that does not answer is stopped
MESSAGE_BYTES_MAX = 64 << 20  # an attach names every tensor: a million, at the 60 bytes that one takes
_OWN_FOLDER = "set XDG_RUNTIME_DIR to a folder of your own"
_LENGTH = struct.Struct("<I")


class NodeStarts(UserError):
    """The node is on its way, and answers nothing yet."""


def runtime_dir() -> Path:
    """Where the control sockets live: $XDG_RUNTIME_DIR/peerd, else a private folder in /tmp. Raises UserError."""
    if not (parent := os.environ.get("XDG_RUNTIME_DIR")):
        return Path(f"/tmp/peerd-{os.getuid()}")
    try:
        return Path(parent).absolute() / "peerd"
    except FileNotFoundError:
        raise UserError(f"XDG_RUNTIME_DIR={parent} begins in a folder that is gone: go to another one (cd)") from None


def socket_path(name: str) -> Path:
    """The control socket of the node called `name`."""
    return runtime_dir() / f"{name}.sock"


def check_private(folder: Path) -> None:
    """Whether only this user can have put a socket there: who listens on it is given the model. Raises UserError."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{folder}, for control sockets: {error.strerror}; {_OWN_FOLDER}") from None
    if stat.S_ISLNK(found.st_mode):
        raise UserError(f"{folder}, for control sockets, is a symbolic link; remove it, or {_OWN_FOLDER}")
    if not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{folder}, for control sockets, is not a folder; remove it, or {_OWN_FOLDER}")
    if found.st_uid != os.getuid():
        raise UserError(f"{folder}, for control sockets, belongs to another user; {_OWN_FOLDER}")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise UserError(f"{folder}, for control sockets, is open to other users (mode {mode:o}); chmod 700 {folder}")


def running_nodes() -> list[str]:
    """Names of the nodes of this user that listen, be they stopped. Raises UserError where another could listen."""
    check_private(runtime_dir())
    found = []
    for path in sorted(runtime_dir().glob("*.sock")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except BlockingIOError:
                pass  # one that does not answer, as it is stopped: it runs
            except OSError:
                continue
            found.append(path.stem)
    return found


def find_node(name: str | None) -> Path:
    """The socket of `name`, or of the only node that runs here. Raises UserError."""
    if name == "":
        raise UserError("the node's name is empty: give --name or PEERD_NAME one, or neither where one node runs")
    running = running_nodes()
    if name is not None:
        if name in running:
            return socket_path(name)
        others = f"; running: {', '.join(running)}" if running else ""
        starts = f"start it with: peerd start train.py --name {name!r}"
        raise UserError(f"no node called {name!r} runs here{others}; {starts}")
    if not running:
        raise UserError("no peerd node runs here; start one with: peerd start train.py")
    if len(running) > 1:
        choose = "choose one with --name, or for a script run by hand with PEERD_NAME"
        raise UserError(f"several nodes run here: {', '.join(running)}; {choose}")
    return socket_path(running[0])


def pack(message: dict[str, Any]) -> bytes:
    """One framed message. Raises ValueError for one that is too long."""
    body: bytes = msgpack.packb(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a local message of {len(body)} bytes is over the limit of {MESSAGE_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def take(buffer: bytearray) -> dict[str, Any] | None:
    """Remove and return the first whole message of `buffer`, if there is one. Raises ValueError."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > MESSAGE_BYTES_MAX:
        raise ValueError(f"a local message of {length} bytes is over the limit of {MESSAGE_BYTES_MAX}")
    if len(buffer) < _LENGTH.size + length:
        return None
    try:
        message = msgpack.unpackb(memoryview(buffer)[_LENGTH.size : _LENGTH.size + length], strict_map_key=True)
    except (msgpack.UnpackException, ValueError, RecursionError) as error:
        raise ValueError(f"not a local message: {error}") from None
    if not isinstance(message, dict):
        raise ValueError("a local message is a map")
    del buffer[: _LENGTH.size + length]
    return message


class Answer(dict[str, Any]):
    """What a daemon says to a command, and each map in it. What it lacks another version of peerd has no word for."""

    def __missing__(self, key: str) -> Any:
        """Raises UserError."""
        cure = "it runs another version of peerd; start it again by this one"
        raise UserError(f"the node's answer has no {key!r}: {cure}")

    @classmethod
    def of(cls, value: Any) -> Any:
        """The same, all maps in it being answers."""
        if isinstance(value, dict):
            return cls((key, cls.of(one)) for key, one in value.items())
        return [cls.of(one) for one in value] if isinstance(value, list) else value


class LocalSocket:
    """The blocking client side: a trainer's session, or one request of the command line."""

    def __init__(self, path: Path, *, waits: bool = True) -> None:
        """Connect; raises OSError. Where too many wait for an answer already, wait with them, or BlockingIOError."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(waits)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(True)
        self._buffer = bytearray()
        self._came: list[bytes] = []  # and is not in the buffer yet

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = (), done: list[int] | None = None) -> None:
        """Send one message, with file descriptors beside it; raises OSError, or ValueError when it is too long.

        `done` is no longer empty once it is sent, whatever interrupts this then; of a long one, once it has begun.
        """
        data = pack(message)
        if fds:
            sent = socket.send_fds(self._socket, [data], list(fds))
            data = data[sent:]
        counts = [] if done is None else done
        while data:  # sending nothing fails, too, when the answer to what was sent ended the connection
            # in one call, as below; not `sendall`, in which Ctrl-C comes after all was sent, too
            counts.extend(map(self._socket.send, (data,)))
            data = data[counts[-1] :]

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None when none comes within `timeout_s` (0: do not wait). Raises EOFError at the end."""
        while (message := take(self._buffer)) is None:
            if not self._came:
                try:
                    self._socket.settimeout(timeout_s)
                    # in one call: Ctrl-C, which a script may catch, comes before or after it, and no byte is lost
                    self._came.extend(map(self._socket.recv, (1 << 16,)))
                except (BlockingIOError, TimeoutError):
                    return None
                finally:
                    self._socket.settimeout(None)
            if not self._came[0]:
                raise EOFError("the daemon closed the connection")
            self._buffer, self._came = self._buffer + self._came[0], []
        return message

    def ask(self, verb: str, /, meanwhile: Callable[[], None] = lambda: None, **arguments: Any) -> Answer:
        """One command and its answer. Raises UserError with the daemon's own words, OSError or EOFError.

        `meanwhile` is called every LOOK_EVERY_S while there is no answer.
        """
        try:
            self.send({"kind": verb, **arguments})
        except UnicodeEncodeError as error:
            raise UserError(f"{verb}: {error.object!r} is not UTF-8") from None
        except OverflowError:
            raise UserError(f"{verb}: a number is too large") from None
        while (answer := self._answer()) is None:
            meanwhile()
            if _stopped(pid := self._pid()):
                raise UserError(f"the node's process {pid} is stopped and cannot answer; kill -CONT {pid} lets it")
        if "error" in answer:
            raise (NodeStarts if answer.get("starts") else UserError)(str(answer["error"]))
        said: Answer = Answer.of(answer)
        return said

    def _answer(self) -> dict[str, Any] | None:
        try:
            return self.receive(LOOK_EVERY_S)
        except ValueError as error:
            raise UserError(f"what listens at {self.path} is no node of this version of peerd: {error}") from None

    def _pid(self) -> int:
        """Whose socket this was when it began to listen."""
        return credentials(self._socket)[0]

    def ends(self, timeout_s: float) -> bool:
        """Whether the daemon's process ends within `timeout_s`: until then it keeps this connection."""
        try:
            self.receive(timeout_s)
        except (EOFError, ConnectionError):
            return True
        return False

    def close(self) -> None:
        """Close; harmless when closed."""
        self._socket.close()


def credentials(connection: Any) -> tuple[int, int, int]:
    """Process, user and group of the other end when it connected, or listened; 0 for one in another namespace."""
    pid, uid, gid = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(pid), int(uid), int(gid)


def process_fields(pid: int) -> list[bytes]:
    """What the kernel says of a process after its name, its state first; empty for none, or in another namespace.

    Raises OSError where that cannot be found out: no descriptor is left.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _stopped(pid: int) -> bool:
    try:
        return process_fields(pid)[:1] == [b"T"]
    except OSError:
        return False


@contextmanager
def conversation(path: Path) -> Iterator[LocalSocket]:
    """A connection of the command line to a daemon. Raises UserError when it is not there or goes away."""
    try:
        client = LocalSocket(path, waits=False)
    except BlockingIOError:
        raise UserError(f"the node at {path} answers nobody: if its process is stopped, kill -CONT lets it") from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise UserError(f"the node {path.stem!r} has ended") from None
    except OSError as error:
        raise UserError(f"the node at {path} does not answer: {error.strerror}") from None
    try:
        yield client
    except (OSError, EOFError):
        raise UserError(f"the node at {path} went away before it answered") from None
    finally:
        client.close()


def request(path: Path, verb: str, /, meanwhile: Callable[[], None] = lambda: None, **arguments: Any) -> Answer:
    """One command to a daemon and its answer. Raises UserError with the daemon's own words."""
    with conversation(path) as client:
        return client.ask(verb, meanwhile, **arguments)
