"""Which checkpoints does a node have? Their names tell: to the script, which writes them, and to its daemon."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"step-(\d{8,18})(\.old)?")


def generations(folder: Path) -> list[Path]:
    """Newest first; of two at one step, the one that replaces the other."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (step_of(path), path.suffix == ""), reverse=True)


def step_of(path: Path) -> int:
    """Of which step a generation is."""
    return int(path.name.removeprefix("step-").removesuffix(".old"))


def newest_step(folder: Path) -> int:
    """Of the newest one, whole or not, of whichever model; 0 where there is none."""
    return next(map(step_of, generations(folder)), 0)
