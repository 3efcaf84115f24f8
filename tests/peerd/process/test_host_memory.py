"""A model's memory is told before it is taken, and where there is less, less is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerd.process import host_memory
from peerd.process.host_memory import Told

SEVEN_BILLION = 7_000_000_000


@pytest.fixture
def free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host that has 64 GB left."""
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       98765432 kB\nMemFree:        1 kB\nMemAvailable:   62500000 kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", path)
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroups")
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
    return path


def test_a_small_model_is_not_worth_a_line(free: Path) -> None:
    assert host_memory.told("gossip", 3, 1_000_000) is None


def test_what_fits_is_told(free: Path) -> None:
    line = "this model takes about 800 MB with one link and 4.2 GB at most of the host's memory in mode gossip"
    assert host_memory.told("gossip", 3, 25_000_000) == Told(f"{line}, and 100 MB in its script", False, 3)
    line = "this model takes about 2.8 GB with one link and 4.8 GB at most of the host's memory in mode gossip"
    assert host_memory.told("gossip", 3, 100_000_000) == Told(f"{line}, and 400 MB in its script", False, 3)
    line = "this model takes about 1.2 GB of the host's memory in mode diloco:2, and 100 MB in its script"
    assert host_memory.told("diloco:2", 3, 25_000_000) == Told(line, False, 3)


def test_copies_with_one_link_and_at_most_at_the_default_view() -> None:
    assert host_memory.copies("gossip", 3, 1_000_000_000) == (7, 12)
    assert host_memory.copies("gossip", 3, 1_000_000) == (9, 51)
    assert host_memory.copies("push-sum", 3, 1_000_000_000) == (11, 23)


def test_where_there_is_less_a_node_looks_for_fewer_partners(free: Path) -> None:
    told = host_memory.told("gossip", 3, 1_300_000_000)
    assert told is not None
    assert (told.warns, told.view) == (True, 2)
    assert told.line == (
        "this model takes about 36.4 GB with one link and 57.2 GB at most of the host's memory in mode gossip, and 5.2 "
        "GB in its script, and there is 64.0 GB: it looks for 2 partners in place of 3, who could take 62.4 GB"
    )


def test_what_does_not_fit_at_all_is_a_warning(free: Path) -> None:
    told = host_memory.told("gossip", 3, SEVEN_BILLION)
    assert told is not None
    assert (told.warns, told.view) == (True, 1)
    assert told.line.endswith("who could take 336.0 GB; that may be too little")
    told = host_memory.told("allreduce", 3, SEVEN_BILLION)
    assert told is not None
    assert (told.warns, told.view) == (True, 3)
    assert told.line.endswith("and there is 64.0 GB; that may be too little")


def limited(folder: Path, names: tuple[str, str], limit: str) -> None:
    """A group that uses 5 GB, 2 of them for what the disk has as well, most of which was read more than once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text("5000000000\n")
    files = {"active_file": 1_500_000_000, "inactive_file": 500_000_000}
    rows = [f"{total}{name} {size}" for total in ("", "total_") for name, size in files.items()]
    (folder / "memory.stat").write_text("\n".join(["anon 3", *rows, ""]))


@pytest.mark.parametrize("outer", ["max", "40000000000", "12000000000"])
@pytest.mark.parametrize("named", [True, False], ids=["by its path", "as the top of all"])
@pytest.mark.parametrize("version", [1, 2])
def test_what_a_container_or_a_job_may_take_is_what_there_is(free: Path, version: int, named: bool, outer: str) -> None:
    """By its path where it sees all groups; a container sees its own alone, which it may know by another path."""
    names, top, hierarchy = {
        1: (("memory.limit_in_bytes", "memory.usage_in_bytes"), free.parent / "cgroups" / "memory", "4:cpu,memory"),
        2: (("memory.max", "memory.current"), free.parent / "cgroups", "0:"),
    }[version]
    (free.parent / "own").write_text(f"9:name=systemd:/else\n{hierarchy}:/job/step\n")
    limited(top / "job" if named else top, names, outer)
    if named:
        limited(top / "job" / "step", names, "20000000000")
    limits = [20e9] * named + [float(one) for one in (outer,) if one != "max"]
    assert host_memory.available() == min([62500000 * 1024, *(limit - 3e9 for limit in limits)])


def test_a_host_that_does_not_tell_gets_no_warning(free: Path) -> None:
    free.unlink()
    told = host_memory.told("gossip", 3, SEVEN_BILLION)
    assert told is not None
    assert (told.warns, told.view) == (False, 3)
