"""Gradients over real daemons are torch's DDP: one model of the same data, and of the survivors' after a death."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import ddp_zoo
import pytest
import script_nodes
import torch
from safetensors.torch import load_file
from script_nodes import Swarm
from torch import nn

import peerd
from peerd.local.local_socket import LocalSocket
from peerd.protocol.trainer import GradientReady
from peerd.protocol.trainer_client import ClientState
from peerd.trainer.session import Session
from peerd.training.model import gradient_parts
from peerd.training.model.gradients import FlatGradients
from peerd.training.rounds import collective
from peerd.training.tasks import digits

STEPS = 100
WORLD = 3
CLOSE = 1e-6  # relative


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What DDP over gloo makes of the zoo in three processes."""
    folder = tmp_path_factory.mktemp("ddp")
    command = [str(WORLD), str(STEPS), str(folder / "group"), str(folder / "out")]
    ranks = [subprocess.Popen([sys.executable, ddp_zoo.__file__, str(rank), *command]) for rank in range(WORLD)]
    assert [rank.wait(240) for rank in ranks] == [0] * WORLD
    return load_file(folder / "out")


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Each model as one vector: a tensor that training has made small has the rounding of when it was large."""
    assert found.keys() == wanted.keys()
    apart = {}
    for model in {name.partition(".")[0] for name in wanted}:
        ours, theirs = (
            torch.cat(
                [
                    value.double().reshape(-1)
                    for name, value in sorted(state.items())
                    if name.startswith(f"{model}.") and value.is_floating_point()
                ]
            )
            for state in (found, wanted)
        )
        apart[model] = float((ours - theirs).norm() / theirs.norm())
    assert max(apart.values()) <= CLOSE, apart


@pytest.mark.cases(1)
@pytest.mark.parametrize(("topology", "bucket"), [("ring", None), ("tree", None), ("halving", None), ("ring", 24)])
def test_the_model_is_that_of_ddp(
    topology: str,
    bucket: int | None,
    of_ddp: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGD with momentum, AdamW, clipping, accumulation, BatchNorm, unused and frozen parameters, a scaler.

    With small buckets parts of the gradients travel while the backward passes are under way.
    """
    if bucket is not None:
        monkeypatch.setattr(gradient_parts, "BUCKET_VALUES", bucket)
        monkeypatch.setattr(collective, "PIECE_VALUES", bucket)
    found: dict[int, dict[str, torch.Tensor]] = {}
    skipped: list[int] = []

    made = [ddp_zoo.Zoo() for _ in range(WORLD)]  # one after the other: they share the random state

    def script(rank: int) -> None:
        zoo = made[rank]
        with peerd.attach(zoo.models, zoo.optimizers) as swarm:
            for step in range(STEPS):
                ddp_zoo.train(zoo, zoo.models, rank, step, swarm.no_sync)
                swarm.step()
        found[rank] = zoo.state()
        skipped.append(zoo.skipped)

    async def scenario(swarm: Swarm) -> None:
        for rank, name in enumerate("abc"):
            await swarm.start(name, partial(script, rank), wait_for=WORLD)
        await swarm.ended("abc")

    script_nodes.run(tmp_path, scenario, topology=topology)
    assert skipped == [1] * WORLD
    assert_same(found[0], of_ddp)
    for rank in range(1, WORLD):
        assert all(torch.equal(found[rank][name], value) for name, value in found[0].items()), "to the bit"


@pytest.mark.cases(2)
@pytest.mark.parametrize("topology", ["auto", "adv:2"])
@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        ("sgd:momentum=0.9", ["sgd", "accumulated", "branches"]),
        ("sgd:momentum=0.9,nesterov=true", ["normed"]),
        ("adamw", ["adamw"]),
        (f"adamw:clip={ddp_zoo.CLIPPED}", ["clipped"]),
    ],
)
def test_the_servers_optimizer_makes_the_parameters_of_ddp(
    optimizer: str, names: list[str], topology: str, of_ddp: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """hardsync: the script's own optimizer and clipping do nothing. Running statistics are the mean of the workers'."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    made = [ddp_zoo.Zoo() for _ in range(WORLD)]

    def script(rank: int) -> None:
        zoo = made[rank]
        models = {name: zoo.models[name] for name in names}
        with peerd.attach(models, {name: zoo.optimizers[name] for name in names}) as swarm:
            for step in range(STEPS):
                ddp_zoo.train(zoo, models, rank, step, swarm.no_sync)
                swarm.step()
        found[rank] = {
            f"{name}.{key}": value.detach().clone()
            for name, model in models.items()
            for key, value in model.named_parameters()
        }

    async def scenario(swarm: Swarm) -> None:
        for rank, name in enumerate("abc"):
            await swarm.start(name, partial(script, rank), wait_for=WORLD)
        await swarm.ended("abc")

    script_nodes.run(
        tmp_path, scenario, mode="hardsync", codec="float32", topology=topology, server_optimizer=optimizer,
        robust=False,
    )  # fmt: skip
    for rank in range(WORLD):
        assert_same(found[rank], {name: of_ddp[name] for name in found[rank]})
        assert all(torch.equal(found[rank][name], value) for name, value in found[0].items()), "to the bit"


class Line:
    """A model that a test can step by itself, with the gradients of whom it likes."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = ddp_zoo.perceptron()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def backward(self, rank: int, step: int) -> None:
        x, y = ddp_zoo.batch(rank, step)
        torch.nn.functional.mse_loss(self.model(x), y).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        """Parameters, and momentum where the optimizer steps."""
        states = [self.optimizer.state[p] for p in self.model.parameters()]
        momentum = [state["momentum_buffer"].clone() for state in states if state]
        return [p.detach().clone() for p in self.model.parameters()] + momentum


def after_one_more(line: Line, ranks: list[int], step: int) -> list[torch.Tensor]:
    """What DDP over these ranks makes of it."""
    for rank in ranks:
        line.backward(rank, step)
    for parameter in line.model.parameters():
        assert parameter.grad is not None
        parameter.grad /= len(ranks)
    line.step()
    return line.state()


def are_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """As far as both say; servers keep the momentum."""
    return all(float((a - b).norm()) <= CLOSE * (1e-3 + float(b.norm())) for a, b in zip(one, other, strict=False))


def bits(state: list[torch.Tensor]) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in state)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("where", "given", "answered_s"),
    [
        ((Session, "_poll"), True, 0.0),
        ((Session, "_poll"), True, 0.5),
        ((FlatGradients, "scatter"), True, 0.0),
        ((Session, "_rates"), False, 0.2),
        ((LocalSocket, "send"), True, 0.2),
    ],
    ids=["wait", "answered", "scatter", "say", "said"],
)
@pytest.mark.parametrize("bucket", [None, 24])
def test_a_script_that_catches_what_interrupts_its_wait_takes_that_mean_with_its_next_pass(
    bucket: int | None,
    where: tuple[type, str],
    given: bool,
    answered_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a cell of a notebook that is stopped and run again: the others have made this step with its gradient."""
    if bucket is not None:
        monkeypatch.setattr(gradient_parts, "BUCKET_VALUES", bucket)
    at, steps = 4, 9
    caught: list[Session] = []
    owner, name = where
    uninterrupted = getattr(owner, name)

    def interrupted(self: object, *arguments: Any, **more: Any) -> object:
        session = sessions.get(0)
        mine = session is not None and self in (session, session._gradients, session._socket)
        if session is None or caught or not mine or session.step != at:
            return uninterrupted(self, *arguments, **more)
        if name == "send":
            found = uninterrupted(self, *arguments, **more)
            if arguments[0]["kind"] == GradientReady.KIND:  # it went, and nobody here has noted that
                caught.append(session)
                raise KeyboardInterrupt
            return found
        if name == "scatter" or session._client.state is ClientState.WITH_GRADIENT:
            caught.append(session)
            raise KeyboardInterrupt
        return uninterrupted(self, *arguments, **more)

    monkeypatch.setattr(owner, name, interrupted)
    lines = [Line() for _ in range(WORLD)]
    sessions: dict[int, Session] = {}
    again = [False] * WORLD

    def script(rank: int) -> None:
        line = lines[rank]
        with peerd.attach(line.model, line.optimizer) as swarm:
            assert swarm._session is not None
            sessions[rank] = swarm._session
            while swarm.step_count < steps:
                try:
                    line.backward(rank, swarm.step_count + 100 * again[rank])
                except KeyboardInterrupt:
                    line.optimizer.zero_grad()
                    again[rank] = given  # then whatever this pass makes counts for nothing
                    time.sleep(answered_s)
                    continue
                again[rank] = False
                line.step()
                swarm.step()

    async def scenario(swarm: Swarm) -> None:
        for rank, node in enumerate("abc"):
            await swarm.start(node, partial(script, rank), wait_for=WORLD)
        await swarm.ended("abc")

    script_nodes.run(tmp_path, scenario)
    start = Line()
    for step in range(steps):
        wanted = after_one_more(start, [0, 1, 2], step)
    assert len(caught) == 1
    assert all(are_close(wanted, line.state()) for line in lines)
    assert len({bits(line.state()) for line in lines}) == 1


@pytest.mark.parametrize(
    "how",
    [{}, {"mode": "hardsync", "codec": "float32", "server_optimizer": "sgd:momentum=0.9", "robust": False}],
    ids=["allreduce", "hardsync"],
)
def test_survivors_of_a_kill_are_ddp_and_a_newcomer_enters_with_their_bits(how: dict[str, Any], tmp_path: Path) -> None:
    killed_at, joined_at, more = 4, 10, 4
    seen: dict[int, dict[int, list[torch.Tensor]]] = {rank: {} for rank in range(4)}  # by rank and step
    ends = threading.Event()

    def script(rank: int) -> None:
        line = lines[rank]
        with peerd.attach(line.model, line.optimizer) as swarm:
            while not (ends.is_set() or swarm.alone):
                line.backward(rank, swarm.step_count)
                line.step()
                swarm.step()
                if not swarm.alone:
                    seen[rank][swarm.step_count] = line.state()
                shared = {bits(state) for state in list(seen[0].values())}
                if sum(bits(state) in shared for state in list(seen[3].values())) >= more:
                    ends.set()

    lines = [Line(seed) for seed in (0, 0, 0, 1)]
    start = Line()

    async def scenario(swarm: Swarm) -> None:
        for rank, name in enumerate("abc"):
            await swarm.start(name, partial(script, rank), wait_for=WORLD)
        await swarm.until(lambda: len(seen[1]) >= killed_at)
        await swarm.nodes["b"].crash()
        await swarm.until(lambda: len(seen[0]) >= joined_at)
        await swarm.start("d", lambda: script(3))
        await swarm.ended("acd")

    script_nodes.run(tmp_path, scenario, **how)
    ranks = [0, 1, 2]
    for step in range(joined_at):
        before = copy.deepcopy((start.model.state_dict(), start.optimizer.state_dict()))
        if not are_close(after_one_more(start, ranks, step), seen[0][step + 1]):
            assert ranks == [0, 1, 2], f"step {step} is nobody's mean"
            start.model.load_state_dict(before[0])
            start.optimizer.load_state_dict(before[1])
            ranks = [0, 2]
            assert are_close(after_one_more(start, ranks, step), seen[0][step + 1])
    assert ranks == [0, 2]
    steps = {bits(state): step for step, state in seen[0].items()}
    assert all(steps[bits(state)] == step for step, state in seen[2].items() if step in seen[0])
    last = max(steps.values())
    newcomers = [(step, steps.get(bits(state), 0)) for step, state in seen[3].items() if step <= last]
    if how:  # it serves itself until it has heard of the others, and counts its own steps
        entered = [step for _, step in newcomers if step]
        assert entered == list(range(entered[0], entered[0] + len(entered)))
    else:
        entered = [step for step, same in newcomers if step == same]
        assert len(entered) == len(newcomers)
    assert len(entered) >= more - 1


@pytest.mark.parametrize(
    "how",
    [{}, {"mode": "softsync", "codec": "float32", "server_optimizer": "sgd:momentum=0.9", "robust": False}],
    ids=["allreduce", "softsync"],
)
def test_a_graph_that_is_older_than_the_swarms_model_is_named(
    how: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model comes between the two passes of an ordinary GAN, of which autograd says nothing that helps."""
    stepped, ends = threading.Event(), threading.Event()

    def script(*, anew: bool) -> None:
        generator = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        discriminator = nn.Linear(2, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (generator, discriminator)]
        with peerd.attach([generator, discriminator], optimizers) as swarm:
            while not (ends.is_set() or swarm.alone):
                noise = torch.randn(4, 2)
                made = generator(noise)
                discriminator(made.detach()).mean().backward()
                optimizers[1].step()
                discriminator(generator(noise) if anew else made).mean().backward()
                optimizers[0].step()
                swarm.step()
                stepped.set()

    def dies() -> None:
        try:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                script(anew=False)
        finally:
            ends.set()

    async def scenario(swarm: Swarm) -> None:
        await swarm.start("a", partial(script, anew=True))
        await swarm.until(stepped.is_set)
        await swarm.start("b", dies)
        await swarm.ended("ab")

    script_nodes.run(tmp_path, scenario, **how)
    assert "make it anew after the first optimizer's step" in capsys.readouterr().err


def test_a_graph_through_batch_norm_takes_a_second_pass(tmp_path: Path) -> None:
    """Its statistics become the mean of all at the end of the first one."""
    found: dict[str, dict[str, torch.Tensor]] = {}

    def script(name: str) -> None:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
        discriminator = nn.Linear(2, 1)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (generator, discriminator)]
        with peerd.attach([generator, discriminator], optimizers) as swarm:
            torch.manual_seed(ord(name))
            for _ in range(5):
                made = generator(torch.randn(4, 2))
                discriminator(made.detach()).mean().backward()
                optimizers[1].step()
                discriminator(made).mean().backward()
                optimizers[0].step()
                swarm.step()
        found[name] = generator.state_dict()

    async def scenario(swarm: Swarm) -> None:
        for name in "ab":
            await swarm.start(name, partial(script, name), wait_for=2)
        await swarm.ended("ab")

    script_nodes.run(tmp_path, scenario)
    assert all(torch.equal(value, found["b"][name]) for name, value in found["a"].items())


def test_a_built_in_task_that_joins_has_one_model_with_the_others(tmp_path: Path) -> None:
    """Its first learning rate is the swarm's, not that of the step at which it was before it had their gradient."""
    steps, joins_at = 24, 6
    runs = [
        digits.prepare(digits.parse(["--steps", str(steps), "--rank", str(rank), "--peers", "3"])) for rank in range(3)
    ]
    seen: dict[int, dict[int, bytes]] = {rank: {} for rank in range(3)}

    def script(rank: int) -> None:
        run = runs[rank]
        with peerd.attach(run.model, run.optimizer) as swarm:
            for number in swarm.steps(steps):
                loss, samples = run.step(number)
                swarm.step(loss=loss, samples=samples)
                seen[rank][swarm.step_count] = bits([parameter.detach() for parameter in run.model.parameters()])
                time.sleep(0.05 if not seen[2] else 0)

    async def scenario(swarm: Swarm) -> None:
        for rank, node in enumerate("ab"):
            await swarm.start(node, partial(script, rank), wait_for=2)
        await swarm.until(lambda: len(seen[0]) >= joins_at)
        await swarm.start("c", partial(script, 2))
        await swarm.ended("abc")

    script_nodes.run(tmp_path, scenario)
    both = sorted(seen[0].keys() & seen[2].keys())
    assert joins_at <= both[0] < both[-1] == steps
    assert [step for step in both if seen[0][step] != seen[2][step]] == []
