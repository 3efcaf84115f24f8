"""What does an attached trainer say? The daemon's end of one session, with what is known of the trainer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import trio

from peerd.control import LocalConnection
from peerd.effects import StepReport
from peerd.logs import LOGGER

T = TypeVar("T")


class TrainerGone(Exception):
    """The trainer's connection ended while it waited for the swarm."""


@dataclass(slots=True)
class TrainerFacts:
    """What the status shows of a trainer."""

    pid: int
    step: int = 0
    first_step: int = 0
    samples: int = 0
    loss: float | None = None
    lr: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    rollbacks: int = 0
    phase: str = "starting"  # then training, finishing, finished, gone
    began: float = 0.0  # when it trained first, on the loop's clock

    def note(self, said: dict[str, Any]) -> None:
        """Take in a step report."""
        self.step = said["step"]
        self.samples += int(said.get("samples") or 0)
        self.loss = said["loss"] if said.get("loss") is not None else self.loss
        self.lr = said["lr"]
        self.metrics.update(said.get("metrics") or {})
        self.rollbacks += bool(said.get("rolled_back"))
        if said.get("finishing"):
            self.phase = "finishing"


class TrainerSession:
    """One attached trainer, until it is gone."""

    def __init__(self, connection: LocalConnection, facts: TrainerFacts) -> None:
        self.facts = facts
        self.started = False  # it has been told what to start from: it knows the mode's barrier
        self.ended = trio.Event()  # its last step has been said, or it is gone
        self._connection = connection

    async def tell(self, kind: str, **content: Any) -> None:
        """Send; a trainer that is gone shows itself in `receive`."""
        await self._connection.send({"kind": kind, **content})

    async def receive(self) -> dict[str, Any] | None:
        """What the trainer says next; None when it is gone, or says what nobody understands."""
        try:
            said = await self._connection.receive()
        except ValueError as error:
            LOGGER.warning("the trainer was cut off: %s", error)
            return None
        if said is not None and not _is_understood(said):
            LOGGER.warning("the trainer said what this daemon does not understand: cut off")
            return None
        return said

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


def report_of(said: dict[str, Any]) -> StepReport:
    """What a step report means to the mode."""
    return StepReport(
        step=said["step"],
        change=said["change"],
        lr_ratio=said["lr_ratio"],
        published=said["published"] is not None,
        finishing=bool(said.get("finishing")),
    )


def is_attach(message: dict[str, Any]) -> bool:
    """Whether the first message of a trainer has what a session begins with."""
    parameters, total, tensors = message.get("parameters"), message.get("total"), message.get("tensors")
    return (
        isinstance(message.get("pid"), int)
        and isinstance(message.get("signature"), str)
        and isinstance(parameters, int)
        and isinstance(total, int)
        and 0 < parameters <= total
        and isinstance(tensors, list)
        and all(isinstance(tensor, str) for tensor in tensors)
    )


def _is_understood(said: dict[str, Any]) -> bool:
    """Whether a later message has what its kind is read for."""
    number = (int, float)
    match said.get("kind"):
        case "ready":
            return isinstance(said.get("step"), int)
        case "step":
            published = said.get("published", "")
            return (
                isinstance(said.get("step"), int)
                and all(isinstance(said.get(key), number) for key in ("change", "lr", "lr_ratio"))
                and (published is None or (isinstance(published, int) and published in (0, 1)))
                and isinstance(said.get("metrics") or {}, dict)
                and isinstance(said.get("samples") or 0, int)
            )
        case "taken":
            return isinstance(said.get("half"), int) and said["half"] in (0, 1)
        case kind:
            return kind in ("slot", "barrier")
