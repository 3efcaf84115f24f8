"""Which Python runs a row? Rivals that bring versions of their own have an environment each, made when needed."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from peerd.transport.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = {"hivemind 32": "hivemind==1.1.12", "torchft DiLoCo 32": "torchft==0.2.0"}
"""What a row needs beside peerd and torch."""


def python_of(row: str) -> str:
    """The interpreter of its workers. Raises UserError: what it needs does not install here."""
    if row not in PACKAGES:
        return sys.executable
    folder = Path(__file__).parent / ".venv" / PACKAGES[row]
    python = folder / "bin" / "python"
    installed = folder / "installed"
    if not installed.exists():
        venv.create(folder, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "-c", str(REPOSITORY / "constraints.txt"), "-e", str(REPOSITORY), PACKAGES[row]],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["without a word"]
            raise UserError(f"{PACKAGES[row]} does not install: {said[-1][:160]}")
        installed.touch()
    return str(python)
