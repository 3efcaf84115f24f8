"""A script that catches what interrupts peerd in it (Ctrl-C in a notebook, memory that ran out) and trains on."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import script_nodes
import torch
from script_nodes import Swarm
from torch import nn

import peerd
from peerd.local.local_socket import LocalSocket, take
from peerd.protocol.trainer import Added, Corrections, encoded
from peerd.protocol.trainer_client import ClientState, TrainerClient
from peerd.trainer import checkpoint
from peerd.trainer.kept import Kept
from peerd.trainer.publication import Publication
from peerd.trainer.ranks import RankCommand
from peerd.trainer.session import Session
from peerd.training.model.flat import FlatModel

INTERRUPTS = (KeyboardInterrupt, torch.OutOfMemoryError)


def once(act: Callable[..., Any], error: type[BaseException], when: Callable[[], bool], *, after: bool) -> Any:
    """`act`, which raises once when that is so: before its work is done, or after it."""
    done: list[bool] = []

    def acts(*given: Any, **named: Any) -> Any:
        raises = not done and when()
        if raises and not after:
            done.append(True)
            raise error
        found = act(*given, **named)
        if raises:
            done.append(True)
            raise error
        return found

    return acts


def here(name: str) -> bool:
    """Whether this thread is the script of that node."""
    trainer = getattr(script_nodes.ScriptTrainer.here, "trainer", None)
    return trainer is not None and trainer.path.stem == name


class Training:
    """A small model and its loop."""

    def __init__(self, seed: int) -> None:
        self.model = nn.Linear(3, 1)
        with torch.no_grad():  # both begin with the same one
            self.model.weight.fill_(0.1)
            self.model.bias.fill_(0.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.batches = torch.Generator().manual_seed(seed)
        self.caught = 0

    def steps(self, swarm: peerd.Swarm, until: Callable[[], bool]) -> None:
        """Steps that are caught count."""
        while not until():
            x = torch.randn(8, 3, generator=self.batches)
            self.optimizer.zero_grad()
            (self.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            self.optimizer.step()
            try:
                swarm.step()
            except INTERRUPTS:
                self.caught += 1


@pytest.mark.parametrize("overlap", [None, "blocking"], ids=["gossip", "blocking"])
@pytest.mark.parametrize(
    ("of", "what", "after", "error"),
    [
        (FlatModel, "add", False, torch.OutOfMemoryError),
        (FlatModel, "add", True, KeyboardInterrupt),
        (FlatModel, "unshared", False, KeyboardInterrupt),
        (Session, "_answer", False, KeyboardInterrupt),
        (Session, "_obey", False, KeyboardInterrupt),
    ],
)
def test_its_node_is_not_cut_off(
    of: type,
    what: str,
    after: bool,
    error: type[BaseException],
    overlap: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = [Training(seed) for seed in range(2)]
    came: list[str] = []  # corrections, by whose they are
    begun = threading.Event()
    add = FlatModel.add

    def counted(self: FlatModel, correction: Any) -> None:
        add(self, correction)
        came.append("a" if here("a") else "b")

    monkeypatch.setattr(FlatModel, "add", counted)
    ready = lambda: begun.is_set() and here("a")  # noqa: E731
    monkeypatch.setattr(of, what, once(getattr(of, what), error, ready, after=after))

    def script(index: int) -> None:
        training = made[index]
        with peerd.attach(training.model, training.optimizer) as swarm:
            training.steps(swarm, lambda: came.count("a") >= 3 and came.count("b") >= 3)
            begun.set()
            training.steps(swarm, lambda: made[0].caught > 0)
            before = came.count("a")
            training.steps(swarm, lambda: came.count("a") >= before + 5)

    async def scenario(swarm: Swarm) -> None:
        for index, name in enumerate("ab"):
            await swarm.start(name, lambda index=index: script(index), wait_for=2)  # type: ignore[misc]
        await swarm.ended("ab")

    how = {"mode": "gossip", "trigger": "always"} if overlap is None else {"mode": "allreduce", "overlap": overlap}
    script_nodes.run(tmp_path, scenario, exchange="weights", **how)
    assert [each.caught for each in made] == [1, 0]
    weights = [each.model.weight.detach() for each in made]
    assert float((weights[0] - weights[1]).norm()) < 0.03 * float(weights[0].norm())


def test_an_end_that_was_broken_off_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Training(seed) for seed in range(2)]
    trains_on, looked = threading.Event(), threading.Event()
    poll = Session._poll

    def polled(self: Session, timeout_s: float | None) -> None:
        if here("b") and not trains_on.is_set() and self._client.state is ClientState.FINISHING:
            raise KeyboardInterrupt
        poll(self, timeout_s)

    monkeypatch.setattr(Session, "_poll", polled)

    def first() -> None:
        with peerd.attach(made[0].model, made[0].optimizer) as swarm:
            made[0].steps(swarm, looked.is_set)

    def second() -> None:
        swarm = peerd.attach(made[1].model, made[1].optimizer)
        ends = swarm.step_count + 20
        made[1].steps(swarm, lambda: swarm.step_count >= ends)
        with pytest.raises(KeyboardInterrupt):
            swarm.finish()
        trains_on.set()
        made[1].steps(swarm, looked.is_set)
        swarm.finish()

    async def scenario(swarm: Swarm) -> None:
        await swarm.start("a", first, wait_for=2)
        await swarm.start("b", second, wait_for=2)
        model = swarm.nodes["b"].daemon.model
        await swarm.until(trains_on.is_set)
        status = model.status
        assert status is not None
        step = status.step
        await swarm.until(lambda: status.step > step + 200)
        assert (status.phase, model.meta.ended) == ("training", False)
        looked.set()
        await swarm.ended("ab")
        assert (status.phase, model.meta.ended) == ("finished", True)

    script_nodes.run(tmp_path, scenario, mode="gossip", exchange="weights")


@pytest.mark.parametrize("exchange", ["weights", "gradients"])
@pytest.mark.parametrize(("of", "what"), [(Session, "_wait"), (checkpoint, "not_kept"), (Kept, "came")])
def test_an_attach_that_was_interrupted_is_in_nobodys_way(
    of: Any, what: str, exchange: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, what, once(getattr(of, what), KeyboardInterrupt, lambda: True, after=False))
    kept: list[Any] = []

    def script() -> None:
        training = Training(0)
        with pytest.raises(KeyboardInterrupt) as caught:
            peerd.attach(training.model, training.optimizer)
        kept.append(caught)  # as a notebook does, with all that its traceback holds
        assert not training.optimizer._optimizer_step_pre_hooks
        with peerd.attach(training.model, training.optimizer) as swarm:
            training.steps(swarm, lambda: swarm.step_count >= 3)
        kept.append(swarm)

    async def scenario(swarm: Swarm) -> None:
        await swarm.start("a", script)
        await swarm.ended("a")

    script_nodes.run(tmp_path, scenario, mode="gossip" if exchange == "weights" else "allreduce", exchange=exchange)
    assert len(kept) == 2


@pytest.fixture
def signalled() -> Iterator[Callable[[socket.socket], None]]:
    """Have the kernel send a signal, which is Ctrl-C's to the script, as soon as something comes to a socket."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise KeyboardInterrupt

    def by(sock: socket.socket) -> None:
        fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(sock, fcntl.F_SETSIG, signal.SIGUSR1)
        fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | fcntl.FASYNC)

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield by
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("where", ["Load", "send", "within"])
def test_a_correction_is_answered_once_wherever_that_was_interrupted(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signalled: Callable[[socket.socket], None]
) -> None:
    """The daemon would take the next one for added, too."""
    added: list[Any] = []
    session = Session.__new__(Session)
    session._client, session._publication = TrainerClient(), Publication()
    session._owed = session._unsaid = None
    session._answered, session.changed_in_pass = [], False
    session._copy_cost_s, session._command = 0.0, RankCommand.GO_ON
    session._came = encoded(Corrections(1))
    session._memory = SimpleNamespace(corrections=[None, None])  # type: ignore[assignment]
    session.flat = SimpleNamespace(add=added.append)  # type: ignore[assignment]

    class Once(type):
        def __instancecheck__(cls, instance: object) -> bool:
            monkeypatch.undo()
            raise KeyboardInterrupt

    if where == "Load":
        monkeypatch.setattr("peerd.trainer.session.Load", Once("Load", (), {}))
    elif where == "send":
        monkeypatch.setattr(LocalSocket, "send", once(LocalSocket.send, KeyboardInterrupt, lambda: True, after=True))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        session._socket = LocalSocket(tmp_path / "s")
        with listening.accept()[0] as daemon:
            if where == "within":  # the call that sends it
                signalled(daemon)
            with pytest.raises(KeyboardInterrupt):
                session._poll(timeout_s=0)
            session._poll(timeout_s=0)
            session._socket.close()
            said = bytearray(daemon.recv(1 << 16))
    assert (added, take(said), len(said)) == ([None], encoded(Added(1)), 0)
