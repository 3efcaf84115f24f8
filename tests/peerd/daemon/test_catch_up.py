"""A newcomer's first model, in virtual time: whom it asks, whom it gives up, and what it waits for."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import TypeVar

import numpy as np
import pytest
import trio
import trio.testing

from peerd.daemon.catch_up import WAIT_TOLD_EVERY_S, CatchUp
from peerd.node import second_opinion
from peerd.node.acquaintances import Acquaintances
from peerd.node.donors import ASK_AGAIN_S, ASK_SOON_S, ASKS_MAX, SLOWEST_DONOR
from peerd.node.meta import NodeMeta
from peerd.training.codecs import vector
from peerd.training.codecs.difference import digest, digest_of_chunks
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.sketch import packed, sketch
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import (
    Member,
    Message,
    ModelEqual,
    ModelPromise,
    ModelRequest,
    ModelSketch,
    ModelSnapshot,
    SketchRequest,
    State,
)

pytestmark = pytest.mark.trio(clock="autojump")

T = TypeVar("T")
FAR = ("far", 1)
LAYOUT = Layout(5, 5)
MODEL = np.arange(5, dtype=np.float32)
OWN = np.ones(5, np.float32)
CHUNKS = tuple(bytes(chunk) for chunk in vector.encode("float32", LAYOUT, MODEL)[0])
PATIENCE_S = 11.0
SNAPSHOT = ModelSnapshot(7, "float32", CHUNKS)


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time goes on while a thread computes."""

    async def run(function: Callable[..., T], *arguments: object, **_: object) -> T:
        await trio.lowlevel.checkpoint()
        return function(*arguments)

    monkeypatch.setattr(trio.to_thread, "run_sync", run)


class Swarm:
    """The members as one node sees them, and what it sends to them."""

    def __init__(self, nursery: trio.Nursery, *, seeds: tuple[Address, ...], awaited: tuple[Address, ...]) -> None:
        self.nursery = nursery
        self.members: dict[NodeId, Member] = {}
        self.bytes_received = 0
        self.asked: list[NodeId] = []
        self.done = trio.Event()  # a fetch has ended
        self.on_asked: Callable[[NodeId], None] = lambda _: None
        self.on_sketch_asked: Callable[[NodeId, bytes], None] = lambda peer, seed: None
        until = trio.current_time() + PATIENCE_S
        restarted = partial(CatchUp, seeds=seeds, awaited=awaited, awaited_until=until)
        everybody = Acquaintances("me", Random(1), lambda _: None, sealed=False)
        self.catch_up = restarted("me", self, lambda: dict(self.members), everybody, Random(2))  # type: ignore[arg-type]
        self.member("me")

    def member(self, id: NodeId, state: State = State.ALIVE, **about: bool | str) -> None:
        self.members[id] = Member(id, f"node-{id}", "h", 1, 1, 0, state, "", NodeMeta(**about).pack())  # type: ignore[arg-type]
        self.catch_up.on_members()

    def send(self, peer: NodeId, message: Message) -> None:
        if isinstance(message, SketchRequest):
            self.on_sketch_asked(peer, message.seed)
            return
        assert message == ModelRequest(digest(OWN, LAYOUT))
        self.asked.append(peer)
        self.on_asked(peer)

    def gives(self, *donors: NodeId) -> None:
        """These donors answer, the others are silent."""
        self.on_asked = lambda peer: self.give(peer) if peer in donors else None

    def give(self, donor: NodeId, model: ModelSnapshot = SNAPSHOT) -> None:
        """As a donor does."""
        self.catch_up.on_promise(donor, ModelPromise(digest_of_chunks(model.chunks)))
        self.catch_up.on_model(donor, model)

    async def fetched(self) -> bool:
        """Whether a model came; it is the one that was sent."""
        found = await self.catch_up.fetch(LAYOUT, OWN)
        self.done.set()
        if found is None:
            return False
        assert found[0].tolist() == MODEL.tolist()
        assert found[1] == 7
        return True


@asynccontextmanager
async def swarm(*, seeds: tuple[Address, ...] = (FAR,), awaited: tuple[Address, ...] = ()) -> AsyncIterator[Swarm]:
    async with trio.open_nursery() as nursery:
        yield Swarm(nursery, seeds=seeds, awaited=awaited)
        nursery.cancel_scope.cancel()


async def unfinished(work: Callable[[], Awaitable[T]], for_s: float) -> bool:
    """Whether `work` still goes on after so long."""
    with trio.move_on_after(for_s) as scope:
        await work()
    return scope.cancelled_caught


async def test_a_founder_starts_from_its_own_model() -> None:
    async with swarm(seeds=()) as there:
        assert not await there.fetched()
        assert there.asked == []


async def test_a_founder_asks_those_it_knew_before_and_then_goes_on_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with swarm(seeds=(), awaited=(FAR,)) as there:
        assert await unfinished(there.fetched, PATIENCE_S - 1)
        assert not await unfinished(there.fetched, 2)
        assert there.asked == []
    assert {record.message for record in caplog.records} == {
        "the trainer waits: members known before the restart may still answer",
        "no member known before the restart answers: this node goes on alone",
    }
    assert len(caplog.records) == 3


async def test_a_founder_takes_the_model_of_those_it_knew_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with swarm(seeds=(), awaited=(FAR,)) as there:
        there.gives("a")
        assert await unfinished(there.fetched, PATIENCE_S - 1)
        there.member("a", ready=True)
        assert await there.fetched()
    assert not caplog.records


async def test_a_founder_in_company_goes_on_without_those_who_are_still_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with swarm(seeds=(), awaited=(FAR,)) as there:
        there.member("me", expects=True, founder=True)
        there.member("a", expects=True)
        assert await unfinished(there.fetched, PATIENCE_S - 1)
        assert not await there.fetched()
    assert not caplog.records


async def test_a_newcomer_that_knew_others_waits_for_ever_all_the_same() -> None:
    async with swarm(awaited=(FAR,)) as there:
        assert await unfinished(there.fetched, 10 * PATIENCE_S)


async def test_a_newcomer_waits_until_somebody_has_a_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with swarm() as there:
        there.gives("a")
        assert await unfinished(there.fetched, 35)
        there.member("a", expects=True, founder=True)
        assert await unfinished(there.fetched, 5)
        there.nursery.start_soon(there.fetched)
        await trio.sleep(5)
        assert there.asked == []
        there.member("a", expects=True, founder=True, ready=True)
        await there.done.wait()
        assert there.asked == ["a"]
    assert [record.message for record in caplog.records] == [
        *["the trainer waits: no node of the swarm has answered yet; peerd doctor --join far:1 shows why"] * 4,
        *["the trainer waits: no member has a model yet; node-a goes first"] * 2,
        "the model of step 7 came from node-a",
    ]


async def test_a_donor_that_goes_away_is_replaced_by_another() -> None:
    async with swarm() as there:
        for donor in "ab":
            there.member(donor, ready=True)

        def asked(peer: NodeId) -> None:
            if len(there.asked) == 1:
                there.member(peer, State.FAILED, ready=True)
            else:
                there.give(peer)

        there.on_asked = asked
        assert await there.fetched()
        assert sorted(there.asked) == ["a", "b"]


async def test_a_silent_donor_is_asked_again_and_then_another_one() -> None:
    async with swarm() as there:
        for donor in "ab":
            there.member(donor, ready=True)
        there.nursery.start_soon(there.fetched)
        await trio.sleep(ASK_SOON_S / 2)
        (first,) = there.asked
        await trio.sleep(2 * ASK_SOON_S)
        assert there.asked == [first, first], "its first answer may have been lost"
        second = {"a": "b", "b": "a"}[first]
        there.gives(second)
        await there.done.wait()
        assert there.asked == [first] * ASKS_MAX + [second]


async def test_a_newcomer_says_whom_it_has_asked_and_what_has_come(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with swarm() as there:
        there.bytes_received = 1_000_000
        there.member("a", ready=True)
        there.nursery.start_soon(there.fetched)
        await trio.sleep(WAIT_TOLD_EVERY_S - 0.5)
        assert not caplog.records, "most models come soon"
        there.bytes_received = 3_500_000
        there.member("b", ready=True)
        await trio.sleep(5 * ASK_AGAIN_S)
        assert set(there.asked) == {"a", "b"}
    said = [record.message for record in caplog.records]
    assert said[0] == "the trainer waits: for the swarm's model, asked of node-a; 2.5 MB came so far"
    assert said[-1] == "the trainer waits: for the swarm's model, asked of node-a, node-b; 2.5 MB came so far"
    assert 4 <= len(said) <= 6


async def test_a_donor_whose_model_is_on_its_way_is_left_in_peace() -> None:
    async with swarm() as there:
        there.member("a", ready=True)
        there.member("b", ready=True)
        there.nursery.start_soon(there.fetched)
        await trio.sleep(ASK_SOON_S / 2)
        (donor,) = there.asked
        for _ in range(100):
            there.bytes_received += 2 * SLOWEST_DONOR
            await trio.sleep(1)
        assert there.asked == [donor], "a large model over a slow network takes its time"
        there.give(donor)
        await there.done.wait()
        assert there.asked == [donor]


async def test_a_slow_donors_model_is_taken_when_another_one_was_asked_meanwhile() -> None:
    async with swarm() as there:
        for donor in "ab":
            there.member(donor, ready=True)
        there.nursery.start_soon(there.fetched)
        await trio.sleep(ASKS_MAX * ASK_AGAIN_S)
        first, last = there.asked[0], there.asked[-1]
        assert first != last
        del there.members[first]
        there.give(first)
        await there.done.wait()


async def test_a_bad_model_of_a_slow_donor_takes_no_turn_of_who_was_asked_since() -> None:
    async with swarm() as there:
        for donor in "ab":
            there.member(donor, ready=True)
        there.nursery.start_soon(there.fetched)
        while len(set(there.asked)) < 2:
            await trio.sleep(1)
        first, second = there.asked[0], there.asked[-1]
        there.give(first, ModelSnapshot(1, "zip", CHUNKS))
        await trio.sleep(2)
        there.give(first)  # it has had its turn
        await trio.sleep(2)
        assert set(there.asked[ASKS_MAX:]) == {second}
        assert not there.done.is_set()
        there.give(second)
        await there.done.wait()


@pytest.mark.parametrize(
    "bad", [ModelSnapshot(1, "float32", ()), ModelSnapshot(1, "zip", CHUNKS), ModelSnapshot(1, "float32", (b"x",))]
)
async def test_a_damaged_model_is_asked_of_another(bad: ModelSnapshot, caplog: pytest.LogCaptureFixture) -> None:
    async with swarm() as there:
        for donor in "ab":
            there.member(donor, ready=True)
        there.on_asked = lambda peer: there.give(peer, bad if len(there.asked) == 1 else SNAPSHOT)
        assert await there.fetched()
        assert sorted(there.asked) == ["a", "b"]
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.endswith("; asking another member")


async def test_a_newcomer_whose_model_is_the_same_goes_on_with_it() -> None:
    async with swarm() as there:
        there.member("a", ready=True)
        there.on_asked = lambda peer: there.catch_up.on_model(peer, ModelEqual(3))
        found = await there.catch_up.fetch(LAYOUT, OWN)
        assert found is not None
        assert (found[0].tolist(), found[1]) == (OWN.tolist(), 3)


def shows(there: Swarm, models: dict[NodeId, Vector]) -> None:
    """What these members give, and what they say of theirs."""

    def give(peer: NodeId) -> None:
        there.give(peer, ModelSnapshot(7, "float32", vector.encode("float32", LAYOUT, models[peer])[0]))

    def say(peer: NodeId, seed: bytes) -> None:
        there.catch_up.on_sketch(peer, ModelSketch(seed, packed(sketch(models[peer], LAYOUT, seed))))

    for id in models:
        there.member(id, ready=True)
    there.on_asked, there.on_sketch_asked = give, say


@pytest.mark.parametrize("liar", "abc")
async def test_a_model_that_is_far_from_all_others_is_asked_of_another(
    liar: NodeId, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm() as there:
        shows(there, dict.fromkeys("abc", MODEL) | {liar: -MODEL})
        assert await there.fetched()
        assert there.asked in ([there.asked[0]], [liar, there.asked[-1]])
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    far = f"the model from node-{liar}: it is far from those of most others; asking another member"
    assert warnings == [far] * (len(there.asked) - 1)


async def test_the_liar_was_asked_first_in_one_of_these() -> None:
    """So that the test before is no empty one."""
    first = []
    for liar in "abc":
        async with swarm() as there:
            shows(there, dict.fromkeys("abc", MODEL) | {liar: -MODEL})
            await there.fetched()
            first.append(there.asked[0] == liar)
    assert any(first)


@pytest.mark.parametrize(("silent", "wait_s"), [(1, ASK_SOON_S), (2, ASK_AGAIN_S), (3, ASK_AGAIN_S)])
async def test_who_says_nothing_of_its_model_is_waited_for_until_others_can_be_compared(
    silent: int, wait_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm() as there:
        shows(there, dict.fromkeys("abcd", MODEL))
        say, told = there.on_sketch_asked, list[NodeId]()

        def said(peer: NodeId, seed: bytes) -> None:
            told.append(peer)
            if len(told) > silent:
                say(peer, seed)

        there.on_sketch_asked = said
        before = trio.current_time()
        assert await there.fetched()
        assert wait_s <= trio.current_time() - before <= wait_s + 2 * ASK_SOON_S
        assert len(told) == 3
        why = f"is taken without a second opinion: of 3 members that were asked about it {3 - silent} answered"
        alone = [f"the model from node-{there.asked[0]} {why}"] if silent > 1 else []
        assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == alone


async def test_who_waits_for_others_to_look_at_a_large_model_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_opinion, "SKETCH_S", 7.0)
    caplog.set_level(logging.INFO)
    async with swarm() as there:
        shows(there, dict.fromkeys("abc", MODEL))
        there.on_sketch_asked = lambda peer, seed: None
        before = trio.current_time()
        assert await there.fetched()
        assert 35.0 <= trio.current_time() - before <= 37.0
        line = f"the trainer waits: until others have looked at the model from node-{there.asked[0]}"
        assert [record.message for record in caplog.records].count(line) == 3


@pytest.mark.parametrize("promise", [None, b"another"])
async def test_a_model_that_is_not_the_promised_one_is_asked_of_another(promise: bytes | None) -> None:
    """Who has learnt by what its model is judged could make it so that it passes."""
    async with swarm() as there:
        shows(there, dict.fromkeys("abc", MODEL))
        give = there.on_asked

        def asked(peer: NodeId) -> None:
            if len(there.asked) > 1:
                give(peer)
                return
            if promise is not None:
                there.catch_up.on_promise(peer, ModelPromise(promise))
            there.catch_up.on_model(peer, SNAPSHOT)

        there.on_asked = asked
        assert await there.fetched()
        assert len(set(there.asked)) == 2


async def test_a_newcomer_that_is_told_its_model_is_the_same_asks_others_too() -> None:
    async with swarm() as there:
        shows(there, dict.fromkeys("abc", MODEL))
        first: list[NodeId] = []

        def give(peer: NodeId) -> None:
            first.append(peer)
            if len(first) == 1:
                there.catch_up.on_model(peer, ModelEqual(3))
            else:
                there.give(peer)

        there.on_asked = give
        assert await there.fetched()
        assert len(first) == 2


@pytest.mark.parametrize("stranger", [ModelSnapshot(99, "float32", CHUNKS), ModelEqual(99)])
async def test_a_model_that_nobody_asked_for_is_dropped(stranger: ModelSnapshot | ModelEqual) -> None:
    async with swarm() as there:
        there.member("a", ready=True)
        there.catch_up.on_model("a", stranger)

        def asked(peer: NodeId) -> None:
            there.catch_up.on_model("b", stranger)
            there.give(peer)
            there.catch_up.on_model("b", stranger)

        there.on_asked = asked
        assert await there.fetched()


async def test_the_first_step_waits_for_enough_members_with_the_same_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with swarm() as there:
        there.member("a", ready=True, model="m")
        await there.catch_up.enough_members(2, "m")
        there.member("b", ready=True, model="another")
        there.member("c", ready=False, model="m")
        there.member("d", State.FAILED, ready=True, model="m")
        enough = partial(there.catch_up.enough_members, 3, "m")
        assert await unfinished(enough, 15)
        there.member("c", ready=True, model="m")
        assert not await unfinished(enough, 1)
    line = "the trainer waits: 2 of 3 members are ready; others join through h:1"
    assert [record.message for record in caplog.records] == [line] * 2


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (("b",), False),  # it has just come: it takes our model
        (("b", "B"), False),
        (("b", "B", "C"), False),  # it may have taken b's
        (("B",), True),
        (("b", "c", "D"), True),
        (("d", "-d", "D"), False),  # it was away
        (("+O",), False),  # of another model: it will be refused
    ],
)
async def test_who_began_alone_and_meets_a_swarm_with_another_model_is_told(
    seen: tuple[str, ...], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Capitals have a model, with a plus another one; with a minus they failed."""
    async with swarm(seeds=()) as there:
        assert not await there.fetched()
        there.member("me", ready=True)
        for one in seen:
            state = State.FAILED if "-" in one else State.ALIVE
            there.member(one[-1].lower(), state, ready=one.isupper(), model="other" if "+" in one else "")
        there.member("me", ready=True)
    lines = [record.message for record in caplog.records]
    assert len(lines) == told
    for line in lines:
        assert line.startswith(f"node-{seen[-1].lower()} trains already, with another model than this node")
        assert line.endswith("stop this node and start it with --join h:1")
