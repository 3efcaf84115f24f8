"""Is the model that travels the model? Users' plain PyTorch scripts; the marked ones run in `make scripts`."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch
from machine import Machine, Node
from measured import BOTH_HALVES_KNOWN, Script, have_met, losses, one_model, said_last

FRESH_STEPS = 50  # how old the model that leaves a node may be
KEPT_STEPS = 400  # and the copy of one that nobody asks: a copy a second, of at most 200 steps, for two seconds
NOISE = 1.5  # between the test losses of one model's last hundred steps, by the noise of its batches


def worst_of_late(node: Node) -> float:
    """The worst of the last hundred losses."""
    return max(loss for _, loss in losses(node)[-100:])


def starts(node: Node, life: int = 1) -> tuple[int, float]:
    """Wait for a script's beginning: the step and the test loss that it starts from."""
    began = re.compile(r"^starts at step (\d+) with a test loss of (\S+)$", re.MULTILINE)
    node.eventually(lambda: len(began.findall(node.log)) >= life)
    step, loss = began.findall(node.log)[life - 1]
    return int(step), float(loss)


def test_a_lone_node_is_asked_for_its_model_and_loses_its_trainer(machine: Machine) -> None:
    script = Script("plain")
    a = machine.start("a", script.path)
    a.trains(beyond=400)
    reached = said_last(a)[0]
    exported = script.export(a)
    a.eventually(lambda: exported.step <= said_last(a)[0])
    assert exported.step >= reached - FRESH_STEPS
    assert exported.loss == pytest.approx(dict(losses(a))[exported.step], rel=1e-3)

    a.trains(beyond=a.step + 600)  # with nobody who asks
    os.kill(a.trainer_pid, signal.SIGKILL)
    a.says("plain.py was killed by SIGKILL; starting it again")
    first_life, worst = dict(losses(a)), worst_of_late(a)
    step, loss = starts(a, life=2)
    assert step >= max(first_life) - KEPT_STEPS
    assert loss == pytest.approx(first_life[step], rel=1e-3)
    assert loss < NOISE * worst


@pytest.mark.scripts
def test_a_node_that_was_left_is_asked_for_its_model(machine: Machine) -> None:
    script = Script("plain")
    a = machine.start("a", script.path, "--wait-for", "2")
    b = machine.start("b", script.path, "--wait-for", "2", join=a, SEED="1")
    a.eventually(lambda: have_met(a))
    left = machine.peerd("leave", "--name", "b")
    assert left.returncode == 0, left.stderr
    assert b.end() == 0
    a.trains(beyond=a.step + 300)
    reached = said_last(a)[0]
    exported = script.export(a)
    a.eventually(lambda: exported.step <= said_last(a)[0])
    assert exported.step >= reached - FRESH_STEPS
    assert exported.loss == pytest.approx(dict(losses(a))[exported.step], rel=1e-3)


@pytest.mark.scripts
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_a_node_that_is_started_again_goes_on_from_its_checkpoint(machine: Machine, by: signal.Signals) -> None:
    script = Script("plain")
    a = machine.start("a", script.path, PEERD_CHECKPOINT_EVERY_S="0.5")
    a.trains(beyond=400)
    a.signal(by)
    a.end()
    first_life, worst = dict(losses(a)), worst_of_late(a)
    a = machine.start("a", script.path)
    step, loss = starts(a, life=2)
    assert step > 0
    if by == signal.SIGINT:
        assert step >= max(first_life)
    if step in first_life:  # the last step of an end in good order is not said
        assert loss == pytest.approx(first_life[step], rel=1e-3)
    a.trains(beyond=step + 100)
    assert max(loss for _, loss in losses(a)[-100:]) < NOISE * worst


@pytest.mark.parametrize(
    "mode",
    ["gossip", *(pytest.param(m, marks=pytest.mark.scripts) for m in ("push-sum", "elastic", "allreduce", "diloco"))],
)
def test_a_newcomer_leaves_a_lone_node_where_it_is(machine: Machine, mode: str) -> None:
    script = Script("plain")
    a = machine.start("a", script.path, "--mode", mode, PACE_S="0.001")
    a.trains(beyond=1000)
    reached, worst = said_last(a)[0], worst_of_late(a)
    b = machine.start("b", script.path, "--mode", mode, join=a, PACE_S="0.001", SEED="1")
    step, loss = starts(b)
    assert step >= reached - FRESH_STEPS
    assert loss < NOISE * worst
    b.trains(beyond=step + 200)
    a.trains(beyond=a.step + 200)
    assert max(loss for step, loss in losses(a) if step > reached) < NOISE * worst
    assert max(loss for _, loss in losses(b)) < NOISE * worst
    assert script.export(b).loss < NOISE * worst


@pytest.mark.scripts
@pytest.mark.parametrize("mode", ["gossip", "allreduce", "diloco"])
def test_batch_norm(machine: Machine, mode: str) -> None:
    assert (
        max(one_model(Script("batch_norm"), machine, 200, "--mode", mode)) < 0.2
    )  # it ends at a variance that is not > 0


def test_two_models_and_two_optimizers(machine: Machine) -> None:
    assert max(one_model(Script("gan"), machine, 400)) < 8.0


@pytest.mark.parametrize(
    "mode", ["gossip", *(pytest.param(m, marks=pytest.mark.scripts) for m in ("allreduce", "diloco"))]
)
def test_a_buffer_that_nobody_trains_stays_the_bits_that_it_is(machine: Machine, mode: str) -> None:
    script = Script("constants")
    a = machine.start("a", script.path, "--mode", mode)
    a.trains(beyond=60)
    b = machine.start("b", script.path, "--mode", mode, join=a, SEED="1")
    b.trains(beyond=b.trains() + 120)
    a.trains(beyond=a.step + 60)
    for node in (a, b):
        node.eventually(lambda node=node: have_met(node))  # type: ignore[misc]
        exported = script.export(node)
        for name in script.constants():
            assert torch.equal(exported.tensors[name], script.constants()[name]), (node.name, name)
    assert len(set(re.findall(r"^constants .*$", a.log + b.log, re.MULTILINE))) == 1


def test_a_model_that_changes_after_attach_is_followed_or_said(machine: Machine) -> None:
    script = Script("changing")
    assert max(one_model(script, machine, 600)) < BOTH_HALVES_KNOWN
    one, other = (script.export(node).tensors["power"] for node in machine.nodes)
    assert float(one.max()) > 0.25, "it is what it was at the attach"
    assert torch.allclose(one, other, atol=0.05)  # of one alone a half is 0, and of the other the other half
    for node in machine.nodes:
        for what in (
            "frozen.bias, frozen.weight can be trained only since peerd.attach "
            "(freeze them after it, and they are shared)",
            "added.bias, added.weight came into the model after peerd.attach",
        ):
            assert node.log.count(f"peerd: not shared: {what}\n") == 1
        assert node.log.count("not shared: ") == 2


def test_a_script_that_leaves_by_exit_leaves_its_last_step(machine: Machine) -> None:
    script = Script("plain")
    a = machine.start("a", script.path, STEPS="60", LEAVE_BY="exit")
    a.eventually(lambda: 60 in dict(losses(a)) and a.ask("status")["phase"] in ("finished", "gone"))
    exported = script.export(a)
    assert exported.step == 60
    assert exported.loss == pytest.approx(dict(losses(a))[60], rel=1e-3)


@pytest.mark.scripts
def test_compiled_beside_plain(machine: Machine) -> None:
    cache = str(machine.path / "inductor")
    losses = one_model(Script("plain"), machine, 1000, COMPILE="1", TORCHINDUCTOR_CACHE_DIR=cache)
    assert max(losses) < BOTH_HALVES_KNOWN


@pytest.mark.scripts
def test_mixed_precision_with_a_scaler_and_without(machine: Machine) -> None:
    assert max(one_model(Script("amp"), machine, 600, SCALER="on")) < BOTH_HALVES_KNOWN


@pytest.mark.scripts
@pytest.mark.parametrize("kept", ["", "1"], ids=["in groups", "in the state of the other"])
def test_masters_beside_a_bfloat16_model(machine: Machine, kept: str) -> None:
    assert max(one_model(Script("masters"), machine, 1000, KEPT=kept)) < BOTH_HALVES_KNOWN


@pytest.mark.scripts
def test_forked_workers_do_not_keep_a_killed_trainer_from_coming_again(machine: Machine) -> None:
    a = machine.start("a", Script("loader").path)
    a.trains(beyond=200)
    a.eventually(lambda: losses(a))
    worst = worst_of_late(a)
    reached = said_last(a)[0]
    os.kill(a.trainer_pid, signal.SIGKILL)
    a.says("loader.py was killed by SIGKILL; starting it again")
    a.trains(beyond=reached + 20)
    assert a.log.count("starting it again") == 1
    assert "attached to this node already" not in a.log
    second_life = [loss for step, loss in losses(a) if step > reached]
    assert max(second_life) < NOISE * worst


@pytest.mark.scripts
def test_the_averaged_model_is_one_and_no_worse(machine: Machine) -> None:
    nodes = machine.three(Script("plain").path)
    for node in nodes:
        node.trains(beyond=300)
    asked = [len(losses(node)) for node in nodes]
    worst = max(worst_of_late(node) for node in nodes)
    answer = machine.peerd("average", "--name", "b")
    assert answer.returncode == 0, answer.stderr
    assert "averaged 3 members" in answer.stdout, answer.stdout

    def common() -> set[float]:
        return set.intersection(
            *({loss for _, loss in losses(n)[first:]} for n, first in zip(nodes, asked, strict=True))
        )

    nodes[0].eventually(common)
    assert max(common()) < worst
