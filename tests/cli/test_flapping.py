"""A peer that comes and goes for long: stopped, killed, started again; by hand, `make soak`."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rich
import torch
from machine import Machine, Node
from safetensors.torch import load_file
from scripts import QUIET

MINUTES = 30
GROWTH_MAX_MIB = 24  # of a daemon: what thirty minutes of logs, counters and an allocator may keep


@pytest.fixture
def machine(machine: Machine) -> Iterator[Machine]:
    yield machine
    assert "Traceback" not in machine.logs()


def memory_mib(node: Node) -> float:
    status = Path(f"/proc/{node.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def descriptors(node: Node) -> int:
    return len(os.listdir(f"/proc/{node.process.pid}/fd"))


def steps_in(node: Node, seconds: float) -> float:
    """Steps a second, measured for so long."""
    first, begun = node.step, time.monotonic()
    time.sleep(seconds)
    return (node.step - first) / (time.monotonic() - begun)


def exported(node: Node) -> torch.Tensor:
    path = node.machine.path / f"{node.name}.safetensors"
    node.ask("export", path=str(path))
    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(path).items())])


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 900)
@pytest.mark.parametrize("seed", [0])
def test_who_stays_trains_on_beside_a_peer_that_flaps(
    machine: Machine, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    script = machine.script("train.py", QUIET)
    a, b, c = machine.three(script)
    before = steps_in(a, 20)
    memory, opened = memory_mib(a), descriptors(a)
    said = len(a.log)
    ends = stops = 0
    begun, first = time.monotonic(), a.step
    while time.monotonic() - begun < 60 * MINUTES:
        if rng.random() < 0.5:
            pids = [c.process.pid, c.trainer_pid]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(rng.choice([0.5, 3.0, 20.0]))
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            stops += 1
        else:
            c.signal(rng.choice([signal.SIGKILL, signal.SIGINT]))
            c.process.wait()
            time.sleep(rng.choice([0.0, 2.0, 15.0]))
            c = machine.start("c", script, join=a, SEED="2")
            ends += 1
        c.trains()
        time.sleep(rng.choice([0.0, 1.0, 10.0]))
    rate = (a.step - first) / (time.monotonic() - begun)
    kept = rate / before
    with capsys.disabled():
        rich.print(
            f"\n{MINUTES} min, seed {seed}: {ends} ends, {stops} stops; a makes {kept:.2f} of its steps; memory"
            f" {memory:.0f} -> {memory_mib(a):.0f} MiB; descriptors {opened} -> {descriptors(a)};"
            f" {(len(a.log) - said) / (ends + stops):.0f} bytes of log for each"
        )
    for node in (a, b, c):
        node.sees(a="alive", b="alive", c="alive")
    assert memory_mib(a) - memory < GROWTH_MAX_MIB
    assert descriptors(a) <= opened + 5
    models = [exported(node) for node in (a, b, c)]
    for other in models[1:]:
        assert torch.norm(other - models[0]) < 0.2 * torch.norm(models[0])
