"""A whole trainer on a device that is as late as CUDA may be: what its daemon reads, and what it takes from it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import late_cuda as late
import numpy as np
import pytest
import torch
from late_cuda import CUDA, Late, late_cuda, moved
from model_node import Node, until
from test_trainer import path, with_daemon
from torch import nn

import peerd
from peerd.trainer import kept as kept_module
from peerd.trainer import swarm as swarm_module
from peerd.trainer.figures import FromGpus
from peerd.trainer.inputs import KEPT, STEPS, _digest_of, _kept
from peerd.trainer.kept import Kept
from peerd.trainer.optimizers import NOT_ASKED, forget, learning_rates
from peerd.trainer.rest import Rest
from peerd.trainer.session import Refused, Session
from peerd.training.model.quasi_global import QuasiGlobalMomentum

__all__ = ["path"]

COPIES, CORRECTIONS = 12, 6
STEPS_MAX = 100_000


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
def test_the_daemon_reads_whole_copies_and_each_correction_comes_once(path: Path, eagerness: float) -> None:
    """A step adds 1, a correction 256: a torn or early copy, a lost correction, or memory of others' would show."""
    found: list[tuple[int, int, set[float]]] = []
    waits: list[int] = []
    corrected = 0

    def script() -> None:
        with late_cuda(1, eagerness) as gpu:
            model = moved(nn.Sequential(nn.Linear(30, 1, bias=False), nn.Linear(1, 20, bias=False)))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.0)
            with peerd.attach(model, torch.optim.SGD(model.parameters(), lr=1.0)) as swarm:
                while swarm.step_count < STEPS_MAX and (
                    len(found) < COPIES or corrected < CORRECTIONS or 0 not in waits
                ):
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.add_(torch.full(parameter.shape, 1.0, device=CUDA))
                    waits.append(gpu.waits_of(swarm.step))
            ends = {float(value) for one in model.parameters() for value in one.detach().cpu().flatten()}
            assert not gpu.pinned, "the addresses are given back"
            assert ends == {swarm.step_count + 256.0 * corrected}

    async def beside(node: Node) -> None:
        nonlocal corrected
        await until(lambda: node.attached and node.side.status is not None and node.side.status.step > 2)
        while len(found) < COPIES or corrected < CORRECTIONS:
            values, step = await node.side.model_values()
            found.append((step, corrected, {*np.asarray(values).tolist()}))
            model = node.side._runner.core.model
            assert model is not None
            if corrected < CORRECTIONS:
                model.add(np.full(50, 256.0, np.float32))
                corrected += 1

    status = with_daemon(path, script, beside).side.status
    assert status is not None
    assert status.phase == "finished"
    assert all(values == {step + 256.0 * given} for step, given, values in found)
    assert min(waits) == 0, "of a step of which nothing is wanted nobody waits for the device"


def test_memory_that_cuda_does_not_pin_is_told_and_ends_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuses(start: int, size: int, flags: int) -> int:
        late._gpu().error = "CUDA error: out of memory"  # kept for whoever asks next
        return 2

    monkeypatch.setattr(late._Runtime, "cudaHostRegister", staticmethod(refuses))

    def script() -> None:
        with late_cuda(1):
            model = moved(nn.Linear(3, 1))
            with peerd.attach(model, torch.optim.SGD(model.parameters(), lr=1.0)) as swarm:
                swarm.step()

    status = with_daemon(path, script).side.status
    assert status is not None
    assert status.phase == "finished"
    assert "CUDA does not pin the shared memory: copies of the model will be slower" in capfd.readouterr().err


def test_a_script_that_is_refused_gives_the_addresses_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: Session, past: object) -> None:
        raise Refused("as a daemon may")

    monkeypatch.setattr(Session, "_attach", refuses)

    def script() -> None:
        with late_cuda(1) as gpu:
            model = moved(nn.Linear(3, 1))
            with pytest.raises(SystemExit, match="as a daemon may"):
                peerd.attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
            assert not gpu.pinned

    with_daemon(path, script)


def test_a_forked_child_lets_nothing_go_that_is_cudas(path: Path) -> None:
    def script() -> None:
        with late_cuda(1) as gpu:
            model = moved(nn.Linear(3, 1))
            with peerd.attach(model, torch.optim.SGD(model.parameters(), lr=1.0)) as swarm:
                swarm.step()
                session = weakref.ref(swarm._session)
                swarm_module._in_forked_child()  # as in one; this test has none, and ends alone
                assert swarm.alone
                gc.collect()
                assert session() is not None
                assert gpu.pinned
        swarm_module._OF_PARENTS.clear()

    with_daemon(path, script)


def test_nor_does_that_of_another_rank_or_of_a_momentum_that_goes_with_the_swarm() -> None:
    """What was read in a stream other than its own, or is cudaMallocAsync's, is let go with calls of CUDA's."""

    class Others:
        """As a Follower: of this rank's own, the copy of its shards."""

        step = 0
        alone = False

    with late_cuda(1):
        model = moved(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        momentum = QuasiGlobalMomentum(optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.full(parameter.shape, 1.0, device=CUDA)
        optimizer.step()
        held: list[weakref.ref[object]] = [weakref.ref(kept.momentum.memory) for kept in momentum._kept.values()]  # type: ignore[attr-defined]
        others: Any = Others()
        held.append(weakref.ref(others))
        swarm = peerd.Swarm(None, None, others, momentum)
        assert not swarm.alone
        del others
        swarm_module._in_forked_child()
        gc.collect()
        assert all(one() is not None for one in held)
        swarm_module._OF_PARENTS.clear()


@pytest.mark.parametrize("eagerness", [0.0, 0.5, 0.9])
def test_figures_on_the_device_come_later_and_nobody_waits(eagerness: float) -> None:
    with late_cuda(2, eagerness) as gpu:
        figures = FromGpus()
        seen = [0.0]

        def step(number: float) -> None:
            loss = torch.full((), number, device=CUDA, requires_grad=True) * 2
            come = figures.exchange({"loss": loss, "here": number})
            assert come.pop("here") == number
            seen.extend(float(value) / 2 for value in come.values())

        waits = [gpu.waits_of(step, float(number)) for number in range(1, 101)]
        assert not any(waits)
        assert len(seen) > 10, "they come while steps are made"
        assert gpu.waits_of(lambda: seen.append(float(figures.rest()["loss"]) / 2)) > 0
        assert seen == sorted({*seen})
        assert seen[-1] == 100.0
        assert figures.rest() == {}
        gc.collect()
        assert not gpu.pinned_by_torch


def test_a_default_device_of_the_scripts_changes_nothing(path: Path) -> None:
    """As `torch.set_default_device("cuda")`: what peerd makes in the host's memory would be elsewhere."""
    found: list[list[float]] = []

    def script() -> None:
        for number in range(2):  # the other resumes
            model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            table = {"w": torch.full((2,), 3.0 + number)}
            x = torch.ones(4, 3)
            torch.set_default_device("meta")
            try:
                with peerd.attach(model, optimizer, keep={"table": table}) as swarm:
                    for _ in swarm.steps(3 + 3 * number):
                        optimizer.zero_grad()
                        model(x).square().mean().backward()
                        optimizer.step()
                        swarm.step(loss=1.0, samples=4)
                assert swarm.step_count == 3 + 3 * number
            finally:
                torch.set_default_device(None)
            found.append(table["w"].tolist())

    with_daemon(path, script)
    assert found == [[3.0, 3.0], [3.0, 3.0]]


def test_the_last_figures_of_a_script_are_waited_for_at_its_end(path: Path) -> None:
    def script() -> None:
        with late_cuda(1, 0.0):
            model = moved(nn.Linear(3, 1))
            with peerd.attach(model, torch.optim.SGD(model.parameters(), lr=1.0)) as swarm:
                for number in range(1, 4):
                    swarm.step(loss=torch.full((), float(number), device=CUDA), samples=2)
                swarm.step(accuracy=torch.full((), 0.5, device=CUDA))

    status = with_daemon(path, script).side.status
    assert status is not None
    assert (status.step, status.loss, status.metrics) == (4, 3.0, {"accuracy": 0.5})


def test_a_rate_on_the_device_is_waited_for_when_it_has_changed() -> None:
    with late_cuda(1) as gpu:
        rate = Late(torch.tensor(0.5))
        optimizer = torch.optim.Adam(moved(nn.Linear(3, 1)).parameters(), lr=rate, capturable=True)
        assert learning_rates(optimizer) == [0.5]
        assert gpu.waits_of(learning_rates, optimizer) == 0
        rate.fill_(0.25)
        assert gpu.waits_of(learning_rates, optimizer) == 1
        assert learning_rates(optimizer) == [0.25]


@pytest.mark.parametrize("kind_of", sorted(NOT_ASKED, key=str))
def test_a_momentum_is_forgotten_where_it_is(kind_of: Any) -> None:
    """SGD is not asked whether it is capturable: a CUDA graph of any may have its addresses."""
    with late_cuda(1):
        held = list(moved(nn.Linear(3, 1, bias=False)).parameters())
        optimizer = kind_of(held, momentum=0.9)
        buffers = [Late(torch.full(parameter.shape, torch.nan)) for parameter in held]
        optimizer.state.update(
            {parameter: {"momentum_buffer": buffer} for parameter, buffer in zip(held, buffers, strict=True)}
        )
        forget(optimizer)
        for parameter, buffer in zip(held, buffers, strict=True):
            now = optimizer.state[parameter]["momentum_buffer"]
            assert now is not buffer
            assert isinstance(now, Late)
            assert now.memory is buffer.memory
            assert not now.cpu().any()


def test_what_is_kept_comes_back_to_the_device() -> None:
    """As torch.load gives it back: averaged weights of a script's own are used as they are."""

    class Averages:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    def fill(device: torch.device, value: float) -> None:
        of, both, ema = (torch.full((2,), value + number, device=device) for number in range(3))
        own.state = {"of": [of], "both": (both, 3), "rng": torch.full((3,), 1, device="cpu")}
        table["ema"] = {"w": ema}

    own, table = Averages(), dict[str, Any]()
    kept = Kept({"own": own, "table": table})
    fill(torch.device("cpu"), 5.0)
    plain, tensors = kept.capture()
    assert plain["table"]["dict"][0][1]["dict"][0][1] == {"tensor": ["kept.table.ema.w", "cpu"]}
    plain["table"]["dict"][0][1]["dict"][0][1] = {"tensor": "kept.table.ema.w"}  # as earlier versions have it
    with late_cuda(1):
        fill(CUDA, 0.0)
        kept.restore(plain, tensors, 7)
        found = [own.state["of"][0], own.state["both"][0], table["ema"]["w"]]
        assert [one.device for one in [*found, own.state["rng"]]] == [CUDA, CUDA, CUDA, torch.device("cpu")]
        assert [one.cpu().tolist() for one in found] == [[5.0, 5.0], [6.0, 6.0], [7.0, 7.0]]
        assert own.state["both"][1] == 3


def test_frozen_weights_are_copied_before_attach_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in another thread ends the capture of a CUDA graph; what is on the disk already is not copied."""
    write, devices = Rest.write, list[list[str]]()

    def noted(rest: Rest, folder: Path) -> None:
        devices.append([value.device.type for value in rest._tensors.values()])
        write(rest, folder)

    monkeypatch.setattr(Rest, "write", noted)

    def script() -> None:
        with late_cuda(1):
            model = moved(nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)))
            next(model.parameters()).requires_grad_(False)
            for _ in range(2):
                with peerd.attach(model, torch.optim.SGD(model.parameters(), lr=1.0)) as swarm:
                    swarm.step()

    with_daemon(path, script)
    assert devices == [["cpu"], ["cuda"]]


def test_what_is_kept_and_made_only_later_comes_back_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As averages that a script makes at its first step, and finds then."""
    monkeypatch.setattr(kept_module, "_plain", lambda tensor, _: tensor)  # the device's are of a class, in one process
    table: dict[str, Any] = {}
    kept = Kept({"table": table})
    with late_cuda(1):
        table |= {"ema": torch.full((2,), 5.0, device=CUDA), "rng": torch.full((3,), 1, device="cpu")}
        plain, captured = kept.capture()
        tensors = {name: tensor.cpu() for name, tensor in captured.items()}
        table.clear()
        kept.restore(plain, tensors, 7)
        assert [table["ema"].device, table["rng"].device] == [CUDA, torch.device("cpu")]
        assert table["ema"].cpu().tolist() == [5.0, 5.0]
    table.clear()
    kept.restore(plain, tensors, 7)
    assert table["ema"].device.type == "cpu", "there is no GPU any more"
    assert table["ema"] is not tensors["kept.table.ema"]
    assert table["ema"].tolist() == [5.0, 5.0]


def test_a_backward_pass_of_a_cuda_graph_exchanges_no_gradients() -> None:
    session: Any = SimpleNamespace(_parts=object(), _is_owed=False)
    with late_cuda(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(SystemExit, match="goes into a CUDA graph"):
            Session._on_gradient(session, Late(torch.zeros(1)))


def test_a_step_in_a_cuda_graph_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its replays would exchange nothing, and nobody would say so."""

    def script() -> None:
        with late_cuda(1):
            model = moved(nn.Linear(3, 1))
            with peerd.attach(model, torch.optim.SGD(model.parameters(), lr=1.0)) as swarm:
                swarm.step()
                with monkeypatch.context() as patch:
                    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                    with pytest.raises(SystemExit, match="after each replay"):
                        swarm.step(loss=torch.full((), 1.0, device=CUDA))
                assert swarm.alone

    with_daemon(path, script)


def test_a_digest_of_inputs_waits_for_the_device_at_its_end() -> None:
    """At the last of its steps; beside numbers that are on the host it is what it would be there."""
    batches = [torch.randn(3, KEPT) for _ in range(STEPS)]
    times = [torch.tensor(float(number)) for number in range(STEPS)]
    on_host = _digest_of([[_kept(batch), _kept(time)] for batch, time in zip(batches, times, strict=True)])
    with late_cuda(1, 0.0) as gpu:
        given = [batch.to(CUDA) for batch in batches]
        steps: list[list[torch.Tensor]] = []
        for batch, time in zip(given, times, strict=True):
            assert gpu.waits_of(lambda batch=batch, time=time: steps.append([_kept(batch), _kept(time)])) == 0
            batch.zero_()  # the script's next batch, in the same memory
        assert _digest_of(steps) == on_host is not None
