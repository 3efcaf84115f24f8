"""A copy that becomes whole while the training goes on, as on a GPU: nothing is said of it before, and all after it.

No GPU is needed: the copy here is late because the test lets it be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from model_node import Node, until
from test_trainer import path, with_daemon
from torch import nn

import peerd
from peerd.trainer import session
from peerd.trainer.publication import Publication

__all__ = ["path"]


CORRECTIONS = 8
STEPS_MAX = 5_000_000  # a minute and more


class LatePublication(Publication):
    """Becomes whole when somebody waits for it, or after so many looks at it."""

    looks = 3

    def __init__(self) -> None:
        super().__init__()
        self._copy: Callable[[], object] | None = None
        self._left = 0
        self.begun = self.waited_for = 0

    def begin(self, parts: Iterable[tuple[slice, torch.Tensor]], target: torch.Tensor, device: torch.device) -> None:
        assert self._copy is None, "one copy at a time"
        self._copy, self._left = lambda: [target[where].copy_(values) for where, values in parts], self.looks
        self.begun += 1

    @property
    def under_way(self) -> bool:
        self._left -= 1
        if self._left <= 0:
            self._end()
        return self._copy is not None

    def wait(self) -> None:
        self.waited_for += self._copy is not None
        self._end()

    def _end(self) -> None:
        if self._copy is not None:
            self._copy()
            self._copy = None


@pytest.mark.parametrize("looks", [2, 5, 40])
def test_what_the_daemon_reads_is_a_whole_copy_of_the_step_that_is_said(
    path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """Each weight is the step's number, so that a torn copy, one of another step, or a lost correction shows."""
    monkeypatch.setattr(session, "Publication", LatePublication)
    monkeypatch.setattr(LatePublication, "looks", looks)
    found: list[tuple[int, set[float]]] = []
    made: list[LatePublication] = []

    def enough() -> bool:
        return len(found) >= 20 and len({step for step, _ in found}) > 2

    def script() -> None:
        model = nn.Linear(50, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.fill_(0.0)
        with peerd.attach(model, optimizer) as swarm:
            assert swarm._session is not None
            made.append(swarm._session._publication)  # type: ignore[arg-type]
            while not enough():
                with torch.no_grad():
                    model.weight += 1.0
                swarm.step()
        assert {*model.weight.detach().flatten().tolist()} == {float(swarm.step_count)}

    async def beside(node: Node) -> None:
        await until(lambda: node.attached and node.side.status is not None and node.side.status.step > 2)
        while not enough():
            values, step = await node.side.model_values()
            found.append((step, {*np.asarray(values).tolist()}))

    status = with_daemon(path, script, beside).side.status
    assert status is not None
    assert status.phase == "finished"
    assert all(values == {float(step)} for step, values in found)
    assert [step for step, _ in found] == sorted(step for step, _ in found)
    assert made[0].begun > 2


def test_corrections_wait_for_the_copy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "Publication", LatePublication)
    monkeypatch.setattr(LatePublication, "looks", 40)
    steps = 0
    made: list[LatePublication] = []

    def script() -> None:
        nonlocal steps
        model = nn.Linear(50, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.0)
        with peerd.attach(model, torch.optim.SGD(model.parameters(), lr=1.0)) as swarm:
            assert swarm._session is not None
            made.append(swarm._session._publication)  # type: ignore[arg-type]
            while (corrected < CORRECTIONS or steps < last + 50) and steps < STEPS_MAX:
                with torch.no_grad():
                    model.weight += 1.0
                swarm.step()
                steps += 1
        # the node's own steps, and each correction once
        assert {*model.weight.detach().flatten().tolist()} == {swarm.step_count + 1000.0 * corrected}

    corrected = last = 0

    async def later(than: int) -> None:
        await until(lambda: steps > than + 1)

    async def beside(node: Node) -> None:
        nonlocal corrected, last
        await until(lambda: node.attached and node.side.status is not None and node.side.status.step > 2)
        model = node.side._runner.core.model
        assert model is not None
        while corrected < CORRECTIONS:
            last = steps
            model.add(np.full(50, 1000.0, np.float32))
            corrected += 1
            for _ in range(3):  # before and after the trainer has taken it
                values, step = await node.side.model_values()
                assert {*np.asarray(values).tolist()} == {step + 1000.0 * corrected}
            await later(last)

    status = with_daemon(path, script, beside).side.status
    assert status is not None
    assert status.phase == "finished"
    assert made[0].waited_for > 0


def test_a_node_that_leaves_has_the_last_step_however_late_its_copy(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "Publication", LatePublication)
    monkeypatch.setattr(LatePublication, "looks", 1_000_000)  # only who waits for it gets it
    found: list[tuple[int, set[float]]] = []
    asked = threading.Event()
    last = 0

    def script() -> None:
        nonlocal last
        model = nn.Linear(50, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.0)
        swarm = peerd.attach(model, torch.optim.SGD(model.parameters(), lr=1.0))

        def train() -> None:
            while swarm.step_count < STEPS_MAX:
                with torch.no_grad():
                    model.weight += 1.0
                swarm.step()

        with pytest.raises(SystemExit):
            train()
        last = swarm.step_count
        asked.wait(30)  # the node ends with the script

    async def beside(node: Node) -> None:
        await until(lambda: node.attached and node.side.status is not None and node.side.status.step > 2)
        await node.side.drain()
        values, step = await node.side.model_values()
        found.append((step, {*np.asarray(values).tolist()}))
        asked.set()

    with_daemon(path, script, beside)
    assert found == [(last, {float(last)})]
