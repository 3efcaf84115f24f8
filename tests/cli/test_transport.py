"""What bulk travels over between real nodes: the carrier is shown, a death is survived, and what is missing is said."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from machine import Machine, Node, eventually
from scripts import TRAIN
from ucx_here import needs_ucx

from peerd.transport.rdma import ucx

OVER_UCX = ("--transport", "rdma", "--rdma-allow-fallback")


def test_no_library_is_one_line(machine: Machine) -> None:
    ran = machine.peerd(
        "start", "--bind", "127.0.0.1:0", "--transport", "rdma", PEERD_UCX_LIBRARY="/nowhere/libucp.so.0"
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("peerd: --transport rdma: ")
    assert len(ran.stderr.splitlines()) == 1
    assert not machine.state.exists()


@needs_ucx
def test_no_device_is_one_line(machine: Machine) -> None:
    if ucx.is_rdma(ucx.resources(ucx.load())):
        pytest.skip("this machine has RDMA")
    ran = machine.peerd("start", "--bind", "127.0.0.1:0", "--transport", "rdma")
    assert ran.returncode == 1
    assert "no InfiniBand or RoCE device" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def carriers(node: Node) -> dict[str, str]:
    return {row["name"]: row["carrier"] for row in node.ask("members")["members"]}


def lose_one(machine: Machine, lost: Node, others: list[Node]) -> None:
    """Kill a node; the others train on and end in good order."""
    lost.signal(signal.SIGKILL)
    lost.end()
    reached = others[0].step
    others[0].trains(beyond=reached + 20)
    for node in others:
        node.signal(signal.SIGINT)
        assert node.end() == 0
    assert "Traceback" not in machine.logs()


def test_nodes_of_one_host_share_memory(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    a, b, c = machine.three(script)
    a.eventually(lambda: carriers(a)["b"] == carriers(a)["c"] == "shm")
    lose_one(machine, b, [a, c])


@needs_ucx
def test_nodes_over_ucx_beside_one_over_tcp(machine: Machine) -> None:
    script = machine.script("train.py", TRAIN)
    a = machine.start("a", script, *OVER_UCX)
    b = machine.start("b", script, *OVER_UCX, join=a, SEED="1")
    c = machine.start("c", script, "--transport", "auto", join=a, SEED="2", PEERD_UCX_LIBRARY="/nowhere/libucp.so.0")
    for node in (a, b, c):
        node.trains()

    a.eventually(lambda: carriers(a)["b"].startswith("ucx tcp") and carriers(a)["c"] == "tcp")
    c.says("models to other machines travel over tcp: ")
    a.eventually(lambda: "travel over tcp: it has shm 1, not UCX 1." in a.log + b.log)
    assert "ucx tcp" in machine.peerd("members", "--name", "a").stdout

    lose_one(machine, b, [a, c])


@pytest.mark.one_run_in(3)
@needs_ucx
def test_a_demo_over_ucx_survives_the_kill_of_a_node(machine: Machine, tmp_path: Path) -> None:
    options = ["--peers", "3", "--steps", "200", "--mode", "allreduce", "--codec", "float32", "--kill", "1@0.5"]
    options += ["--format", "json", "--picture", str(tmp_path / "run.png"), *OVER_UCX]
    demo = machine.spawn("demo", ["-m", "peerd.cli.main", "demo", *options], TMPDIR=str(machine.path))
    eventually(lambda: demo.process.poll() is not None, machine.logs, patience_s=240)
    assert demo.end() == 0, demo.log
    result = json.loads(next(line for line in demo.log.splitlines() if line.startswith("{")))
    assert result["killed"] == "node-1"
    assert result["failures"] == []
    assert result["steps"] == 200
    assert any(carrier.startswith("ucx") for carrier in result["carriers"])
