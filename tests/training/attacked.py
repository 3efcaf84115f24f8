"""A swarm of mode cores of which anybody may lie to anybody: what tests and fuzzing do to every mode."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from mode_swarm import ModeSwarm, carried

from peerd.node.core import NodeCore
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Apply, Effect, Send, StepReport, Vector
from peerd.training.mode_core import (
    ModeBegins,
    ModeEvent,
    Model,
    PeersChanged,
    Received,
    Reconnected,
    Stepped,
    TimerDue,
)
from peerd.training.modes import MODES, parse_mode
from peerd.transport.errors import PeerError
from peerd.transport.messages import AS_STARTED, Connected, Message

ROWS: list[tuple[str, dict[str, Any]]] = [
    *((mode, {}) for mode in [*MODES, "elastic:pairwise", "diloco:2"]),
    ("hardsync", {"servers": 3}),
    ("softsync:2", {"topology": "adv:2"}),
    ("allreduce", {"topology": "tree:2"}),
    ("allreduce", {"topology": "halving", "overlap": "hpsgd"}),
]


class Inside:
    """A mode in the core that every node has around it, which the harness takes for the mode."""

    def __init__(self, mode: str, name: str, layout: Layout, rng: random.Random, chosen: Any, read: Any) -> None:
        self.step = 0
        self.values = self.look = read
        self.core = NodeCore()
        whole: Model = self  # a missing method is found by the type checker
        self.core.model = whole  # type: ignore[assignment]
        self._corrections: list[Effect] = []
        make = parse_mode(mode)
        begins = ModeBegins(AS_STARTED, frozenset(), lambda values: make(name, layout, rng, chosen, values))
        self.core.handle(begins, 0.0)
        self.mode: Any = self.core.mode

    def tell(self, event: ModeEvent, now: float) -> list[Effect]:
        """As the daemon does, early messages and all; what was added to the model comes back as effects."""
        self._corrections = []
        effects = self.core.handle_all(event, now)
        return [*self._corrections, *effects]  # type: ignore[list-item]

    def add(self, correction: Vector) -> None:
        self._corrections.append(Apply(correction.copy()))

    @property
    def gradient(self) -> Vector:
        return np.empty(0)

    def spares(self) -> list[Any]:
        """The harness applies what comes back."""
        return []

    def drain(self) -> None:
        """Whatever was added is with the harness."""

    def be_quiet(self, quiet: Any) -> None:
        """The harness asks the mode."""

    def published(self, copy: int, step: int, *, apart: bool) -> None:
        self.step = step

    def load(self, values: Vector, step: int) -> int:
        raise AssertionError("nobody replaces a model whose owner is the harness")

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        return self.core.handle(Stepped(report, 0 if report.published else None), now)

    def on_message(self, sender: str, message: Message | Connected, now: float) -> list[Effect]:
        event = Reconnected(sender) if isinstance(message, Connected) else Received(sender, message)
        return self.core.handle(event, now)

    def on_peers(self, alive: frozenset[str], now: float) -> list[Effect]:
        return self.core.handle(PeersChanged(alive), now)

    def on_timer(self, now: float) -> list[Effect]:
        return self.core.handle(TimerDue(), now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mode, name)


class Attacked(ModeSwarm):
    """A swarm that remembers what was said, and breaks the connection of whoever breaks a rule."""

    def __init__(self, row: tuple[str, dict[str, Any]], names: str = "abc", **told: Any) -> None:
        mode, options = row
        self.said: list[Message] = []
        self.refused = 0
        self.sent = 0

        def make(name: str, layout: Layout, rng: random.Random, values: Callable[[], Vector]) -> Any:
            return Inside(mode, name, layout, rng, self.settings, values)

        super().__init__(mode, names, every=2, make=make, dtype="float32", buffers=3, **{**options, **told})

    def perform(self, name: str, effects: list[Effect]) -> None:
        super().perform(name, effects)
        said = [effect.message for effect in effects if isinstance(effect, Send)]
        self.sent += len(said)
        self.said += said[-4:]
        del self.said[:-64]

    def deliver(self, source: str, target: str) -> bool:
        try:
            return super().deliver(source, target)
        except PeerError:
            self.refused += 1
            self.lose(source, target)
            return True

    def lie(self, sender: str, target: str, message: Message) -> None:
        """One message beside the queues."""
        try:
            came = carried(message)
        except (PeerError, ValueError):
            return  # no wire brings it
        self.queues[sender, target].appendleft(came)
        self.deliver(sender, target)
