"""Parameter servers in one process: models that start as zeros, and what is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mode_swarm import ModeSwarm

from peerd.training.effects import Averaged, Effect, Vector
from peerd.training.parameter_server.shard_server import ShardServer

CALM_S = 600.0  # until timers have reminded of what was lost


class ServerSwarm(ModeSwarm):
    """Everybody has heard of everybody, and each shard is served."""

    def __init__(self, mode: str, names: str, size: int = 8, codec: str = "float32", **settings: Any) -> None:
        """What is counted is exact, so no push is shortened and no model doubted, unless the settings say so."""
        super().__init__(mode, names, size, codec=codec, **{"robust": False, **settings})
        super().all_hear()  # one that is alone, too
        self.settle()

    def first_model(self) -> Vector:
        return np.zeros(self.layout.total)

    def all_hear(self) -> None:
        """Whom it is news to: nobody may need to hear it twice."""
        for name, node in sorted(self.nodes.items()):
            if node.heard != self.nodes.keys() - {name}:
                self.hear(name)

    def step(self, name: str, move: Vector | float, *, finishing: bool = False) -> None:
        """A step of a trainer that does not wait; a run's last one may say that it ends, before there is an answer."""
        node = self.nodes[name]
        assert not node.waits
        assert not node.finishing
        if not finishing:
            super().step(name, move)
            return
        node.move(move)
        node.steps += 1
        self.finish(name)

    def die(self, name: str) -> None:
        """Nobody knows yet; what it has sent may still arrive: a server's last words must do no harm."""
        del self.nodes[name]
        for (_, target), queue in self.queues.items():
            if target == name:
                queue.clear()

    def dies_after(self, messages: int, victim: str) -> None:
        """So many messages are delivered, links in turn; then the victim dies, all hear of it, all comes to rest."""
        for number in range(messages):
            if waiting := self.waiting():
                self.deliver(*waiting[number % len(waiting)])
        self.die(victim)
        self.all_hear()
        self.settle()

    def join(self, name: str, donor: str) -> None:
        """It knows everybody; nobody knows it."""
        self.live(name, self.nodes[donor].x)
        self.hear(name)

    def heal(self) -> None:
        """And the timers remind of the rest."""
        self.all_hear()
        self.settle()
        super().heal()
        until = self.now + CALM_S
        while (deadline := min(node.core.deadline for node in self.nodes.values())) <= until:  # each in its turn
            self.pass_time(max(0.0, deadline - self.now))
            self.settle()

    def serving(self, shard: int = 0) -> list[str]:
        return [name for name, node in self.nodes.items() if node.core._leadership.shards[shard].server is not None]

    def server(self, shard: int = 0) -> ShardServer:
        """The only one of a shard."""
        (name,) = self.serving(shard)
        server: ShardServer = self.nodes[name].core._leadership.shards[shard].server
        return server

    def weights(self) -> Vector:
        """Of all shards, as served."""
        return np.concatenate([self.server(shard).weights for shard in range(self.settings.servers)])


class GradientSwarm(ServerSwarm):
    """Trainers that push gradients and wait for the servers' steps."""

    def __init__(self, mode: str, names: str, optimizer: str, **settings: Any) -> None:
        """No rate is limited, unless the settings say so."""
        super().__init__(mode, names, exchange="gradients", server_optimizer=optimizer, **settings)

    def first_model(self) -> Vector:
        return self.start

    def push(
        self, name: str, gradient: Vector | float, rate: float, samples: float = 1.0,
        flags: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Its trainer has a gradient, and waits; float buffers are as they are. `flags` are 1 unless they are given."""
        node = self.nodes[name]
        assert not node.waits
        cut = self.layout.parameters
        said = np.ones(self.layout.gradients.total - self.layout.total) if flags is None else flags
        flat = np.concatenate([np.zeros(cut) + gradient, node.x[cut:], said])
        node.waits, node.steps = True, node.steps + 1
        self.perform(name, node.core.on_gradient(flat, samples, node.steps, self.now, rate))

    def perform(self, name: str, effects: list[Effect]) -> None:
        super().perform(name, effects)
        for effect in effects:
            if isinstance(effect, Averaged):
                assert effect.gradient is None
                assert self.nodes[name].waits
                self.nodes[name].waits = False
