"""Where are finished cells kept? One JSON file each, under what it is of, so that a run resumes where it ended."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peerd import __version__
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


class CellStore:
    """The finished cells of all experiments. A cell is found again if it, its experiment's revision and peerd's
    version are the same."""

    def __init__(self, folder: Path) -> None:
        """The folder is made when there is something to keep."""
        self._folder = folder

    def find(self, experiment: Experiment, cell: Cell) -> Result | None:
        """What was measured; None: nothing yet, or what is kept is damaged."""
        path = self._path(experiment, cell)
        try:
            with path.open(encoding="utf-8") as file:
                kept = json.loads(file.read(FILE_MAX))
        except (OSError, ValueError, RecursionError):
            return None
        whole = isinstance(kept, dict) and kept.get("of") == _of(experiment, cell)
        result = kept.get("result") if whole else None
        return result if isinstance(result, dict) else None

    def keep(self, experiment: Experiment, cell: Cell, result: Result) -> None:
        """Either all of it or nothing is there afterwards. Raises UserError."""
        path = self._path(experiment, cell)
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps({"of": _of(experiment, cell), "result": result}), encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise UserError(f"cannot keep a finished cell in {path.parent}: {error.strerror}") from None

    def _path(self, experiment: Experiment, cell: Cell) -> Path:
        text = json.dumps(_of(experiment, cell), sort_keys=True)
        return self._folder / experiment.name / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _of(experiment: Experiment, cell: Cell) -> dict[str, Any]:
    said = {"experiment": experiment.name, "revision": experiment.revision, "peerd": __version__, **asdict(cell)}
    normal: dict[str, Any] = json.loads(json.dumps(said))  # tuples become lists, as they are read
    return normal
