"""How does a flat vector become a file of named tensors again? safetensors, in the tensors' own types."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file

from peerd.transport.errors import UserError


def write_safetensors(path: Path, values: npt.NDArray[Any], tensors: list[str]) -> int:
    """Write `values`, shape (total,), as the tensors described ("name dtype shape ..."); returns the file's bytes.

    float64 and float16 keep their type; bfloat16 is written as float32, which holds the same values, for numpy has no
    such type. Frozen tensors are not in the vector and not in the file. Raises UserError.
    """
    path = Path(os.path.realpath(path))  # a link is followed, not replaced
    check_folder(path)
    named: dict[str, npt.NDArray[Any]] = {}
    start = 0
    for line in _in_vector_order(tensors):
        name, dtype, shape, _ = _fields(line)
        sizes = [] if shape == "scalar" else [int(size) for size in shape.split("x")]
        count = math.prod(sizes)
        kind = {"float16": np.float16, "float64": np.float64}.get(dtype, np.float32)
        named[name] = values[start : start + count].reshape(sizes).astype(kind, copy=False)
        start += count
    return replaced(path, lambda temporary: save_file(named, temporary, metadata={"format": "pt"}))


def replaced(path: Path, write: Callable[[Path], None]) -> int:
    """Have `write` make a new file for `path`, which appears at once; returns its bytes. Raises UserError."""
    path = Path(os.path.realpath(path))  # a link is followed, not replaced
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")  # of two at once, too
    try:
        temporary.touch()
        mode = (path if path.exists() else temporary).stat().st_mode & 0o777  # as the umask has it, for a new one
        write(temporary)  # for the owner alone
        temporary.chmod(mode)
        temporary.replace(path)
        return path.stat().st_size
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {_cause(error)}") from None
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Before a large model is converted. Raises UserError."""
    folder = path.parent
    if not os.path.isdir(folder):  # Path's own raises where a folder above it is closed to this user
        raise UserError(f"cannot write {path}: no such folder: {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {path}: the folder {folder} is not writable")
    if os.path.isdir(path):
        raise UserError(f"cannot write {path}: it is a folder")


def _cause(error: OSError | SafetensorError) -> str:
    """What the disk said; safetensors wraps it in its own words and the name of a temporary file."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    number = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(number[1])) if number else str(error)


def _in_vector_order(tensors: list[str]) -> list[str]:
    """Trainable parameters, then buffers: the order of the flat vector. Frozen tensors are not in it.

    What comes after them there is the optimizer's.
    """
    return [line for kind in ("trainable", "buffer") for line in tensors if _fields(line)[3] == kind]


def _fields(line: str) -> tuple[str, str, str, str]:
    """Name, dtype, shape and kind, read from the right: a name may hold spaces."""
    kind = "trainable"
    words = line.split(" ")
    if words[-1] in ("buffer", "state"):
        kind = words.pop()
    elif words[-2] == "frozen":
        kind = words[-2]
        del words[-2:]
    return " ".join(words[:-2]), words[-2], words[-1], kind
