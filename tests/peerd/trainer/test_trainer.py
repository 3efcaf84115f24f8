"""A user's script and a daemon's model side, both real, in one process: what the user sees and the daemon knows."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trio
from model_node import Node, running, until
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.nn.utils.parametrizations import orthogonal
from torch.testing._internal.distributed.fake_pg import FakeStore

import peerd
from peerd.daemon import control, trainer_service
from peerd.daemon.trainer_session import report_of
from peerd.local import local_socket
from peerd.local.generations import generations, step_of
from peerd.local.shared_memory import SharedMemory
from peerd.protocol.trainer import BarrierHeard, BarrierIs, Load, Stepped, encoded
from peerd.protocol.trainer_client import TrainerClient
from peerd.trainer import checkpoint, session
from peerd.trainer import swarm as swarm_module
from peerd.trainer.figures import Figures
from peerd.training.effects import StepReport
from peerd.training.model.over import OVER, PARTS


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    path = local_socket.socket_path("me")
    monkeypatch.setenv("PEERD_SOCKET", str(path))
    return path


async def nothing(_: Node) -> None:
    """Beside the script."""


def with_daemon(
    path: Path,
    script: Callable[[], None],
    beside: Callable[[Node], Awaitable[None]] = nothing,
    verbs: dict[str, control.Verb] | None = None,
    **settings: Any,
) -> Node:
    """Run the script in a thread beside the model side of a node; the node, afterwards."""

    async def main() -> Node:
        node = Node(path.parent / "state", **settings)
        async with running(node) as nursery:
            nursery.start_soon(beside, node)
            await nursery.start(control.serve, path, verbs or {}, node.side.attach)
            await trio.to_thread.run_sync(script)
        return node

    return trio.run(main)


def normed() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def test_a_daemon_that_is_stopped_as_its_trainer_comes_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(local_socket, "_stopped", lambda pid: True)
    asked = []

    async def exchange(message: dict[str, Any]) -> dict[str, Any]:
        asked.append(message)
        await trio.sleep(0.2)
        return {"exchange": "weights", "optimizer": False}

    def script() -> None:
        with peerd.attach(*normed()) as swarm:
            swarm.step()

    node = with_daemon(path, script, verbs={"exchange": exchange})
    assert len(asked) == 1
    assert node.side.status is not None
    assert node.side.status.step == 1


def test_a_run(path: Path) -> None:
    def script() -> None:
        model, optimizer = normed()
        with peerd.attach(model, optimizer) as swarm:
            assert not swarm.alone
            for _ in range(5):
                model(torch.randn(8, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                swarm.step(loss=1.5, samples=8, accuracy=0.5)
        assert swarm.step_count == 5

    status = with_daemon(path, script).side.status
    assert status is not None
    assert (status.step, status.samples, status.loss, status.metrics) == (5, 40, 1.5, {"accuracy": 0.5})
    assert (status.phase, status.rollbacks, status.lr) == ("finished", 0, 0.01)


def test_a_script_may_attach_and_count_its_steps_in_inference_mode(path: Path) -> None:
    """Beside its metrics, say: a later step outside of it ended with torch's words on what was made there."""

    def script() -> None:
        for steps in (4, 8):
            model, optimizer = normed()
            with torch.inference_mode():
                swarm = peerd.attach(model, optimizer)
            for step in swarm.steps(steps):
                model(torch.randn(8, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert swarm._session is not None
                swarm._session._copied_at = -math.inf  # each step publishes a copy
                with torch.inference_mode(step % 2 == 0):
                    swarm.step()
            with torch.inference_mode():
                swarm.finish()
        assert swarm.step_count == 8

    with_daemon(path, script)


def test_a_model_that_is_attached_again_after_an_error_is_told_to_go_back(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a notebook, say: what no copy had was gone without a word."""

    def script() -> None:
        model, optimizer = normed()
        with suppress(KeyboardInterrupt), peerd.attach(model, optimizer) as swarm:
            assert swarm._session is not None
            swarm._session._copied_at = -math.inf  # the first step publishes a copy
            for step in swarm.steps(9):
                if step == 6:
                    raise KeyboardInterrupt
                swarm.step()
                swarm._session._copied_at = math.inf
        with peerd.attach(model, optimizer) as swarm:
            went_back = swarm.step_count
        assert 0 < went_back < 6
        assert f"the model goes back from step 6 to {went_back}: " in capsys.readouterr().err

    with_daemon(path, script)


@pytest.mark.parametrize("ends", ["finish", "block", "error"])
def test_steps_after_the_end_of_a_training_are_told_once_to_be_alone(
    path: Path, capsys: pytest.CaptureFixture[str], ends: str
) -> None:
    """As of who finishes after each epoch: all but the first were of this node alone, without a word."""

    def script() -> None:
        swarm = peerd.attach(*normed())
        for _ in range(3):
            with suppress(ZeroDivisionError), nullcontext() if ends == "finish" else swarm:
                swarm.step()
                swarm.step()
                if ends == "error":
                    raise ZeroDivisionError
            swarm.finish()
        assert swarm.step_count == 6

    with_daemon(path, script)
    told = 'peerd: swarm.step after swarm.finish() or the end of its "with" block: this training goes on alone; '
    assert capsys.readouterr().err.count(told) == 1


def test_a_cell_of_a_notebook_that_is_run_again_attaches_anew(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused, and where its first run had lost the swarm nothing helped but a new kernel."""

    def script() -> None:
        model, optimizer = normed()

        def cell(*, fails: bool) -> peerd.Swarm:
            swarm = peerd.attach(model, optimizer)
            swarm.step()
            if fails:
                raise ZeroDivisionError
            return swarm

        with pytest.raises(ZeroDivisionError):
            cell(fails=True)
        with pytest.raises(SystemExit, match="attached already"):
            cell(fails=False)
        monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
        earlier = cell(fails=False)
        later = cell(fails=False)
        earlier.step()
        assert (earlier.alone, later.alone) == (True, False)
        later.finish()

    with_daemon(path, script)
    told = capsys.readouterr().err
    assert told.count("the earlier training of this process, which was not finished, ends here") == 2
    assert told.count("swarm.step of a training in whose place another came: this training goes on alone") == 1


def test_steps_in_a_forked_process_are_told_to_be_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script() -> None:
        with peerd.attach(*normed()) as swarm:
            swarm_module._in_forked_child()  # as in one
            swarm.step()
            swarm.step()

    with_daemon(path, script)
    told = "peerd: swarm.step in a process that was forked after peerd.attach: this training goes on alone; "
    assert capsys.readouterr().err.count(told) == 1


def test_a_training_after_another_in_one_script_is_told_that_it_goes_on(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[list[str]] = []

    def script() -> None:
        for _ in range(3):
            with peerd.attach(*normed()) as swarm:
                told.append(re.findall("this training .*", capsys.readouterr().err))
                for _ in swarm.steps(4 * len(told)):
                    swarm.step()

    with_daemon(path, script)
    cure = "another one (another fold or seed) wants a node of its own: PEERD_RUN=NAME peerd start --name NAME"
    assert told[0] == []
    for count in (1, 2):
        step = 4 * count
        goes_on = f"this training goes on from step {step} with the model of the one before it in this script"
        assert told[count] == [f"{goes_on}; {cure}"]
    session._TRAINED.clear()  # as in a process that was started again
    with_daemon(path, script)
    assert told[3] == []


def test_a_training_that_goes_on_with_its_own_models_is_not_told_that_they_are_others(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several models, and a compiled one, are another module at each attach."""
    several = [normed(), normed()]
    models, optimizers = [model for model, _ in several], [optimizer for _, optimizer in several]

    def script() -> None:
        for _ in range(2):
            with peerd.attach(models, optimizers) as swarm:
                swarm.step()

    with_daemon(path, script)
    assert "this training goes on from step" not in capsys.readouterr().err


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spoilt", [False, True])
def test_what_is_private_is_not_taken_back_by_a_later_attach_of_its_process(
    tied: bool, spoilt: bool, path: Path
) -> None:
    """A head that is trained alone between two trainings went back to the checkpoint of the first, without a word."""
    model, optimizer = normed()
    if tied:
        model.add_module("tied", model[2])
    head = model.get_parameter("2.weight")
    found: list[torch.Tensor] = []

    def script() -> None:
        for _ in range(2):
            with peerd.attach(model, optimizer, exclude=["2.*"]) as swarm:
                found.append(head.detach().clone())
                swarm.step()
            with torch.no_grad():
                head.fill_(math.nan if spoilt else 7.0)

    with_daemon(path, script)
    assert torch.equal(found[1], found[0] if spoilt else torch.full((1, 4), 7.0))


def test_whose_the_optimizers_state_is_where_it_is_a_part_of_the_model(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It came with the model, and the line said that it was of this node's own checkpoint."""

    async def exchange(_: dict[str, Any]) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"exchange": "gradients", "optimizer": True}

    def script() -> None:
        for _ in range(2):
            with peerd.attach(*normed()) as swarm:
                swarm.step()

    with_daemon(
        path, script, verbs={"exchange": exchange}, mode="allreduce", exchange="gradients", trigger="change:0.05"
    )
    told = [line for line in capsys.readouterr().err.splitlines() if "checkpoint" in line]
    given = "peerd: the model of step 1 comes from the daemon"
    assert told == [f"{given}, and so is the optimizer's state, in place of that of the checkpoint of step 1"]


def test_a_script_that_trains_another_model_than_it_gave_is_told(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made a new one, and each node trained its own, as if there were no others."""
    monkeypatch.setattr(session, "STILL_STEPS", 5)
    told: list[int] = []

    def script() -> None:
        model, optimizer = normed()
        with peerd.attach(model, optimizer) as swarm:

            def train(steps: int, *, stands: bool = False) -> None:
                for _ in range(steps):
                    model(torch.randn(8, 3)).square().mean().backward()
                    if not stands:
                        optimizer.step()
                    swarm._session._look(swarm.step_count + 1)  # type: ignore[union-attr]
                    swarm.step()
                told.append(capsys.readouterr().err.count("has not changed in 5 steps: does the optimizer step"))

            train(12)
            optimizer.param_groups[0]["lr"] = 0.0
            train(12)
            optimizer.param_groups[0]["lr"] = 0.01
            train(1, stands=True)  # a schedule that begins anew has set the next step's rate
            train(3)
            model.requires_grad_(False)
            model[2].requires_grad_(True)
            train(12, stands=True)
            train(12, stands=True)

    with_daemon(path, script)
    assert told == [0, 0, 0, 0, 1, 0]


def test_a_process_group_that_is_made_after_attach_ends_the_script(path: Path) -> None:
    """This rank alone would take corrections."""
    told: list[str] = []

    def script() -> None:
        with peerd.attach(*normed()) as swarm:
            swarm.step()
            distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
            try:
                swarm.step()
            except SystemExit as end:
                told.append(str(end))
            finally:
                distributed.destroy_process_group()

    with_daemon(path, script)
    assert told == ["peerd: the process group was made after peerd.attach: make it before, on all ranks"]


def test_a_session_that_has_ended_itself_is_not_finished_again(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where the node leaves while the script waits for its gradient's mean."""

    def train() -> None:
        with peerd.attach(*normed()) as swarm:
            swarm.step()
            assert swarm._session is not None
            swarm._session._end(1)

    def script() -> None:
        with pytest.raises(SystemExit):
            train()

    with_daemon(path, script)
    assert "went away" not in capsys.readouterr().err
    assert [file.name for file in (path.parent / "state" / "checkpoints").glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_while_the_last_checkpoint_is_written_the_model_is_the_daemons(
    path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    nodes: list[Node] = []
    let_go: list[bool] = []

    async def beside(node: Node) -> None:
        nodes.append(node)

    def save(folder: Path, generation: checkpoint.Generation) -> None:
        began = time.monotonic()
        while nodes[0].attached and time.monotonic() < began + 60:
            time.sleep(0.001)
        let_go.append(not nodes[0].attached)
        if interrupted:
            raise KeyboardInterrupt

    def script() -> None:
        swarm = peerd.attach(*normed())
        swarm.step()
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                swarm.finish()
        else:
            swarm.finish()
        assert swarm.alone
        swarm.step()  # a script may go on by itself

    monkeypatch.setattr(checkpoint, "save", save)
    status = with_daemon(path, script, beside).side.status
    assert status is not None
    assert (status.phase, status.step, let_go) == ("finished", 1, [True])


def test_a_worker_that_runs_the_script_anew_is_told_of_the_scripts_top(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told to end the training that it works for, which is attached."""

    def script() -> None:
        with peerd.attach(*normed()) as swarm:
            swarm.step()
            with monkeypatch.context() as worker:
                worker.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
                with pytest.raises(SystemExit, match="__main__"):
                    peerd.attach(*normed())
            swarm.step()

    status = with_daemon(path, script).side.status
    assert status is not None
    assert (status.step, status.phase) == (2, "finished")


@pytest.mark.parametrize("samples", [0, math.inf, math.nan, "many", None, torch.zeros(2), 1j])
def test_what_weighs_nothing_is_refused_by_one_line(samples: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERD_NAME", "nobody")
    model, optimizer = normed()
    swarm = peerd.attach(model, optimizer)
    swarm.weigh(torch.tensor(8))
    with pytest.raises(ValueError, match="should be a number above 0"):
        swarm.weigh(samples)


def test_a_mode_hears_how_large_batches_are_of_late(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[StepReport] = []

    def listening(said: Stepped) -> StepReport:
        heard.append(report_of(said))
        return heard[-1]

    def script(sizes: list[int]) -> None:
        with peerd.attach(*normed()) as swarm:
            for samples in sizes:
                swarm.step(samples=samples)

    monkeypatch.setattr(trainer_service, "report_of", listening)
    for sizes, mean in (([8, 0, 24], 16.0), ([0, 0], 0.0), ([10] * 300 + [50] * 1000, 50.0)):
        with_daemon(path, partial(script, sizes))
        assert heard[-1].samples == pytest.approx(mean, rel=1e-3), "a step that does not say its size says nothing"


def test_a_trainer_that_waits_at_a_barrier_goes_on_when_the_mode_changes(path: Path) -> None:
    reached: list[int] = []

    def script() -> None:
        model, optimizer = normed()
        with peerd.attach(model, optimizer) as swarm:
            for _ in range(9):
                swarm.step()
                reached.append(swarm.step_count)

    async def beside(node: Node) -> None:
        await until(lambda: node.side.status is not None and node.side.status.step == 3)
        await trio.sleep(0.05)
        assert reached == [1, 2], "a round of two does not come"
        node.side.plans.propose("allreduce every=2 overlap=blocking")  # from barrier to barrier
        await until(lambda: node.side.status is not None and node.side.status.step == 4)
        node.side.plans.propose("gossip")

    beside_a_wait: dict[str, Any] = {"mode": "allreduce", "overlap": "blocking", "every": 3, "min_peers": 2}
    side = with_daemon(path, script, beside, **beside_a_wait).side
    assert reached == [*range(1, 10)]
    assert side.status is not None
    assert side.status.phase == "finished"
    assert side.plans.plan.number == 2


def test_spoilt_statistics_are_rolled_back(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def script() -> None:
        model, optimizer = normed()
        with peerd.attach(model, optimizer) as swarm:
            weights = model.get_parameter("0.weight").detach().clone()
            model(torch.full((8, 3), float("nan")))  # and no step, as an AMP scaler does: no parameter is touched
            assert not torch.isfinite(model.get_buffer("1.running_mean")).all()
            swarm.step()
            assert torch.isfinite(model.get_buffer("1.running_mean")).all()
            assert torch.equal(model.get_parameter("0.weight"), weights)
            for _ in range(2 * session.ROLLBACKS_MAX):
                swarm.step()

    status = with_daemon(path, script).side.status
    assert status is not None
    assert status.rollbacks == 1
    assert "the model is not finite at step 1: back to its last published copy" in capfd.readouterr().err


def test_a_model_that_stays_spoilt_ends_the_script(path: Path) -> None:
    def train() -> None:
        model, optimizer = normed()
        with peerd.attach(model, optimizer) as swarm:
            while True:
                with torch.no_grad():
                    model.get_parameter("0.weight").fill_(float("inf"))
                swarm.step()

    def script() -> None:
        with pytest.raises(SystemExit, match="not finite at step 4, again after 3 returns"):
            train()

    status = with_daemon(path, script).side.status
    assert status is not None
    assert status.rollbacks == session.ROLLBACKS_MAX


def test_a_finite_number_beyond_float32_is_not_the_learning_rates_fault(path: Path) -> None:
    def train() -> None:
        model, optimizer = normed()
        model.register_buffer("seen", torch.ones((), dtype=torch.float64))
        with peerd.attach(model, optimizer) as swarm:
            swarm.step()
            model.get_buffer("seen").fill_(1e300)
            swarm.step(loss=math.nan)

    def script() -> None:
        with pytest.raises(SystemExit, match=r"^peerd: seen holds a float64 beyond what float32 can, .* it private"):
            train()

    status = with_daemon(path, script).side.status
    assert status is not None
    assert status.rollbacks == 0


def test_the_daemon_hears_why_no_checkpoint_is_written_and_that_one_is_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, told = checkpoint.save, list[str | None]()

    def full(folder: Path, generation: checkpoint.Generation) -> None:
        if not told:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(folder, generation)

    monkeypatch.setattr(checkpoint, "save", full)

    def script() -> None:
        with peerd.attach(*normed()) as swarm:
            until = time.monotonic() + 30
            while len(told) < 2 and time.monotonic() < until:
                swarm.step()

    async def look(node: Node) -> None:
        for fails in (True, False):
            while node.side.status is None or (node.side.status.checkpoint_failed is not None) is not fails:
                await trio.sleep(0.001)
            told.append(node.side.status.checkpoint_failed)

    with_daemon(path, script, look, checkpoint_every_s=1e-6)
    why, then = told
    assert re.fullmatch(r"at step \d+: No space left on device; .*(is kept|none yet)", str(why))
    assert then is None


@pytest.mark.parametrize("ends", [False, True])
def test_checkpoints_of_a_past_that_the_swarm_did_not_take_are_put_aside(
    ends: bool, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of who was cut off alone: its swarm's model is of an earlier step. All nodes would go on from them, as they are
    the latest, if all were started again.
    """
    monkeypatch.setattr("peerd.trainer.checkpoint_writer.FIRST_S", 0.0)
    monkeypatch.setattr("peerd.trainer.checkpoint_writer.COST_MAX", 1.0)
    folders: list[Path] = []

    def script() -> None:
        with peerd.attach(*normed()) as swarm:
            own = swarm._session
            assert own is not None
            folders.append(own.checkpoints.folder)
            while not any(step >= 10 for step in map(step_of, generations(own.checkpoints.folder))):
                swarm.step()
            own._obey(Load(own._client.published_to, 3))
            assert swarm.step_count == 3
            swarm.step()
            while not ends and 4 not in map(step_of, generations(own.checkpoints.folder)):
                time.sleep(0.01)
                own.on_step(4, Figures(None, 0, {}))
        assert swarm.step_count == 4

    with_daemon(path, script)
    folder = folders[0]
    assert max(map(step_of, generations(folder))) == 4
    aside = folder.with_name(f"{folder.name}-passed")
    assert max(map(step_of, generations(aside))) >= 10
    assert f"checkpoints of later steps than 3 are in {aside} now" in capsys.readouterr().err


def test_the_step_of_a_swarms_model_is_shown_though_it_is_an_earlier_one(path: Path) -> None:
    """Who was cut off alone comes back to less than it had made: its status went on to show that, with no report."""
    nodes = list[Node]()

    async def look(node: Node) -> None:
        nodes.append(node)

    def shown() -> int:
        status = trio.from_thread.run_sync(lambda: nodes[0].side.status)
        assert status is not None
        return status.step

    def script() -> None:
        with peerd.attach(*normed()) as swarm:
            for _ in range(10):
                swarm.step()
            assert shown() == 10
            own = swarm._session
            assert own is not None
            own._obey(Load(own._client.published_to, 3))
            assert shown() == 3
            swarm.step()
            assert shown() == 4

    with_daemon(path, script, look, trigger="change:1000")


def test_no_checkpoint_holds_a_model_that_is_not_finite(path: Path) -> None:
    """Though no loss tells of it and nothing else has the model looked at."""

    def script() -> None:
        model, optimizer = normed()
        with peerd.attach(model, optimizer) as swarm:
            for step in range(1, 200):
                if step % 7 == 0:
                    with torch.no_grad():
                        model.get_parameter("2.weight").fill_(float("nan"))
                swarm.step()

    with_daemon(path, script, trigger="change:1000", checkpoint_every_s=1e-6)
    kept = sorted((path.parent / "state" / "checkpoints").glob("step-*/*.safetensors"))
    assert kept
    for file in kept:
        assert all(
            bool(torch.isfinite(tensor).all()) for tensor in load_file(file).values() if tensor.is_floating_point()
        )


@pytest.mark.parametrize("count", [3, 300])
def test_a_model_of_too_many_tensors_is_told_what_to_do(
    path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "MESSAGE_BYTES_MAX", 1000)
    model = nn.ParameterList([torch.zeros(1) for _ in range(count)])

    def script() -> None:
        peerd.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)).finish()

    if count == 3:
        assert with_daemon(path, script).side.tensors == [f"{index} float32 1" for index in range(count)]
        return
    with pytest.raises(BaseExceptionGroup) as failure:
        with_daemon(path, script)
    (refusal,) = failure.value.exceptions
    assert isinstance(refusal, SystemExit)
    assert str(refusal).startswith(
        "peerd: the names of the model's 300 tensors are too long together (a local message of "
    )
    assert str(refusal).endswith("; join small parameters into larger ones")


def test_a_model_that_the_daemon_refuses_ends_the_script_with_its_words(path: Path) -> None:
    def script() -> None:
        model, optimizer = normed()
        with peerd.attach(model, optimizer):
            pass
        other = nn.Linear(3, 4)
        with pytest.raises(SystemExit, match=r"^peerd: this node holds another model: 0.weight float32 4x3 here, "):
            peerd.attach(other, torch.optim.SGD(other.parameters(), lr=0.1))

    with_daemon(path, script)


def test_variances_that_are_slices_of_a_table_are_known_to_the_daemon(path: Path) -> None:
    def script() -> None:
        model, optimizer = normed()
        model.register_buffer("table", torch.ones(2, 3))
        model.register_buffer("ema_var", model.get_buffer("table")[1])
        with peerd.attach(model, optimizer) as swarm:
            swarm.step()

    layout = with_daemon(path, script).side.layout
    assert layout is not None
    assert sorted(stop - start for start, stop in layout.variances) == [3, 3, 4], "of the table, the slice, the norm"


def test_the_rows_of_padding_are_known_to_the_daemon(path: Path) -> None:
    """What another moves by one bit a value went into them, too."""

    def script() -> None:
        model = nn.Sequential(nn.Linear(2, 5), nn.Embedding(5, 3, padding_idx=-1))
        with peerd.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as swarm:
            swarm.step()

    model = with_daemon(path, script).side.runner.core.model
    assert model is not None
    before = model.values().copy()
    model.add(np.ones(30, np.float32))
    assert np.flatnonzero(model.values() == before).tolist() == [27, 28, 29]


@pytest.mark.parametrize("exclude", [(), "first.*"])
@pytest.mark.parametrize("map", ["householder", "cayley"])
def test_reflections_that_no_codec_keeps_are_told(
    path: Path, capsys: pytest.CaptureFixture[str], map: str, exclude: Any
) -> None:
    """Columns of the matrix became zeros, and the loss as large as at first, without a word."""

    def script() -> None:
        model = nn.Sequential()
        model.add_module("first", orthogonal(nn.Linear(2, 5), orthogonal_map=map))
        model.add_module("last", nn.Linear(5, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with peerd.attach(model, optimizer, exclude=exclude) as swarm:
            swarm.step()

    with_daemon(path, script)
    told = "peerd: first.parametrizations.weight.original is made orthogonal by Householder reflections"
    assert capsys.readouterr().err.count(told) == (map == "householder" and not exclude)


@pytest.mark.parametrize("shape", [(2, 3, 3), (3, 3)])
def test_an_embedding_whose_weight_has_no_row_of_padding_is_taken_as_it_is(path: Path, shape: tuple[int, ...]) -> None:
    """A weight of three dimensions was refused, and of one with fewer rows another row was held at zeros."""

    def script() -> None:
        model = nn.Sequential(nn.Embedding(5, 3, padding_idx=-1))
        model[0].weight = nn.Parameter(torch.zeros(shape))
        with peerd.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as swarm:
            swarm.step()

    model = with_daemon(path, script).side.runner.core.model
    assert model is not None
    model.add(np.ones(model.total, np.float32))
    assert model.values().all()


def test_a_buffer_that_is_another_ones_bytes_is_refused(path: Path) -> None:
    def script() -> None:
        model, optimizer = normed()
        model.register_buffer("table", torch.ones(4))
        model.register_buffer("halves", model.get_buffer("table").view(torch.float16))
        with pytest.raises(SystemExit, match="peerd: table and halves are two tensors in one memory"):
            peerd.attach(model, optimizer)

    with_daemon(path, script)


def linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights_after(path: Path | None, *, quasi_global: bool) -> list[float]:
    """Of three steps in a swarm of one, or alone, and three more behind them."""
    found: list[float] = []

    def script() -> None:
        torch.manual_seed(1)
        model, optimizer = linear()

        def three() -> None:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                swarm.step()
            found.extend(model.weight.detach().reshape(-1).tolist())

        with peerd.attach(model, optimizer, quasi_global_momentum=quasi_global) as swarm:
            three()
        assert swarm.alone
        optimizer.state.clear()
        three()

    script() if path is None else with_daemon(path, script)
    return found


def test_quasi_global_momentum_is_for_as_long_as_there_is_a_swarm(path: Path) -> None:
    without = weights_after(None, quasi_global=False)
    assert weights_after(None, quasi_global=True) == without
    with_it = weights_after(path, quasi_global=True)
    first, then = slice(0, 3), slice(3, 6)
    assert with_it[first] != without[first]
    moved = [b - a for a, b in zip(with_it[first], with_it[then], strict=True)]
    usual = [b - a for a, b in zip(without[first], without[then], strict=True)]
    assert moved == pytest.approx(usual)


def test_checkpoints_that_cannot_be_written_are_told_at_attach(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "HEADER_BYTES_MAX", 1000)
    told = []

    def script() -> None:
        with peerd.attach(*linear()):
            told.append(capsys.readouterr().err.count("peerd: checkpoints may fail: "))

    with_daemon(path, script)
    assert told == [1]


def test_quasi_global_momentum_that_sees_no_step_says_so_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a CUDA graph that was captured before: its replays call no hooks."""
    monkeypatch.setattr(swarm_module, "STILL_STEPS", 5)
    told = []

    def script() -> None:
        model, optimizer = linear()
        with peerd.attach(model, optimizer, quasi_global_momentum=True) as swarm:
            for replays in (4, 4, 11):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                for _ in range(replays):
                    swarm.step()
                told.append(capsys.readouterr().err.count("quasi_global_momentum does nothing"))

    with_daemon(path, script)
    assert told == [0, 0, 1]


def test_a_checkpoint_of_a_training_that_was_broken_off_is_written_to_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A notebook's next cell attaches again, and clears away what nobody writes any more."""
    begun = threading.Event()

    def slow(*given: Any, **named: Any) -> None:
        if not begun.is_set():
            begun.set()
            time.sleep(1)
        save_file(*given, **named)

    monkeypatch.setattr(checkpoint, "save_file", slow)

    def script() -> None:
        model, optimizer = linear()
        with suppress(KeyboardInterrupt), peerd.attach(model, optimizer) as swarm:
            assert swarm._session is not None
            swarm._session.checkpoints._writer._thread.join()
            swarm._session.checkpoints._writer.hasten()
            swarm.step()
            assert begun.wait(60)
            writes = swarm._session.checkpoints._writer._thread
            raise KeyboardInterrupt
        with peerd.attach(model, optimizer) as swarm:
            swarm.step()
        writes.join()

    with_daemon(path, script)
    assert "no checkpoint written" not in capfd.readouterr().err


def test_an_attach_that_fails_leaves_no_descriptor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's kernel, in which a cell is tried again and again, may have 1,024."""
    made: list[int] = []
    create = SharedMemory.create

    def creates(*given: Any) -> SharedMemory:
        memory = create(*given)
        made.append(os.fstat(memory.fd).st_ino)
        return memory

    monkeypatch.setattr(SharedMemory, "create", creates)

    def script() -> None:
        model = nn.ParameterList([torch.zeros(0)])
        with pytest.raises(SystemExit, match="the model has nothing to share"):
            peerd.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with_daemon(path, script)
    assert made
    left = [os.stat(link).st_ino for link in Path("/proc/self/fd").iterdir() if "memfd:peerd" in os.path.realpath(link)]
    assert set(left).isdisjoint(made)


def test_a_refused_attach_leaves_the_momentum_as_it_was(path: Path) -> None:
    """A notebook catches it, and its next cell attaches again: two of it would each put the other's away."""
    hooks: list[int] = []

    def script() -> None:
        model, optimizer = linear()
        with pytest.raises(SystemExit, match="fits no tensor of the model"):
            peerd.attach(model, optimizer, exclude=["typo"], quasi_global_momentum=True)
        hooks.append(len(optimizer._optimizer_step_pre_hooks))
        with peerd.attach(model, optimizer, quasi_global_momentum=True) as swarm:
            hooks.append(len(optimizer._optimizer_step_pre_hooks))
            swarm.step()

    with_daemon(path, script)
    assert hooks == [0, 1]


@pytest.mark.parametrize(
    ("make", "exchange", "line"),
    [
        (normed, "weights", "peerd: quasi_global_momentum needs torch.optim.SGD, not Adam"),
        (linear, "gradients", "peerd: quasi_global_momentum: nodes that exchange gradients have one"),
    ],
)
def test_quasi_global_momentum_where_it_cannot_be(path: Path, make: Any, exchange: str, line: str) -> None:
    async def asked(_: dict[str, Any]) -> dict[str, Any]:
        return {"exchange": exchange, "optimizer": True}

    def script() -> None:
        with pytest.raises(SystemExit, match=line):
            peerd.attach(*make(), quasi_global_momentum=True)

    async def refused(_: dict[str, Any]) -> dict[str, Any]:
        return {}

    with_daemon(path, script, verbs={"exchange": asked, "refused": refused})


def test_an_optimizer_that_steps_by_many_passes_is_torchs_own(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LBFGS calls a closure several times a step; its memory, of lists of tensors, is in no checkpoint, as is told."""

    def train(*, alone: bool, steps: int) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        x, y = torch.randn(16, 3), torch.randn(16, 1)

        def closure() -> float:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return float(loss.detach())

        with nullcontext() if alone else peerd.attach(model, optimizer) as swarm:
            for _ in range(steps):
                optimizer.step(closure)  # type: ignore[no-untyped-call]
                if swarm is not None:
                    swarm.step()
        return list(model.parameters())

    def script() -> None:
        bare, ours = train(alone=True, steps=6), train(alone=False, steps=6)
        assert all(torch.equal(one, other) for one, other in zip(bare, ours, strict=True))
        train(alone=False, steps=6)

    status = with_daemon(path, script).side.status
    assert status is not None
    assert status.step == 12
    assert "the checkpoint of step 6, this node's own, has no state that fits the optimizer" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["allreduce", "hardsync"])
def test_an_optimizer_that_was_replaced_where_gradients_are_exchanged_is_told(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Its momentum was no part of the model, so a newcomer made other steps; nor did its rate count."""
    monkeypatch.setattr(session, "STILL_STEPS", 5)
    told: list[int] = []

    async def exchange(_: dict[str, Any]) -> dict[str, Any]:
        return {"exchange": "gradients", "optimizer": mode == "allreduce"}

    def script() -> None:
        model, given = normed()
        with peerd.attach(model, given) as swarm:
            for optimizer in (given, torch.optim.Adam(model.parameters())):
                for step in range(12):
                    model(torch.randn(8, 3)).square().mean().backward()
                    if step % 5:  # a scaler leaves some out
                        optimizer.step()
                    optimizer.zero_grad()
                    swarm.step()
                told.append(capsys.readouterr().err.count("has not stepped in 5 steps: does another one"))

    with_daemon(path, script, verbs={"exchange": exchange}, mode=mode, exchange="gradients", trigger="change:0.05")
    assert told == [0, 1]


def test_sparse_gradients_are_refused_before_a_step_where_they_would_be_exchanged(path: Path) -> None:
    """The first backward pass ended the script, which the daemon started again, to the same end."""
    refusals = []

    async def asked(_: dict[str, Any]) -> dict[str, Any]:
        return {"exchange": "gradients", "optimizer": False}

    async def refused(message: dict[str, Any]) -> dict[str, Any]:
        refusals.append(message)
        return {}

    def script() -> None:
        model = nn.ModuleDict({"words": nn.Embedding(9, 2, sparse=True), "bag": nn.EmbeddingBag(9, 2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(SystemExit, match=r"the gradient of words\.weight is sparse: make it with sparse=False"):
            peerd.attach(model, optimizer)
        peerd.attach(model, optimizer, exclude=["words.*"])._close()

    with_daemon(path, script, verbs={"exchange": asked, "refused": refused}, mode="hardsync", exchange="gradients")
    assert len(refusals) == 1


@pytest.mark.parametrize("by_steps", [True, False])
def test_a_run_that_ends_before_its_last_step_says_why_once(
    path: Path, capfd: pytest.CaptureFixture[str], by_steps: bool
) -> None:
    made = 0

    def script() -> None:
        nonlocal made
        model = nn.Linear(2, 1)
        with peerd.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as swarm:
            if by_steps:
                for _ in swarm.steps(10**6):
                    swarm.step()
            else:
                while not swarm.is_over(10**6):
                    swarm.step()
                assert swarm.is_over(10**6)
            made = swarm.step_count

    async def beside(node: Node) -> None:
        await until(lambda: node.attached and node.side.status is not None and node.side.status.step > 2)
        assert node.side.runner.session is not None
        node.side.runner.session.board.say_others(OVER)

    with_daemon(path, script, beside)
    late = "peerd: this node left out steps that most others were past (it is slower, or was restarted, or came late)"
    line = f"{late}: its run ends with theirs, after {made:,} of 1,000,000 steps"
    assert capfd.readouterr().err.count(line) == 1


def test_epochs_that_each_say_how_long_the_run_is_by_then(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Others who had made all steps of the first seemed far ahead in the second, whose steps were left out."""
    numbers: list[list[int]] = []

    def script() -> None:
        with peerd.attach(*normed()) as swarm:
            for total in (10, 20, 20):
                numbers.append([])
                for number in swarm.steps(total):
                    numbers[-1].append(number)
                    swarm._others = PARTS
                    swarm.step()
                    swarm._others = PARTS

    with_daemon(path, script)
    assert numbers == [[0, 9], list(range(10, 20)), []]
    line = "swarm.steps(20) has none left: it counts the whole run's; for another epoch give what all have together"
    assert capsys.readouterr().err.count(f"peerd: {line}, swarm.steps(40) and so on\n") == 1


def test_the_numbers_of_steps_go_back_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was cut off alone is further than the others whose model it takes over: so would its learning rate be, and
    its run would end before theirs.
    """
    monkeypatch.setenv("PEERD_NAME", "nobody")
    swarm = peerd.attach(*normed())
    numbers: list[int] = []
    for number in swarm.steps(12):
        numbers.append(number)
        if numbers.count(8) == 1 and number == 8:
            swarm._step_count = 3  # as a session's is with the model that comes in a backward pass
        swarm.step()
    assert numbers == [*range(9), *range(4, 12)]
    assert swarm.step_count == 12


@pytest.mark.parametrize("started", [True, False])
def test_a_script_of_a_daemons_ends_with_it_and_another_trains_on(
    path: Path, started: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if started:  # within another command, whose end alone the kernel sees to
        monkeypatch.setenv("PEERD_DAEMON", "1")
    else:
        monkeypatch.delenv("PEERD_DAEMON", raising=False)
    ends = pytest.raises(SystemExit, match="started this script went away") if started else nullcontext()

    def script() -> None:
        swarm = peerd.attach(*normed())
        swarm.step()
        assert swarm._session is not None
        swarm._session._socket._socket.shutdown(socket.SHUT_RDWR)
        with ends:
            for _ in range(3):
                time.sleep(2 * session.LISTEN_EVERY_S)
                swarm.step()
        assert swarm.alone

    with_daemon(path, script)
    comes = pytest.raises(SystemExit, match="does not answer") if started else nullcontext()
    with comes:
        assert peerd.attach(*normed()).alone
    assert ("training alone" in capsys.readouterr().err) is not started


def test_a_node_that_ends_as_a_script_looks_for_one_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PEERD_SOCKET")
    monkeypatch.setattr(swarm_module, "find_node", lambda _: path)
    assert peerd.attach(*normed()).alone
    assert f"the node at {path} does not answer (No such file or directory)" in capsys.readouterr().err


def test_no_answer_overtakes_what_is_said_of_a_copy() -> None:
    """The daemon goes by the new barrier from that answer on, and the copy is of a step before it."""
    one, sent = session.Session.__new__(session.Session), list[dict[str, Any]]()
    one._publication = SimpleNamespace(wait=lambda: None, device_s=0.0)  # type: ignore[assignment]
    one._socket = SimpleNamespace(send=lambda message, **_: sent.append(message))  # type: ignore[assignment]
    one._copy_cost_s, one._client, one._answered = 0.0, TrainerClient(), []
    one._unsaid = Stepped(5, 0.0, 1.0, False, 1, False)
    one._obey(BarrierIs(3))
    assert [message["kind"] for message in sent] == [
        encoded(said)["kind"] for said in (Stepped(5, 0.0, 1.0, False, 1, False), BarrierHeard())
    ]
