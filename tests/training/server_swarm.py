"""A swarm of parameter server cores in one process: queues for connections, models of whole numbers, nothing else."""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from peerd.effects import Apply, Effect, Proceed, Resume, Send, StepReport, Vector
from peerd.messages import Connected, Message
from peerd.training.delta import Layout
from peerd.training.modes import ModeSettings, parse_mode
from peerd.training.modes.parameter_server import ParameterServer
from peerd.training.trigger import parse_trigger


class Node:
    """A core and its model; its trainer waits for a Resume after each step."""

    def __init__(self, name: str, mode: str, start: Vector, seed: int, settings: ModeSettings) -> None:
        self.x = start.copy()
        self.steps = 0
        self.waits = False
        self.finishing = False
        self.proceeded: list[bool] = []
        self._buffer = np.empty_like(start)
        layout = Layout(len(start), len(start))
        core = parse_mode(mode)(name, layout, random.Random(seed), settings, self._values)
        assert isinstance(core, ParameterServer)
        self.core = core

    def _values(self) -> Vector:
        np.copyto(self._buffer, self.x)
        return self._buffer


class ServerSwarm:
    """Nodes whose messages wait in one queue a direction until `deliver`."""

    def __init__(self, mode: str, names: str, size: int = 8, codec: str = "float32", servers: int = 1,
        topology: str = "auto",
    ) -> None:  # fmt: skip
        self.mode = mode
        self.start = np.zeros(size)
        self.settings = ModeSettings(codec, parse_trigger("always"), view=3, topology=topology, servers=servers)
        self.nodes: dict[str, Node] = {}
        self.alive: dict[str, set[str]] = {}  # in the view of each
        self.queues: dict[tuple[str, str], deque[Message]] = {}
        self.now = 0.0
        self.messages = 0
        self._lives = 0
        for name in names:
            self.nodes[name] = self._node(name)
        for name in names:
            self.peers(name, set(names))
        self.settle()

    def _node(self, name: str, start: Vector | None = None) -> Node:
        self._lives += 1
        return Node(name, self.mode, self.start if start is None else start, self._lives, self.settings)

    # ---------------------------------------------------------------- what happens

    def peers(self, name: str, alive: set[str]) -> None:
        self.alive[name] = alive | {name}
        self.perform(name, self.nodes[name].core.on_peers(frozenset(alive - {name}), self.now))

    def step(self, name: str, change: Vector | float, *, finishing: bool = False) -> None:
        """A step of a trainer that does not wait."""
        node = self.nodes[name]
        assert not node.waits
        assert not node.finishing
        node.x = node.x + change
        node.steps += 1
        node.waits, node.finishing = True, finishing
        report = StepReport(node.steps, 0.0, 1.0, published=True, finishing=finishing)
        self.perform(name, node.core.on_step(report, self.now))

    def perform(self, name: str, effects: list[Effect]) -> None:
        node = self.nodes[name]
        for effect in effects:
            match effect:
                case Apply():
                    node.x = node.x + effect.correction
                    effect.correction.fill(np.nan)  # lent until the next event
                case Send():
                    if effect.peer in self.nodes:
                        self.queues.setdefault((name, effect.peer), deque()).append(effect.message)
                case Resume():
                    assert node.waits, "nobody waits"
                    assert not node.finishing
                    node.waits = False
                case Proceed():
                    node.waits = False
                    node.proceeded.append(effect.settled)

    def deliver(self, source: str, target: str) -> bool:
        queue = self.queues.get((source, target))
        if not queue or target not in self.nodes:
            return False
        self.messages += 1
        message = queue.popleft()
        self.perform(target, self.nodes[target].core.on_message(source, message, self.now))
        return True

    def cut(self, source: str, target: str) -> None:
        """The connection breaks and is made again: what was on it is lost."""
        if queue := self.queues.get((source, target)):
            queue.clear()
        if source in self.nodes and target in self.nodes:
            self.perform(source, self.nodes[source].core.on_message(target, Connected(), self.now))

    def die(self, name: str) -> None:
        """Nobody knows yet; what it has sent may still arrive."""
        del self.nodes[name], self.alive[name]
        for (_, target), queue in self.queues.items():
            if target == name:
                queue.clear()

    def dies_after(self, messages: int, victim: str) -> None:
        """So many messages are delivered, links in turn; then the victim dies, all hear of it, all comes to rest."""
        for _ in range(messages):
            waiting = sorted(pair for pair, queue in self.queues.items() if queue)
            if waiting:
                self.deliver(*waiting[messages % len(waiting)])
        self.die(victim)
        for name in sorted(self.nodes):
            self.peers(name, set(self.nodes))
        self.settle()

    def join(self, name: str, donor: str) -> None:
        """It knows everybody; nobody knows it."""
        self.nodes[name] = self._node(name, self.nodes[donor].x)
        self.peers(name, set(self.nodes))

    def timers(self, seconds: float = 3600.0) -> None:
        self.now += seconds
        for name, node in list(self.nodes.items()):
            if node.core.deadline <= self.now:
                self.perform(name, node.core.on_timer(self.now))

    # ---------------------------------------------------------------- and comes to rest

    def settle(self) -> None:
        for _ in range(1000):
            delivered = [self.deliver(*pair) for pair in list(self.queues)]
            if not any(delivered):
                return
        raise AssertionError("messages without end")

    def heal(self) -> None:
        """Everybody knows who is alive, every connection is made anew, and the timers remind of the rest."""
        for name in list(self.nodes):
            if self.alive[name] != set(self.nodes):
                self.peers(name, set(self.nodes))
        self.settle()
        for source, target in list(self.queues):
            self.cut(source, target)
        self.settle()
        self.timers()
        self.settle()

    def serving(self, shard: int = 0) -> list[str]:
        return [name for name, node in self.nodes.items() if node.core._seats.all[shard].server is not None]

    def weights(self) -> Vector:
        """Of all shards, as served."""
        pieces = []
        for shard in range(self.settings.servers):
            (name,) = self.serving(shard)
            server = self.nodes[name].core._seats.all[shard].server
            assert server is not None
            pieces.append(server.weights)
        return np.concatenate(pieces)
