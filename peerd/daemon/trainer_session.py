"""What does an attached trainer say? The daemon's end of one session, with what is known of the trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import trio

from peerd.daemon.control import LocalConnection
from peerd.local.board import Board, LastStep
from peerd.process.logs import LOGGER
from peerd.protocol.trainer import (
    FROM_TRAINER,
    BarrierHeard,
    CheckpointFailed,
    Go,
    GradientIs,
    GradientReady,
    Resume,
    Said,
    Stepped,
    decoded,
    encoded,
)
from peerd.training.effects import StepReport

PATIENCE_STEPS = 10
PATIENCE_MIN_S = 3.0

T = TypeVar("T")


class TrainerPhase(StrEnum):
    """How far a trainer is, in the words that the status shows."""

    STARTING = "starting"  # it comes to the swarm's model, and waits for Go
    TRAINING = "training"
    FINISHING = "finishing"  # its last step is made, and the others are to agree
    FINISHED = "finished"
    GONE = "gone"


TRANSITIONS: dict[TrainerPhase, dict[TrainerPhase, str]] = {
    TrainerPhase.STARTING: {
        TrainerPhase.TRAINING: "enough members are ready: Go",
        TrainerPhase.GONE: "it died, or said what nobody understands",
    },
    TrainerPhase.TRAINING: {
        TrainerPhase.FINISHING: "its last step",
        TrainerPhase.GONE: "as before",
    },
    TrainerPhase.FINISHING: {
        TrainerPhase.FINISHED: "all agree, or they take too long: Finished",
        TrainerPhase.FINISHING: "its last step again: the script caught what interrupted swarm.finish(), and exits",
        TrainerPhase.TRAINING: "another step: it caught that, and trains on",
        TrainerPhase.GONE: "as before",
    },
    TrainerPhase.FINISHED: {
        TrainerPhase.FINISHING: "its last step again, which Finished crossed",
        TrainerPhase.TRAINING: "another step, which Finished crossed",
    },
    TrainerPhase.GONE: {},
}
"""What a phase may be followed by, and why."""


class TrainerGone(Exception):
    """The trainer's connection ended while it waited for the swarm."""


@dataclass(slots=True)
class TrainerStatus:
    """What the status shows of a trainer."""

    pid: int
    step: int = 0
    first_step: int = 0
    samples: int = 0
    loss: float | None = None
    lr: float | None = None
    lr_max: float = 0.0  # the trigger's threshold follows the learning rate, across restarts of the trainer too
    metrics: dict[str, float] = field(default_factory=dict)
    rollbacks: int = 0
    phase: TrainerPhase = TrainerPhase.STARTING
    began: float = 0.0  # when it trained first, on the loop's clock
    last_step_at: float | None = None  # on the loop's clock
    waits: bool = False  # that was a step of the mode's barrier: the trainer stands until the swarm lets it go
    released_at: float = -math.inf  # when it last did
    checkpoint_failed: str | None = None  # why the last one was not written
    at_exit: bool = False  # it finished only because its interpreter ended, which may be a failure

    @property
    def has_stepped(self) -> bool:
        """Whether it has made a step."""
        return self.began > 0 and self.step > self.first_step

    def enter(self, phase: TrainerPhase) -> None:
        """The only way from one phase to another."""
        assert phase in TRANSITIONS[self.phase], f"{self.phase.name} -> {phase.name}"
        self.phase = phase

    def note(self, said: Stepped) -> None:
        """Take in a step report."""
        self.last_step_at = trio.current_time()
        self.step = said.step
        self.rollbacks += said.rolled_back
        if said.finishing:
            self.enter(TrainerPhase.FINISHING)
            self.at_exit = said.at_exit
        elif self.phase in (TrainerPhase.FINISHING, TrainerPhase.FINISHED):
            self.enter(TrainerPhase.TRAINING)

    def take(self, last: LastStep) -> None:
        """Take in what it noted of its last step."""
        self.step, self.samples = last.step, last.samples
        self.loss = last.loss if math.isfinite(last.loss) else self.loss
        self.lr, self.lr_max = last.lr, max(self.lr_max, last.lr_max)
        self.metrics.update(last.metrics)


class TrainerSession:
    """One attached trainer, until it is gone."""

    def __init__(self, connection: LocalConnection, facts: TrainerStatus, board: Board) -> None:
        self.board = board
        self.facts = facts
        self.started = False  # it has been told what to start from: it knows the mode's barrier
        self.ended = trio.Event()  # its last step has been said, or it is gone
        self.waits_for_others = trio.CancelScope()  # since it has
        self._connection = connection
        self._stepped_at = 0.0  # on the machine's clock, which the trainer reads

    def look(self) -> None:
        """See how far the trainer is."""
        last = self.board.last_step()
        if last is None:
            return
        self.facts.take(last)
        if last.at > self._stepped_at:
            self._stepped_at = last.at
            self.facts.last_step_at = trio.current_time() - (time.monotonic() - last.at)

    @property
    def patience_s(self) -> float:
        """How long the trainer has to come to its next step: some of those it made, so that a hang adds nothing."""
        facts = self.facts
        until = trio.current_time() if facts.last_step_at is None else facts.last_step_at
        step_s = max(0.0, until - facts.began) / max(1, facts.step - facts.first_step)
        return max(PATIENCE_MIN_S, PATIENCE_STEPS * step_s)

    async def tell(self, said: Said) -> None:
        """Send; a trainer that is gone shows itself in `receive`."""
        self.board.sends()
        if isinstance(said, Go | Resume | GradientIs):
            self._released()
        await self._connection.send(encoded(said))

    async def refuse(self, why: str) -> None:
        """End it with this reason, which is this daemon's own end."""
        await self._connection.send({"error": why, "passes": True})

    async def receive(self) -> Said | None:
        """What the trainer says next; None when it is gone, or says what nobody understands."""
        try:
            message = await self._connection.receive()
        except ValueError as error:
            LOGGER.warning("the trainer was cut off: %s", error)
            return None
        if message is None:
            return None
        try:
            said = decoded(message, FROM_TRAINER)
        except ValueError as error:
            LOGGER.warning("the trainer said what this daemon does not understand: cut off (%s)", error)
            return None
        if isinstance(said, Stepped) and said.finishing and self.facts.phase is TrainerPhase.STARTING:
            LOGGER.warning("the trainer made its last step before it was told to go: cut off")
            return None
        if isinstance(said, CheckpointFailed):
            self.facts.checkpoint_failed = said.why
        self._note_wait(said)
        return said

    def _note_wait(self, said: Said) -> None:
        """Whether the trainer waits for the swarm now, from what it says."""
        match said:
            case Stepped(stands=stands):
                self.facts.waits = stands
            case GradientReady():
                self.facts.waits = True
            case BarrierHeard():  # it does not wait at the old one any more
                self._released()

    def _released(self) -> None:
        self.facts.waits, self.facts.released_at = False, trio.current_time()

    def cut_if_dead(self) -> bool:
        """End the session of a trainer whose process is gone while another holds its connection; whether it was one."""
        if not self._connection.has_lost_its_process():
            return False
        LOGGER.info("the trainer (pid %d) is gone, though something that it started is not", self.facts.pid)
        self._connection.cut()
        return True

    async def attended(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` for a trainer that waits and is silent meanwhile. Raises TrainerGone when it is not."""
        done: list[T] = []

        async def watch() -> None:
            with suppress(ValueError):
                await self._connection.receive()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            done.append(await work())
            nursery.cancel_scope.cancel()
        if not done:
            raise TrainerGone
        return done[0]


def report_of(said: Stepped) -> StepReport:
    """What a step report means to the mode."""
    return StepReport(
        said.step, said.change, said.lr_ratio, said.published is not None, said.finishing, said.stands, said.samples
    )
