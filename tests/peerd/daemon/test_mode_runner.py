"""The shell around the mode: which events reach it, in what order, and what becomes of its effects."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
import trio.testing

from peerd.daemon import mode_runner
from peerd.daemon.mode_runner import (
    DRAIN_MIN_S,
    EXCHANGE_SHARE,
    LOOK_MAX_S,
    TAKEN_MAX_S,
    WIND_UP_LOOK_S,
    WIND_UP_MIN_S,
    ModeRunner,
)
from peerd.daemon.offences import Offences
from peerd.daemon.trainer_session import TrainerPhase, TrainerStatus
from peerd.local.shared_memory import SharedMemory
from peerd.node.core import Nothing
from peerd.node.model_copy import ModelCopy
from peerd.protocol.trainer import Said, encoded
from peerd.training import room
from peerd.training.codecs import vector
from peerd.training.codecs.difference import digest_of_chunks
from peerd.training.codecs.vector import Layout, NotFinite
from peerd.training.effects import Apply, Effect, Log, Proceed, Publish, Send, StepReport
from peerd.training.mode_core import (
    BarrierKnown,
    GradientCame,
    ModeEnds,
    ModeEvent,
    NodeLeaves,
    Reconnected,
    RunStands,
    TrainerLost,
)
from peerd.training.mode_settings import ModeSettings
from peerd.training.modes import EVERY_STEP, Quiet
from peerd.transport.errors import PeerError, UserError
from peerd.transport.ids import NodeId
from peerd.transport.messages import (
    AS_STARTED,
    Connected,
    Delta,
    LinkClose,
    LinkOpen,
    Member,
    Message,
    ModelPromise,
    ModelSnapshot,
    Plan,
    State,
)

pytestmark = pytest.mark.trio(clock="still")  # the compute thread takes no time

LAYOUT = Layout(2, 2)
HALF = Delta(1, 1, "sign", 0.5, True, False, b"", 0.0, 0.0, ())
CLOSE = LinkClose(1, 1)
ONE = np.array([1, 1], np.float32)


def report(step: int, *, published: bool = False, finishing: bool = False) -> StepReport:
    return StepReport(step, 0.5, 1.0, published, finishing)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is a large one."""
    monkeypatch.setattr(room, "LARGE", 1)


class Mode:
    """Notes what it is told, and answers what the test says."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.deadline = float("inf")
        self.told: list[Any] = []
        self.left: npt.NDArray[np.float32] | None = None  # that the model has not got
        self.answer: Callable[[Any], list[Effect]] = lambda _: []

    def succeeds(self, last: Any) -> None:
        pass

    def works_in_place(self, spares: Any) -> bool:
        return False

    def _hear(self, event: Any) -> list[Effect]:
        self.told.append(event)
        return self.answer(event)

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        return self._hear(report)

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        return self._hear((sender, message))

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        return self._hear(alive)

    def on_timer(self, now: float) -> list[Effect]:
        self.deadline = float("inf")
        return self._hear("timer")

    def on_trainer_lost(self, now: float) -> list[Effect]:
        return []

    @property
    def quiet(self) -> Quiet:
        return EVERY_STEP

    def end(self) -> npt.NDArray[np.float32] | None:
        return self.left


class There:
    """Exchanges with a mode on a replica of two values, its peers and its trainer."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.plan = AS_STARTED
        self.started = True
        self.clock = trio.lowlevel.current_clock()
        self.sent: list[tuple[NodeId, Message]] = []
        self.drained_after: list[tuple[NodeId, Message]] | None = None
        self.told: list[tuple[Any, ...]] = []
        self.memory, self.model_copy = memory_and_replica()
        self.board = self.model_copy._memory.board
        self.mode = Mode()
        self.facts = TrainerStatus(1)
        self.offences = Offences()
        self.runner = ModeRunner(self)  # type: ignore[arg-type]  # it is its peers, too
        self.runner.core.model = self.model_copy
        self.runner.core.mode = self.mode  # type: ignore[assignment]
        self.runner.core._note_members(frozenset("abc"), 0.0)
        self.runner.session = self  # type: ignore[assignment]  # and its trainer

    def trains(self, patience_s: float) -> None:
        """The trainer makes steps, and has so long to make the next one."""
        self.facts.phase = TrainerPhase.TRAINING
        self.patience_s = patience_s

    async def trains_and_is_corrected(self, patience_s: float, phase: TrainerPhase = TrainerPhase.TRAINING) -> None:
        """The same, and a peer has corrected its model; each exchange will."""
        self.trains(patience_s)
        self.facts.phase = phase
        self.asks(Apply(ONE))
        await self.runner.on_message("a", HALF)

    def look(self) -> None:
        """What there is to know of it is known."""

    def send(self, peer: NodeId, message: Message) -> None:
        self.sent.append((peer, message))

    async def drain(self) -> None:
        self.drained_after = list(self.sent)
        await trio.lowlevel.checkpoint()

    async def tell(self, said: Said) -> None:
        await trio.lowlevel.checkpoint()
        self.told.append(tuple(encoded(said).values()))

    async def worked(self) -> None:
        """All that was posted so far is done."""
        await trio.testing.wait_all_tasks_blocked()
        await self.runner.compute.call(Nothing())

    async def later(self, seconds: float) -> None:
        """So much time has passed, and what was due then is done."""
        await self.worked()
        assert isinstance(self.clock, trio.testing.MockClock)
        self.clock.jump(seconds)
        await self.worked()

    def asks_after(self, gate: threading.Event) -> None:
        """The mode stands until then, and asks for nothing."""

        def stand(_: Any) -> list[Effect]:
            assert gate.wait(60)
            return []

        self.mode.answer = stand

    def asks(self, *effects: Effect) -> None:
        """The mode asks for these, whatever comes."""
        self.mode.answer = lambda _: list(effects)


def memory_and_replica() -> tuple[SharedMemory, ModelCopy]:
    memory = SharedMemory.create(2)
    other = SharedMemory(os.dup(memory.fd), 2)
    memory.close_fd()
    other.close_fd()
    return memory, ModelCopy(other)


@asynccontextmanager
async def there() -> AsyncIterator[There]:
    async with trio.open_nursery() as nursery:
        made = There(nursery)
        nursery.start_soon(made.runner.run)
        yield made
        nursery.cancel_scope.cancel()


async def test_before_there_is_a_mode_nothing_is_told() -> None:
    async with there() as it:
        it.runner.core.mode = None
        it.runner.on_reconnected("a")
        await it.runner.on_message("a", HALF)
        await it.worked()
        assert it.mode.told == []


async def test_events_reach_the_mode_in_order() -> None:
    async with there() as it:
        it.runner.on_partners(frozenset("ab"))
        it.runner.on_report(report(1, published=True), 1)
        await it.runner.on_message("a", HALF)
        it.runner.on_reconnected("b")
        it.runner.on_report(report(2, finishing=True), None)
        await it.worked()
        assert it.mode.told == [
            frozenset("ab"),
            report(1, published=True),
            ("a", HALF),
            ("b", Connected()),
            report(2, finishing=True),
        ]


async def test_a_peers_mistake_is_raised_where_its_message_came_in() -> None:
    async with there() as it:

        def wrong(_: Any) -> list[Effect]:
            raise PeerError("a bad payload")

        it.mode.answer = wrong
        with pytest.raises(PeerError, match="a bad payload"):
            await it.runner.on_message("a", HALF)
        it.asks()
        await it.runner.on_message("a", HALF)


async def test_reports_that_wait_for_the_thread_are_replaced_by_the_newest() -> None:
    async with there() as it:
        gate = threading.Event()
        it.asks_after(gate)
        it.runner.compute.post(Reconnected("a"))
        for step in range(1, 5):
            it.runner.on_report(report(step), None)
        it.runner.on_report(report(5, published=True), 1)  # this one says more than how far the model moved
        it.runner.on_report(report(6), None)
        gate.set()
        await it.worked()
        assert it.mode.told[1:] == [report(4), report(5, published=True), report(6)]
        it.runner.on_report(report(7), None)
        await it.worked()
        assert it.mode.told[4:] == [report(7)]


async def test_a_publish_is_asked_once_until_it_comes() -> None:
    async with there() as it:
        it.asks(Publish())
        it.runner.on_report(report(1), None)
        await it.worked()
        it.runner.on_report(report(2), None)
        it.runner.ask_publish()
        await it.worked()
        assert it.told == [("publish",)]
        it.asks()
        it.memory.copies[1][:] = 7
        it.runner.on_report(report(3, published=True), 1)
        it.runner.ask_publish()
        await it.worked()
        assert it.told == [("publish",), ("publish",)]
        values, step = await it.runner.values()
        assert (values.tolist(), step) == ([7, 7], 3)
        assert it.memory.board.current == 1, "the trainer may write the other one now"


async def test_corrections_are_handed_over_until_taken() -> None:
    async with there() as it:
        it.asks(Apply(ONE), Send("a", HALF))
        await it.runner.on_message("a", HALF)
        await it.runner.on_message("a", HALF)
        assert it.sent == [("a", HALF)] * 2
        assert it.told == [("corrections", 0)], "the trainer has one half at a time"
        taken = [it.runner.all_taken]
        it.runner.on_taken(0)
        await it.worked()
        assert it.told == [("corrections", 0), ("corrections", 1)]
        it.runner.on_taken(1)
        await it.worked()
        assert [*taken, it.runner.all_taken] == [False, True]
        assert (await it.runner.values())[0].tolist() == [2, 2]


@pytest.mark.usefixtures("large")
async def test_an_exchange_of_a_large_model_waits_until_the_trainer_has_taken_the_last_correction() -> None:
    async with there() as it:
        it.trains(patience_s=3.0)
        it.asks(Apply(ONE))
        for turn in range(3):
            it.nursery.start_soon(it.runner.on_message, "a", HALF)
            await it.later(2.9)
            assert len(it.mode.told) == max(1, 2 * turn)
            it.asks()
            await it.runner.on_message("b", CLOSE)
            assert it.mode.told[-1] == ("b", CLOSE), "whatever corrects nothing does not wait"
            it.asks(Apply(ONE))
            if turn:
                it.runner.on_taken(0)
                await it.worked()
                assert it.mode.told[-1] == ("a", HALF)
        assert it.told == [("corrections", 0)] * 3
        assert not it.memory.corrections[1].any(), "memory that is never touched is none"
        it.runner.on_taken(0)
        await it.runner.on_message("a", HALF)
        assert (await it.runner.values())[0].tolist() == [4, 4]


@pytest.mark.usefixtures("large")
async def test_waits_of_several_exchanges_do_not_add_up() -> None:
    async with there() as it:
        await it.trains_and_is_corrected(3.0)
        for sender in "bca":
            it.nursery.start_soon(it.runner.on_message, sender, HALF)
        await it.later(2.9)
        assert len(it.mode.told) == 1
        it.runner.on_taken(0)
        await it.worked()
        assert len(it.mode.told) == 4


@pytest.mark.usefixtures("large")
async def test_at_a_runs_end_exchanges_of_a_large_model_go_in_turn() -> None:
    async with there() as it:
        await it.trains_and_is_corrected(3.0, TrainerPhase.FINISHING)
        for sender in "bc":
            it.nursery.start_soon(it.runner.on_message, sender, HALF)
            await it.worked()
        for sender in "bc":
            assert it.mode.told[-1] != (sender, HALF)
            it.runner.on_taken(0)
            await it.worked()
            assert it.mode.told[-1] == (sender, HALF)
        assert it.told == [("corrections", 0)] * 3


@pytest.mark.usefixtures("large")
async def test_who_does_not_take_a_correction_is_waited_for_once() -> None:
    async with there() as it:
        await it.trains_and_is_corrected(3.0)
        it.nursery.start_soon(it.runner.on_message, "b", HALF)
        await it.later(3.1)
        assert it.mode.told == [("a", HALF), ("b", HALF)]
        await it.runner.on_message("c", HALF)  # at once, on a clock that stands
        it.runner.on_taken(0)
        await it.worked()
        assert it.told == [("corrections", 0), ("corrections", 1)]
        it.nursery.start_soon(it.runner.on_message, "a", HALF)
        await it.later(2.9)
        assert len(it.mode.told) == 3, "one that takes again is waited for again"
        it.runner.on_taken(1)
        await it.worked()
        assert len(it.mode.told) == 4


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("how", ["another mode", "the node leaves"])
async def test_what_must_end_soon_waits_for_no_step(how: str) -> None:
    async with there() as it:
        await it.trains_and_is_corrected(3600.0)
        it.nursery.start_soon(it.runner.on_message, "b", HALF)
        await it.worked()
        assert len(it.mode.told) == 1
        it.nursery.start_soon(it.runner.wind_up if how == "another mode" else partial(it.runner.drain, 1))
        await it.worked()
        heard = [told for told in it.mode.told if told == ("b", HALF)]
        it.runner.on_taken(0)
        await it.worked()
        await it.runner.on_message("c", HALF)
        assert (heard, it.mode.told[-1]) == ([("b", HALF)], ("c", HALF))


@pytest.mark.usefixtures("large")
async def test_under_the_next_mode_exchanges_wait_again_and_never_for_long() -> None:
    async with there() as it:
        await it.trains_and_is_corrected(3600.0)
        it.runner._hurry()
        it.started = False
        make: Any = lambda *_: it.mode  # noqa: E731
        plan = Plan(1, "", False)
        await it.runner.begin(plan, frozenset("abc"), make, "me", LAYOUT, random.Random(1), ModeSettings())
        it.runner.on_taken(0)
        await it.runner.on_message("a", HALF, plan)
        told = len(it.mode.told)
        it.nursery.start_soon(it.runner.on_message, "b", HALF, plan)
        await it.later(TAKEN_MAX_S - 0.1)
        assert len(it.mode.told) == told
        await it.later(0.2)
        assert it.mode.told[-1] == ("b", HALF)


@pytest.mark.usefixtures("large")
async def test_what_was_offered_to_a_trainer_that_has_just_gone_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with there() as it:
        it.trains(patience_s=3600.0)
        tell = it.tell

        async def goes(said: Said) -> None:
            it.runner.on_trainer_gone()
            await tell(said)

        monkeypatch.setattr(it, "tell", goes)
        it.asks(Publish(), Apply(ONE))
        await it.runner.on_message("a", HALF)
        monkeypatch.setattr(it, "tell", tell)
        it.runner.session = it  # type: ignore[assignment]  # the next one
        await it.runner.on_message("b", HALF)
        assert (await it.runner.values())[0].tolist() == [2, 2]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("how", ["is gone", "has finished", "has not begun"])
async def test_no_exchange_waits_for_a_trainer_that_takes_nothing(how: str) -> None:
    async with there() as it:
        await it.trains_and_is_corrected(3.0)
        if how != "is gone":
            it.facts.phase = TrainerPhase.FINISHED if how == "has finished" else TrainerPhase.STARTING
            await it.runner.on_message("b", HALF)
        else:
            it.nursery.start_soon(it.runner.on_message, "b", HALF)
            await it.worked()
            assert len(it.mode.told) == 1
            it.runner.on_trainer_gone()
            await it.worked()
        assert it.mode.told[1] == ("b", HALF)
        assert (await it.runner.values())[0].tolist() == [2, 2]


async def test_without_a_trainer_corrections_are_the_models_at_once() -> None:
    async with there() as it:
        it.asks(Apply(ONE), Publish())
        await it.runner.on_message("a", HALF)
        it.told.clear()
        it.runner.on_trainer_gone()
        await it.worked()
        assert (await it.runner.values())[0].tolist() == [1, 1], "what it had not taken is not lost"
        await it.runner.on_message("a", HALF)
        assert it.told == []
        assert it.runner.all_taken
        assert (await it.runner.values())[0].tolist() == [2, 2]

        # the next trainer gets the model in its own memory, and is asked to publish anew
        memory, fresh = memory_and_replica()
        await it.runner.move(fresh)
        it.runner.session = it  # type: ignore[assignment]
        assert memory.copies[0].tolist() == [2, 2]
        it.runner.ask_publish()
        await it.worked()
        assert it.told == [("publish",)]


async def test_a_trainer_that_comes_before_the_last_one_is_tidied_away_keeps_its_corrections() -> None:
    async with there() as it:
        it.asks(Apply(ONE))
        await it.runner.on_message("a", HALF)
        it.runner.on_trainer_gone()
        it.runner.session = it  # type: ignore[assignment]
        await it.runner.on_message("a", HALF)
        _, fresh = memory_and_replica()
        await it.runner.go_on_from(fresh, 3)
        assert (await it.runner.values())[0].tolist() == [2, 2]


async def test_the_model_is_given_bit_for_bit_unless_it_is_not_finite() -> None:
    async with there() as it:
        model = np.array([1 / 3, 1e-30], np.float32)
        it.memory.copies[0][:] = model
        it.model_copy.step = 9
        await it.runner.give_model("a", LAYOUT, b"")
        (first, promise), (peer, message) = it.sent
        assert isinstance(message, ModelSnapshot)
        assert (first, promise) == ("a", ModelPromise(digest_of_chunks(message.chunks)))
        assert (peer, message.step) == ("a", 9)
        found = np.empty(2, np.float32)
        vector.decode(message.codec, LAYOUT, message.chunks, found)
        assert found.tobytes() == model.tobytes()
        it.memory.copies[0][1] = np.nan
        with pytest.raises(NotFinite):
            await it.runner.give_model("a", LAYOUT, b"")
        assert len(it.sent) == 2


async def test_the_mode_is_woken_at_its_deadline() -> None:
    async with there() as it:
        it.mode.deadline = 40.0
        await it.later(39)
        assert it.mode.told == []
        await it.later(2)
        assert it.mode.told == ["timer"]


async def test_what_the_mode_says_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with there() as it:
        it.asks(Log("the model is not finite"))
        await it.runner.on_message("a", HALF)
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.WARNING, "the model is not finite")
    ]


async def test_members_are_logged_by_their_names(caplog: pytest.LogCaptureFixture) -> None:
    member = Member("0123456789abcdef", "gpu-7", "10.0.0.1", 1, 1, 0, State.ALIVE, "", b"")
    async with there() as it:
        it.runner._members = lambda: {member.id: member}
        it.asks(Log(f"without {member.id}: 0123456789abcdef0, 01234567 and a are others"))
        await it.runner.on_message("a", HALF)
    assert caplog.messages == ["without gpu-7 (01234567): 0123456789abcdef0, 01234567 and a are others"]


async def test_proceed_says_what_is_done() -> None:
    async with there() as it:
        it.runner.on_report(report(1, finishing=True), None)
        settled = it.runner.settled
        it.asks(Proceed(settled=False))
        await it.runner.on_message("a", HALF)
        assert not settled.is_set()
        it.asks(Proceed(settled=True))
        await it.runner.on_message("a", HALF)
        assert settled.is_set()
        it.runner.on_report(report(1, finishing=True), None)
        assert it.runner.settled.is_set(), "without a step the mode has nothing more to say"
        it.runner.on_report(report(2), None)
        assert not it.runner.settled.is_set(), "a new run ends anew"


END = StepReport(12, 0.0, 1.0, published=False, finishing=True)


async def test_a_leaving_node_waits_until_its_partners_have_all(caplog: pytest.LogCaptureFixture) -> None:
    async with there() as it:
        it.mode.answer = lambda event: [Proceed(settled=False)] if event == END else []
        await it.runner.drain(12)
        assert it.mode.told == [END]
    assert not caplog.records


async def test_a_node_that_leaves_in_its_second_run_waits_for_this_runs_change() -> None:
    async with there() as it:
        it.asks(Proceed(settled=False), Proceed(settled=True))
        it.runner.on_report(report(1, finishing=True), None)
        await it.worked()
        it.asks()
        it.runner.on_report(report(2), None)
        it.nursery.start_soon(it.runner.drain, 12)
        await it.worked()
        assert it.mode.told[-1] == END
        it.asks(Send("a", HALF), Proceed(settled=False))
        await it.runner.on_message("a", HALF)
        await it.worked()
        assert it.drained_after == [("a", HALF)]


async def test_halves_that_cross_are_no_slow_exchange(caplog: pytest.LogCaptureFixture) -> None:
    async with there() as it:
        it.mode.answer = lambda event: [Send("a", HALF)] if isinstance(event, StepReport) else []
        it.runner.on_report(report(1), None)
        await it.runner.on_message("a", HALF)  # it is here before the compute thread has begun ours
        await it.later(1000)
        await it.runner.on_message("a", HALF)
        it.nursery.start_soon(it.runner.drain, 12)
        await it.later(DRAIN_MIN_S + 1)
    assert [record.message for record in caplog.records] == ["not every partner took what this node had not yet sent"]


@pytest.mark.parametrize("slowest_s", [0, 30])
@pytest.mark.parametrize("how", ["answered", "reconnected", "gone"])
async def test_a_leaving_node_waits_as_its_slowest_exchange_suggests(
    how: str, slowest_s: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with there() as it:
        it.asks(Send("a", HALF), Send("b", LinkOpen(1)))
        await it.runner.on_message("c", LinkOpen(2))
        it.asks()
        await it.later(slowest_s)
        match how:
            case "reconnected":  # what is said again is another exchange
                it.runner.on_reconnected("a")
            case "gone":
                it.runner.on_partners(frozenset("bc"))
        await it.runner.on_message("a", HALF)
        await it.runner.on_message("b", HALF)  # no exchange, so it took no time
        await it.later(1000)
        await it.runner.on_message("a", HALF)  # nor is the next one that it begins ours
        it.nursery.start_soon(it.runner.drain, 12)
        patience_s = EXCHANGE_SHARE * slowest_s if how == "answered" else 0
        await it.later(max(patience_s, DRAIN_MIN_S) - 1)
        assert not caplog.records
        await it.later(2)
    assert [record.message for record in caplog.records] == ["not every partner took what this node had not yet sent"]


# ------------------------------------------------------------------------------------------------------ another mode

PLAN = Plan(1, "a", True, "gossip")


class Busy(Mode):
    """As long as the test says so, it has something under way."""

    under_way = True
    barrier = 3


async def begin(it: There, plan: Plan = PLAN) -> Busy:
    """The mode of another plan, which the exchanges now have."""
    made = Busy()
    it.mode = made
    await it.runner.begin(plan, frozenset("ab"), lambda *_: made, "me", LAYOUT, random.Random(1), None)  # type: ignore
    assert made.told.pop() == frozenset("ab")
    return made


@pytest.mark.parametrize("line", ["own.py, line 7, fails", None])
async def test_a_mode_of_the_users_that_cannot_begin_is_one_line(
    monkeypatch: pytest.MonkeyPatch, line: str | None
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(mode_runner, "told_of_own", lambda error: line)
    async with there() as it:
        with pytest.raises(UserError if line else RuntimeError) as told:
            await it.runner.begin(PLAN, frozenset("ab"), fails, "me", LAYOUT, random.Random(1), ModeSettings())
        assert str(told.value) == (line or "no such thing")


async def test_each_mode_hears_only_what_was_meant_for_it() -> None:
    async with there() as it:
        before = it.mode
        await it.runner.on_message("a", HALF, PLAN)
        await it.runner.on_message("a", HALF)
        after = await begin(it)
        await it.runner.on_message("b", HALF)
        await it.runner.on_message("b", HALF, PLAN)
        await it.runner.on_message("b", HALF, Plan(1, "b", True, "gossip"))
        assert (before.told, after.told) == ([("a", HALF)], [("b", HALF)])


async def test_what_is_sent_belongs_to_the_mode_that_sends_it() -> None:
    async with there() as it:
        assert it.plan == AS_STARTED
        await begin(it)
        assert it.plan == PLAN


async def test_a_trainer_is_told_the_barrier_and_until_it_knows_its_steps_are_not_the_modes() -> None:
    async with there() as it:
        await begin(it)
        assert it.told == [("barrier", 3)]
        it.memory.copies[1][:] = 5
        it.runner.on_report(report(1, published=True), 1)
        it.runner.on_report(report(2), None)
        await it.worked()
        assert it.mode.told == []
        assert (await it.runner.values())[0].tolist() == [5, 5], "though the model is known"
        await begin(it, Plan(2, "a"))
        it.runner.on_told()
        it.runner.on_report(report(3), None)
        await it.worked()
        assert it.mode.told == [], "it knows of the change before"
        it.runner.on_told()
        it.runner.on_report(report(4), None)
        it.runner.on_report(report(5, finishing=True), None)
        await it.worked()
        assert it.mode.told == [report(4), report(5, finishing=True)]


async def test_a_trainer_that_does_not_know_the_barrier_yet_is_not_told_another() -> None:
    async with there() as it:
        it.started = False
        await begin(it)
        assert it.told == []
        it.runner.on_report(report(1), None)
        await it.worked()
        assert it.mode.told == [report(1)]


async def test_a_run_that_ended_before_the_change_is_still_ended_after_it() -> None:
    async with there() as it:
        it.runner.on_report(report(7, finishing=True), None)
        await begin(it)
        it.runner.go_on_finishing(7, stands=False)
        await it.worked()
        assert it.mode.told == [report(7, finishing=True)]


async def test_each_mode_hears_of_a_last_step_once_however_often_it_is_said() -> None:
    last = StepReport(7, 0.0, 1.0, published=False, finishing=True)
    async with there() as it:
        for _ in range(2):
            it.runner.on_report(last, None)
            await it.worked()
        assert it.mode.told == [last]
        await begin(it)
        for _ in range(2):
            it.runner.go_on_finishing(7, stands=False)
            await it.worked()
        assert it.mode.told == [last], "the new one, too"
        it.runner.on_report(report(8, finishing=True), None)
        await it.worked()
        assert [said.step for said in it.mode.told] == [7, 8], "another run has an end of its own"


@pytest.mark.parametrize("stands", [False, True])
async def test_a_node_that_does_not_train_says_so_where_all_wait_for_it(stands: bool) -> None:
    async with there() as it:
        it.runner.on_report(report(7), None)
        await it.worked()
        await begin(it)
        it.runner.go_on_finishing(7, stands=stands)
        await it.worked()
        assert [said.step for said in it.mode.told] == [7] * stands
        assert all(said.finishing for said in it.mode.told)


async def test_before_a_change_what_is_under_way_comes_to_its_end_and_nothing_new_begins() -> None:
    async with there() as it:
        mode = await begin(it)
        it.runner.on_told()
        wound_up = trio.Event()

        async def wind_up() -> None:
            await it.runner.wind_up()
            wound_up.set()

        it.nursery.start_soon(wind_up)
        await it.later(WIND_UP_MIN_S / 2)
        it.runner.on_report(report(1), None)
        await it.runner.on_message("a", HALF, PLAN)
        assert mode.told == [("a", HALF)]
        assert not wound_up.is_set()
        mode.under_way = False
        await it.later(WIND_UP_LOOK_S)
        await it.later(WIND_UP_LOOK_S)
        assert wound_up.is_set()

        mode = await begin(it, Plan(2, "a"))
        it.runner.on_told()
        it.runner.on_report(report(2), None)
        await it.worked()
        assert mode.told == [report(2)]
        wound_up = trio.Event()
        it.nursery.start_soon(wind_up)
        await it.worked()
        await it.later(WIND_UP_MIN_S)
        assert wound_up.is_set(), "whoever does not answer is not waited for"


async def test_what_a_mode_still_held_is_the_models_before_another_takes_over() -> None:
    async with there() as it:
        it.mode.left = ONE
        made = await begin(it)
        assert (await it.runner.values())[0].tolist() == [1, 1]
        assert ("corrections", 0) in it.told, "the trainer gets it, too"
        assert made.told == []


async def test_an_average_is_no_end_of_a_run() -> None:
    async with there() as it:
        await begin(it, Plan(1, "a", False))
        it.asks(Proceed(settled=False))
        await it.runner.on_message("a", HALF, Plan(1, "a", False))
        assert not it.runner.averaged.is_set()
        it.asks(Proceed(settled=True))
        await it.runner.on_message("a", HALF, Plan(1, "a", False))
        assert it.runner.averaged.is_set()
        assert not it.runner.settled.is_set()
        await begin(it, Plan(2, "a"))
        assert not it.runner.averaged.is_set()


async def test_what_a_peer_said_may_fail_later_and_the_node_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(_: Any) -> list[Effect]:
        raise OverflowError

    async with there() as it:
        it.mode.answer = wrong
        it.runner.on_partners(frozenset("ab"))
        it.runner.on_report(report(1), None)
        it.mode.deadline = 0.0
        await it.later(LOOK_MAX_S)
        with pytest.raises(OverflowError):
            await it.runner.on_message("a", HALF)  # then it is known who did it
        it.asks()
        await it.runner.on_message("a", HALF)
        assert it.mode.told[-1] == ("a", HALF)
    assert it.offences.counts["unforeseen_errors"] == 3
    assert sum(bool(record.exc_info) for record in caplog.records) == 1


async def test_what_the_user_can_mend_ends_the_node() -> None:
    def wrong(_: Any) -> list[Effect]:
        raise UserError("mend it")

    async def node() -> None:
        async with there() as it:
            it.mode.answer = wrong
            it.runner.on_partners(frozenset("ab"))
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as failure:
        await node()
    assert failure.group_contains(UserError)


async def test_what_peers_cause_waits_in_bounded_room_and_the_last_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_runner, "WAITING_MAX", 4)
    gate = threading.Event()
    async with there() as it:
        it.asks_after(gate)
        for number in range(99):
            it.runner.on_partners(frozenset([str(number)]))
            it.runner.on_reconnected("a")
        assert it.runner.compute.waiting == 4
        gate.set()
        it.asks()
        await it.later(LOOK_MAX_S)
        assert len(it.mode.told) == 6
        assert it.mode.told[-2:] == [frozenset(["98"]), ("a", Connected())]


@pytest.mark.parametrize(
    "event",
    [GradientCame(1, 1.0, 0.1), TrainerLost(), RunStands(1, True), NodeLeaves(1), BarrierKnown(), ModeEnds()],
    ids=lambda event: type(event).__name__,
)
async def test_an_error_of_a_mode_ends_no_node_whatever_brings_it_up(
    event: ModeEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with there() as it:
        handle = it.runner.core.handle

        def breaks(one: Any, now: float) -> Any:
            if type(one) is type(event):
                raise KeyError("what a peer said earlier")
            return handle(one, now)

        monkeypatch.setattr(it.runner.core, "handle", breaks)
        if isinstance(event, ModeEnds):
            await it.runner.wind_up()
        else:
            it.runner.compute.post(event)
        await it.worked()
        assert it.offences.counts["unforeseen_errors"] == 1
        await it.runner.on_message("a", HALF)
        assert it.mode.told == [("a", HALF)], "and the next is heard"
