"""Where are finished cells kept? One JSON file each, under what it is of, so that a run resumes where it ended."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import peerd
from peerd.reproduce.experiment import Cell, Experiment, Result
from peerd.transport.errors import UserError

FILE_MAX = 50_000_000  # bytes


def default_folder() -> Path:
    """$XDG_CACHE_HOME/peerd/reproduce, else below ~/.cache. Raises UserError."""
    if told := os.environ.get("XDG_CACHE_HOME"):
        return Path(told) / "peerd" / "reproduce"
    try:
        return Path.home() / ".cache" / "peerd" / "reproduce"
    except RuntimeError:  # a container's user may have none
        raise UserError("this user has no home folder for finished cells: set XDG_CACHE_HOME, or --cells") from None


@dataclass(frozen=True, slots=True)
class Kept:
    """What was measured, and on which day (UTC)."""

    result: Result
    date: str


class CannotKeep(UserError):
    """What was measured would be lost, and all that comes after it."""


class CellStore:
    """The finished cells of all experiments. A cell is found again if it and peerd's sources are the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self) -> None:
        """Make the folder, before there is anything to keep: what cannot be kept need not be measured. UserError."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise UserError(f"--cells {self._folder}: {error.strerror}; choose another place") from None

    def find(self, experiment: Experiment, cell: Cell) -> Kept | None:
        """None: nothing yet, or what is kept is damaged."""
        path = self._path(experiment, cell)
        try:
            with path.open(encoding="utf-8") as file:
                found = json.loads(file.read(FILE_MAX))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("of") != _of(experiment, cell):
            return None
        result, date = found.get("result"), found.get("date")
        return Kept(result, date) if isinstance(result, dict) and isinstance(date, str) else None

    def keep(self, experiment: Experiment, cell: Cell, result: Result) -> Kept:
        """Either all of it or nothing is there afterwards. Raises CannotKeep."""
        kept = Kept(result, time.strftime("%Y-%m-%d", time.gmtime()))
        path = self._path(experiment, cell)
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps({"of": _of(experiment, cell), **asdict(kept)}), encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            raise CannotKeep(f"cannot keep a finished cell in {path.parent}: {error.strerror}") from None
        return kept

    def _path(self, experiment: Experiment, cell: Cell) -> Path:
        text = json.dumps(_of(experiment, cell), sort_keys=True)
        return self._folder / experiment.name / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _of(experiment: Experiment, cell: Cell) -> dict[str, Any]:
    said = {"experiment": experiment.name, "sources": sources(), **asdict(cell)}
    normal: dict[str, Any] = json.loads(json.dumps(said))  # tuples become lists, as they are read
    return normal


@cache
def sources() -> str:
    """A digest of all code of peerd: what a cell finds may come from any of it."""
    root = Path(peerd.__file__).parent
    folders = [root, root / "training", root / "transport"]  # which are links where peerd was installed to be edited
    files = {path for folder in folders for kind in ("py", "c") for path in folder.rglob(f"*.{kind}")}
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]
