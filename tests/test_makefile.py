"""Whoever ends `make` ends what it runs: a shell between the two would die alone, and hundreds of processes run on."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATIENCE_S = 20.0


@pytest.mark.parametrize("target", ["test", "thorough", "quick", "scripts", "soak", "fuzz"])
def test_a_target_that_is_ended_runs_no_longer(tmp_path: Path, target: str) -> None:
    (python := tmp_path / "python").write_text(f"#!/bin/sh\necho $$\nexec sleep {3 * PATIENCE_S:.0f}\n")
    python.chmod(0o700)
    there = ["-o", ".venv/installed", "-o", ".venv/frameworks"]
    command = ["make", "--silent", "--no-print-directory", "-C", str(ROOT), *there, f"BIN={tmp_path}", target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as make:
        assert make.stdout is not None
        runs = int(make.stdout.readline())
        make.terminate()
        try:
            make.communicate(timeout=PATIENCE_S)  # until nobody is left who could write
        finally:
            with suppress(ProcessLookupError):
                os.kill(runs, signal.SIGKILL)
