"""A live swarm's mode from the command line: show, set, average; a killed node comes back to what is in force."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from machine import Machine
from scripts import TRAIN
from typer.testing import CliRunner

from peerd.cli.average import average
from peerd.cli.main import app
from peerd.cli.mode import _late, _wait, set_mode, show
from peerd.cli.output import Format
from peerd.cli.start import start
from peerd.training.mode_settings import OPTIONS, PLANNED


@pytest.mark.parametrize(("not_in_it", "why"), [([], "no other member has the model"), (["b", "c"], "not in it: b, c")])
def test_an_average_of_one_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], not_in_it: list[str], why: str
) -> None:
    answer = {
        "members": ["a"], "seconds": 0.1, "not_in_it": not_in_it, "distance": 0.0, "bytes_sent": 0,
        "bytes_received": 0, "plan": 2, "mode": "gossip",
    }  # fmt: skip
    monkeypatch.setattr("peerd.cli.average.find_node", lambda _: Path("a.sock"))
    monkeypatch.setattr("peerd.cli.average.request", lambda *_, **__: answer)
    average(format=Format.TEXT)
    assert capsys.readouterr().out == f"nothing was averaged: {why}\n"


def test_a_swarm_of_one_has_one_member(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {
        "plan": 1, "author": "a", "proposed_by": "a", "mode": "gossip", "settings": {}, "failed": [], "revoked": [],
        "settle_steps": 0,
        "members": [{"name": "a", "plan": 1, "author": "a"}],
    }  # fmt: skip
    monkeypatch.setattr("peerd.cli.mode.find_node", lambda _: Path("a.sock"))
    monkeypatch.setattr("peerd.cli.mode.request", lambda *_, **__: answer)
    show(format=Format.TEXT)
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 member"
    set_mode(mode="gossip", format=Format.TEXT, **dict.fromkeys(PLANNED))
    assert capsys.readouterr().out.startswith("plan 1: mode gossip; 1 member, ")


def test_who_waits_for_a_mode_hears_what_for_and_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, before = {"plan": 1, "author": "a"}, {"plan": 0, "author": ""}
    members = [{"name": "a", **mine}, {"name": "b", **before}, {"name": "c", **mine}]
    answers = [{**mine, "members": members}] * 2 + [{**mine, "members": members[:1]}]
    monkeypatch.setattr("peerd.cli.mode.request", lambda *_: answers.pop(0))
    monkeypatch.setattr("peerd.cli.mode.TELL_EVERY_S", -1.0)
    _wait(Path("a.sock"), mine, time.monotonic())
    assert capsys.readouterr().err == 2 * "plan 1 is set, and in force on 2 of 3 members; not yet b\n"


class _FullDisk(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_who_cannot_be_told_what_a_command_waits_for_still_has_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An average was taken back for it, as by Ctrl-C."""
    mine, before = {"plan": 1, "author": "a"}, {"plan": 0, "author": ""}
    answers = [{**mine, "members": [{"name": "b", **before}]}, {**mine, "members": []}]
    monkeypatch.setattr("peerd.cli.mode.request", lambda *_: answers.pop(0))
    monkeypatch.setattr("peerd.cli.mode.TELL_EVERY_S", -1.0)
    monkeypatch.setattr(sys, "stderr", _FullDisk())
    assert _wait(Path("a.sock"), mine, time.monotonic())["members"] == []


def test_help_says_which_options_of_a_mode_cannot_be_set() -> None:
    kept = [f"--{name.replace('_', '-')}" for name in OPTIONS if name not in PLANNED]
    assert kept
    for command in (set_mode, start):
        assert [option for option in kept if option not in str(command.__doc__)] == []
    assert "peerd mode set changes" in " ".join(str(start.__doc__).split())


def test_help_says_what_may_follow_a_mode() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["start", "--help"]).stdout
    for spelt in (
        "gossip, ", "elastic[:BETA], elastic:pairwise[:ALPHA], ", "diloco[:P]", "hardsync[:batch=B]",
        "softsync[:N[:RATE]]", "FILE.py:CLASS",
    ):  # fmt: skip
        assert spelt in " ".join(shown.replace("│", " ").split())


def test_the_mode_of_a_live_swarm(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    a = machine.start("a", script)
    a.trains()
    alone = machine.peerd("average", "--name", "a")
    assert (alone.stdout, alone.stderr) == ("nothing was averaged: no other member has the model\n", "")
    assert a.ask("status")["plan"] == 0, "nothing was proposed"
    b, c = (machine.start(name, script, join=a, SEED=seed) for name, seed in (("b", "1"), ("c", "2")))
    for node in (a, b, c):
        node.trains()
        node.sees(a="alive", b="alive", c="alive")
    shown = machine.peerd("mode", "show", "--name", "b").stdout.splitlines()
    assert shown[0] == "plan 0: mode gossip, as started"
    assert shown[1] == "codec auto, trigger change:0.05, view 3"  # what has an effect in this mode, and no more
    assert shown[2] == "3 of 3 members"

    refused = machine.peerd("mode", "set", "gosip", "--name", "b")
    assert refused.returncode == 1
    assert refused.stderr.startswith("peerd: mode: 'gosip' is not one of ")
    assert refused.stderr.endswith("did you mean 'gossip'?\n")
    assert refused.stderr.count("\n") == 1
    refused = machine.peerd("mode", "set", "allreduce", "--overlap", "never", "--name", "b")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    refused = machine.peerd("mode", "set", "hardsync", "--every", "5", "--name", "b")
    takes = "which takes codec, topology, servers; leave it out"  # and what may be said only as nodes start
    assert refused.stderr == f"peerd: every: without effect in mode hardsync, {takes}\n"

    changed = machine.peerd("mode", "set", "allreduce", "--every", "5", "--overlap", "blocking", "--name", "b")
    assert changed.returncode == 0, changed.stderr
    lines = changed.stdout.splitlines()
    assert lines[0].startswith("plan 1: mode allreduce (was gossip); 3 members, ")
    own = "every 5, overlap blocking, topology auto, min_peers 1"
    assert lines[1] == f"changed: codec float32 (was auto); new: {own}"
    assert lines[2:] == ["in force on a, b, c"]
    c.eventually(lambda: c.ask("status")["counts"].get("rounds", 0) > 3)
    assert "mode: allreduce" in machine.peerd("status", "--name", "c").stdout
    about = machine.peerd("info", "--name", "c").stdout
    assert "mode_in_force        allreduce" in about
    assert "sealed               True" in about, "as the JSON calls it"

    def shows() -> str:
        return machine.peerd("mode", "show", "--name", "a").stdout.splitlines()[1]

    assert shows() == "codec float32, every 5, overlap blocking, topology auto, min_peers 1"
    assert machine.peerd("mode", "set", "noloco", "--codec", "sign", "--name", "b").returncode == 0
    a.says("mode noloco takes codec bfloat16 in place of sign, which drops too much")
    assert shows() == "codec bfloat16, view 3, every 50, outer_lr 0.7, outer_momentum 0.5"
    changed = machine.peerd("mode", "set", "allreduce", "--name", "b")
    assert "every as rounds cost" in changed.stdout
    assert shows() == "codec auto, every as rounds cost, overlap quorum, topology auto, min_peers 1"
    changed = machine.peerd("mode", "set", "allreduce", "--overlap", "delayed", "--name", "b")
    every = "every 20 after a round has ended"
    assert f"{every} (was as rounds cost)" in changed.stdout
    assert shows() == f"codec float32, {every}, overlap delayed, topology auto, min_peers 1"

    reached = c.step
    c.signal(signal.SIGKILL)
    c.end()
    for node in (a, b):
        node.sees(c="failed")
    changed = machine.peerd("mode", "set", "allreduce", "--every", "5", "--overlap", "blocking", "--name", "b")
    assert changed.stdout.startswith("plan 5: mode allreduce; 2 members, ")
    assert changed.stdout.endswith("not c: failed; who comes back comes to it\n")
    c = machine.start("c", script, join=a, SEED="2")
    c.trains(beyond=reached)
    c.eventually(lambda: c.ask("status")["counts"].get("rounds", 0) > 1)
    assert c.ask("status")["plan"] == 5
    a.eventually(lambda: {row["mode"] for row in a.ask("members")["members"]} == {"allreduce"})

    averaged = machine.peerd("average", "--name", "a", "--format", "json")
    assert averaged.returncode == 0, averaged.stderr
    answer = json.loads(averaged.stdout)
    assert answer["members"] == ["a", "b", "c"]
    assert answer["not_in_it"] == []
    assert (answer["plan"], answer["mode"]) == (6, "allreduce")

    changed = machine.peerd("mode", "set", "gossip", "--name", "c", "--format", "json")
    assert json.loads(changed.stdout)["plan"] == 7
    reached = a.step
    for node in (a, b, c):
        node.trains(beyond=reached + 20)
    assert "Traceback" not in machine.logs()


def test_who_has_left_is_no_partner_of_the_rounds_that_wait_for_another(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    rounds = "--mode", "diloco", "--every", "5", "--min-peers", "2"
    a = machine.start("a", script, *rounds)
    machine.start("b", script, *rounds, join=a, SEED="1")
    a.eventually(lambda: [link["peer"] for link in a.ask("status")["links"]] == ["b"])
    assert machine.peerd("leave", "--name", "b").returncode == 0
    a.sees(b="left")
    assert a.ask("status")["links"] == []


def test_nodes_that_were_all_killed_come_back_in_the_mode_that_was_set(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    a = machine.start("a", script)
    b = machine.start("b", script, join=a, SEED="1")
    for node in (a, b):
        node.trains()
    assert machine.peerd("mode", "set", "diloco", "--every", "5", "--name", "b").returncode == 0
    for node in (a, b):
        node.signal(signal.SIGKILL)
        node.end()
    a = machine.start("a", script)
    b = machine.start("b", script, join=a, SEED="1")
    for node in (a, b):
        node.trains()
        node.says("plan 1 kept in this node's state folder: mode diloco every=5")
        assert node.ask("mode")["settings"]["every"] == 5
    for node in (b, a):
        node.signal(signal.SIGINT)
        assert node.end() == 0
    a = machine.start("a", script)
    a.trains()
    assert a.ask("status")["mode"] == "gossip", "one that left starts as it is told"
    assert "Traceback" not in machine.logs()


def test_who_works_under_a_plan_that_was_set_at_the_same_time_has_not_come_to_ours() -> None:
    members = [{"name": name, "plan": 3, "author": author} for name, author in (("a", "aa"), ("c", "cc"))]
    assert _late({"members": members}, {"plan": 3, "author": "cc"}) == ["a"]
