"""The bench of rivals: its sums, and a tiny run of one of them and of peerd over loopback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import benchmarks.versus.__main__ as versus
from benchmarks.versus.__main__ import Kept, best, code, main, middle, row_of, span
from benchmarks.versus.cell import Cell, run
from benchmarks.versus.judge import Look, bytes_at, moments, newest, reached
from benchmarks.versus.rivals import RIVALS, DiLoCo, SparseLoCo
from peerd.training.tasks import TASKS

instants = st.lists(st.floats(0, 1e3), min_size=1, max_size=8, unique=True).map(sorted)


@given(st.dictionaries(st.integers(0, 3), instants, min_size=1), st.floats(0, 1e3), st.floats(0, 1e3))
def test_the_newest_weights_of_the_living_count(times: dict[int, list[float]], at: float, death: float) -> None:
    found = newest(times, at, {0: death})
    for rank, when in times.items():
        so_far = [one for one in when if one <= at]
        if rank == 0 and at >= death:
            assert rank not in found
        else:
            assert found.get(rank) == (max(so_far) if so_far else None)


@given(instants, st.lists(st.integers(0, 10**9), min_size=8, max_size=8), st.floats(-1.0, 2e3))
def test_bytes_grow_from_nothing_to_all_that_was_counted(when: list[float], steps: list[int], at: float) -> None:
    totals = [sum(steps[: index + 1]) for index in range(len(when))]
    sent = [(moment, [total, 3 * total]) for moment, total in zip(when, totals, strict=True)]
    found = bytes_at(sent, at)
    assert 0 <= found <= 2 * (totals[-1] - totals[0]) * (1 + 1e-9)
    assert bytes_at(sent, when[-1]) == pytest.approx(2 * (totals[-1] - totals[0]))
    assert bytes_at(sent, when[0]) == 0


@given(st.dictionaries(st.integers(0, 3), instants, min_size=1))
def test_looks_begin_where_all_have_weights(times: dict[int, list[float]]) -> None:
    for at in moments(times, 5):
        assert newest(times, at, {}).keys() == times.keys()


def test_a_target_between_two_looks() -> None:
    found = [Look(0.0, 0.0, 0.1), Look(2.0, 100.0, 0.5), Look(4.0, 300.0, 0.9)]
    assert reached(found, 0.7) == pytest.approx((3.0, 200.0))
    assert reached(found, 0.95) is None


def test_what_the_table_says() -> None:
    results: list[dict[str, Any]] = [
        {"lr": "0.1", "seconds": 3.0, "bytes": 2e6, "accuracy": 0.9, "bytes_in_all": 4e6, "ended": "well"},
        {"lr": "0.2", "seconds": None, "bytes": None, "accuracy": 0.95, "bytes_in_all": 5e6, "ended": "hangs"},
    ]
    assert best(results) == "0.1", "who gets there, before who comes further"
    assert best(results[1:]) == "0.2"
    assert middle([3.0, None]) == "3.0, never in 1"
    assert row_of("x", results)[-1] == "hangs"
    assert span("0..2") == [0, 1, 2]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_sparse_outer_steps_keep_what_they_drop() -> None:
    """Alone, what all steps have moved and what is still owed make what the training moved."""
    task = TASKS["digits"].prepare([])
    rival = SparseLoCo(task, 1)
    rival.DECAY = 1.0
    start = rival._agreed.clone()
    came = torch.randn(len(start))
    for _ in range(3):
        with torch.no_grad():
            flat = rival._agreed - came
            torch.nn.utils.vector_to_parameters(flat, task.model.parameters())
        rival._since = 1
        rival.end()
    moved = start - rival._agreed
    assert moved.abs().sum() > 0
    torch.testing.assert_close(moved + rival._error[: len(start)], 3 * came, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("alone")
def test_the_last_outer_step_is_of_steps() -> None:
    """A run whose steps are a multiple of the period has made it: another would be of the momentum alone."""
    task = TASKS["digits"].prepare([])
    rival = DiLoCo(task, 2)
    for number in range(4):
        rival.step(number)
    agreed = rival._agreed.clone()
    rival.end()
    torch.testing.assert_close(rival._agreed, agreed, rtol=0, atol=0)
    rival.step(4)
    rival.end()
    assert not torch.equal(rival._agreed, agreed)


@pytest.mark.one_run_in(3)
@pytest.mark.parametrize("row", ["local SGD 8", "peerd"])
def test_a_tiny_run(row: str, tmp_path: Path) -> None:
    cell = Cell(row, 0, peers=2, steps=32, pace=0.0, mbit=0.0, shard="iid")
    kept = Kept(tmp_path / "cells")
    found = kept.result(cell, 0.3)
    assert found["ended"] == "well"
    assert found["seconds"] is not None
    assert found["accuracy"] > 0.5
    assert Kept(tmp_path / "cells").result(cell, 0.3) == found, "kept"


def test_a_finished_run_is_of_the_code_of_rivals_too(tmp_path: Path) -> None:
    here = Path(versus.__file__).parent
    for path in here.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert code(tmp_path) == code()
    with (tmp_path / "__main__.py").open("a") as file:
        file.write("# other columns\n")
    assert code(tmp_path) == code()
    with (tmp_path / "rivals.py").open("a") as file:
        file.write("# another rival\n")
    assert code(tmp_path) != code()


def test_a_worker_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(Cell("local SGD 8", 0, peers=2, steps=2, mbit=0.0, shard="nonsense"), 0.5)
    assert found["ended"].startswith("worker ")
    assert found["looks"] == []
    assert set(RIVALS) >= {"DDP", "local SGD 32"}


@pytest.mark.parametrize(
    ("option", "text"),
    [("--mbit", "nan"), ("--mbit", "-1"), ("--pace", "inf"), ("--target", "9"), ("--target", "x"),
     ("--cells", "/proc/x/cells"), ("--cells", "/proc"), ("--plot", "/nowhere/plot.svg"),
     ("--seeds", "2..0"), ("--seeds", "-1"), ("--seeds", "0..x")],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_before_a_run(
    option: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["versus", option, text])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert f"argument {option}: " in capsys.readouterr().err
