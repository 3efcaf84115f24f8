"""The demo as a user ends it or breaks it: nothing stays behind, and what went wrong is said once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from machine import Machine, eventually
from rich.console import Console

from peerd.cli.demo.figures import counted_in, print_summary, table
from peerd.cli.demo.local_swarm import LocalSwarm
from peerd.cli.demo.picture import draw
from peerd.cli.demo.run import Kill, Sample, Watch, follow
from peerd.local.local_socket import request
from peerd.transport.errors import UserError


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "phases", [("script awaited", "starting", "training"), ("training",)], ids=["imports", "trains"]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_demo_that_is_killed_leaves_nothing(
    machine: Machine, number: signal.Signals, phases: tuple[str, ...]
) -> None:
    # of a node of the user's
    placed: dict[str, Any] = {"PEERD_JOIN": "127.0.0.1:1", "PEERD_STATE_DIR": str(machine.path / "mine")}
    placed["PEERD_EVERY"] = "8"  # with which no gossip would start
    demo = machine.spawn("demo", ["-m", "peerd.cli.main", "demo", "--peers", "2"], TMPDIR=str(machine.path), **placed)

    def runs() -> bool:
        sockets = list(machine.path.glob("peerd-demo-*/peerd/*.sock"))
        return len(sockets) == 2 and all(request(path, "status")["phase"] in phases for path in sockets)

    demo.eventually(runs)
    demo.signal(number)
    assert demo.end() == 128 + number
    eventually(lambda: not machine.processes())
    assert not list(machine.path.glob("peerd-demo-*"))
    assert not (machine.path / "mine").exists()
    assert "Traceback" not in demo.log


def test_a_node_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"^node-0 did not start: codec: 'none' is not one of "):
        LocalSwarm(1, {"--codec": "none"}, ["digits"]).__enter__()
    assert not list(tmp_path.iterdir())


def test_a_demo_whose_script_fails_says_why(machine: Machine) -> None:
    ran = machine.peerd("demo", "--task", "fashion-mnist", "--peers", "2", PEERD_DATA=str(machine.path))
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert f"PEERD_DATA={machine.path} has none" in ran.stderr


def test_a_demo_survives_the_kill_of_a_node(machine: Machine, tmp_path: Path) -> None:
    options = ["--peers", "3", "--steps", "200", "--kill", "1@0.5", "--format", "json"]
    options += ["--picture", str(tmp_path / "run.png")]
    demo = machine.spawn("demo", ["-m", "peerd.cli.main", "demo", *options], TMPDIR=str(machine.path))
    eventually(lambda: demo.process.poll() is not None, machine.logs, patience_s=240)
    assert demo.end() == 0, demo.log
    result = json.loads(next(line for line in demo.log.splitlines() if line.startswith("{")))
    assert result["killed"] == "node-1"
    assert result["stalled_s"] is not None
    assert result["failures"] == []
    assert result["steps"] == 200
    assert result["consensus_distance"] < 0.01


@pytest.mark.parametrize(
    ("mode", "counts", "unit"),
    [
        ("gossip", {"exchanges": 7}, "exchanges"),
        ("allreduce", {"rounds": 7, "attempts": 9}, "rounds"),
        ("diloco:2", {}, "rounds"),
        ("async", {"exchanges": 7}, "exchanges"),
    ],
)
def test_the_table_counts_what_the_mode_does(mode: str, counts: dict[str, int], unit: str) -> None:
    status = {"phase": "training", "trainer": None, "counts": counts, "consensus_distance": 0.0, "bytes_sent": 0}
    shown = table({"node-0": status}, counted_in(mode))
    (column,) = [column for column in shown.columns if column.header == unit]
    assert list(column.cells) == [str(counts.get(unit, 0))]


def test_the_table_fits_eighty_columns() -> None:
    """Of ten columns headings were cut, and each size was in two lines."""
    trainer: dict[str, Any] = {"step": 10_000, "loss": 2.3456, "metrics": {"accuracy": 1.0}}
    status: dict[str, Any] = {"phase": "script awaited", "trainer": trainer, "counts": {"exchanges": 10_000}}
    status |= {"consensus_distance": 1.0, "bytes_sent": 677_730}
    console = Console(record=True, width=80)
    console.print(table({"node-63": status}, "exchanges"))
    heading, row = console.export_text().splitlines()
    assert heading.split() == ["node", "phase", "step", "loss", "accuracy", "distance", "sent", "exchanges"]
    assert " ".join(row.split()) == "node-63 script awaited 10000 2.3456 100.00% 100.00% 677.73 kB 10000"


def test_a_kill_that_comes_too_late_is_told() -> None:
    """As after a late first look: the others stood still for 0.0 s, it was said, who had nothing left to do."""

    class Ended(LocalSwarm):
        def ended(self) -> dict[str, int]:
            return {}

        def status(self, name: str) -> dict[str, Any]:
            return {"phase": "finished", "trainer": None}

        def kill(self, name: str) -> None:
            raise AssertionError(name)

    watch = Watch(Kill.parse("1@0.5", peers=3))
    swarm = Ended(3, {}, [])
    with swarm._folder:  # its own warning, that nobody removed it, would be an error of this test or of a later one
        assert len(list(follow(swarm, watch))) == 1
    assert watch.killed_at_s is None
    assert watch.failures == ["node-1 was not killed: the others were through already; take more --steps"]


@pytest.mark.parametrize("text", ["1", "1@2", "3@0.5", "-1@0.5", "x@0.5", "1@x", "1@nan"])
def test_a_kill_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=rf"^--kill {text}: "):
        Kill.parse(text, peers=3)


@pytest.mark.parametrize(
    ("sent", "carriers", "traffic", "way"),
    [
        (250, ["shm", "tcp"], "75.0% saved", "shm, tcp (shm: memory that nodes of one machine share)"),
        (1000, ["tcp"], "0.0% saved", "tcp"),
        (1500, [], "500 B more were sent", "nothing"),
    ],
)
def test_the_summary_says_what_was_saved_and_explains_what_was_used(
    sent: int, carriers: list[str], traffic: str, way: str
) -> None:
    result: dict[str, Any] = {
        **dict.fromkeys(("peers", "steps", "seconds", "exchanges", "snapshots", "consensus_distance"), 1),
        **dict.fromkeys(("accuracy_averaged_model", "accuracy_mean", "accuracy_worst"), 0.9),
        "task": "digits", "mode": "gossip", "killed": None, "failures": [], "carriers": carriers,
        "bytes_sent_total": sent, "bytes_every_step_fp32": 1000, "bytes_saved_fraction": 1 - sent / 1000,
    }  # fmt: skip
    console = Console(record=True, width=200)
    print_summary(console, result, Path("run.png"))
    lines = console.export_text().splitlines()
    assert f"           every-step fp32 gossip would send 1.00 kB: {traffic}" in lines
    assert f"went over  {way}" in lines
    assert lines[2].endswith(" sent in 1 exchange and 1 model sent whole")


def test_a_demo_looks_before_it_imports_what_takes_long() -> None:
    """On a busy machine torch and matplotlib took longer than the training: nothing was seen, and nothing drawn."""
    code = """if True:
        import sys
        from contextlib import nullcontext
        from peerd.cli import demo, main
        demo.LocalSwarm = lambda *_: nullcontext()
        demo.show_live = lambda *_: sys.exit(f"imported: {sorted({'torch', 'matplotlib'} & sys.modules.keys())}")
        sys.argv = ["peerd", "demo"]
        main.run()
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stderr == "imported: []\n"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("nodes", [1, 64])
def test_a_picture_of_many_nodes_is_drawn_without_a_word(tmp_path: Path, nodes: int) -> None:
    """The names of 40 left no room for the lines, and matplotlib said so on stderr."""
    looks = [
        Sample(float(second), f"node-{node}", {"consensus_distance": 0.1, "bytes_sent": 1e6, "trainer": {"loss": 1.0}})
        for node in range(nodes)
        for second in range(3)
    ]
    draw(tmp_path / "run.png", looks, "digits")
    assert (tmp_path / "run.png").stat().st_size > 10_000
