"""Mode cores that start apart, each from a model of its own, and what their models sum up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from mode_swarm import Core, ModeSwarm

from peerd.training.effects import Effect, Vector
from peerd.training.pairs.duration import StepTime
from peerd.transport.messages import Message


class EverySecond(StepTime):
    """Of nodes that are equally fast."""

    @property
    def seconds(self) -> float:
        return 1.0


class GossipSwarm(ModeSwarm):
    """`count` nodes, named by letters. Their trainers never wait nor rest, and publish as soon as they are asked."""

    def __init__(
        self, count: int, size: int, codec: str, trigger: str = "always", view: int = 3, seed: int = 0,
        buffers: int = 0, mode: str = "gossip", dtype: str = "float64", every: int = 0, make: Core | None = None,
        robust: bool = False, samples: Sequence[float] = (), **told: Any,
    ) -> None:  # fmt: skip
        """Models that start apart are further from each other than limits by own steps let come together at once.

        `samples`: of a step of each; the sum of all models is then by these.
        """
        names = "abcdefghijklmnop"[:count]
        settings: dict[str, Any] = {"trigger": trigger, "view": view, "every": every, "robust": robust, **told}
        super().__init__(mode, names, size, buffers=buffers, dtype=dtype, seed=seed, codec=codec, make=make, **settings)
        self._counts_as = dict(zip(names, samples, strict=True)) if samples else dict.fromkeys(names, 1.0)
        for name, node in self.nodes.items():
            node.samples = self._counts_as[name] if samples else 0.0
            if samples:  # both are known from the first steps on
                node.core._samples, node.core._step_time = node.samples, EverySecond()
        first, *others = (self._counts_as[name] * node.x for name, node in self.nodes.items())
        self.initial_sum: Vector = sum(others, first)
        self.injected = np.zeros(size)

    def first_model(self) -> Vector:
        return self.rng.normal(size=self.layout.total).astype(self.start.dtype)

    def everyone_alive(self) -> None:
        self.all_hear()

    def step(self, name: str, change: Vector | float | None = None, *, finishing: bool = False) -> None:
        """One step, or the word of one that moved nothing."""
        node = self.nodes[name]
        if change is not None:
            node.x = node.x + np.asarray(change, node.x.dtype)
            self.injected += change * self._weight(name)
            node.steps += 1
        node.finishing = finishing
        restless = replace(node.core.quiet, rest_until=-1)
        self.report(name, published=finishing or restless.wants_copy(node.change(), node.steps))

    def perform(self, name: str, effects: list[Effect]) -> None:
        super().perform(name, effects)
        if self.nodes[name].asked:
            self.report(name, published=True)

    def quiesce(self) -> None:
        """Deliver everything, then let the timers repeat what still waits for an answer."""
        self.settle()
        self.now += 61.0
        for name, node in self.nodes.items():
            self.perform(name, node.core.on_timer(self.now))
        self.settle()

    def calm(self) -> None:
        """All are alive again, every connection is made anew, and the timers repeat what waits."""
        self.heal()
        self.quiesce()
        self.quiesce()

    def drift(self) -> float:
        """How far the sum of all models is from what was put in, over its norm."""
        expected = self.initial_sum + self.injected
        models = [node.x.astype(np.float64) * self._weight(name) for name, node in self.nodes.items()]
        total = sum(self.centres(), sum(models[1:], models[0]))
        return float(np.abs(total - expected).max() / max(1.0, np.abs(expected).max()))

    def _weight(self, name: str) -> float:
        pushed: float = getattr(self.nodes[name].core, "weight", 1.0)  # of push-sum
        return pushed * self._counts_as[name]

    def centres(self) -> list[Vector]:
        """Of an elastic swarm: the models that belong to no trainer."""
        held = (getattr(node.core, "centre_values", None) for node in self.nodes.values())
        return [values for values in held if values is not None]


class KeptMessages(GossipSwarm):
    """All that was delivered is kept, to be counted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.delivered: list[Message] = []
        super().__init__(*arguments, **options)

    def deliver(self, source: str, target: str) -> bool:
        if queue := self.queues[source, target]:
            self.delivered.append(queue[0])
        return super().deliver(source, target)

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.delivered)


def assert_references_agree(swarm: GossipSwarm) -> None:
    """Both ends of a link at one version hold the same bits."""
    for a, node in swarm.nodes.items():
        for b, mine in node.core.references().items():
            theirs = swarm.nodes[b].core.references().get(a) if b in swarm.nodes else None
            if theirs is None or theirs.link != mine.link:
                continue
            if mine.version == theirs.version:
                assert mine.mine[:].tobytes() == theirs.theirs[:].tobytes(), f"what {b} knows of {a}"
                assert mine.theirs[:].tobytes() == theirs.mine[:].tobytes(), f"what {a} knows of {b}"
            else:
                assert abs(mine.version - theirs.version) == 1
