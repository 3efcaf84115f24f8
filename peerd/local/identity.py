"""Who is this node, across restarts? Its key, which its id is the hash of, and a count of its starts.

Both are kept in its state folder. An id without a key, of an earlier version, cannot be proved, and counts for none.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from peerd.local import node_key
from peerd.local.durable import replace
from peerd.local.node_key import NodeKey
from peerd.transport.errors import UserError
from peerd.transport.ids import NodeId
from peerd.transport.messages import COUNT

EPOCH_MAX = COUNT.high
LOCK_TRIES = 16  # as many starts may fail beside this one
_FILE = "identity.json"
_KEY = "key.pem"
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Identity:
    """`epoch` grows with every start: it supersedes what the swarm believed of the previous life."""

    key: NodeKey
    epoch: int
    lock: int  # a locked descriptor, held as long as the process lives

    @property
    def id(self) -> NodeId:
        """What the others call it."""
        return self.key.id


@contextmanager
def taken(folder: Path, runtime: Path, told: Collection[str] = ()) -> Iterator[Identity]:
    """`take` the folder for a node's life. One that fails leaves no folder that it made, nor its `runtime`'s.

    A state folder that has more than the identity stays: checkpoints, or the members by which it finds its swarm. The
    files that are `told` are no more: what others told this node, and tell whoever comes.
    """
    # os.path: what may not be looked at is `take`'s to refuse
    made = [path for path in (folder, *folder.parents, runtime, *runtime.parents) if not os.path.exists(path)]
    try:
        identity = take(folder)
        try:
            yield identity
        except BaseException:
            with suppress(OSError):  # it is gone, or no longer ours: the refusal counts
                ours = (*told, _FILE, _KEY, _LOCK)  # the lock is held until the process ends
                if folder in made and {path.name for path in folder.iterdir()} <= set(ours):
                    for name in ours:
                        (folder / name).unlink(missing_ok=True)
            raise
    except BaseException:
        for path in made:
            with suppress(OSError, ValueError):  # another node came to be there meanwhile; or it never could be
                path.rmdir()
        raise


def take(folder: Path) -> Identity:
    """Lock the state folder and begin a new epoch. Raises UserError."""
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError:  # no script could be told where it is, and safetensors reads nothing there
        raise UserError(f"state folder {folder}: its name is not UTF-8; choose another with state_dir") from None
    try:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileNotFoundError:  # another node, which failed to start, took a folder above that it had made away
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(LOCK_TRIES):
            if (lock := _lock(folder / _LOCK)) is not None:
                break
        else:
            raise OSError(errno.ESTALE, "its lock is another file each time")
    except BlockingIOError:
        raise UserError(f"a node already runs with the state folder {folder}; give this one another --name") from None
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"state folder {folder}: {cause}; choose another with state_dir") from None
    try:
        return Identity(*_begin(folder), lock)
    except UserError:
        os.close(lock)
        raise


def _lock(path: Path) -> int | None:
    """A locked descriptor of the file; None: another start, which failed, took the file away just now.

    Whoever then made it anew could lock it, too. Raises OSError, BlockingIOError where another process has the lock.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _begin(folder: Path) -> tuple[NodeKey, int]:
    known = node_key.read(folder / _KEY)
    key = known or NodeKey.generate()
    epoch = _epoch_after(folder / _FILE, key.id) if known else 1
    try:
        # after a power cut the same epoch must not begin twice
        replace(folder / _FILE, json.dumps({"id": key.id, "epoch": epoch}))
        if known is None:
            key.write(folder / _KEY)
    except OSError as error:
        if known is None:
            (folder / _LOCK).unlink(missing_ok=True)
        raise UserError(f"state folder {folder}: {error.strerror}") from None
    return key, epoch


def _epoch_after(path: Path, id: NodeId) -> int:
    """What this start counts as. A count that is lost goes on from the clock: no node starts every second."""
    try:
        kept = json.loads(path.read_text())
        ours, epoch = kept["id"] == id, kept["epoch"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        ours, epoch = False, 0
    return epoch + 1 if ours and type(epoch) is int and 0 < epoch < EPOCH_MAX else max(1, int(time.time()))
