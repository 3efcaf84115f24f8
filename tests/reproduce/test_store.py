"""Finished cells: found again by content and version, whatever lies in the folder; a run resumes from them."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.reproduce import cells
from peerd.reproduce.cells import CellStore
from peerd.reproduce.experiment import (
    Cell,
    Criterion,
    Experiment,
    Findings,
    NotRun,
    Result,
    Run,
    Size,
    Verdict,
    judge,
    verdict,
)
from peerd.reproduce.runs import Progress, run_experiment
from peerd.reproduce.statistics import Estimate, estimate, exactly
from peerd.transport.errors import UserError

CELLS = [Cell("arm", seed, {"steps": 3}) for seed in range(4)]
measured: list[int] = []


def measure(cell: Cell) -> Result:
    if cell.seed in cell.settings.get("broken", ()):
        raise KeyboardInterrupt
    measured.append(cell.seed)
    return {"value": float(cell.seed)}


def study(size: Size, run: Run) -> Findings:
    values = [result["value"] for result in run(CELLS)]
    return Findings("It was seen.", {"mean": estimate(values)}, [])


EXAMPLE = Experiment(
    "E0", "an example", "nobody", "It was said.", [Criterion("mean", "the mean", 1, 2)], measure, study
)


def test_a_cell_is_found_by_its_content_and_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cell = CellStore(tmp_path), CELLS[0]
    assert store.find(EXAMPLE, cell) is None
    store.keep(EXAMPLE, cell, {"value": 1.5})
    kept = CellStore(tmp_path).find(EXAMPLE, cell)
    assert kept is not None
    assert kept.result == {"value": 1.5}
    for other in (replace(cell, seed=9), replace(cell, tag="other"), replace(cell, settings={"steps": 4})):
        assert store.find(EXAMPLE, other) is None
    monkeypatch.setattr(cells, "sources", lambda: "of another day")
    assert store.find(EXAMPLE, cell) is None


def test_a_report_is_of_the_days_on_which_its_cells_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CellStore(tmp_path)
    for seed, day in ((0, "2026-11-03"), (2, "2026-11-01")):
        monkeypatch.setattr(time, "strftime", lambda *_, day=day: day)
        store.keep(EXAMPLE, CELLS[seed], {"value": float(seed)})
    assert run_experiment(EXAMPLE, Size.TINY, store, 1).date == "2026-11-01 to 2026-11-03"


@given(damage=st.binary(max_size=60))
def test_a_damaged_file_is_a_cell_that_was_not_run(tmp_path_factory: pytest.TempPathFactory, damage: bytes) -> None:
    store = CellStore(tmp_path_factory.mktemp("cells"))
    store.keep(EXAMPLE, CELLS[0], {"value": 1.5})
    (path,) = store._folder.rglob("*.json")
    path.write_bytes(damage)
    assert store.find(EXAMPLE, CELLS[0]) is None


def test_a_run_that_was_ended_goes_on_where_it_was(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    for seed in (0, 2):
        store.keep(EXAMPLE, CELLS[seed], {"value": float(seed)})
    measured.clear()
    seen: list[Progress] = []
    report = run_experiment(EXAMPLE, Size.TINY, store, 1, seen.append)
    assert measured == [1, 3]
    assert [each.done for each in seen] == [2, 3, 4]
    assert seen[-1].left_s == 0.0
    assert (report.verdict, report.cells, report.seeds) == (Verdict.REPRODUCED, 4, [0, 1, 2, 3])


@pytest.mark.parametrize("place", ["/dev/null", "/proc/nowhere"])
def test_cells_that_cannot_be_kept_end_the_run(place: str) -> None:
    """Of an experiment that was not run a page would say so, and the command would have done what it was told."""
    with pytest.raises(UserError, match=f"^cannot keep a finished cell in {place}/E0: No"):
        run_experiment(EXAMPLE, Size.TINY, CellStore(Path(place)), 1)


def test_an_interrupt_keeps_what_is_finished(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    some = [replace(cell, settings={"broken": [2]}) for cell in CELLS]
    broken = replace(EXAMPLE, study=lambda size, run: Findings(str(run(some)), {}, []))
    with pytest.raises(KeyboardInterrupt):
        run_experiment(broken, Size.TINY, store, 1)
    assert [store.find(broken, cell) is not None for cell in some] == [True, True, False, False]


def test_what_the_user_can_mend_is_not_run_and_says_why(tmp_path: Path) -> None:
    def missing(cell: Cell) -> Result:
        raise UserError("no plays are installed")

    report = run_experiment(replace(EXAMPLE, measure=missing), Size.TINY, CellStore(tmp_path), 1)
    assert report.verdict is Verdict.NOT_RUN
    assert "no plays are installed" in report.findings.seen


def killed(cell: Cell) -> Result:
    os._exit(1)


def test_a_process_that_dies_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a process was ended"):
        run_experiment(replace(EXAMPLE, measure=killed), Size.TINY, CellStore(tmp_path), 2)


def test_several_processes_find_the_same(tmp_path: Path) -> None:
    from peerd.reproduce import EXPERIMENTS

    example = EXPERIMENTS["E7"]
    one, two = (run_experiment(example, Size.TINY, CellStore(tmp_path / str(jobs)), jobs) for jobs in (1, 2))
    assert one == two


@given(st.floats(-10, 10), st.floats(0, 5), st.floats(-10, 0), st.floats(0, 10))
def test_a_figure_is_sure_if_its_interval_is_on_one_side(mean: float, half: float, least: float, most: float) -> None:
    judged = judge(Criterion("", "", least, most), Estimate(mean, mean - half, mean + half, 3))
    assert judged.met == (least <= mean <= most)
    ends = {judge(judged.criterion, exactly(end)).met for end in (mean - half, mean + half)}
    if judged.sure:
        assert ends == {judged.met}


def test_verdicts() -> None:
    met, missed, absent = (judge(Criterion("", "", 0, 1), each) for each in (exactly(1), exactly(2), NotRun("why")))
    assert verdict([met, met]) is Verdict.REPRODUCED
    assert verdict([met, missed]) is verdict([met, absent]) is Verdict.PARTLY
    assert verdict([missed, absent]) is Verdict.NOT_REPRODUCED
    assert verdict([absent]) is Verdict.NOT_RUN
    assert judge(Criterion("", "", 0, 1), exactly(float("nan"))).met is False
