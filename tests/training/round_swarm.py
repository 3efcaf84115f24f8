"""A swarm of modes with rounds in one process: queues for connections, float64 models, deaths, nothing else."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np

from peerd.effects import Apply, Effect, Proceed, Publish, Resume, Send, StepReport, Vector
from peerd.messages import Connected, Message
from peerd.training.delta import Layout
from peerd.training.modes import ModeSettings
from peerd.training.modes.allreduce import AllReduce
from peerd.training.modes.average import Average
from peerd.training.modes.diloco import DiLoCo
from peerd.training.modes.rounds import Committed
from peerd.training.trigger import parse_trigger


class Node:
    """One life of one member: a core, its model, and what it applied."""

    def __init__(self, swarm: RoundSwarm, name: str, model: Vector, seed: int) -> None:
        node = self
        self.x = model
        self.steps = 0
        self.asked = self.waiting = self.ended = False
        self.proceeded: list[bool] = []
        self.applied: dict[int, int] = {}  # attempt by round
        self.heard: frozenset[str] = frozenset()

        class Watched(swarm.kind):  # type: ignore[name-defined,misc]
            def _contribution(self, whole: bool, where: slice) -> Vector:
                summand: Vector = super()._contribution(whole, where)
                swarm.contributions[self._rounds._seen, name] = summand.copy()
                return summand

            def _on_committed(self, committed: Committed) -> list[Effect]:
                swarm.committed(node, name, committed)
                effects: list[Effect] = super()._on_committed(committed)
                return effects

        settings = ModeSettings(
            swarm.codec,
            parse_trigger("always"),
            3,
            swarm.every,
            swarm.overlap,
            swarm.topology,
            min_peers=swarm.min_peers,
        )
        self.core: AllReduce = Watched(
            name,
            swarm.layout,
            random.Random(seed),
            settings,
            lambda: self.x.copy(),
            **({"fragments": swarm.fragments} if swarm.fragments > 1 else {}),
        )


class RoundSwarm:
    """Members whose messages wait in one queue a direction until `deliver`."""

    def __init__(
        self,
        names: str,
        size: int = 12,
        *,
        mode: str = "allreduce",
        codec: str = "float32",
        every: int = 1,
        overlap: str = "delayed",
        topology: str = "auto",
        min_peers: int = 1,
        seed: int = 0,
    ) -> None:
        name, _, fragments = mode.partition(":")
        self.kind = {"allreduce": AllReduce, "average": Average, "diloco": DiLoCo}[name]
        self.fragments = int(fragments or 1)
        self.layout = Layout(size - size // 4, size)
        self.codec, self.every, self.overlap, self.topology, self.min_peers = codec, every, overlap, topology, min_peers
        self.rng = np.random.default_rng(seed)
        self.now = 0.0
        self.lives = seed * 1000
        self.contributions: dict[tuple[int, str], Vector] = {}
        self.results: dict[int, bytes] = {}  # by attempt
        self.queues: dict[tuple[str, str], deque[Message]] = {}
        self.delivered: dict[tuple[str, str], Message] = {}
        self.nodes: dict[str, Node] = {}
        start = self.integers()
        for name in names:
            self.nodes[name] = self._life(name, start.copy())

    def integers(self) -> Vector:
        return self.rng.integers(-1000, 1000, self.layout.total).astype(np.float64)

    def _life(self, name: str, model: Vector) -> Node:
        self.lives += 1
        return Node(self, name, model, self.lives)

    def committed(self, node: Node, name: str, committed: Committed) -> None:
        begin = committed.begin
        assert begin.round not in node.applied, "applied twice"
        assert begin.round > max(node.applied, default=0)
        node.applied[begin.round] = begin.attempt
        result = self.results.setdefault(begin.attempt, committed.total.tobytes())
        assert committed.total.tobytes() == result, "two results of one attempt"
        summands = [self.contributions[begin.attempt, member] for member in begin.roster]
        if begin.codec == "float32":
            exact = all((summand == np.round(summand)).all() for summand in summands)
            total = np.sum(summands, axis=0)
            assert (
                (committed.total == total).all() if exact else np.allclose(committed.total, total, rtol=1e-5, atol=0.01)
            )

    # ---------------------------------------------------------------- what happens

    def hear(self, name: str) -> None:
        """Membership tells a node who is there now."""
        node = self.nodes[name]
        node.heard = frozenset(self.nodes.keys() - {name})
        self.perform(name, node.core.on_peers(node.heard, self.now))

    def all_hear(self) -> None:
        for name in sorted(self.nodes):
            self.hear(name)

    def step(self, name: str, move: Vector | None = None) -> None:
        """One optimizer step; without `move` to a random model of integers."""
        node = self.nodes[name]
        if node.waiting or node.ended:
            return
        node.x = self.integers() if move is None else node.x + move
        node.steps += 1
        barrier = node.core.barrier
        node.waiting = barrier > 0 and node.steps % barrier == 0
        published, node.asked = node.asked or node.waiting, False
        report = StepReport(node.steps, 1.0, 1.0, published, finishing=False)
        self.perform(name, node.core.on_step(report, self.now))

    def finish(self, name: str) -> None:
        node = self.nodes[name]
        if not node.ended and not node.waiting:
            node.ended = True
            report = StepReport(node.steps, 1.0, 1.0, published=True, finishing=True)
            self.perform(name, node.core.on_step(report, self.now))

    def die(self, name: str) -> None:
        """What was on its way to it, and from it, is lost; who knows it hears so later."""
        del self.nodes[name]
        for link in list(self.queues):
            if name in link:
                self.queues[link].clear()

    def restart(self, name: str) -> None:
        """Its next life, with anybody's model; the others' connections break, if they still knew it."""
        model = next(iter(self.nodes.values())).x.copy() if self.nodes else self.integers()
        if name in self.nodes:
            self.die(name)
        self.nodes[name] = self._life(name, model)
        self.hear(name)
        for other in sorted(self.nodes):
            if other != name and name in self.nodes[other].heard:
                self.perform(other, self.nodes[other].core.on_message(name, Connected(), self.now))

    def cut(self, source: str, target: str) -> None:
        """The connection breaks and is made again: what was on it is lost."""
        self.queues.get((source, target), deque()).clear()
        if source in self.nodes:
            self.perform(source, self.nodes[source].core.on_message(target, Connected(), self.now))

    def deliver(self, source: str, target: str) -> bool:
        queue = self.queues.get((source, target))
        if not queue:
            return False
        message = self.delivered[source, target] = queue.popleft()
        if target in self.nodes:
            self.perform(target, self.nodes[target].core.on_message(source, message, self.now))
        return True

    def deliver_again(self, source: str, target: str) -> None:
        if (source, target) in self.delivered and {source, target} <= self.nodes.keys():
            message = self.delivered[source, target]
            self.perform(target, self.nodes[target].core.on_message(source, message, self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for name, node in sorted(self.nodes.items()):
            if node.core.deadline <= self.now:
                self.perform(name, node.core.on_timer(self.now))

    def settle(self, most: int = 5_000) -> int:
        """Deliver everything."""
        count = 0
        while any(self.queues.values()):
            for source, target in sorted(self.queues):
                while self.deliver(source, target):
                    count += 1
                    assert count < most, "messages without end"
        return count

    def perform(self, name: str, effects: list[Any]) -> None:
        node = self.nodes[name]
        for effect in effects:
            match effect:
                case Apply():
                    node.x = node.x + effect.correction
                case Send():
                    assert effect.peer != name
                    self.queues.setdefault((name, effect.peer), deque()).append(effect.message)
                case Publish():
                    node.asked = True
                case Resume():
                    assert node.waiting, "nobody waits"
                    node.waiting = False
                case Proceed():
                    node.proceeded.append(effect.settled)
