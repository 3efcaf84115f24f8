"""Who is this node, across restarts? A random id and a count of its starts, kept in its state folder."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerd.local.durable import replace
from peerd.transport.errors import UserError
from peerd.transport.ids import NodeId

EPOCH_MAX = 1 << 53
_FILE = "identity.json"
_LOCK = "lock"
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Identity:
    """`epoch` grows with every start: it supersedes what the swarm believed of the previous life."""

    id: NodeId
    epoch: int
    lock: int  # a locked descriptor, held as long as the process lives


@contextmanager
def taken(folder: Path, runtime: Path) -> Iterator[Identity]:
    """`take` the folder for a node's life. One that fails leaves no folder that it made, nor its `runtime`'s.

    A state folder that has more than the identity stays: checkpoints, or the members by which it finds its swarm.
    """
    # os.path: what may not be looked at is `take`'s to refuse
    made = [path for path in (folder, *folder.parents, runtime, *runtime.parents) if not os.path.exists(path)]
    try:
        identity = take(folder)
        try:
            yield identity
        except BaseException:
            with suppress(OSError):  # it is gone, or no longer ours: the refusal counts
                if folder in made and {path.name for path in folder.iterdir()} <= {_FILE, _LOCK}:
                    (folder / _FILE).unlink(missing_ok=True)
                    (folder / _LOCK).unlink(missing_ok=True)  # which is held until the process ends
            raise
    except BaseException:
        for path in made:
            with suppress(OSError, ValueError):  # another node came to be there meanwhile; or it never could be
                path.rmdir()
        raise


def take(folder: Path) -> Identity:
    """Lock the state folder and begin a new epoch. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"state folder {folder}: {cause}; choose another with state_dir") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UserError(f"a node already runs with the state folder {folder}; give this one another --name") from None
    known = _read(folder / _FILE)
    identity = Identity(known.get("id", secrets.token_hex(8)), known.get("epoch", 0) + 1, lock)
    try:
        # after a power cut the same epoch must not begin twice
        replace(folder / _FILE, json.dumps({"id": identity.id, "epoch": identity.epoch}))
    except OSError as error:
        if not known:
            (folder / _LOCK).unlink(missing_ok=True)
        os.close(lock)
        raise UserError(f"state folder {folder}: {error.strerror}") from None
    return identity


def _read(path: Path) -> dict[str, Any]:
    """What was kept; a damaged file counts as a new identity, which is safe: the old one just stays failed."""
    try:
        kept = json.loads(path.read_text())
        id, epoch = kept["id"], kept["epoch"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    whole = type(id) is str and _ID.fullmatch(id) and type(epoch) is int and 0 < epoch <= EPOCH_MAX
    return {"id": id, "epoch": epoch} if whole else {}
