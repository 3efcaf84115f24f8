"""What did this node know of its swarm when it last ran? Its members' addresses, and the plan in force.

Both are files in the state folder until the node leaves: one that was killed finds its swarm by them, and when all were
killed at once, the swarm comes back in its mode.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import trio

from peerd.local.durable import replace
from peerd.process.logs import LOGGER
from peerd.process.threads import in_thread
from peerd.protocol.plan import pack, unpack
from peerd.settings import Settings, planned
from peerd.training.mode_settings import PLANNED
from peerd.transport.errors import UserError
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import AS_STARTED, Member, Plan, State

KNOWN_MAX = 16
TEXT_MAX = 1 << 16  # characters of a file
LOOK_EVERY_S = 1.0  # the members of a swarm that forms come in crowds: one writing for each crowd
_FILE = "members.json"
_PLAN_FILE = "plan.json"
_LEFT_FILE = "left.json"  # who was a member when this node left
_IF_IT_STAYS = {  # all that is kept, and what the next start does with what cannot be removed
    _FILE: "asks the members named there",
    _PLAN_FILE: "takes up the plan there",
    _LEFT_FILE: "says that it left those named there",
}
_ONE_AT_A_TIME = Lock()  # a plan that is being written in a thread when the node leaves must not come after the end


def read(settings: Settings, file: str = _FILE) -> tuple[Address, ...]:
    """The addresses kept; none when their file is damaged, or of another swarm or run."""
    try:
        kept = json.loads(_text(settings.state_path / file))
        same_swarm = _is_of(settings, kept)
        addresses = tuple((host, port) for host, port in kept["members"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ()
    whole = all(type(host) is str and type(port) is int and 0 <= port < 65536 for host, port in addresses)
    return addresses[:KNOWN_MAX] if whole and same_swarm else ()


def write(settings: Settings, addresses: tuple[Address, ...], file: str = _FILE) -> None:
    """Keep these addresses. Raises OSError."""
    kept = {**_swarm(settings), "members": addresses}
    replace(settings.state_path / file, json.dumps(kept))


def take_left(settings: Settings) -> tuple[Address, ...]:
    """Who was a member when this node left in its last run: once."""
    left = read(settings, _LEFT_FILE)
    with suppress(OSError):
        (settings.state_path / _LEFT_FILE).unlink()
    return left


def read_plan(settings: Settings) -> Plan:
    """The plan kept; AS_STARTED when there is none, or the node is told something else now.

    Whoever starts it with another mode, or other settings of it, than it had under the plan has decided anew.
    """
    path = settings.state_path / _PLAN_FILE
    if not os.path.lexists(path):
        return AS_STARTED
    try:
        kept = json.loads(_text(path))
        same_swarm = _is_of(settings, kept)
        proof = bytes.fromhex(kept.get("proof", ""))
        plan, same_flags = unpack(kept["plan"], proof), kept["started"] == _started(settings)
        mode = plan.text or str(kept["started"]["mode"])
        planned(settings, plan.text)
    except (UserError, OSError) as error:  # of another version of peerd, or not to be read
        cause = error.strerror if isinstance(error, OSError) else error
        LOGGER.warning("%s: %s; this node starts in the mode that it is told", path, cause)
        return AS_STARTED
    except (ValueError, LookupError, TypeError, RecursionError):
        plan = AS_STARTED
    if plan == AS_STARTED or plan.once:
        LOGGER.warning("%s is damaged: it is ignored, and this node starts in the mode that it is told", path)
        return AS_STARTED
    if same_swarm and not same_flags:
        said = "plan %d of the last run (mode %s) is not taken up: this node is started with another mode or settings"
        LOGGER.info(said, plan.number, mode)
    return plan if same_swarm and same_flags else AS_STARTED


def _text(path: Path) -> str:
    """The beginning of a plain file. Raises OSError, and ValueError when it is no text."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "not a file")
    with path.open() as file:
        return file.read(TEXT_MAX)


def write_plan(settings: Settings, plan: Plan, leaves: Callable[[], bool]) -> None:
    """Keep this one, under which a node that was started so works, unless the node leaves. Raises OSError."""
    kept = {**_swarm(settings), "started": _started(settings), "plan": pack(plan), "proof": plan.proof.hex()}
    with _ONE_AT_A_TIME:
        if not leaves():
            replace(settings.state_path / _PLAN_FILE, json.dumps(kept))


def _swarm(settings: Settings) -> dict[str, str]:
    return {"swarm": settings.swarm, "run": settings.run}


def _is_of(settings: Settings, kept: dict[str, Any]) -> bool:
    """Whether it was kept in this swarm and run."""
    return {key: kept[key] for key in ("swarm", "run")} == _swarm(settings)


def _started(settings: Settings) -> dict[str, str | int]:
    return {key: getattr(settings, key) for key in ("mode", *PLANNED)}


def texts(settings: Settings) -> dict[Path, str]:
    """What is kept, by file."""
    found = {}
    for file in _IF_IT_STAYS:
        with suppress(OSError, ValueError):
            found[settings.state_path / file] = _text(settings.state_path / file)
    return found


def forget(settings: Settings, left: tuple[Address, ...] = ()) -> None:
    """Keep nothing, but the addresses of those whom this node has `left`."""
    with _ONE_AT_A_TIME:
        for file, consequence in _IF_IT_STAYS.items():
            path = settings.state_path / file
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                LOGGER.warning("%s: %s; the next start %s", path, error.strerror, consequence)
        if left:
            with suppress(OSError):  # it is a hint, no more
                write(settings, left, _LEFT_FILE)


def known(members: Mapping[NodeId, Member], me: NodeId, before: tuple[Address, ...]) -> tuple[Address, ...]:
    """Some of the living others, those known before first.

    While none lives, all known before but those who left: when the power goes, some see the others die first. Who has
    this node's address is no other: an earlier life of it whose key was lost, or one whose port it has now.
    """
    here = members[me].host, members[me].port
    others = [member for member in members.values() if (member.host, member.port) != here]
    live = dict.fromkeys((member.host, member.port) for member in others if member.state <= State.SUSPECT)
    if live:
        return tuple(dict.fromkeys([*(where for where in before if where in live), *live]))[:KNOWN_MAX]
    left = {(member.host, member.port) for member in others if member.state == State.LEFT}
    return tuple(where for where in before if where not in left and where != here)


async def keep(
    settings: Settings,
    me: NodeId,
    members: Callable[[], Mapping[NodeId, Member]],
    kept: tuple[Address, ...],
    leaving: trio.Event,
) -> None:
    """Have the members' file, which holds `kept`, follow the members until the node leaves."""
    told = False
    while not leaving.is_set():
        if (found := known(members(), me, kept)) != kept:
            try:
                await in_thread(partial(write, settings, found))
                kept, told = found, False
            except OSError as error:  # it is tried again
                cause = f"{settings.state_path / _FILE}: {error.strerror}"
                if not told:
                    LOGGER.warning("%s; after a crash this node may not find its swarm", cause)
                told = True
        with trio.move_on_after(LOOK_EVERY_S):
            await leaving.wait()
