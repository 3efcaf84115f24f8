"""A script that was started by hand, whose daemon goes away, and comes again."""

from __future__ import annotations

import errno
import gc
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from model_node import Node, running, until
from torch import nn

import peerd
from peerd.daemon.main import _Desk
from peerd.daemon.trainer_service import TrainerService
from peerd.local import board, local_socket
from peerd.local.shared_memory import SharedMemory
from peerd.trainer import comeback
from peerd.trainer.swarm import Swarm

BACK = "peerd: training goes on with the swarm, from step"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("LOCAL_RANK", "PEERD_DAEMON", "PEERD_SOCKET", "PEERD_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(comeback, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(comeback, "COST_MAX", math.inf)
    (tmp_path / "peerd").mkdir(mode=0o700)
    return local_socket.socket_path("me")


def small(**settings: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def beside_daemons(path: Path, script: Callable[[], None], starts_s: float = 0.0, **second: Any) -> list[Node]:
    """The script beside a daemon that goes away, and another one with these settings, until it has ended."""
    ended = trio.Event()

    async def exchange(_: dict[str, Any]) -> dict[str, Any]:
        return {"exchange": "weights"}

    async def runs() -> None:
        await trio.to_thread.run_sync(script)
        ended.set()

    async def main() -> list[Node]:
        nodes: list[Node] = []
        async with trio.open_nursery() as scripts:
            for settings in ({}, second):
                node = Node(path.parent / "state", **settings)
                nodes.append(node)
                async with running(node) as nursery:
                    desk = _Desk(path)
                    await desk.open(nursery)
                    await trio.sleep(0 if node is nodes[0] else starts_s)
                    desk.give_to({"exchange": exchange}, node.side.attach)
                    if node is nodes[0]:
                        scripts.start_soon(runs)
                        await until(partial(has_stepped, node))
                    else:
                        await ended.wait()
        return nodes

    return trio.run(main)


def has_stepped(node: Node) -> bool:
    session = node.side.runner.session
    last = None if session is None else session.board.last_step()
    return last is not None and last.step >= 3


class Training:
    """A script whose every step adds 1 to its first weight."""

    def __init__(self, **settings: Any) -> None:
        self.model, self.optimizer = small(**settings)
        self.steps = 0

    def step(self, swarm: Swarm) -> None:
        with torch.no_grad():
            self.model.weight[0, 0] += 1
        self.steps += 1
        swarm.step(loss=1.0, samples=2)
        time.sleep(0.002)

    def step_while(self, swarm: Swarm, condition: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + 50
        while condition():
            assert time.monotonic() < give_up_at
            self.step(swarm)

    @property
    def moved(self) -> float:
        return self.model.weight[0, 0].item()


def test_it_goes_on_with_the_next_daemon_from_where_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints are there, too, older than what it has made of the model since."""
    monkeypatch.setattr("peerd.trainer.checkpoint_writer.FIRST_S", 0.0)
    training, total = Training(), 1_000_000
    told_total = list[int]()

    def script() -> None:
        with peerd.attach(training.model, training.optimizer) as swarm:
            assert next(swarm.steps(total)) == 0
            training.step_while(swarm, lambda: not swarm.alone)
            written = (path.parent / "state").rglob  # by a nice thread, which waits for others on a busy machine
            training.step_while(swarm, lambda: not list(written("*.safetensors")))
            training.step_while(swarm, lambda: swarm.alone)
            assert swarm._session is not None
            told_total.append(swarm._session._board._numbers[board._TOTAL])
            for _ in range(3):
                training.step(swarm)
            assert swarm.step_count == training.steps

    _, second = beside_daemons(path, script)
    assert training.moved == training.steps
    assert second.side.status is not None
    assert second.side.status.step == training.steps
    assert told_total == [total]
    told = capsys.readouterr().err
    assert told.count("went away; training goes on alone, and with the swarm again once the node is back") == 1
    assert told.count(BACK) == 1
    assert "resumed" not in told


def test_a_daemon_that_will_not_have_it_is_asked_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()

    def script() -> None:
        with peerd.attach(training.model, training.optimizer) as swarm:
            training.step_while(swarm, lambda: not swarm.alone)
            training.step_while(swarm, lambda: swarm._comeback is not None)
            for _ in range(20):
                training.step(swarm)
            assert swarm.alone

    beside_daemons(path, script, mode="allreduce", exchange="gradients")
    assert training.moved == training.steps
    refused = "peerd: this node exchanges gradients, and the script's peerd does not"
    assert capsys.readouterr().err.count(refused) == 1


@pytest.mark.parametrize("why", ["it leaves", "it has no memory", "this process has no descriptor"])
def test_a_node_that_cannot_have_it_yet_is_asked_again(
    why: str, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever refused it, training went on alone for good."""
    training, tries = Training(), 0
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    is_taken, mapped, create = TrainerService._not_now, SharedMemory.__init__, SharedMemory.create

    def fails() -> bool:
        """At the second and third try, the first two of another daemon."""
        nonlocal tries
        tries += 1
        return tries in (2, 3)

    def leaves(side: TrainerService, *said: Any) -> str | None:
        side._leaving = fails()
        return is_taken(side, *said)

    def maps(memory: SharedMemory, fd: int, *sizes: int) -> None:
        if threading.current_thread() is daemons and fails():
            raise full
        mapped(memory, fd, *sizes)

    def creates(*sizes: int) -> SharedMemory:
        if fails():
            raise full
        return create(*sizes)

    daemons = threading.current_thread()
    if why == "it leaves":
        monkeypatch.setattr(TrainerService, "_not_now", leaves)
    elif why == "it has no memory":
        monkeypatch.setattr(SharedMemory, "__init__", maps)
    else:
        monkeypatch.setattr(SharedMemory, "create", creates)

    def script() -> None:
        with peerd.attach(training.model, training.optimizer) as swarm:
            training.step_while(swarm, lambda: not swarm.alone)
            training.step_while(swarm, lambda: swarm.alone)

    beside_daemons(path, script)
    assert tries == 4
    told = capsys.readouterr().err
    assert told.count("training goes on alone, and the node is asked again") == 1
    assert told.count("the node is back: this script waits") == told.count(BACK) == 1


def test_momentum_is_the_swarms_again(path: Path) -> None:
    training = Training(momentum=0.9)

    def script() -> None:
        with peerd.attach(training.model, training.optimizer, quasi_global_momentum=True) as swarm:
            training.step_while(swarm, lambda: not swarm.alone)
            training.step_while(swarm, lambda: swarm.alone)
            assert len(training.optimizer._optimizer_step_pre_hooks) == 1

    beside_daemons(path, script)


def test_a_run_that_has_ended_does_not_come_back_and_lets_go_of_the_model(path: Path) -> None:
    training = Training()
    held = weakref.ref(training.model)

    def script() -> None:
        nonlocal training
        swarm = peerd.attach(training.model, training.optimizer)
        training.step_while(swarm, lambda: not swarm.alone)
        swarm.finish()
        for _ in range(5):
            training.step(swarm)
        assert swarm.alone
        del training
        gc.collect()
        assert held() is None

    beside_daemons(path, script)


def test_a_node_that_is_on_its_way_is_looked_for_again(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where its relay has yet to answer. That its daemon is gone a script finds out within a second."""
    training = Training()

    def script() -> None:
        with peerd.attach(training.model, training.optimizer) as swarm:
            training.step_while(swarm, lambda: not swarm.alone)
            training.step_while(swarm, lambda: swarm.alone)

    beside_daemons(path, script, starts_s=1.5)
    told = capsys.readouterr().err
    assert told.count(BACK) == 1
    assert "is starting" not in told


def test_no_comeback_follows_a_run_whose_daemon_goes_away_as_it_ends(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training()

    def script() -> None:
        swarm = peerd.attach(training.model, training.optimizer)
        while swarm.step_count < 10:
            training.step(swarm)
        time.sleep(2)
        swarm.finish()
        for _ in range(5):
            training.step(swarm)
        assert swarm.alone

    beside_daemons(path, script)
    assert capsys.readouterr().err == "peerd: the daemon went away; training goes on alone\n"


def test_a_script_that_never_had_a_daemon_lets_go_of_the_model(path: Path) -> None:
    model, optimizer = small()
    held = weakref.ref(model)
    swarm = peerd.attach(model, optimizer)
    swarm.step()
    assert swarm.alone
    del model, optimizer
    gc.collect()
    assert held() is None


def test_a_comeback_that_is_interrupted_as_it_ends_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, which the script catches: the session is not left attached, for the next one would be refused."""
    training, interrupted = Training(), list[None]()

    def interrupts(line: str) -> None:
        if "goes on with the swarm, from" in line and not interrupted:
            interrupted.append(None)
            raise KeyboardInterrupt

    monkeypatch.setattr("peerd.trainer.swarm.say", interrupts)

    def script() -> None:
        with peerd.attach(training.model, training.optimizer) as swarm:
            training.step_while(swarm, lambda: not swarm.alone)
            with pytest.raises(KeyboardInterrupt):
                training.step_while(swarm, lambda: swarm.alone)
            training.step_while(swarm, lambda: swarm.alone)
            assert swarm.step_count == training.steps

    beside_daemons(path, script)
