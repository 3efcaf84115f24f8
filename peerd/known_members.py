"""Where was the swarm when this node last ran? Addresses of its members, in the state folder until the node leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import trio

from peerd.durable import replace
from peerd.effects import Address, NodeId
from peerd.logs import LOGGER
from peerd.messages import Member, State
from peerd.settings import Settings

KNOWN_MAX = 16
LOOK_EVERY_S = 1.0  # the members of a swarm that forms come in crowds: one writing for each crowd
_FILE = "members.json"


def read(settings: Settings) -> tuple[Address, ...]:
    """The addresses kept; none when the file is damaged, or of another swarm or run."""
    try:
        kept = json.loads((settings.state_path / _FILE).read_text())
        same_swarm = (kept["swarm"], kept["run"]) == (settings.swarm, settings.run)
        addresses = tuple((host, port) for host, port in kept["members"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ()
    whole = all(type(host) is str and type(port) is int and 0 <= port < 65536 for host, port in addresses)
    return addresses[:KNOWN_MAX] if whole and same_swarm else ()


def write(settings: Settings, addresses: tuple[Address, ...]) -> None:
    """Keep these. Raises OSError."""
    kept = {"swarm": settings.swarm, "run": settings.run, "members": addresses}
    replace(settings.state_path / _FILE, json.dumps(kept))


def forget(settings: Settings) -> None:
    """Keep none."""
    path = settings.state_path / _FILE
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        LOGGER.warning("%s: %s; the next start asks the members named there", path, error.strerror)


def known(members: Mapping[NodeId, Member], me: NodeId, before: tuple[Address, ...]) -> tuple[Address, ...]:
    """Some of the living others, those known before first.

    While none lives, all known before but those who left: when the power goes, some see the others die first.
    """
    others = [member for id, member in members.items() if id != me]
    live = dict.fromkeys((member.host, member.port) for member in others if member.state <= State.SUSPECT)
    if live:
        return tuple(dict.fromkeys([*(where for where in before if where in live), *live]))[:KNOWN_MAX]
    left = {(member.host, member.port) for member in others if member.state == State.LEFT}
    return tuple(where for where in before if where not in left)


async def keep(
    settings: Settings,
    me: NodeId,
    members: Callable[[], Mapping[NodeId, Member]],
    kept: tuple[Address, ...],
    leaving: trio.Event,
) -> None:
    """Have the file, which holds `kept`, follow the members until the node leaves."""
    while not leaving.is_set():
        if (found := known(members(), me, kept)) != kept:
            kept = found
            try:
                await trio.to_thread.run_sync(write, settings, kept)
            except OSError as error:
                cause = f"{settings.state_path / _FILE}: {error.strerror}"
                LOGGER.warning("%s; after a crash this node may not find its swarm", cause)
        with trio.move_on_after(LOOK_EVERY_S):
            await leaving.wait()
