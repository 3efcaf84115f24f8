"""How a trainer comes, trains with the swarm and goes: the daemon's side, against a script of words."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from model_node import SIGNATURE, TENSORS, Node, Script, running, until

from peerd.daemon import trainer_service, trainer_session
from peerd.daemon.trainer_service import TrainerService
from peerd.daemon.trainer_session import TRANSITIONS, TrainerPhase, TrainerStatus
from peerd.node.donors import ASK_AGAIN_S, EARLY_SHARE
from peerd.node.meta import NodeMeta
from peerd.node.strikes import STRIKES_MAX
from peerd.process import host_memory
from peerd.protocol.trainer import Stepped
from peerd.training import refusal
from peerd.training.codecs import vector
from peerd.training.codecs.difference import digest, digest_of_chunks
from peerd.training.codecs.vector import Layout
from peerd.training.modes.gossip import Gossip
from peerd.training.sketch import packed, sketch
from peerd.transport.errors import PeerError, UserError
from peerd.transport.messages import (
    LinkOpen,
    LinkSnapshot,
    Member,
    ModelEqual,
    ModelPromise,
    ModelRequest,
    ModelSketch,
    ModelSnapshot,
    SketchRequest,
    State,
)

LAYOUT = Layout(6, 6)
MODEL = np.arange(6, dtype=np.float32)
SEED = bytes(range(16))
READY = NodeMeta(model=SIGNATURE, ready=True, expects=True)
NEW = NodeMeta(expects=True)


@contextmanager
def script(**attach: Any) -> Iterator[Script]:
    made = Script()
    made.attach |= attach
    try:
        yield made
    finally:
        made.close()


def snapshot(step: int) -> ModelSnapshot:
    return ModelSnapshot(step, "float32", vector.encode("float32", LAYOUT, MODEL)[0])


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


# ------------------------------------------------------------------------------------------------------- a whole life


async def test_a_run_from_the_attach_to_the_end(tmp_path: Path) -> None:
    node = Node(tmp_path, checkpoint_every_s=30)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            welcome = await trainer.hear("welcome")
            assert welcome["checkpoints"] == str(tmp_path / "checkpoints")
            assert welcome["checkpoint_every_s"] == 30
            ready = [node.side.meta.ready]
            assert node.side.meta.expects
            trainer.memory.copies[0][:] = MODEL
            await trainer.say("ready", step=3)
            assert await trainer.hear("start") == {
                "kind": "start",
                "load": None,
                "step": 3,
                "lr_max": 0.0,
                "barrier": 0,
            }
            assert [*ready, node.side.meta.ready] == [False, True]
            await trainer.hear("go")
            assert (await node.side.model_values())[0].tolist() == MODEL.tolist()
            assert trainer.daemons_end.fds == []

            await trainer.step(4, loss=0.5, samples=8, metrics={"accuracy": 0.9})
            await trainer.step(5, lr=0.05, samples=8, rolled_back=True)
            status = node.side.status
            assert status is not None
            await until(lambda: status.rollbacks == 1)
            assert node.side.status is status
            assert (status.pid, status.phase, status.step, status.first_step, status.samples) == (
                1234,
                "training",
                5,
                3,
                16,
            )
            assert (status.loss, status.lr, status.metrics, status.rollbacks) == (0.5, 0.05, {"accuracy": 0.9}, 1)

            await trainer.say("spare")
            await trainer.hear("spare")
            slot = 1 - trainer.memory.board.current
            trainer.memory.copies[slot][:] = 2 * MODEL
            await trainer.step(6, published=slot, finishing=True)
            await trainer.hear("finished")
            assert status.phase == "finished"
            trainer.leave()
            await until(lambda: not node.attached)
            assert status.phase == "finished"
            assert (await node.side.model_values())[0].tolist() == (2 * MODEL).tolist()


@asynccontextmanager
async def beside_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> AsyncIterator[tuple[Node, list[frozenset[str]]]]:
    """A node that trains, and whom its mode is told of since there is another."""
    told: list[frozenset[str]] = []
    node = Node(folder, mode=mode)
    async with running(node) as nursery:
        with script() as trainer:
            nursery.start_soon(trainer.serve, node)
            await trainer.trains()
            node.member("other", READY)
            monkeypatch.setattr(node.side._runner, "on_partners", told.append)
            yield node, told


@pytest.mark.parametrize(("mode", "stays"), [("gossip", False), ("allreduce", True)])
async def test_who_is_refused_has_no_link_until_it_is_heard_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, stays: bool
) -> None:
    """With rounds all must name the same members."""
    monkeypatch.setattr(refusal, "REFUSED_S", 0.1)
    async with beside_another(tmp_path, monkeypatch, mode) as (node, told):
        for _ in range(STRIKES_MAX):
            node.offences.strike("other", "h", PeerError("garbage"))
        assert node.offences.counts["peers_refused"] == 1
        await until(lambda: len(told) == 2)
    assert told == [frozenset({"other"} if stays else ()), frozenset({"other"})]


@pytest.mark.parametrize(
    ("mode", "stays"),
    [("gossip", False), ("gossip-push", False), ("elastic:pairwise", False), ("elastic", True), ("allreduce", True)],
)
async def test_who_cannot_be_dialled_has_no_link_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, stays: bool
) -> None:
    async with beside_another(tmp_path, monkeypatch, mode) as (node, told):
        for node.far in (["other"], []):
            node.side.on_members()
    assert told == [frozenset({"other"} if stays else ()), frozenset({"other"})]


async def test_a_node_that_came_back_with_another_id_does_not_draw_as_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While nobody knows yet that its former life has ended."""
    node = Node(tmp_path)
    async with running(node) as nursery:
        with script() as trainer:
            nursery.start_soon(trainer.serve, node)
            await trainer.trains()
            await trainer.say("drew", digest=b"one seed")
            await until(lambda: node.side.meta.draws == b"one seed")
            same = replace(READY, draws=b"one seed")
            node.members["former"] = Member("former", "me", "h", 1, 1, 0, State.ALIVE, "", same.pack())
            node.side.on_members()
            assert node.side.same_batches == frozenset()
            node.member("other", same)
            assert node.side.same_batches == {"other"}
    assert [line.split()[0] for line in lines(caplog) if "same batches" in line] == ["other"]


@pytest.mark.parametrize(("kept", "load", "goes_on_at"), [(4, 0, 9), (9, 0, 9), (11, None, 11)])
async def test_a_trainer_that_comes_back_goes_on_from_what_is_newer(
    tmp_path: Path, kept: int, load: int | None, goes_on_at: int
) -> None:
    """Its checkpoint, or the copy that it last published here; of the same step the copy, which has all corrections."""
    node = Node(tmp_path)
    async with running(node) as nursery:
        with script() as first:
            nursery.start_soon(first.serve, node)
            first.memory.copies[0][:] = MODEL
            await first.trains()
            first.memory.copies[1][:] = 2 * MODEL
            await first.step(9, lr=0.4, published=1)
            await first.step(12, lr=0.1)
            await until(lambda: node.side._runner.step == 9)
            assert node.side.status is not None
            assert node.side.status.step == 12
            first.leave()  # it died
            await until(lambda: not node.attached)
            assert node.side.status is not None
            assert node.side.status.phase == "gone"
        with script() as second:
            nursery.start_soon(second.serve, node)
            second.memory.copies[0][:] = 3 * MODEL
            start = await second.trains(step=kept)
            assert start == {"kind": "start", "load": load, "step": goes_on_at, "lr_max": 0.4, "barrier": 0}
            expected = (2 if load is not None else 3) * MODEL
            assert second.memory.copies[0].tolist() == expected.tolist()
            values, step = await node.side.model_values()
            assert (values.tolist(), step) == (expected.tolist(), goes_on_at)
            assert node.side.attaches == 2
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("kilobytes", "level"), [(9999, logging.INFO), (0, logging.WARNING)], ids=["fits", "does not"])
async def test_what_a_large_model_takes_is_said_before_it_is_taken(
    tmp_path: Path, kilobytes: int, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(host_memory, "WORTH_A_LINE", 500)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text(f"MemAvailable: {kilobytes} kB\n")
    node = Node(tmp_path, view=2)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            await trainer.trains()
            assert isinstance(node.side.mode, Gossip)
            assert node.side.mode._settings.view == (2 if kilobytes else 1)
    about = [record for record in caplog.records if record.message.startswith("this model takes about ")]
    assert [(record.levelno, record is caplog.records[0]) for record in about] == [(level, True)]
    assert any(line.startswith("a trainer attached: ") for line in lines(caplog))


# ----------------------------------------------------------------------------------------------------- the first model


@pytest.mark.parametrize(("kept", "step"), [(2, 7), (20, 7)], ids=["behind", "ahead"])
async def test_a_newcomer_starts_from_the_swarms_model(tmp_path: Path, kept: int, step: int) -> None:
    node = Node(tmp_path, join=("10.0.0.1",))
    node.member("donor", READY)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            await trainer.hear("welcome")
            await trainer.say("ready", step=kept)
            await node.sent_to("donor", ModelRequest)
            assert not node.side.meta.ready
            node.side.on_message("another", ModelRequest())  # it has none to give yet
            assert len(node.sent) == 1
            await node.side.runner.on_message("donor", LinkOpen(1))  # too early for the mode: there is none
            node.side.on_message("donor", ModelPromise(digest_of_chunks(snapshot(7).chunks)))
            node.side.on_message("donor", snapshot(7))
            start = await trainer.hear("start")
            assert (start["load"], start["step"]) == (0, step)
            assert trainer.memory.copies[0].tolist() == MODEL.tolist()
            await trainer.hear("go")
            await node.sent_to("donor", LinkOpen)


@pytest.mark.parametrize(("step", "load"), [(0, None), (7, 0)], ids=["all have just begun", "it had made steps"])
async def test_a_newcomer_that_has_the_swarms_model_writes_it_only_where_its_step_is_another(
    tmp_path: Path, step: int, load: int | None
) -> None:
    node = Node(tmp_path, join=("10.0.0.1",))
    node.member("donor", READY)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            await trainer.hear("welcome")
            trainer.memory.copies[0][:] = MODEL
            await trainer.say("ready", step=step)
            assert await node.sent_to("donor", ModelRequest) == ModelRequest(digest(MODEL, LAYOUT))
            node.side.on_message("donor", ModelEqual(0))
            start = await trainer.hear("start")
            assert (start["load"], start["step"]) == (load, 0)
            assert (await node.side.model_values())[0].tolist() == MODEL.tolist()


@pytest.mark.parametrize("how", ["it dies", "it talks", "it babbles"])
async def test_a_trainer_may_go_while_it_waits_and_another_come(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node = Node(tmp_path, join=("10.0.0.1",))
    async with running(node) as nursery:
        for _ in range(2):
            with script() as trainer:
                nursery.start_soon(trainer.serve, node)
                await trainer.hear("welcome")
                await trainer.say("ready", step=0)
                await until(lambda: any("no node of the swarm has answered yet" in line for line in lines(caplog)))
                match how:
                    case "it dies":
                        trainer.leave()
                    case "it talks":
                        await trainer.step(1)
                    case _:
                        await trainer.say_bytes(b"\xff" * 9)
                await until(lambda: not node.attached)
                assert "the trainer went away before its first step" in lines(caplog)
                caplog.clear()
        assert node.sent == []


async def test_the_model_is_given_to_newcomers_once_there_is_one(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.member("newcomer", NEW)
    with script() as trainer:
        async with running(node) as nursery:
            node.side.on_message("newcomer", ModelRequest())
            assert node.sent == []
            nursery.start_soon(trainer.serve, node)
            trainer.memory.copies[0][:] = MODEL
            await trainer.trains(step=5)
            node.side.on_message("newcomer", ModelRequest())
            given = await node.sent_to("newcomer", ModelSnapshot)
            assert isinstance(given, ModelSnapshot)
            found = np.empty(6, np.float32)
            vector.decode(given.codec, LAYOUT, given.chunks, found)
            assert (given.step, found.tolist()) == (5, MODEL.tolist())
            await until(lambda: node.side.snapshots == 1)  # counted once all of it is on its way


async def test_a_model_that_a_newcomer_has_does_not_travel(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.member("newcomer", NEW)
    node.member("another", NEW)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            trainer.memory.copies[0][:] = MODEL
            await trainer.trains(step=5)
            node.side.on_message("newcomer", ModelRequest(digest(MODEL, Layout(len(MODEL), len(MODEL)))))
            assert await node.sent_to("newcomer", ModelEqual) == ModelEqual(5)
            node.side.on_message("another", ModelRequest(digest(2 * MODEL, Layout(len(MODEL), len(MODEL)))))
            await node.sent_to("another", ModelSnapshot)


async def test_no_stranger_is_given_the_model_nor_a_member_too_often(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.member("newcomer", NEW)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            await trainer.trains(step=5)
            began = trio.current_time()
            for _ in range(100):
                node.side.on_message("stranger", ModelRequest())
                node.side.on_message("newcomer", ModelRequest())
                await trio.sleep(0.1)
            again = (trio.current_time() - began) // (EARLY_SHARE * ASK_AGAIN_S)
            assert {peer for peer, message in node.sent if isinstance(message, ModelSnapshot)} == {"newcomer"}
            assert 2 <= node.side.snapshots <= 2 + again, "again after a second, then every ten, or a little sooner"


async def test_a_sketch_is_of_the_model_as_it_stands_and_not_for_strangers_nor_too_often(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.member("newcomer", NEW)
    with script() as trainer:
        async with running(node) as nursery:
            node.side.on_message("newcomer", SketchRequest(SEED))
            assert node.sent == [], "there is no model yet"
            nursery.start_soon(trainer.serve, node)
            await trainer.trains(step=5)
            await trainer.step(1005)
            for _ in range(9):
                node.side.on_message("newcomer", SketchRequest(SEED))
                node.side.on_message("stranger", SketchRequest(SEED))
            copy = await trainer.asked_to_publish()
            trainer.memory.copies[copy][:] = 3 * MODEL
            await trainer.step(1006, published=copy)
            said = await node.sent_to("newcomer", ModelSketch)
            assert said == ModelSketch(SEED, packed(sketch(3 * MODEL, LAYOUT, SEED)))
            await trio.sleep(0.1)
            assert len(node.sent) == 1


async def test_one_donor_that_refuses_ends_no_newcomer(tmp_path: Path) -> None:
    node = Node(tmp_path, join=("10.0.0.1",))
    node.member("fake", READY)
    node.member("honest", READY)
    for _ in range(3):
        node.side.on_refused(PeerError("another model"), newcomer=True, peer="fake")
    assert not node.side.failed.is_set()
    node.side.on_refused(PeerError("another model"), newcomer=True, peer="honest")
    assert node.side.failed.is_set()


async def test_what_all_donors_refuse_a_newcomer_for_is_said_once_before_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path, join=("10.0.0.1",))
    for name in "abcd":
        node.member(name, READY)
    for name, of in (("a", "other"), ("b", "other"), ("c", "third"), ("d", "other")):
        node.side.on_refused(PeerError(f"{name}: {of}"), newcomer=True, peer=name, differs=("model", of, "ours"))
    assert lines(caplog) == ["a: other", "c: third"]
    assert node.side.fatal == "d: other"


async def test_a_donor_gives_the_model_of_its_next_step_once_however_often_it_is_asked(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.member("newcomer", NEW)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            trainer.memory.copies[0][:] = MODEL
            await trainer.trains(step=5)
            await trainer.step(1005)
            for _ in range(3):
                node.side.on_message("newcomer", ModelRequest())
            copy = await trainer.asked_to_publish()
            assert node.sent == [], "the copy of step 5 is not the model"
            trainer.memory.copies[copy][:] = 3 * MODEL
            await trainer.step(1006, published=copy)
            given = await node.sent_to("newcomer", ModelSnapshot)
            assert isinstance(given, ModelSnapshot)
            found = np.empty(6, np.float32)
            vector.decode(given.codec, LAYOUT, given.chunks, found)
            assert (given.step, found.tolist()) == (1006, (3 * MODEL).tolist())
            assert [type(message) for _, message in node.sent] == [ModelPromise, ModelSnapshot]
            assert node.sent[0][1] == ModelPromise(digest_of_chunks(given.chunks))
            values, step = await node.side.model_values()
            assert (step, values.tolist()) == (1006, (3 * MODEL).tolist()), "it stands: there is no later step"


async def test_a_link_to_a_member_that_comes_starts_from_the_model_as_it_is(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            await trainer.trains(step=5)
            copy = await trainer.asked_to_publish()  # as every trainer is that comes
            await trainer.step(6, published=copy)
            await until(lambda: node.side.runner.step == 6)
            await trainer.step(1005)
            assert await trainer.silent()
            node.member("other", READY)
            await trainer.hear("publish")
            copy = 1 - trainer.memory.board.current
            trainer.memory.copies[copy][:] = 3 * MODEL
            await trainer.step(1006, published=copy)
            await until(lambda: node.side.runner.step == 1006)
            await node.side.runner.on_message("other", LinkOpen(1))
            given = await node.sent_to("other", LinkSnapshot)
            assert isinstance(given, LinkSnapshot)
            found = np.empty(6, np.float32)
            vector.decode(given.codec, LAYOUT, given.chunks, found)
            assert found.tolist() == (3 * MODEL).tolist()


async def test_the_first_step_waits_for_other_members(tmp_path: Path) -> None:
    node = Node(tmp_path, wait_for=2)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            await trainer.hear("welcome")
            await trainer.say("ready", step=0)
            await trainer.hear("start")
            await trainer.hear("publish")
            assert await trainer.silent()
            node.member("other", READY)
            await trainer.hear("go")


async def test_who_has_trained_waits_for_no_members_again(tmp_path: Path) -> None:
    """They may have ended their runs and left: a script that died then was held for ever."""
    node = Node(tmp_path, wait_for=2)
    async with running(node) as nursery:
        for life in range(3):
            with script() as trainer:
                nursery.start_soon(trainer.serve, node)
                await trainer.hear("welcome")
                await trainer.say("ready", step=0)
                await trainer.hear("start")
                if life == 0:
                    node.member("other", READY)
                await trainer.hear("go")
                if life == 1:
                    await trainer.step(7, published=1)
                trainer.leave()
                await trainer.served.wait()
            if life == 0:
                del node.members["other"]
                node.side.on_members()


async def test_a_trainer_may_go_while_it_waits_for_others_and_another_come(tmp_path: Path) -> None:
    node = Node(tmp_path, wait_for=2)
    async with running(node) as nursery:
        for _ in range(2):
            with script() as trainer:
                nursery.start_soon(trainer.serve, node)
                await trainer.hear("welcome")
                await trainer.say("ready", step=0)
                await trainer.hear("publish")
                trainer.leave()
                await trainer.served.wait()


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("attach", "why"),
    [
        ({"pid": "me"}, "do not understand each other"),
        ({"signature": None}, "do not understand each other"),
        ({"tensors": [1]}, "do not understand each other"),
        ({"tensors": "weight"}, "do not understand each other"),
        ({"parameters": 0}, "do not understand each other"),
        ({"parameters": 7}, "do not understand each other"),
        ({"total": None}, "do not understand each other"),
        ({"total": 2**40}, "the model has 1,099,511,627,776 values; peerd takes at most "),
        ({"total": 7}, "cannot map the script's memory: the shared memory is not a sealed file of "),
    ],
    ids=str,
)
async def test_an_attach_that_cannot_be_is_refused_with_the_cause(
    tmp_path: Path, attach: dict[str, Any], why: str
) -> None:
    node = Node(tmp_path)
    with script(**attach) as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            assert why in (await trainer.hear("error"))["error"]
            with pytest.raises(EOFError):
                await trainer.hear("anything")
            assert node.side.status is None
            assert not node.side.meta.expects


async def test_an_attach_without_memory_is_refused(tmp_path: Path) -> None:
    """The kernel drops it where the daemon has no descriptor left, which it may have when the script comes again."""
    node, unfit = Node(tmp_path), trio.Event()
    with script() as trainer:
        await node.side.attach(trainer.daemons_end, trainer.attach, tell_unfit=unfit.set)
        assert (await trainer.hear("error"))["error"].startswith("the script's memory did not come with its word")
    assert not unfit.is_set()


@pytest.mark.parametrize(("again", "alike"), [(False, True), (True, True), (True, False)])
async def test_a_second_trainer_is_refused_while_there_is_one(tmp_path: Path, again: bool, alike: bool) -> None:
    node = Node(tmp_path)
    with script() as first, script() as second:
        async with running(node) as nursery:
            nursery.start_soon(first.serve, node)
            await first.hear("welcome")
            second.attach["pid"] = 1234 if again else 1235
            if not alike:
                second.attach["signature"] = "another"
            nursery.start_soon(second.serve, node)
            refusal = (await second.hear("error"))["error"]
            if again:  # what is the likelier cause comes first
                likelier = "for another training put the" if alike else "several models go in one attach("
                assert refusal.startswith(f"this script is attached already: {likelier}")
                assert '"with peerd.attach(...) as swarm:"' in refusal, "that can be done without a name"
                assert "swarm.finish()" in refusal
            else:
                assert refusal == (
                    "a trainer (pid 1234) is attached to this node already: end that one, or let this script train "
                    "alone by PEERD_NAME=none"
                )
            assert node.side.meta.expects
            await first.say("ready", step=0)
            await first.hear("go")


async def test_another_model_than_before_is_refused_with_the_tensor(tmp_path: Path) -> None:
    node = Node(tmp_path)
    async with running(node) as nursery:
        with script() as first:
            nursery.start_soon(first.serve, node)
            await first.trains()
            assert node.side.meta.expects
            first.leave()
            await until(lambda: not node.attached)
            await until(lambda: not node.side.meta.expects)
        for tensors, differing, cure in (
            ([TENSORS[0], "bias float32 3"], "bias float32 2 here, bias float32 3 in the script", "the same sizes"),
            ([*TENSORS, "more float32 1"], "nothing here, more float32 1 in the script", "the same exclude="),
            ([TENSORS[0]], "bias float32 2 here, nothing in the script", "the same exclude="),
        ):
            for pid, cure_told in ((99, cure), (1234, "attach all that a script trains at once, before it is frozen")):
                with script(signature="6" * 64, tensors=tensors, pid=pid) as other:
                    nursery.start_soon(other.serve, node)
                    refusal = (await other.hear("error"))["error"]
                    assert refusal.startswith(f"this node holds another model: {differing}; ")
                    assert cure_told in refusal
                    assert refusal.endswith(", or peerd leave and start this node anew")


NONSENSE: list[dict[str, Any]] = [
    {"kind": "dance"},
    {"kind": "ready"},
    {"kind": "step"},
    {"kind": "step", "step": "1", "change": 0.0, "lr_ratio": 1.0, "stands": False, "published": None},
    {"kind": "step", "step": 1, "change": None, "lr_ratio": 1.0, "stands": False, "published": None},
    {"kind": "step", "step": 1, "change": 0.0, "lr_ratio": 1.0, "stands": False, "published": 2},
    {"kind": "step", "step": 1, "change": 0.0, "lr_ratio": 1.0, "stands": False, "published": 1.0},
    {"kind": "taken", "half": 2},
    {"kind": "taken", "half": 0.0},
    {"kind": "taken"},
]


@pytest.mark.parametrize("before", ["ready", "training"])
@pytest.mark.parametrize("said", NONSENSE, ids=str)
async def test_a_trainer_that_talks_nonsense_is_cut_off(
    tmp_path: Path, said: dict[str, Any], before: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            await (trainer.hear("welcome") if before == "ready" else trainer.trains())
            await trainer.say(**said)
            with pytest.raises(EOFError):
                await trainer.hear("anything")
            assert node.side.status is not None
            assert node.side.status.phase == "gone"
    line, *rest = lines(caplog)
    assert line.startswith("the trainer said what this daemon does not understand: cut off (")
    assert [line[:29] for line in rest] == ["no script trains here any mor"] * (before == "training")


async def test_bytes_that_are_no_message_cut_the_trainer_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            await trainer.trains()
            await trainer.say_bytes(b"\xff" * 9)
            with pytest.raises(EOFError):
                await trainer.hear("anything")
    assert [line.split(":")[0] for line in lines(caplog)] == [
        "the trainer was cut off",
        "no script trains here any more",
    ]


async def test_a_refusal_by_peers_is_fatal_for_a_newcomer_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path)
    node.side.on_refused(PeerError("one of many"), newcomer=False)
    fatal = [node.side.fatal]
    node.side.on_refused(PeerError("the first"), newcomer=True)
    node.side.on_refused(PeerError("the second"), newcomer=True)
    assert [*fatal, node.side.fatal] == [None, "the first"]
    assert node.side.failed.is_set()

    member = Node(tmp_path)
    with script() as trainer:
        async with running(member) as nursery:
            nursery.start_soon(trainer.serve, member)
            await trainer.trains()
            member.side.on_refused(PeerError("one that came later"), newcomer=True)
            assert member.side.fatal is None
    assert lines(caplog) == ["one of many", "one that came later"]


# -------------------------------------------------------------------------------------------------------- ends of runs


async def test_an_end_does_not_wait_for_ever_for_those_who_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(trainer_service, "SETTLE_MIN_S", 0.05)
    monkeypatch.setattr(trainer_service, "SETTLE_SHARE", 0.0)
    node = Node(tmp_path)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            await trainer.trains()
            node.member("other", READY)  # it never answers
            await node.sent_to("other", LinkOpen)
            await trainer.step(1, published=1, finishing=True)
            await trainer.step(1, finishing=True)  # again, while the end is waited for
            await trainer.hear("finished")
            trainer.leave()
            await until(lambda: not node.attached)
    said = "not all members have ended their runs after 0 s: this one ends with the model as it is"
    assert [line for line in lines(caplog) if line == said or "training finished" in line] == [
        said,
        "training finished at step 1; still a member, with the model",
    ]


async def test_a_last_step_may_be_said_again_but_not_before_the_trainer_may_go(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            await trainer.trains()
            for _ in range(2):  # as of a script that was interrupted in swarm.finish(), went on and exits
                await trainer.step(1, finishing=True)
                await trainer.hear("finished")
            trainer.leave()
            await until(lambda: not node.attached)
            assert node.side.status is not None
            assert node.side.status.phase is TrainerPhase.FINISHED
    node = Node(tmp_path, wait_for=2)
    with script() as hasty:
        async with running(node) as nursery:
            nursery.start_soon(hasty.serve, node)
            await hasty.hear("welcome")
            await hasty.say("ready", step=0)
            await hasty.step(1, finishing=True)
            await until(lambda: node.side.status is not None and node.side.status.phase is TrainerPhase.GONE)


@given(st.lists(st.sampled_from(TrainerPhase), max_size=9))
def test_a_trainer_goes_only_where_the_table_says(phases: list[TrainerPhase]) -> None:
    facts = TrainerStatus(1)
    for phase in phases:
        before = facts.phase
        if phase in TRANSITIONS[before]:
            facts.enter(phase)
            assert facts.phase is phase
        else:
            with pytest.raises(AssertionError, match=f"{before.name} -> {phase.name}"):
                facts.enter(phase)
            assert facts.phase is before


async def test_a_node_that_leaves_has_its_trainer_end_and_publish(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            await trainer.trains()
            left = trio.Event()

            async def leave() -> None:
                await node.side.drain()
                left.set()

            nursery.start_soon(leave)
            await trainer.hear("stop")
            assert not left.is_set()
            trainer.memory.copies[1][:] = MODEL
            await trainer.step(1, published=1, finishing=True)
            await left.wait()
            assert (await node.side.model_values())[0].tolist() == MODEL.tolist()


@pytest.mark.parametrize(("how", "patience_s"), [("hangs", 0.01), ("dies", 3600)])
async def test_a_node_that_leaves_does_not_wait_for_a_trainer_that_will_not_answer(
    tmp_path: Path, how: str, patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_session, "PATIENCE_MIN_S", patience_s)
    monkeypatch.setattr(trainer_session, "PATIENCE_STEPS", 0)
    node = Node(tmp_path)
    with script() as trainer:
        async with running(node) as nursery:
            nursery.start_soon(trainer.serve, node)
            await trainer.trains()
            async with trio.open_nursery() as leaving:
                leaving.start_soon(node.side.drain)
                await trainer.hear("stop")
                if how == "dies":
                    trainer.leave()


async def test_a_node_without_a_model_has_nothing_to_hand_over_nor_to_export(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.side.drain()
    with pytest.raises(UserError, match="this node has no model yet"):
        await node.side.model_values()
    await node.side.expect_none()
    assert not node.side.meta.expects
    assert node.sent == []


@pytest.mark.parametrize("total", [6, 7], ids=["attached", "refused"])
async def test_no_descriptor_is_left_open(tmp_path: Path, total: int) -> None:
    async def come_and_go(node: Node, nursery: trio.Nursery) -> None:
        with script(total=total) as trainer:
            nursery.start_soon(trainer.serve, node)
            await trainer.hear("welcome" if total == 6 else "error")
            trainer.leave()
            await until(lambda: not node.attached)

    node = Node(tmp_path)
    async with running(node) as nursery:
        before = len(os.listdir("/proc/self/fd"))
        await come_and_go(node, nursery)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_an_end_that_is_broken_off_as_all_have_come_to_agree_is_none() -> None:
    """Both in one turn of the loop."""
    service, said = TrainerService.__new__(TrainerService), list[object]()
    service._runner = SimpleNamespace(settled=trio.Event(), all_taken=True)  # type: ignore[assignment]
    status = TrainerStatus(1, phase=TrainerPhase.FINISHING)

    async def tell(word: object) -> None:
        said.append(word)

    session: Any = SimpleNamespace(facts=status, waits_for_others=trio.CancelScope(), tell=tell)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service._end_run, session)
        await trio.testing.wait_all_tasks_blocked()
        service._runner.settled.set()
        status.note(Stepped(5, 0.0, 1.0, False, None, False))
        session.waits_for_others.cancel()
    assert (status.phase, said) == (TrainerPhase.TRAINING, [])
