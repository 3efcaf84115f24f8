"""A swarm of mode cores in one process, whatever the mode: queues for connections, trainers that do as they are told.

Every message is encoded and decoded. A death, a cut or a view of who is alive is one call; time moves by calls alone.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Apply, Effect, Log, Proceed, Publish, Resume, Send, StepReport, Vector
from peerd.training.mode_settings import AUTO
from peerd.training.modes import Mode, ModeSettings, parse_mode, settings_of
from peerd.transport import wire
from peerd.transport.messages import Connected, Message

SETTINGS = ModeSettings(codec="float32", trigger="always", robust=False)
MESSAGES_MAX = 20_000  # until a swarm of a few nodes must be at rest
ROUNDS_MAX = 100  # of everybody's next thing
PATIENCE_S = 4000.0  # of time that the test itself lets pass: whatever takes longer does not come

Core = Callable[[str, Layout, random.Random, Callable[[], Vector]], Mode]


def carried(message: Message) -> Message:
    """As it comes out of a connection, whose frames tests/transport/test_framing.py has."""
    header, chunks = wire.encode(message)
    came = wire.decode(message.KIND, header, 1 << 20).message(tuple(memoryview(bytes(chunk)) for chunk in chunks))
    assert came == message
    return came


class Life:
    """One life of one member: a core, its model, and a trainer that waits where its mode says so."""

    def __init__(self, name: str, model: Vector, layout: Layout, seed: int, make: Core) -> None:
        self.x = model
        self.base = model.copy()
        self.steps = self.applied = 0
        self.samples = 0.0  # of a step, as its trainer says
        self.asked = self.waits = self.finishing = False
        self.proceeded: list[bool] = []
        self.heard: frozenset[str] = frozenset()
        self._buffer = np.empty_like(model)
        self.core: Any = make(name, layout, random.Random(seed), self._values)

    def _values(self) -> Vector:
        """One buffer for every call, as the daemon's replica does."""
        np.copyto(self._buffer, self.x)
        return self._buffer

    def move(self, move: Vector | float) -> None:
        """The optimizer's step."""
        self.x = self.x + np.asarray(move, self.x.dtype)

    def change(self) -> float:
        """How far the model has moved since it was published."""
        return float(np.linalg.norm(self.x - self.base))

    def publish(self) -> None:
        """The core may see the model as it is now."""
        self.base = self.x.copy()

    def proceed(self, settled: bool) -> None:
        """Its run, which is over, may go."""
        assert self.finishing
        self.proceeded.append(settled)

    def correct(self, correction: Vector) -> None:
        """Apply what the core asks for."""
        self.x = self.x + correction
        self.base = self.base + correction
        self._buffer.fill(np.nan)  # nobody may look at it again, nor at the correction, which is lent


class ModeSwarm:
    """Members whose messages wait in one queue a direction until `deliver`."""

    life: Callable[..., Life] = Life

    def __init__(
        self, mode: str, names: str, size: int = 12, *, buffers: int = 0, dtype: str = "float64", seed: int = 0,
        codec: str | None = None, make: Core | None = None, variances: tuple[tuple[int, int], ...] = (),
        **settings: Any,
    ) -> None:  # fmt: skip
        """All start from one model; nobody has heard of anybody."""
        self.layout = Layout(size - buffers, size, variances, tuple(range(2, size + 1, 3)))
        self.settings = settings_of(mode, replace(SETTINGS, codec=codec or AUTO, **settings))

        def made(name: str, layout: Layout, rng: random.Random, values: Callable[[], Vector]) -> Mode:
            return parse_mode(mode)(name, layout, rng, self.settings, values)

        self.make: Core = make or made
        self.rng = np.random.default_rng(seed)
        self.start = self.rng.normal(size=size).astype(dtype)
        self.now = 0.0
        self.messages = 0
        self.lives = 1000 * seed
        self.queues: defaultdict[tuple[str, str], deque[Message]] = defaultdict(deque)
        self.logged: list[tuple[str, str]] = []  # by whom, and the line
        self.nodes: dict[str, Life] = {}
        for name in names:
            self.live(name, self.first_model())

    def first_model(self) -> Vector:
        """What a member starts from."""
        return self.start

    # ---------------------------------------------------------------- what happens to a member

    def live(self, name: str, model: Vector) -> None:
        """A new life, which has heard of nobody."""
        self.lives += 1
        self.nodes[name] = self.life(name, model.copy(), self.layout, self.lives, self.make)

    def die(self, name: str) -> None:
        """What was on its way to it, and from it, is lost; who knows it hears so later."""
        del self.nodes[name]
        for link, queue in self.queues.items():
            if name in link:
                queue.clear()

    def restart(self, name: str, model: Vector) -> None:
        """Its next life, before anybody misses the last: the others' connections break and are made again."""
        if name in self.nodes:
            self.die(name)
        self.live(name, model)
        self.hear(name)
        for other, node in sorted(self.nodes.items()):
            if name in node.heard:
                self.perform(other, node.core.on_message(name, Connected(), self.now))

    def peers(self, name: str, alive: set[str]) -> None:
        """Membership tells a node who is there."""
        node = self.nodes[name]
        node.heard = frozenset(alive - {name})
        self.perform(name, node.core.on_peers(node.heard, self.now))

    def declare_dead(self, name: str, others: set[str]) -> None:
        """It believes these dead, and closes its connections to them."""
        for other in others:
            self.lose(name, other)
        self.peers(name, {*self.nodes[name].heard} - others)

    def hear(self, name: str) -> None:
        """It learns who is there now."""
        self.peers(name, set(self.nodes))

    def all_hear(self) -> None:
        """Everybody does."""
        for name in sorted(self.nodes):
            self.hear(name)

    # ---------------------------------------------------------------- what a trainer does

    def step(self, name: str, move: Vector | float) -> None:
        """One optimizer step, unless it waits or has ended."""
        node = self.nodes[name]
        if node.waits or node.finishing:
            return
        node.move(move)
        node.steps += 1
        node.waits = node.core.quiet.stands_at(node.steps, node.core.barrier)
        self.report(name, published=node.asked or node.waits)

    def finish(self, *names: str) -> None:
        """Their runs end, unless they wait or have ended."""
        for name in names:
            node = self.nodes[name]
            if not node.finishing and not node.waits:
                node.finishing = True
                self.report(name, published=True)

    def begin_again(self, name: str) -> None:
        """Another run follows one that has ended."""
        self.nodes[name].finishing = False
        self.nodes[name].proceeded.clear()

    def report(self, name: str, *, published: bool) -> None:
        """Its trainer says where it is."""
        node = self.nodes[name]
        change, quiet = node.change(), node.core.quiet
        published |= not node.finishing and quiet.wants_copy(change, node.steps)
        if published:
            node.asked = False
            node.publish()
        if not (published or node.finishing or quiet.wants_report(node.steps)):
            if node.steps % 2:
                return  # no report, as in production; of those that come all the same nothing may follow
            assert (
                node.core.on_step(StepReport(node.steps, change, 1.0, False, False, samples=node.samples), self.now)
                == []
            )
            return
        report = StepReport(node.steps, change, 1.0, published, node.finishing, node.waits, node.samples)
        self.perform(name, node.core.on_step(report, self.now))

    def perform(self, name: str, effects: list[Effect]) -> None:
        """Do what a core asks for."""
        node = self.nodes[name]
        for effect in effects:
            match effect:
                case Apply():
                    assert np.isfinite(effect.correction).all()
                    assert effect.correction.dtype == node.x.dtype
                    node.correct(effect.correction)
                    node.applied += 1
                    effect.correction.fill(np.nan)
                case Send():
                    assert effect.peer != name
                    self.queues[name, effect.peer].append(carried(effect.message))
                case Publish():
                    node.asked = True
                case Resume():
                    assert node.waits, "nobody waits"
                    node.waits = False
                case Proceed():
                    node.proceed(effect.settled)
                case Log():
                    self.logged.append((name, effect.text))

    # ---------------------------------------------------------------- connections

    def waiting(self) -> list[tuple[str, str]]:
        """Connections with something on them."""
        return sorted(link for link, queue in self.queues.items() if queue)

    def deliver(self, source: str, target: str) -> bool:
        """One message; says whether there was one."""
        if not (queue := self.queues[source, target]):
            return False
        message = queue.popleft()
        if target in self.nodes:
            self.messages += 1
            self.perform(target, self.nodes[target].core.on_message(source, message, self.now))
        return True

    def duplicate(self, source: str, target: str, *, late: bool = True) -> None:
        """What waits at the head of a queue comes once more: behind all the rest, or at once."""
        if queue := self.queues[source, target]:
            (queue.append if late else queue.appendleft)(queue[0])

    def lose(self, source: str, target: str, *kinds: type) -> None:
        """What is on the connection is lost, or of that what is of these kinds."""
        queue = self.queues[source, target]
        kept = [message for message in queue if kinds and not isinstance(message, kinds)]
        queue.clear()
        queue.extend(kept)

    def cut(self, source: str, target: str) -> None:
        """The connection breaks and is made again, be it to one that nobody has named: what was on it is lost."""
        self.lose(source, target)
        if source in self.nodes and source != target:
            self.perform(source, self.nodes[source].core.on_message(target, Connected(), self.now))

    def settle(self) -> int:
        """Deliver everything; returns how much that was."""
        before = self.messages
        while links := self.waiting():
            for source, target in links:
                while self.deliver(source, target):
                    assert self.messages - before < MESSAGES_MAX, "messages without end"
        return self.messages - before

    # ---------------------------------------------------------------- time, and an end

    def pass_time(self, seconds: float) -> None:
        """And whose deadline comes acts."""
        self.now += seconds
        for name, node in sorted(self.nodes.items()):
            if node.core.deadline <= self.now:
                self.perform(name, node.core.on_timer(self.now))

    def come_to(self, goal: Callable[[str], bool], then: Callable[[str], None]) -> None:
        """Each member does its next thing, messages come, and timers that are due, or all when nothing comes, until all
        are there."""
        until = self.now + PATIENCE_S
        for _ in range(ROUNDS_MAX):
            for name in sorted(self.nodes):
                then(name)
            moved = self.settle()
            if all(goal(name) for name in self.nodes):
                return
            deadline = min(node.core.deadline for node in self.nodes.values())
            if deadline <= self.now or (not moved and deadline <= until):
                self.pass_time(max(0.0, deadline - self.now) + 1e-6)
        stuck = {name: (node.steps, node.waits, node.finishing, node.proceeded) for name, node in self.nodes.items()}
        raise AssertionError(f"hangs at {self.now:.0f} s: {stuck}")

    def train(self, steps: int, move: Callable[[str], Vector | float] = lambda name: 0.0) -> None:
        """Everybody makes so many steps, and nobody is kept waiting while the others train on."""
        self.settle()
        wanted = {name: node.steps + steps for name, node in self.nodes.items()}
        self.come_to(lambda name: self.nodes[name].steps >= wanted[name], lambda name: self.step(name, move(name)))

    def heal(self) -> None:
        """Everybody hears of everybody, and every connection is made anew."""
        self.all_hear()
        for source, target in permutations(sorted(self.nodes), 2):
            self.cut(source, target)
        self.settle()

    def end(self) -> None:
        """Every run ends."""
        self.settle()
        self.come_to(lambda name: self.nodes[name].proceeded[-1:] == [True], self.finish)

    def spread(self) -> float:
        """Largest distance of a model from the mean, over the mean's norm."""
        models = [node.x for node in self.nodes.values()]
        mean = sum(models) / len(models)
        return max(float(np.linalg.norm(model - mean)) for model in models) / float(np.linalg.norm(mean))
