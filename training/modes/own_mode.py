"""How does a mode from a user's own file come into the table? By being named: `--mode FILE.py:CLASS[:ARGUMENT]`.

Only who starts a node names a file: what members propose to each other (`mode set`) is a name that each knows already.
The file runs with all that the user may do, as a training script does.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from pathlib import Path

from peerd.training.mode import ModeClass
from peerd.training.modes import MODES
from peerd.transport.errors import WrongSetting

SUFFIX = ".py"
NAME = r"[A-Za-z0-9][A-Za-z0-9-]*"

_sources: dict[str, str] = {}  # where those that were adopted come from


def adopted(text: str) -> str:
    """What `text` is called once its file is loaded: NAME[:ARGUMENT]; other texts are as they are. Raises UserError."""
    file, colon, rest = text.partition(f"{SUFFIX}:")
    if not colon:
        return text
    name, colon, argument = rest.partition(":")
    found = _load(Path(file + SUFFIX), text, name)
    if not re.fullmatch(NAME, getattr(found, "NAME", "")) or not hasattr(found, "TAKES"):
        raise WrongSetting(
            f"--mode {text}: {name} needs a NAME of letters, digits and '-', and TAKES, the settings it heeds", "mode"
        )
    known = MODES.setdefault(found.NAME, found)
    if (known.__module__, known.__qualname__) != (found.__module__, found.__qualname__):
        raise WrongSetting(f"--mode {text}: there is a mode {found.NAME!r} already; give it another NAME", "mode")
    _sources[found.NAME] = f"{Path(file + SUFFIX).absolute()}:{name}"
    return f"{found.NAME}{colon}{argument}"


def as_told(mode: str) -> str:
    """The text by which another process finds this mode, too."""
    name, colon, argument = mode.partition(":")
    return f"{_sources.get(name, name)}{colon}{argument}"


def whose(error: Exception) -> str | None:
    """The file of a mode that was adopted, where this comes from it."""
    files = {source.rpartition(":")[0] for source in _sources.values()}
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((frame.filename for frame in frames if frame.filename in files), None)


def _load(file: Path, text: str, name: str) -> type[ModeClass]:
    if not os.path.isfile(file):  # before it is resolved, which some names cannot be
        raise WrongSetting(f"--mode {text}: there is no file {file}", "mode")
    module_name = f"peerd_mode_{file.resolve()}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None, "its name ends in .py"
        assert spec.loader is not None, "it is a file"
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # of the user's own code
            del sys.modules[module_name]
            raise WrongSetting(f"--mode {text}: {file} fails with {type(error).__name__}: {error}", "mode") from None
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, ModeClass):
        raise WrongSetting(
            f"--mode {text}: {file} has no class {name!r} that is a ModeClass (CONTRIBUTING.md has one)", "mode"
        )
    return found
