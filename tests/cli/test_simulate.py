"""`peerd simulate`: one line of JSON, the same run of a seed in any process, and one line for what is wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peerd.cli.main import app
from peerd.protocol.trainer import VALUES_MAX
from peerd.simulation.scenario import Scenario
from peerd.simulation.swarm import Swarm
from peerd.transport.errors import UserError

SHORT = ["--peers", "6", "--minutes", "3", "--faults", "all", "--fault-every", "20"]


def simulate(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["simulate", *words, "--format", "json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    line: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return line


def elsewhere(hash_seed: str, *words: str) -> str:
    command = [sys.executable, "-c", "from peerd.cli.main import run; run()", "simulate", *words, "--format", "json"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    digest: str = json.loads(done.stdout)["digest"]
    return digest


def test_the_result_is_one_object_with_what_a_plan_needs() -> None:
    result = simulate(*SHORT, "--seed", "3")
    wanted = {
        "peers", "seed", "digest", "virtual_seconds", "seconds", "probes", "false_deaths", "detection_median_s",
        "detection_p99_s", "exchanges", "bytes_sent_total", "consensus_distance", "violations",
    }  # fmt: skip
    assert wanted <= result.keys()
    assert result["violations"] == []
    assert result["virtual_seconds"] == 180.0
    assert result["exchanges"] > 0
    assert result["bytes_sent_total"] > 0


@pytest.mark.one_run_in(3)
def test_a_seed_replays_a_run_bit_for_bit_in_other_processes() -> None:
    here = simulate(*SHORT, "--seed", "5")["digest"]
    assert [elsewhere(hash_seed, *SHORT, "--replay", "5") for hash_seed in ("0", "4711")] == [here, here]
    assert simulate(*SHORT, "--seed", "6")["digest"] != here


def test_the_replay_line_runs_the_same_again() -> None:
    result = simulate(*SHORT, "--seed", "7", "--codec", "int8")
    program, verb, *words = result["replay"].split()
    assert (program, verb) == ("peerd", "simulate")
    assert simulate(*words)["digest"] == result["digest"]


def test_digits_train_in_virtual_time() -> None:
    words = ["--problem", "digits", "--peers", "3", "--steps", "120", "--faults", "none", "--compute", "fixed:0.05"]
    result = simulate(*words, "--join-over", "1")
    assert result["accuracy"] > 0.8
    assert result["steps"] == 120


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "words",
    [
        *(["--mode", mode] for mode in ("gossip", "elastic", "push-sum", "noloco", "allreduce", "diloco")),
        *(["--mode", mode] for mode in ("hardsync", "softsync:2")),
        *(["--mode", mode, "--exchange", "gradients"] for mode in ("allreduce", "hardsync", "softsync:2")),
    ],
)
def test_a_run_that_diverges_ends_and_says_so(words: list[str]) -> None:
    words = ["--peers", "3", "--steps", "40", "--compute", "fixed:0.1", "--faults", "none", *words]
    shown = CliRunner().invoke(app, ["simulate", *words, "--lr", "1e30"], catch_exceptions=False)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "\ndiverged" in shown.stdout
    assert "nan" not in shown.stdout
    several = CliRunner().invoke(app, ["simulate", *words, "--lr", "1e30", "--seeds", "0,1"], catch_exceptions=False)
    assert "nan" not in several.stdout
    assert simulate(*words, "--lr", "1e30")["diverged"]
    assert not simulate(*words)["diverged"]


def test_a_trace_holds_every_event_and_changes_none(tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.html"
    traced = simulate(*SHORT, "--seed", "8", "--trace", str(trace), "--report", str(report))
    *rows, last = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(rows) == traced["events"]
    told = {"event": "end", "violations": 0, **{key: traced[key] for key in ("events", "digest")}}
    assert {key: last[key] for key in last if key != "t"} == told
    assert last["t"] >= max(traced["virtual_seconds"], rows[-1]["t"])
    assert {"start", "datagram", "message", "step", "apply"} <= {row["event"] for row in rows}
    assert traced["digest"] == simulate(*SHORT, "--seed", "8")["digest"]
    page = report.read_text()
    assert page.count("<svg") == 1
    assert traced["digest"] in page
    assert not {"<script", "<link", "<img", 'href="http'} & set(page.split()), "the page loads nothing"


def test_a_trace_that_was_cut_has_no_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(swarm: Swarm, seconds: float, stop: object = None) -> bool:
        if swarm.world.now > 20:
            raise KeyboardInterrupt
        return run(swarm, seconds)

    run, trace = Swarm.run, tmp_path / "trace.jsonl"
    monkeypatch.setattr(Swarm, "run", interrupted)
    with pytest.raises(UserError, match="interrupted: no result; a trace holds what was simulated until then"):
        simulate(*SHORT, "--trace", str(trace))
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert rows
    assert rows[-1]["event"] != "end"


def test_a_trace_is_not_blamed_for_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode of the user's own may read one."""

    def reads(swarm: Swarm, seconds: float, stop: object = None) -> bool:
        return Path("/nowhere/table").exists() or bool(Path("/nowhere/table").read_text())

    monkeypatch.setattr(Swarm, "run", reads)
    with pytest.raises(FileNotFoundError, match="/nowhere/table"):
        simulate(*SHORT, "--trace", str(tmp_path / "trace.jsonl"))


def test_a_report_that_cannot_be_written_loses_no_result(tmp_path: Path) -> None:
    (report := tmp_path / "report.html").symlink_to("/dev/full")
    done = CliRunner().invoke(app, ["simulate", *SHORT, "--report", str(report), "--format", "json"])
    assert str(done.exception) == f"--report {report}: No space left on device"
    assert json.loads(done.stdout)["digest"]


def test_a_swarm_that_does_not_fit_into_memory_is_told_in_a_line() -> None:
    limited = (
        "import resource; from peerd.cli import main; from peerd.cli.simulate import simulate; "
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); main.run()"
    )
    words = ["simulate", "--problem", "teacher:4096-64-10:examples=1000000", "--peers", "2", "--steps", "1"]
    done = subprocess.run([sys.executable, "-c", limited, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("peerd: not enough memory for this swarm (Unable to allocate 15.3 GiB")
    assert done.stderr.count("\n") == 1


def test_a_mode_that_has_come_to_no_round_yet_says_so() -> None:
    words = ["--problem", "bytes", "--parameters", "1000000000", "--network", "home", "--faults", "none"]
    words = ["simulate", *words, "--mode", "hardsync", "--steps", "9", "--minutes", "1", "--peers", "2"]
    shown = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert re.search(r"^rounds +0 *$", shown, re.MULTILINE)
    shown = CliRunner().invoke(app, ["simulate", "--problem", "members", "--minutes", "1", "--peers", "2"]).stdout
    assert re.search(r"^membership ", shown, re.MULTILINE)
    assert not re.search(r"^(rounds|exchanges) ", shown, re.MULTILINE)


def test_the_help_of_a_narrow_terminal_is_whole() -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["simulate", "--help"]).stdout
    assert "\u2026" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_how_many_crashes_were_known_is_said_of_the_members() -> None:
    words = ["--peers", "4", "--minutes", "20", "--problem", "members", "--fault-every", "60"]
    shown = CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False).stdout
    assert re.search(r"^crashes +\d+ \(\d+ known to nearly all\)", shown, re.MULTILINE)
    assert re.search(r"^faults +crash \(see --faults\) *$", shown, re.MULTILINE), "by default"


def test_two_modes_with_crashes_stand_beside_each_other_in_80_columns() -> None:
    words = ["simulate", "--peers", "4", "--steps", "60", "--mode", "gossip,allreduce"]
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, words, catch_exceptions=False).stdout
    assert re.search(r"^ +gossip +allreduce *$", shown, re.MULTILINE)
    assert re.search(r"^exchanges +[1-9]\d* +- *$", shown, re.MULTILINE)
    assert re.search(r"^rounds +- +[1-9]\d* *$", shown, re.MULTILINE)
    assert re.search(r"^crashes +\d+ +\d+ *$", shown, re.MULTILINE)
    assert re.search(r"^faults +crash +crash *$", shown, re.MULTILINE)


def test_people_get_a_summary() -> None:
    result = CliRunner().invoke(app, ["simulate", "--peers", "4", "--minutes", "1"], catch_exceptions=False)
    assert result.exit_code == 0
    for word in ("virtual time", "traffic", "membership", "digest", "replay"):
        assert word in result.stdout


def test_the_headings_of_a_comparison_say_what_differs() -> None:
    words = ["--problem", "teacher", "--peers", "2", "--steps", "2", "--faults", "none", "--lr", "0.1", "--batch", "8"]
    shown = CliRunner().invoke(app, ["simulate", *words, "--mode", "gossip,gossip;codec=int8,diloco;every=9"]).stdout
    table, _ = shown.split("\nreplay\n")
    assert re.findall(r"[a-z]+=\S+", table) == ["codec=int8", "every=9"]


def test_liars_are_named_not_counted() -> None:
    words = ["simulate", "--problem", "consensus", "--peers", "4", "--steps", "5", "--faults", "none", "--byzantine"]
    for attack, named in (("noise:1", r"^liars +node \d; "), ("noise:2", r"^liars +nodes \d, \d; ")):
        shown = CliRunner().invoke(app, [*words, attack], catch_exceptions=False).stdout
        assert re.search(named, shown, re.MULTILINE), shown


TWO = "gossip;codec=top_k_3;trigger=change:0.1,noloco;codec=sign;every=20;outer-lr=0.3"


@pytest.mark.cases(2)
@pytest.mark.parametrize("seeds", [["--seed", "7"], ["--seeds", "0..2"]])
@pytest.mark.parametrize("modes", ["gossip,allreduce,diloco,hardsync,async", TWO, "gossip"])
def test_a_summary_fits_a_narrow_terminal_and_its_commands_can_be_copied(modes: str, seeds: list[str]) -> None:
    words = ["--peers", "4", "--steps", "5", "--faults", "none", "--compute", "lognormal:0.4:0.2", *seeds]
    said = ["simulate", *words, "--mode", modes]
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, said, catch_exceptions=False).stdout
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert "..." not in shown
    (_, again) = f"\n{shown}".split("\nreplay\n")
    commands = again.replace("\\\n", "").splitlines()
    assert len(commands) == modes.count(",") + 1
    for command, mode in zip(commands, modes.split(","), strict=True):
        program, verb, *said = shlex.split(command)
        assert (program, verb) == ("peerd", "simulate")
        runs = simulate(*said)
        ran = runs.get("runs", [runs])
        assert {run["run"] for run in ran} == {mode}
        assert [run["seed"] for run in ran] == ([7] if len(ran) == 1 else [0, 1, 2])


def test_the_codec_in_force_is_told() -> None:
    words = ["--peers", "4", "--steps", "5", "--faults", "none", "--mode", "noloco", "--codec", "sign"]
    settings = simulate(*words)["settings"]
    assert (settings["codec"], settings["every"]) == ("bfloat16", 50)
    assert "trigger" not in settings, "it has none"
    assert re.search(r"^codec +bfloat16, not sign", CliRunner().invoke(app, ["simulate", *words]).stdout, re.MULTILINE)
    assert "settings" not in simulate("--problem", "members", "--peers", "4", "--minutes", "1"), "nobody trains"


@pytest.mark.one_run_in(3)
def test_modes_are_compared_in_one_run(tmp_path: Path) -> None:
    words, report = [*SHORT, "--mode", "gossip,allreduce,async"], tmp_path / "report.html"
    runs = simulate(*words, "--report", str(report))["runs"]
    assert [run["mode"] for run in runs] == ["gossip", "allreduce", "async"]
    assert runs[0]["digest"] == simulate(*SHORT)["digest"], "each is the run that it would be alone"
    assert report.read_text().count("<svg") == 4
    shown = CliRunner().invoke(app, ["simulate", "--peers", "4", "--minutes", "1", "--mode", "gossip,hardsync"])
    assert "hardsync" in shown.stdout


def test_of_several_modes_each_is_told_what_it_takes() -> None:
    runs = simulate(*SHORT, "--mode", "gossip,allreduce", "--every", "7")["runs"]
    assert ["--every 7" in run["replay"] for run in runs] == [False, True]
    assert runs[0]["digest"] == simulate(*SHORT)["digest"]
    assert simulate(*runs[1]["replay"].split()[2:])["digest"] == runs[1]["digest"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--minutes"),
        (["--minutes", "1", "--problem", "mnist"], "not one of members, consensus, bytes"),
        (["--minutes", "1", "--mode", "nope"], "--mode nope"),
        (["--minutes", "1", "--mode", "gossip,nope"], "--mode nope"),
        (["--minutes", "1", "--mode", "gossip,async", "--trace", "t"], "--trace t: it holds one run"),
        (["--minutes", "1", "--codec", "nope"], "codec: 'nope' is not one of"),
        (["--minutes", "1", "--trigger", "nope"], "nope"),
        (["--minutes", "1", "--overlap", "nope"], "overlap: 'nope' is not one of"),
        (["--minutes", "1", "--mode", "allreduce", "--topology", "star"], "star"),
        (["--minutes", "1", "--faults", "crash,nope"], "'nope' is none of crash"),
        (["--minutes", "1", "--network", "moon"], "--network moon"),
        (
            ["--minutes", "1", "--network", "absent.toml"],
            "--network absent.toml: No such file or directory; docs/",
        ),
        (["--minutes", "1", "--compute", "often"], "--compute often"),
        (["--minutes", "1", "--problem", "bytes"], "--steps"),
        (["--steps", "5", "--problem", "bytes", "--parameters", "7"], "--parameters 7"),
        (["--minutes", "1", "--compute", "fixed:1e-9"], "each from 0.0001 to 1e+06"),
        (["--minutes", "1", "--compute", "trace:/dev/zero"], "one number of seconds a line"),
        (["--minutes", "1", "--peers", "4", "--mode", "async", "--servers", "5"], "--servers 5: the swarm has 4 peers"),
        (["--minutes", "1", "--peers", "4", "--min-peers", "9"], "--min-peers 9: the swarm has 4 peers"),
        (["--minutes", "1", "--every", "5"], "every: without effect in mode gossip, which takes codec, trigger, view"),
        (["--minutes", "1", "--mode", "gossip,push-sum", "--servers", "2"], "servers: without effect in mode gossip"),
        (["--minutes", "1", "--join-over", "61"], "--join-over 61: the run ends after 60 s"),
        (["--minutes", "1", "--target", "speed:3"], "--target speed:3: wanted accuracy:SHARE"),
        (["--minutes", "1", "--target", "loss:-1"], "or loss:VALUE above 0"),
        (["--minutes", "1", "--problem", "members", "--target", "loss:1"], "--problem members has no accuracy"),
        (["--minutes", "1", "--batch", "8"], "--batch: without effect on --problem consensus, which takes --lr"),
        (["--minutes", "1", "--lr", "nan"], "--lr: 'nan' is not a number"),
        (["--minutes", "1", "--optimizer", "magic"], "--optimizer magic: not one of sgd, nesterov, quasi-global"),
        (
            ["--minutes", "1", "--problem", "teacher", "--optimizer", "quasi-global"],
            "--optimizer quasi-global: needs a task of torch: --problem digits",
        ),
        (
            ["--minutes", "1", "--mode", "allreduce", "--exchange", "gradients", "--optimizer", "quasi-global"],
            "--optimizer quasi-global: nodes that exchange gradients have one momentum already",
        ),
        (
            ["--minutes", "1", "--problem", "teacher", "--optimizer", "adamw", "--momentum", "0.5"],
            "without effect with",
        ),
        (["--minutes", "1", "--problem", "teacher", "--schedule", "cosine"], "--schedule cosine: say how many --steps"),
        (["--minutes", "1", "--problem", "teacher:5-x"], "--problem teacher:5-x: wanted teacher[:SIZES]"),
        (["--minutes", "1", "--drop", "0.2"], "--drop 0.2: mode gossip needs every message"),
        (["--minutes", "1", "--seeds", "3..1"], "--seeds 3..1: wanted FIRST..LAST"),
        (["--minutes", "1", "--seeds", "0..1", "--seed", "4"], "--seed 4 and --seeds 0..1: say one of them"),
        (["--minutes", "1", "--seeds", "0..1", "--trace", "t"], "--trace t: it holds one run"),
        (["--minutes", "1", "--mode", "gossip;speed=3"], "'speed=3' is not KEY=VALUE with a KEY of codec"),
        (["--minutes", "1", "--mode", "gossip;every=5"], "every: without effect in mode gossip"),
        (["--minutes", "1", "--report", "plan.pdf"], "must end in .html"),
        (
            ["--steps", "5", "--mode", "allreduce", "--exchange", "gradients", "--every", "10"],
            "every: without effect in mode allreduce with gradients",
        ),
        (
            ["--steps", "5", "--mode", "gossip,allreduce;exchange=gradients", "--every", "10"],
            "every: without effect in mode gossip",
        ),
        (
            ["--steps", "5", "--mode", "async", "--exchange", "gradients", "--optimizer", "sgd", "--weight-decay", "0"],
            "--optimizer, --weight-decay: without effect in mode async with gradients",
        ),
        (["--minutes", "1", "--trace", "/nowhere/trace"], "--trace /nowhere/trace"),
        (["--minutes", "1", "--parameters", "1000000"], "--parameters: without effect on --problem consensus"),
        (
            ["--minutes", "1", "--faults", "none", "--fault-every", "5"],
            "--fault-every: without effect with --faults none",
        ),
        (
            ["--minutes", "1", "--problem", "members", "--steps", "5", "--compute", "fixed:1", "--mode", "diloco"],
            "--steps, --compute, --mode: without effect on --problem members, where nobody trains; leave it out",
        ),
        (["--minutes", "1", "--problem", "members", "--view", "5", "--no-robust"], "--view, --no-robust: without"),
        (["--minutes", "1", "--workers", "2"], "--workers 2: without effect on one run"),
        (["--minutes", "1", "--mode", "gossip,gossip"], "gossip is given twice"),
        (["--minutes", "1", "--mode", "gossip;view=3,gossip"], "gossip is given twice"),
        (["--minutes", "1", "--mode", "softsync,softsync:1"], "softsync:1 is given twice"),
    ],
)
def test_bad_input_gets_one_clear_line(words: list[str], says: str) -> None:
    with pytest.raises(UserError) as refused:
        CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("may_write", "why"), [(True, "this is a folder"), (False, "you may not write there")])
def test_a_report_that_cannot_be_written_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, may_write: bool, why: str
) -> None:
    """Not after it: what an hour has simulated would be gone."""
    monkeypatch.setattr("peerd.cli.simulate.run_scenario", None)
    report = tmp_path / "plan.html"
    if may_write:
        report.mkdir()
    else:
        monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match=f"^--report {report}: {why}"):
        CliRunner().invoke(app, ["simulate", "--minutes", "1", "--report", str(report)], catch_exceptions=False)


def test_a_model_that_no_node_takes_is_not_planned() -> None:
    words = ["simulate", "--problem", "bytes", "--steps", "1", "--peers", "2", "--parameters", str(VALUES_MAX + 1)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert f"less than or equal to {VALUES_MAX}" in result.output


@pytest.mark.parametrize("seconds", ["0", "1e-14", "0.0009", "inf", "nan"])
def test_looks_are_a_while_apart(seconds: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "--minutes", "1", "--look-every", seconds])
    assert result.exit_code != 0
    with pytest.raises(UserError, match=r"wanted at least 0\.001 virtual seconds"):
        Scenario(look_every=float(seconds))


def test_modes_and_seeds_run_in_several_processes_as_they_do_in_one() -> None:
    words = ["--problem", "teacher:6-8-3:examples=300", "--peers", "3", "--steps", "20", "--faults", "none"]
    words += [
        "--mode",
        "gossip;codec=int8,diloco;every=5",
        "--seeds",
        "1,2",
        "--look-every",
        "5",
        "--target",
        "loss:0.1",
    ]
    here, there = (simulate(*words, "--workers", workers)["runs"] for workers in ("1", "2"))
    told = [("gossip;codec=int8", 1), ("gossip;codec=int8", 2), ("diloco;every=5", 1), ("diloco;every=5", 2)]
    assert [(run["run"], run["seed"]) for run in here] == told
    assert [{**run, "seconds": 0} for run in here] == [{**run, "seconds": 0} for run in there]
    assert here[0]["seconds_to_target"] is None
    assert simulate(*here[2]["replay"].split()[2:])["series"] == here[2]["series"]
    shown = CliRunner().invoke(app, ["simulate", *words, "--format", "text"], catch_exceptions=False).stdout
    assert "reached by 0 of 2" in " ".join(shown.split())


def test_an_older_trace_outlives_settings_that_make_no_sense(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    trace.write_text("kept\n")
    with pytest.raises(UserError):
        CliRunner().invoke(
            app, ["simulate", "--minutes", "1", "--codec", "nope", "--trace", str(trace)], catch_exceptions=False
        )
    assert trace.read_text() == "kept\n"
    simulate(*SHORT, "--trace", str(trace))
    assert "kept" not in trace.read_text()


def test_a_topology_that_is_nested_without_end_is_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("a=" + "[" * 100_000)
    with pytest.raises(UserError, match="no TOML: "):
        CliRunner().invoke(app, ["simulate", "--minutes", "1", "--network", str(path)], catch_exceptions=False)


def test_steps_are_told_of_the_slowest_and_the_fastest_node() -> None:
    """Of one server behind a thin line its own worker alone gets anywhere."""
    words = ["--problem", "bytes", "--parameters", "10000000", "--peers", "6", "--steps", "500", "--minutes", "2"]
    result = simulate(*words, "--mode", "async", "--compute", "fixed:1", "--uplink-mbit", "5", "--faults", "none")
    assert result["steps_least"] <= result["steps"] < result["steps_most"] / 10
    assert result["steps_most"] <= result["exchanges"] < 2 * result["steps_most"]


def test_a_scenario_says_only_what_is_not_the_default() -> None:
    assert Scenario(peers=5, seed=0).command() == "peerd simulate --peers 5 --seed 0"
