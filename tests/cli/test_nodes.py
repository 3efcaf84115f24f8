"""What a user does with nodes, in real processes: start, join, watch, kill, leave, resume, export."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from machine import Machine, Node, alive, eventually
from safetensors.torch import load_file
from scripts import MOTLEY, STUBBORN, TRAIN

import peerd
from peerd.daemon.main import TWICE_S

DETECTION_S = 12.0
SLACK = 3
A_COPY = 250  # steps of 10 ms and more that a killed trainer may lose: a copy is made every second


@pytest.fixture
def machine(machine: Machine) -> Iterator[Machine]:
    yield machine
    # not a trace of what ended by itself or was killed, whatever the test did
    machine.end()
    eventually(lambda: not machine.processes(), machine.logs)
    assert "Traceback" not in machine.logs()


def no_trace_of(node: Node) -> None:
    assert not node.socket.exists()
    assert f"{node.name}.sock" not in os.listdir(node.machine.runtime / "peerd")


def documented_keys() -> list[set[str]]:
    """Of the tables of docs/json.md, in turn."""
    page = (Path(__file__).parent.parent.parent / "docs" / "json.md").read_text()
    tables = page.split("|---|---|")[1:]
    rows = [[line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")] for table in tables]
    return [{key for row in table for key in re.findall(r"`(\w+)`", row)} for table in rows]


def test_the_life_of_a_swarm(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    a, b, c = machine.three(script)
    for node in (a, b, c):
        node.sees(a="alive", b="alive", c="alive")
    here = "--name THEIRS --bind 127.0.0.1:0"
    a.says(f"listening on {a.address}; others join with: peerd start {script} --join {a.address} {here}\n")
    shown = machine.peerd("members", "--name", "b")
    assert shown.returncode == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["NAME", "a", "b", "c"]
    assert "several nodes run here: a, b, c" in machine.peerd("members").stderr
    a.eventually(lambda: a.ask("status")["links"])
    told = a.ask("status")
    assert [told.keys(), told["trainer"].keys(), told["links"][0].keys(), a.ask("members")["members"][0].keys()] == (
        documented_keys()
    )

    # a killed daemon takes its trainer along; a killed trainer is started again, its daemon lives on
    orphan, killed, reached, where = b.trainer_pid, c.trainer_pid, c.step, b.address
    b.signal(signal.SIGKILL)
    os.kill(killed, signal.SIGKILL)
    killed_at = time.monotonic()
    b.end()
    eventually(lambda: not alive(orphan))
    c.says("train.py was killed by SIGKILL; starting it again")

    # the others notice, and train on; the new trainer goes on from its daemon's model
    for node in (a, c):
        node.eventually(lambda node=node: node.members()["b"] == "failed")  # type: ignore[misc]
        assert time.monotonic() - killed_at < SLACK * DETECTION_S
        lines = [line for line in node.log.splitlines() if where in line]
        assert lines
        assert [line for line in lines if not re.search(rf" b(: .*| \(){where}", line)] == []
    a.trains(beyond=a.step)
    c.eventually(lambda: c.trainer_pid != killed)
    c.trains()
    assert c.ask("status")["trainer"]["first_step"] >= reached - A_COPY

    # restarted, it is alive again and begins with the swarm's model
    reached = min(a.step, c.step)  # either may be the one that gives it
    b = machine.start("b", script, join=a, SEED="1")
    b.trains()
    assert b.log.count("the model of step ") == 2
    assert b.ask("status")["trainer"]["first_step"] >= reached
    a.sees(b="alive")
    c.sees(b="alive")

    # a node without a script is a member; the model of another is exported by name
    d = machine.start("d", join=a)
    d.sees(a="alive", b="alive", c="alive")
    a.sees(d="alive")
    assert d.ask("status")["phase"] == "no trainer"
    exported = machine.peerd("export", "--name", "a", "m.safetensors")
    assert exported.returncode == 0, exported.stderr
    there = "peerd: export m.safetensors: there is such a file already; --force puts this one in its place\n"
    assert machine.peerd("export", "--name", "a", "m.safetensors").stderr == there
    assert machine.peerd("export", "--name", "a", "m.safetensors", "--force").returncode == 0
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model.load_state_dict(load_file(machine.path / "m.safetensors"))
    x = torch.randn(64, 4)
    with torch.no_grad():
        assert float(((model(x) - x.sum(1, keepdim=True)) ** 2).mean()) < 1.0  # it has learned: 4.0 before

    # three ways to go, each in good order
    left = machine.peerd("leave", "--name", "b")
    assert not alive(b.process.pid)  # not only leaving: its name, port and state folder are free
    assert (left.returncode, left.stdout) == (0, "b has left\n"), left.stderr
    again = machine.start("b")
    again.says("this node left a swarm that had a member at ")
    again.signal(signal.SIGINT)
    assert again.end() == 0
    c.signal(signal.SIGINT)
    d.signal(signal.SIGTERM)
    for node in (b, c, d):
        assert node.end() == 0, node.log
        no_trace_of(node)
    a.sees(b="left", c="left", d="left")
    a.trains(beyond=a.step)
    a.signal(signal.SIGTERM)
    assert a.end() == 0
    assert not machine.processes()
    assert not list(machine.path.rglob("*.sock"))


def test_a_killed_founder_comes_back_to_its_swarm(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    bind = f"127.0.0.1:{Machine.free_port()}"
    a = machine.start("a", script, "--bind", bind)
    a.trains()
    b = machine.start("b", script, join=a, SEED="1")
    b.trains()
    state = machine.state / "peerd" / "a"
    a.eventually(lambda: (state / "members.json").exists())
    a.signal(signal.SIGKILL)
    a.end()
    reached = b.step
    shutil.rmtree(state / "checkpoints", ignore_errors=True)  # the first may have been due

    a = machine.start("a", script, "--bind", bind)
    a.trains()
    assert a.ask("status")["trainer"]["first_step"] >= reached
    assert a.log.count("the model of step ") == 1
    for node in (a, b):
        node.sees(a="alive", b="alive")

    # who leaves on purpose starts afresh
    assert machine.peerd("leave", "--name", "a").returncode == 0
    assert a.end() == 0
    assert not (state / "members.json").exists()
    b.sees(a="left")


def test_a_swarm_forms_again_after_a_power_cut(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    binds = {name: f"127.0.0.1:{Machine.free_port()}" for name in "abc"}

    def start(name: str) -> Node:
        join = None if name == "a" else binds["a"]
        return machine.start(name, script, "--bind", binds[name], join=join, SEED=name.encode().hex())

    nodes = {name: start(name) for name in "abc"}
    for node in nodes.values():
        node.trains()
        node.sees(a="alive", b="alive", c="alive")
    kept = [machine.state / "peerd" / name / "members.json" for name in "abc"]
    eventually(lambda: all(path.exists() and path.read_text().count("127.0.0.1") == 2 for path in kept))
    for node in nodes.values():
        node.signal(signal.SIGKILL)
    for node in nodes.values():
        node.end()
    fetched = sum(node.log.count("the model of step ") for node in nodes.values())
    assert fetched == 2

    # two of them find each other, though the one that they join through is not there yet
    for name in "cb":
        nodes[name] = start(name)
    for name in "cb":
        nodes[name].trains()
    nodes["a"] = start("a")
    nodes["a"].trains()
    for node in nodes.values():
        node.sees(a="alive", b="alive", c="alive")
    assert sum(node.log.count("the model of step ") for node in nodes.values()) == fetched + 2
    assert "goes on alone" not in nodes["a"].log


def test_a_second_interrupt_ends_at_once(machine: Machine) -> None:
    node = machine.start("n", machine.script("stubborn.py", STUBBORN))
    node.says("running as ")
    pid = int(node.log.split("running as ")[1].split()[0])
    assert alive(pid)
    node.signal(signal.SIGINT)
    node.says("leaving the swarm")
    time.sleep(2 * TWICE_S)
    node.signal(signal.SIGINT)
    assert node.end() == 128 + signal.SIGINT
    eventually(lambda: not alive(pid))
    no_trace_of(node)


def test_a_script_that_never_attaches_is_no_hindrance(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    a = machine.start("a", machine.script("prints.py", "print('hello')"))
    a.says("prints.py ended without calling peerd.attach")
    b = machine.start("b", join=a)
    b.sees(a="alive")
    monkeypatch.setenv("PEERD_SOCKET", str(b.socket))
    model = torch.nn.Linear(2, 1)
    with peerd.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as swarm:  # it does not wait for a's model
        swarm.step(loss=1.0, samples=1)
    b.says("training finished at step 1")


def test_a_script_attached_by_hand(machine: Machine) -> None:
    script = str(machine.script("train.py", TRAIN))
    alone = machine.spawn("alone", [script])
    assert alone.end() == 0
    assert alone.log == "peerd: no peerd node runs here; start one with: peerd start train.py; training alone\n" + (
        "ready, alone at step 0\ndone\n"
    )
    daemon = machine.start("x")
    assert daemon.address
    hand = machine.spawn("hand", [script], PEERD_NAME="x")
    daemon.trains()
    daemon.signal(signal.SIGKILL)
    daemon.end()
    assert hand.end() == 0
    lost = "the daemon went away; training goes on alone, and with the swarm again once the node is back"
    assert hand.log == f"ready, in a swarm at step 0\npeerd: {lost}\ndone\n"


def test_a_script_attached_by_hand_says_that_it_ends_with_a_node_that_leaves(machine: Machine) -> None:
    daemon = machine.start("x")
    assert daemon.address
    hand = machine.spawn("hand", [str(machine.script("train.py", TRAIN))], PEERD_NAME="x")
    daemon.trains()
    assert machine.peerd("leave").returncode == 0
    assert hand.end() == 0
    told = "the node that this script trains with leaves the swarm: the script ends here"
    assert hand.log == f"ready, in a swarm at step 0\npeerd: {told}\n"


def test_a_nodes_own_script_finds_its_place_though_another_comes_first(machine: Machine) -> None:
    script = str(machine.script("train.py", TRAIN))
    slow = machine.script("slow.py", "import time\ntime.sleep(6)\n" + TRAIN)
    a = machine.start("a", slow)
    assert a.address
    hand = machine.spawn("hand", [script], PEERD_NAME="a")
    assert hand.end() == 1
    refusal = "this node has a script of its own, slow.py, and this one is not of its processes"
    assert hand.log.startswith(f"peerd: {refusal}: let this script train alone by PEERD_NAME=none; ")
    a.trains()
    alone = machine.spawn("alone", [script], PEERD_NAME="none")
    assert alone.end() == 0


def test_what_is_refused_of_a_script_run_by_hand_says_nothing_of_the_nodes_own(machine: Machine) -> None:
    own = "import os, sys, time\nwhile not os.path.exists('end'):\n    time.sleep(0.05)\nsys.exit(1)\n"
    a = machine.start("a", machine.script("own.py", own))
    assert a.address
    frozen = TRAIN.replace("peerd.attach(model,", "peerd.attach(model.requires_grad_(False),")
    hand = machine.spawn("hand", [str(machine.script("frozen.py", frozen))], PEERD_NAME="a")
    assert hand.end() == 1
    hand.says("there is nothing to train together")
    machine.script("end", "")
    assert a.end() == 1
    a.says("own.py exited with code 1 before peerd.attach was done")


def test_a_script_attached_by_hand_comes_back_to_its_swarm(machine: Machine) -> None:
    """With the model of the others, which have trained on meanwhile."""
    script = str(machine.script("train.py", TRAIN.replace("swarm.alone and swarm.step_count > 5", "False")))
    a = machine.start("a", script)
    a.trains()
    b = machine.start("b", join=a)
    b.sees(a="alive")
    hand = machine.spawn("hand", [script], PEERD_NAME="b")
    b.trains()
    b.signal(signal.SIGKILL)
    b.end()
    hand.says("the daemon went away; training goes on alone")
    again = machine.start("b", join=a)
    hand.says("the node is back: this script waits for its swarm")
    hand.says("training goes on with the swarm, from step ")
    again.trains()
    again.sees(a="alive")
    a.sees(b="alive")
    hand.signal(signal.SIGTERM)


def test_a_script_started_by_hand_with_another_model_is_told_why(machine: Machine) -> None:
    script = str(machine.script("train.py", TRAIN))
    a = machine.start("a", script)
    a.trains()
    b = machine.start("b", join=a)
    b.sees(a="alive")
    hand = machine.spawn("hand", [script], PEERD_NAME="b", HIDDEN="8")
    assert hand.end() == 1
    assert hand.log.count("build the model with the same sizes and types on all nodes") == 1
    assert "Traceback" not in hand.log
    assert b.end() == 1


def test_a_trainer_that_dies_while_it_waits_may_come_again(machine: Machine) -> None:
    port = Machine.free_port()
    b = machine.start("b", machine.script("train.py", TRAIN), join=f"127.0.0.1:{port}")
    b.says(f"the trainer waits: no node of the swarm has answered yet; peerd doctor --join 127.0.0.1:{port} shows why")
    b.says(f"; joining through 127.0.0.1:{port}\n")
    assert "others join with" not in b.log  # they would wait with it
    b.says(f"cannot reach 127.0.0.1:{port}: Connection refused; trying again")
    assert b.log.count("cannot reach ") == 1
    assert f"no member found yet through 127.0.0.1:{port};" in machine.peerd("status", "--name", "b").stdout
    killed = b.trainer_pid
    os.kill(killed, signal.SIGKILL)
    b.eventually(lambda: b.trainer_pid != killed)
    # the seed appears, and is found: then the two train
    a = machine.start("a", "--bind", f"127.0.0.1:{port}", "--join", b.address)
    b.trains()
    a.sees(b="alive")
    assert b.ask("status")["joining"] == []
    assert b.log.count("warning") <= 3
    assert "is attached to this node already" not in b.log


def test_checkpoints_survive_an_interrupt_and_damage(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    steps: list[int] = []
    for life in range(2):
        node = machine.start("n", script)
        node.says("ready, in a swarm", times=life + 1)
        assert f"ready, in a swarm at step {steps[-1] if steps else 0}\n" in node.log
        reached = node.trains(beyond=(steps[-1] if steps else 0) + 10)
        if life == 1:  # the daemon's model is newer than the checkpoint: what comes from where is said
            os.kill(node.trainer_pid, signal.SIGKILL)
            node.says("optimizer's state is this node's own, from the checkpoint of step ")
            assert node.trains() >= reached - A_COPY
        node.signal(signal.SIGINT)
        assert node.end() == 0
        generations = sorted((machine.state / "peerd" / "n" / "checkpoints").iterdir())
        steps.append(int(generations[-1].name[5:]))
    assert steps[1] > steps[0]
    assert node.log.count(f"resumed from the checkpoint of step {steps[0]}\n") == 1

    tensors = generations[-1] / "model.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    node = machine.start("n", script)
    node.says("ready, in a swarm", times=4)
    refused = [line for line in node.log.splitlines() if "refused" in line]
    assert len(refused) == 1
    assert str(generations[-1]) in refused[0]
    assert "SHA-256" in refused[0]
    assert f"ready, in a swarm at step {steps[0]}\n" in node.log.split(refused[0])[1]


def test_a_motley_model_trains_in_a_swarm(machine: Machine) -> None:
    script = machine.script("motley.py", MOTLEY)
    a = machine.start("a", script, "--wait-for", "2", SEED="1")
    b = machine.start("b", script, "--wait-for", "2", join=a, SEED="2")
    for node in (a, b):
        node.says("whole True")
        assert node.ask("status")["exchanges"] > 0
        assert machine.peerd("export", "--name", node.name, f"{node.name}.safetensors").returncode == 0
    assert machine.peerd("forgive", "b", "--name", "a").stdout == "b was not refused\n"
    assert "no member of the name or id 'c'" in machine.peerd("forgive", "c", "--name", "a").stderr
    models = [load_file(machine.path / f"{name}.safetensors") for name in "ab"]
    assert {name: tensor.dtype for name, tensor in models[0].items() if tensor.dtype != torch.float32} == {
        "high.weight": torch.float64,
        "high.bias": torch.float64,
    }
    assert "first.weight" in models[0]
    assert not {"last.weight", "base.weight", "norm.num_batches_tracked"} & set(models[0])
    assert "norm.running_mean" in models[0]
    for name, tensor in models[0].items():
        assert float((tensor - models[1][name]).norm() / (1e-3 + tensor.norm())) < 0.1, name
