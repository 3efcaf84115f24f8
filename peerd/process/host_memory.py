"""How much of the host's memory will a model take here? Told before it is taken: a node killed for it says nothing.

In copies of the model in float32, 4 bytes a value, in the daemon and what it shares with its trainer. Where the host,
or the container or job that the node runs in, has less than all links may come to, it looks for fewer partners.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from peerd.training.modes import class_of
from peerd.training.room import room

SHARED = 4  # two copies and two halves of corrections, which trainer and daemon share
WORK = 2  # of encoding and decoding, of what is on its way, and of corrections that come faster than a trainer steps
PUSHED_WORK = 3  # the same, and what a correction is made of
A_PUSHED_LINK = 4  # with a push under way: what both ends know of it, and of one back; what is kept of one that went
A_ROUND = 6  # of a mode without links: what is read, contribution, sum, what all agreed on, what a codec dropped, work
WORTH_A_LINE = 1 << 30  # bytes
MEMINFO = Path("/proc/meminfo")
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Told:
    """What there is to say, and to do."""

    line: str
    warns: bool
    view: int
    """Partners to look for: as many as were wanted, or as the host has memory for."""


def copies(mode: str, view: int, values: int) -> tuple[int, int]:
    """How many there are with one link, and at most."""
    its_class, links = class_of(mode), room(view, values)
    if its_class.PUSHES:
        return SHARED + PUSHED_WORK + A_PUSHED_LINK, SHARED + PUSHED_WORK + A_PUSHED_LINK * links.active
    if its_class.KEEPS_LINKS:
        return SHARED + WORK + links.of_link, SHARED + WORK + links.models
    return SHARED + WORK + A_ROUND, SHARED + WORK + A_ROUND


def available() -> int | None:
    """Bytes that the host has left for new memory, and lets this process have; None where it does not tell."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min([1024 * kib[0], *_left_by_cgroups()]) if kib else None


def _left_by_cgroups() -> Iterator[int]:
    """What each of them that this process is in, and that has a limit, may still take (cgroups(7), both versions).

    A container sees its own group as the top of all, by whatever path the kernel calls it. Pages of files are given
    back before anybody is killed, those in use as well as others: so the host's figure counts them, too, and a job that
    has read its data fills its group with them.
    """
    own = ""
    with suppress(OSError):
        own = OWN_CGROUPS.read_text()
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, used, total = CGROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, limit, used, total = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        folder = top / path.strip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top):
                with suppress(OSError, ValueError, LookupError):  # there is none, or it has no limit
                    most, taken = (int((group / name).read_text()) for name in (limit, used))
                    rows = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                    files = sum(int(rows[f"{total}{which}_file"]) for which in ("active", "inactive"))
                    yield max(0, most - taken + files)


def told(mode: str, view: int, values: int) -> Told | None:
    """Of a model of so many values; None: not worth a line."""
    least, most = _bytes(mode, view, values)
    if most < WORTH_A_LINE:
        return None
    script, left = 4 * values, available()
    fits = view
    while left is not None and fits > 1 and _bytes(mode, fits, values)[1] + script > left:
        fits -= 1
    span = _span(*_bytes(mode, fits, values))
    line = f"this model takes about {span} of the host's memory in mode {mode}, and {_shown(script)} in its script"
    most_here = _bytes(mode, fits, values)[1]
    if left is None or (fits == view and most_here + script <= left):
        return Told(line, warns=False, view=view)
    line = f"{line}, and there is {_shown(left)}"
    fits = view if least == most else fits
    if fits < view:
        line = (
            f"{line}: it looks for {fits} partner{'s' * (fits > 1)} in place of {view}, who could take {_shown(most)}"
        )
    if most_here + script > left:
        line = f"{line}; that may be too little"
    return Told(line, warns=True, view=fits)


def _bytes(mode: str, view: int, values: int) -> tuple[int, int]:
    least, most = copies(mode, view, values)
    return 4 * values * least, 4 * values * most


def _span(least: int, most: int) -> str:
    return _shown(most) if least == most else f"{_shown(least)} with one link and {_shown(most)} at most"


def _shown(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
