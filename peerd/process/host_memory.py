"""How much of the host's memory will a model take here? Told before it is taken: a node killed for it says nothing.

In copies of the model in float32, 4 bytes a value, in the daemon and what it shares with its trainer.
"""

from __future__ import annotations

from pathlib import Path

from peerd.training.modes import class_of

SHARED = 5  # two copies and two halves of corrections, which trainer and daemon share, and one that is read
WORK = 3  # of encoding and decoding, and of what is on its way
OWN_WAY = 1  # of a mode with links: where the model was when its own steps were last told from corrections (robust)
A_LINK = 3  # what each end knows of the other, and where this model was at the last exchange
A_ROUND = 4  # of a mode without links: contribution, sum, what all agreed on, what a codec dropped
WORTH_A_LINE = 1 << 30  # bytes
MEMINFO = Path("/proc/meminfo")


def copies(mode: str, view: int) -> tuple[int, int]:
    """How many there are with one link; and at most: twice the view, and thrice for what is kept of absent peers."""
    if class_of(mode).KEEPS_LINKS:
        least = SHARED + WORK + OWN_WAY
        return least + A_LINK, least + A_LINK * 5 * view
    return SHARED + WORK + A_ROUND, SHARED + WORK + A_ROUND


def available() -> int | None:
    """Bytes that the host has left for new memory; None where it does not tell."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024 * kib[0] if kib else None


def told(mode: str, view: int, values: int) -> tuple[str, bool] | None:
    """The line to say for a model of so many values, and whether it is a warning; None: not worth one."""
    least, most = (4 * values * count for count in copies(mode, view))
    if most < WORTH_A_LINE:
        return None
    span = _shown(most) if least == most else f"{_shown(least)} with one link and {_shown(most)} at most"
    line = f"this model takes about {span} of the host's memory in mode {mode}, and {_shown(4 * values)} in its script"
    left = available()
    if left is None or most + 4 * values <= left:
        return line, False
    cure = "; a smaller --view means fewer links" if least < most else ""
    return f"{line}, and there is {_shown(left)}{cure}", True


def _shown(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
