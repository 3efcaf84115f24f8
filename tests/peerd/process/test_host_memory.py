"""A model's memory is told before it is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerd.process import host_memory

SEVEN_BILLION = 7_000_000_000


@pytest.fixture
def free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host that has 64 GB left."""
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       98765432 kB\nMemFree:        1 kB\nMemAvailable:   62500000 kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", path)
    return path


def test_a_small_model_is_not_worth_a_line(free: Path) -> None:
    assert host_memory.told("gossip", 3, 1_000_000) is None


def test_what_fits_is_told(free: Path) -> None:
    line = "this model takes about 1.2 GB with one link and 5.4 GB at most of the host's memory in mode gossip"
    assert host_memory.told("gossip", 3, 25_000_000) == (f"{line}, and 100 MB in its script", False)
    line = "this model takes about 1.2 GB of the host's memory in mode diloco:2, and 100 MB in its script"
    assert host_memory.told("diloco:2", 3, 25_000_000) == (line, False)


def test_what_does_not_fit_is_a_warning_with_a_cure(free: Path) -> None:
    told = host_memory.told("gossip", 3, SEVEN_BILLION)
    assert told is not None
    line, warns = told
    assert warns
    assert line.endswith("and there is 64.0 GB; a smaller --view means fewer links")
    told = host_memory.told("allreduce", 3, SEVEN_BILLION)
    assert told is not None
    assert told[0].endswith("and there is 64.0 GB")


def test_a_host_that_does_not_tell_gets_no_warning(free: Path) -> None:
    free.unlink()
    told = host_memory.told("gossip", 3, SEVEN_BILLION)
    assert told is not None
    assert not told[1]
