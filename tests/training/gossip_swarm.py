"""A swarm of mode cores in one process: queues for connections, float64 models (or float32), nothing else."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np

from peerd.effects import Apply, Effect, Proceed, Publish, Send, StepReport, Vector
from peerd.messages import Connected, Message
from peerd.training.delta import Layout
from peerd.training.modes import ModeSettings, parse_mode
from peerd.training.trigger import parse_trigger


class Node:
    """A core, its model, and its replica of nothing: corrections are applied at once."""

    def __init__(
        self, name: str, model: Vector, layout: Layout, seed: int, settings: ModeSettings, mode: str = "gossip"
    ) -> None:
        self.x = model
        self.base = model.copy()
        self.steps = 0
        self.applied = 0
        self.proceeded: list[bool] = []
        self.finishing = False
        self._buffer = np.empty_like(model)
        self.core: Any = parse_mode(mode)(name, layout, random.Random(seed), settings, self._values)

    def _values(self) -> Vector:
        """One buffer for every call, as the daemon's replica does."""
        np.copyto(self._buffer, self.x)
        return self._buffer


class GossipSwarm:
    """`names` nodes whose messages wait in one queue a direction until `deliver`."""

    def __init__(
        self,
        count: int,
        size: int,
        codec: str,
        trigger: str = "always",
        view: int = 3,
        seed: int = 0,
        buffers: int = 0,
        mode: str = "gossip",
        dtype: str = "float64",
        every: int = 1,
    ) -> None:
        rng = np.random.default_rng(seed)
        layout = Layout(size - buffers, size)
        settings = ModeSettings(codec, parse_trigger(trigger), view, every)
        names = [chr(ord("a") + index) for index in range(count)]
        self._make = lambda name, x, seed: Node(name, x, layout, seed, settings, mode)
        self.nodes = {
            name: Node(name, rng.normal(size=size).astype(dtype), layout, seed + index, settings, mode)
            for index, name in enumerate(names)
        }
        self.queues: dict[tuple[str, str], deque[Message]] = {(a, b): deque() for a in names for b in names if a != b}
        self.now = 0.0
        self.initial_sum = sum(node.x for node in self.nodes.values())
        self.injected = np.zeros(size)
        self.messages = 0

    def everyone_alive(self) -> None:
        for name in self.nodes:
            self.peers(name, set(self.nodes))

    def restart(self, name: str, model: Vector, seed: int) -> None:
        """A new process, which knows nobody yet, with this model."""
        self.nodes[name] = self._make(name, model.copy(), seed)

    def peers(self, name: str, alive: set[str]) -> None:
        self.perform(name, self.nodes[name].core.on_peers(frozenset(alive - {name}), self.now))

    def step(self, name: str, change: Vector | None = None, *, finishing: bool = False) -> None:
        node = self.nodes[name]
        if change is not None:
            node.x = node.x + change.astype(node.x.dtype)
            self.injected += change * getattr(node.core, "weight", 1.0)
            node.steps += 1
        node.finishing = finishing
        self._report(name, published=finishing, finishing=finishing)

    def _report(self, name: str, *, published: bool, finishing: bool = False) -> None:
        node = self.nodes[name]
        change = float(np.linalg.norm(node.x - node.base))
        if published:
            node.base = node.x.copy()
        report = StepReport(node.steps, change, 1.0, published, finishing)
        self.perform(name, node.core.on_step(report, self.now))

    def perform(self, name: str, effects: list[Effect]) -> None:
        node = self.nodes[name]
        asked = False
        for effect in effects:
            match effect:
                case Apply():
                    assert np.isfinite(effect.correction).all()
                    assert effect.correction.dtype == node.x.dtype
                    node.x = node.x + effect.correction
                    node.applied += 1
                    effect.correction.fill(np.nan)  # lent until the next event: nobody may look at it again
                    node._buffer.fill(np.nan)
                case Send():
                    self.queues[name, effect.peer].append(effect.message)
                case Publish():
                    asked = True
                case Proceed():
                    node.proceeded.append(effect.settled)
        if asked:
            self._report(name, published=True)

    def deliver(self, source: str, target: str) -> bool:
        queue = self.queues[source, target]
        if not queue:
            return False
        self.messages += 1
        message = queue.popleft()
        self.perform(target, self.nodes[target].core.on_message(source, message, self.now))
        return True

    def duplicate(self, source: str, target: str) -> None:
        """What waits at the head of a queue comes once more, behind all the rest."""
        if queue := self.queues[source, target]:
            queue.append(queue[0])

    def cut(self, source: str, target: str) -> None:
        """The connection from source to target breaks and is made again: what was on it is lost."""
        self.queues[source, target].clear()
        self.perform(source, self.nodes[source].core.on_message(target, Connected(), self.now))

    def settle(self, rounds: int = 400) -> None:
        """Deliver everything, with the timers that repeat what waits."""
        for _ in range(rounds):
            busy = False
            for source, target in self.queues:
                while self.deliver(source, target):
                    busy = True
            if not busy:
                return
        raise AssertionError("messages without end")

    def quiesce(self) -> None:
        """Deliver everything, then let the timers repeat what still waits for an answer."""
        self.settle()
        self.now += 61.0
        for name, node in self.nodes.items():
            self.perform(name, node.core.on_timer(self.now))
        self.settle()

    def drift(self) -> float:
        """How far the sum of all models is from what was put in, over its norm."""
        expected = self.initial_sum + self.injected
        total = sum(node.x.astype(np.float64) * getattr(node.core, "weight", 1.0) for node in self.nodes.values())
        total = total + sum(self.centres())
        return float(np.abs(total - expected).max() / max(1.0, np.abs(expected).max()))

    def centres(self) -> list[Vector]:
        """Of an elastic swarm: the models that belong to no trainer."""
        held = (getattr(node.core, "centre_values", None) for node in self.nodes.values())
        return [values for values in held if values is not None]

    def spread(self) -> float:
        """Largest distance of a model from the mean, over the mean's norm."""
        mean = sum(node.x for node in self.nodes.values()) / len(self.nodes)
        return max(float(np.linalg.norm(node.x - mean)) for node in self.nodes.values()) / float(np.linalg.norm(mean))


def assert_references_agree(swarm: GossipSwarm) -> None:
    """Both ends of a link at one version hold the same bits."""
    for a, node in swarm.nodes.items():
        for b, mine in node.core.references().items():
            theirs = swarm.nodes[b].core.references().get(a)
            if theirs is None or theirs.link != mine.link:
                continue
            if mine.version == theirs.version:
                assert mine.mine.tobytes() == theirs.theirs.tobytes(), f"what {b} knows of {a}"
                assert mine.theirs.tobytes() == theirs.mine.tobytes(), f"what {a} knows of {b}"
            else:
                assert abs(mine.version - theirs.version) == 1
