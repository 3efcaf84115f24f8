"""Modes with rounds in one process: models of whole numbers, and every contribution and result of a round watched."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from mode_swarm import Life, ModeSwarm

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Effect, Send, Vector
from peerd.training.modes.allreduce import AllReduce
from peerd.training.modes.average import Average
from peerd.training.modes.diloco import DiLoCo
from peerd.training.rounds.member import Committed
from peerd.transport.messages import Message, RoundBegin

Lie = Callable[[str, Message], Message | None]
"""What a member says to another in place of a message; None: nothing."""

DEADLINES_S = 10.0


def formed(names: str, size: int = 12, **settings: Any) -> RoundSwarm:
    """A swarm whose members know of each other."""
    swarm = RoundSwarm(names, size, **settings)
    swarm.all_hear()
    swarm.settle()
    return swarm


class RoundLife(Life):
    """A life that knows which rounds it was in."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rounds: dict[int, int] = {}  # attempt by round

    def proceed(self, settled: bool) -> None:
        """An average of all is no run's end: its trainer may stand at the barrier."""
        assert self.finishing or self.waits
        self.proceeded.append(settled)


class RoundSwarm(ModeSwarm):
    """All start from one model; a fourth of it are float buffers."""

    life = RoundLife
    nodes: dict[str, RoundLife]  # type: ignore[assignment]

    def __init__(
        self, names: str, size: int = 12, *, mode: str = "allreduce", codec: str = "float32", seed: int = 0,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.contributions: dict[tuple[int, str], Vector] = {}
        self.results: dict[int, bytes] = {}  # by attempt
        self.impatient: set[int] = set()  # attempts of leaders that went on without a living member's word
        self.delivered: dict[tuple[str, str], Message] = {}
        self.lies: dict[str, Lie] = {}  # by member
        name, _, fragments = mode.partition(":")
        kind = {"allreduce": AllReduce, "average": Average, "diloco": DiLoCo}[name]
        settings.setdefault("overlap", "delayed")
        argument: dict[str, Any] = {"fragments": int(fragments)} if fragments else {}
        swarm = self

        class Watched(kind):  # type: ignore[valid-type,misc]
            def _contribution(self, begin: RoundBegin, where: slice) -> Vector:
                summand: Vector = super()._contribution(begin, where)
                swarm.contributions[self._rounds._seen, self._me] = summand.copy()
                return summand

            def _on_committed(self, committed: Committed, now: float) -> list[Effect]:
                swarm.committed(self._me, committed)
                effects: list[Effect] = super()._on_committed(committed, now)
                return effects

        def made(name: str, layout: Layout, rng: random.Random, values: Callable[[], Vector]) -> AllReduce:
            core: AllReduce = Watched(name, layout, rng, self.settings, values, **argument)
            return core

        of = "allreduce" if kind is Average else mode
        super().__init__(of, names, size, buffers=size // 4, seed=seed, codec=codec, make=made, **settings)

    def first_model(self) -> Vector:
        return np.round(1000 * self.start) + 0.0  # no -0.0, which a sum makes 0.0

    def integers(self) -> Vector:
        return self.rng.integers(-1000, 1000, self.layout.total).astype(np.float64)

    def perform(self, name: str, effects: list[Effect]) -> None:
        said: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Send) and name in self.lies:
                lie = self.lies[name](effect.peer, effect.message)
                said += [Send(effect.peer, lie)] if lie is not None else []
                continue
            if isinstance(effect, Send) and isinstance(effect.message, RoundBegin):
                self.note_impatience(name, effect.message)
            said.append(effect)
        super().perform(name, said)

    def note_impatience(self, name: str, begin: RoundBegin) -> None:
        """It had no report, or one from before that member went on alone, as one that has not heard of this leader."""
        node = self.nodes[name]
        alone = [other for other in node.heard & self.nodes.keys() if self.nodes[other].core._rounds._leads != name]
        if node.core._rounds._leader._done_without or set(alone) - set(begin.roster):
            self.impatient.add(begin.attempt)

    def committed(self, name: str, committed: Committed) -> None:
        begin, rounds = committed.begin, self.nodes[name].rounds
        if begin.roster == (name,):  # nobody was sent this order
            self.note_impatience(name, begin)
        assert begin.round not in rounds, "applied twice"
        assert begin.round > max(rounds, default=0)
        rounds[begin.round] = begin.attempt
        result = self.results.setdefault(begin.attempt, committed.mean.tobytes())
        assert committed.mean.tobytes() == result, "two results of one attempt"
        summands = [self.contributions[begin.attempt, member] for member in begin.roster]
        if begin.codec == "float32":
            exact = all((summand == np.round(summand)).all() for summand in summands)
            mean = np.sum(summands, axis=0)
            parameters = self.nodes[name].core._rounds.summed(begin)[1].parameters
            mean[:parameters] /= sum(begin.shares) or len(summands)
            mean[parameters:] /= len(summands)
            assert (committed.mean == mean).all() if exact else np.allclose(committed.mean, mean, rtol=1e-5, atol=0.01)

    def step(self, name: str, move: Vector | float | None = None) -> None:
        """One optimizer step; without `move` to a random model of integers, so that sums are exact."""
        node = self.nodes[name]
        if move is None and not node.waits and not node.finishing:
            node.x = self.integers()
        super().step(name, 0.0 if move is None else move)

    def pass_time(self, seconds: float) -> None:
        """Nobody stands: a deadline comes when it comes."""
        for _ in range(int(seconds // DEADLINES_S)):
            super().pass_time(DEADLINES_S)
        super().pass_time(seconds % DEADLINES_S)

    def deliver(self, source: str, target: str) -> bool:
        if queue := self.queues[source, target]:
            self.delivered[source, target] = queue[0]
        return super().deliver(source, target)

    def deliver_again(self, source: str, target: str) -> None:
        """What came last on this connection, be it to an earlier life."""
        if (source, target) in self.delivered and {source, target} <= self.nodes.keys():
            message = self.delivered[source, target]
            self.perform(target, self.nodes[target].core.on_message(source, message, self.now))
