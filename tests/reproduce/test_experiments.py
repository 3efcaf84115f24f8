"""Every experiment, tiny: its cells run, its figures are those that its criteria ask for, its page says all."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from peerd import reproduce
from peerd.cli.main import app
from peerd.cli.output import finite
from peerd.reproduce import EXPERIMENTS, FILES
from peerd.reproduce import e06_topologies as e06
from peerd.reproduce.cells import CellStore
from peerd.reproduce.e07_speedup import predicted
from peerd.reproduce.experiment import Cell, Criterion, NotRun, Size, Verdict, judge
from peerd.reproduce.page import as_html, as_json, shown
from peerd.reproduce.runs import Report, run_experiment
from peerd.reproduce.sockets.lines import can_make_namespaces, namespaces
from peerd.reproduce.statistics import Estimate, estimate, exactly
from peerd.training.modes import MODES, own_mode
from peerd.transport.errors import UserError


@pytest.fixture(autouse=True, scope="module")
def modes_as_they_were() -> Iterator[None]:
    """E10's control joins them, and is no mode of peerd for the tests that come after."""
    modes, sources = dict(MODES), dict(own_mode._sources)
    yield
    MODES.clear()
    MODES.update(modes)
    own_mode._sources.clear()
    own_mode._sources.update(sources)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Report]:
    """Runs an experiment once."""
    store = CellStore(tmp_path_factory.mktemp("cells"))
    return cache(lambda name: run_experiment(EXPERIMENTS[name], Size.TINY, store, 1))


def test_the_table_is_whole() -> None:
    assert set(FILES) == {file.stem for file in Path(reproduce.__file__).parent.glob("e[0-9]*.py")}
    assert [name.lower() for name in EXPERIMENTS] == [file.partition("_")[0].replace("e0", "e") for file in FILES]


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "E6"])
def test_a_tiny_one_measures_what_its_criteria_ask_for(tiny: Callable[[str], Report], name: str) -> None:
    report = tiny(name)
    figures = report.findings.figures
    assert figures.keys() == {criterion.key for criterion in report.experiment.criteria}
    found = [each for each in figures.values() if not isinstance(each, NotRun)]
    assert found
    assert all(math.isfinite(each.mean) for each in found)
    assert report.verdict is not Verdict.NOT_RUN
    assert report.findings.plots
    for text in (report.experiment.claim, report.findings.seen):  # two sentences in all
        assert text.endswith(".")
        assert "inf" not in text.split()


def test_the_page_and_its_json_stand_alone(tiny: Callable[[str], Report]) -> None:
    reports = [tiny(name) for name in ("E1", "E7", "E9")]
    page = as_html(reports)
    assert "<script" not in page
    assert "src=" not in page
    for report in reports:
        assert f'id="{report.experiment.name}"' in page
    said = json.loads(json.dumps(finite(as_json(reports)), allow_nan=False))
    by_name = {each["name"]: each for each in said["experiments"]}
    assert list(by_name) == ["E1", "E7", "E9"]
    assert "<td>not at this size<td>not run" in as_html([tiny("E5b")])
    assert "unverified" in " ".join(by_name["E7"]["notes"]).lower()
    assert "unverified" in by_name["E7"]["seen"]


def test_controls_are_in_the_tables(tiny: Callable[[str], Report]) -> None:
    def arms(name: str) -> str:
        return " ".join(str(row) for row in tiny(name).findings.rows)

    assert "period:" in arms("E5b")
    assert "delayed" in arms("E9")
    assert "no replica" in arms("E9")
    assert "no error feedback" in arms("E10")
    assert "not packed" in arms("E10")


def test_a_cell_names_no_place_of_this_machine(tmp_path: Path) -> None:
    """Another machine finds it again."""
    store = CellStore(tmp_path)
    run_experiment(EXPERIMENTS["E10"], Size.TINY, store, 1)
    kept = [path.read_text() for path in tmp_path.rglob("*.json")]
    assert any('"forgetful"' in text for text in kept)
    assert not any(str(Path(e06.__file__).parent) in text for text in kept)


def test_what_one_seed_says_and_what_was_not_run() -> None:
    def said(figure: Estimate | NotRun) -> str:
        return shown(judge(Criterion("", ""), figure))

    assert said(NotRun("no network")) == "no network"
    assert shown(judge(Criterion("", "", least=25), exactly(20.0))) == "20 (wanted: at least 25)"
    assert Criterion("", "", least=1, most=2.5).bound == "at least 1, at most 2.5"
    assert said(estimate([3.0])) == "3 (one seed: no interval)"
    assert said(exactly(3.0)) == "3"
    with np.errstate(invalid="ignore"):
        assert said(estimate([math.inf, math.inf])) == "inf"
    assert said(Estimate(3.0, 2.0, 4.0, 5)) == "3 [2, 4]"


def test_the_prediction_is_its_own_calibration() -> None:
    for law in ("tree:2", "ring", "parameter server"):
        assert predicted(20.0, 32, 32, law) == pytest.approx(20.0)
        assert predicted(32.0, 32, 128, law) == pytest.approx(128.0)  # no cost at all


@pytest.mark.one_run_in(3)
def test_servers_and_trees_over_real_sockets_come_to_the_mean(tmp_path: Path) -> None:
    """Where no namespace can be made the limit is in each process: that is what runs here, without privileges."""
    settings = {"peers": 3, "values": 20_000, "mbit": 50.0, "repeats": 1, "namespaces": False}
    for arm in ("parameter server", "ring"):
        result = e06.measure(Cell(arm, 0, {**settings, "arm": arm}))  # raises UserError if it is not the mean
        assert len(result["seconds"]) == 1
        floor_s = e06.predicted(arm, 4 * 20_000, 3, 50.0 * 125_000)
        assert result["seconds"][0] > 0.5 * floor_s, "the lines were faster than told"
        assert result["bytes"] > 4 * 20_000


def test_the_sums_are_judged_by_their_formulas() -> None:
    """A ring a fifth slower than its formula, and a tree as fast as its own."""

    def run(cells: Sequence[Cell]) -> list[dict[str, Any]]:
        said = [(cell.settings["arm"], 4.0 * cell.settings["values"], cell.settings["peers"]) for cell in cells]
        times = {arm: e06.predicted(arm, size, peers, 100.0 * 125_000) for arm, size, peers in said}
        return [{"seconds": [times[arm] * (1.2 if arm == "ring" else 1.0)] * 2, "bytes": size} for arm, size, _ in said]

    findings = e06.study(Size.TINY, run)
    judged = {each.key: judge(each, findings.figures[each.key]) for each in e06.EXPERIMENT.criteria}
    assert {key: each.met for key, each in judged.items()} == {
        "distance": True,
        "order": True,
        "server over tree": None,
    }
    distance = findings.figures["distance"]
    assert not isinstance(distance, NotRun)
    assert (distance.low, distance.mean, distance.high) == pytest.approx((0.2, 0.2, 0.2))


def test_a_process_that_ends_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(e06, "free_ports", lambda count: [port] * count)
        settings = {"peers": 2, "values": 100, "mbit": 50.0, "repeats": 1, "namespaces": False, "arm": "ring"}
        with pytest.raises(UserError, match="a process ended"):
            e06.measure(Cell("ring", 0, settings))


def test_nobody_waits_for_ever_for_a_process_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(rank: e06._Rank) -> None:
        ordered.append(rank)
        if len(ordered) == 2:
            rank.kill()
        order(rank)

    ordered: list[e06._Rank] = []
    order = e06._Rank.order
    monkeypatch.setattr(e06._Rank, "order", lost)
    monkeypatch.setattr(e06, "ROUND_S", 0.5)
    settings = {"peers": 2, "values": 100, "mbit": 50.0, "repeats": 1, "namespaces": False, "arm": "ring"}
    with pytest.raises(UserError, match="a process ended"):
        e06.measure(Cell("ring", 0, settings))
    assert len(ordered) == 2


@pytest.fixture(scope="module")
def makes_namespaces() -> None:
    if not can_make_namespaces():
        pytest.skip("needs root, ip and tc, and a kernel or a container that gives namespaces")


@pytest.mark.usefixtures("makes_namespaces")
def test_nothing_is_left_of_namespaces() -> None:
    with namespaces(2, 10.0) as within:
        names = [words[-1] for words in within]
        assert all(Path("/run/netns", name).exists() for name in names)
    assert not any(Path("/run/netns", name).exists() for name in names)


@pytest.mark.usefixtures("makes_namespaces")
def test_nothing_is_left_of_namespaces_when_they_are_ended_by_kill() -> None:
    program = (
        "import time\n"
        "from peerd.reproduce.sockets.lines import namespaces\n"
        "with namespaces(2, 10.0) as within:\n"
        "    print(*(words[-1] for words in within), flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        names = process.stdout.readline().split()
        assert len(names) == 2
        assert all(Path("/run/netns", name).exists() for name in names)
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(Path("/run/netns", name).exists() for name in names)
    switch = names[0].removesuffix(".0")
    assert not Path("/sys/class/net", switch).exists()


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["reproduce", *words])


def test_the_verb_writes_a_page_and_resumes(tmp_path: Path) -> None:
    words = ["e7", "--tiny", "--jobs", "1", "--report", f"{tmp_path}/r.html", "--cells", f"{tmp_path}/cells"]
    first, second = run(*words, "--format", "json"), run(*words)
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert json.loads(first.stdout)["experiments"][0]["name"] == "E7"
    assert "E7 FireCaffe" in second.stdout
    assert "--tiny: next to no training, so the verdicts mean nothing" in second.stdout
    assert first.stderr.startswith("E7: 0 of "), "nobody sees a bar, so a line says that it has begun"
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "r.json").read_text())["experiments"][0]["command"] == "peerd reproduce E7 --tiny"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["E99"], "not one of E1"),
        (["E7", "--quick", "--tiny"], "say one of them"),
        (["E7", "--report", "page.txt"], "must end in .html"),
        (["E7", "--report", "nowhere/at/all/page.html"], "no such folder"),
        (["E7", "--tiny", "--cells", "/dev/null/cells"], "--cells /dev/null/cells: Not a directory; choose another"),
        (["E7", "--tiny", "--cells", "/proc/cells"], "--cells /proc/cells: No such file"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str) -> None:
    result = run(*words)
    assert isinstance(result.exception, UserError)
    assert said in str(result.exception)


def test_a_page_without_a_place_for_its_figures_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "page.json").mkdir()
    result = run("E7", "--report", f"{tmp_path}/page.html", "--cells", f"{tmp_path}/cells", "--tiny")
    assert str(result.exception) == f"--report {tmp_path}/page.json: this is a folder"
    assert not (tmp_path / "cells").exists()


def test_without_names_it_lists_them() -> None:
    result = run()
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(EXPERIMENTS)
