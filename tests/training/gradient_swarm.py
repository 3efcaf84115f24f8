"""Members that exchange gradients, in one process: each trainer waits with its own, and steps by what comes back.

A model is parameters, float buffers and the optimizer's momentum. Gradients are whole numbers, so that sums are exact.
What every member of an attempt has after it must be the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from mode_swarm import Life, ModeSwarm

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Averaged, Become, Effect, Publish, StepReport, Vector
from peerd.training.modes.gradients import GradientAllReduce
from peerd.training.rounds.weights import scales
from peerd.transport.messages import RoundBegin

LR, MOMENTUM = np.float32(0.25), np.float32(0.5)
BUFFERS = 3


class GradientLife(Life):
    """A life whose core sees nothing but published copies."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.skipped = 0  # steps that a scaler would have left out
        self.shortened = 0  # rounds whose mean was longer than it may be
        self.comes: Vector | None = None  # the gradient of the backward pass that is under way
        self.memory: Vector = np.empty(0)  # as much of it as has come
        self.first = 0  # from here on
        self.late: list[Effect] = []  # what a trainer hears when it looks

    def _values(self) -> Vector:
        np.copyto(self._buffer, self.base)
        return self._buffer


class GradientSwarm(ModeSwarm):
    """`samples` and `spoils` say what the next gradients of a member are like."""

    life = GradientLife
    nodes: dict[str, GradientLife]  # type: ignore[assignment]

    def __init__(self, names: str, parameters: int = 9, *, codec: str = "float32", seed: int = 0, **settings: Any):
        self.samples: dict[str, float] = {}
        self.spoils: set[str] = set()
        self.unused: dict[str, set[int]] = {}  # tensors that get no gradient
        self.given: dict[tuple[int, str], Vector] = {}  # by attempt and member, what it contributed
        self.after: dict[int, bytes] = {}  # by attempt, the model that it led to
        swarm = self

        class Watched(GradientAllReduce):
            def _contribution(self, begin: RoundBegin, where: slice) -> Vector:
                self.attempt = begin.attempt
                return super()._contribution(begin, where)

            def _fill(self) -> None:
                super()._fill()
                if self._is_whole and self._summand is not None and self._gradient is not None:
                    parameters = self._gradient[: self._layout.parameters]
                    swarm.given[self.attempt, self._me] = np.concatenate([parameters, self._tail])

        def made(name: str, layout: Layout, rng: random.Random, values: Callable[[], Vector]) -> GradientAllReduce:
            return Watched(name, layout, rng, self.settings, values)

        size = 2 * parameters + BUFFERS
        super().__init__(
            "allreduce", "", size, buffers=size - parameters, dtype="float32", seed=seed, codec=codec, make=made,
            exchange="gradients", **settings,
        )  # fmt: skip
        self.layout = replace(self.layout, states=parameters)
        self.flags = slice(self.layout.gradients.parameters + BUFFERS, None)
        for name in names:
            self.live(name, self.first_model())
        self.all_hear()
        self.settle()

    @property
    def exact(self) -> bool:
        return self.settings.codec == "float32"

    def integers(self) -> Vector:
        return self.rng.integers(-100, 100, self.layout.parameters).astype(np.float32)

    def step(self, name: str, move: Vector | float | None = None) -> None:
        """A backward pass with a gradient of 1000 times `move`, in whole numbers; the step comes with the mean."""
        node = self.nodes[name]
        if node.waits or node.finishing:
            return
        if node.comes is not None:
            self.part(name, 0)
            return
        gradient = self.passed(name, move)
        node.waits = True
        self.perform(name, node.core.on_gradient(gradient, self.samples.get(name, 1.0), node.steps, self.now, 0.1))

    def part(self, name: str, first: int, *, anew: bool = False) -> None:
        """A backward pass begins, or begins `anew`, or comes to the parameter `first`; the trainer waits at 0."""
        node, parameters = self.nodes[name], self.layout.parameters
        if node.waits or node.finishing:
            return
        if begins := node.comes is None or anew:
            node.comes, node.first = self.passed(name, None), parameters
            if not node.memory.size:
                node.memory = np.full_like(node.comes, 1e9)  # of nobody's gradient
        assert node.comes is not None
        part = slice(min(first, node.first), node.first if first else None)
        node.memory[part], node.first = node.comes[part], min(first, node.first)
        samples = self.samples.get(name, 1.0)
        told: Any = (node.memory, samples, node.steps, self.now)
        if first:
            effects = node.core.on_part(node.memory, node.first, *told[1:], anew=begins)
        else:
            node.waits, node.comes = True, None
            effects = node.core.on_gradient(*told, 0.1, anew=begins)
        self.perform(name, effects)
        if not first:
            late, node.late = node.late, []
            self.perform(name, [*late, *([Publish()] if node.asked else [])])

    def passed(self, name: str, move: Vector | float | None) -> Vector:
        """What a backward pass makes."""
        node, layout = self.nodes[name], self.layout
        parameters = layout.parameters
        gradient = np.zeros(layout.gradients.total, np.float32)
        drawn = self.integers() if move is None else np.round(1000 * np.asarray(move, np.float32)).reshape(-1)
        gradient[:parameters] = drawn[:parameters] if drawn.size > 1 else drawn
        if name in self.spoils:
            gradient[0] = np.inf
        node.x[parameters : parameters + BUFFERS] += np.float32(1 + ord(name))  # its forward pass
        gradient[parameters : parameters + BUFFERS] = node.x[parameters : parameters + BUFFERS]
        gradient[self.flags] = 1.0
        starts = [0, *layout.tensors]
        for tensor in self.unused.get(name, ()):
            gradient[starts[tensor] : starts[tensor + 1]] = 0.0
            gradient[self.flags][tensor] = 0.0
        return gradient

    def finish(self, *names: str) -> None:
        """In the middle of a backward pass, too."""
        for name in names:
            self.nodes[name].comes = None
            super().finish(name)

    def perform(self, name: str, effects: list[Effect]) -> None:
        node = self.nodes[name]
        rest: list[Effect] = []
        for effect in effects:
            match effect:
                case Averaged(gradient):
                    assert gradient is not None
                    self._go_on(name, gradient)
                case Become(values, step) if node.comes is not None:
                    node.late.append(Become(values.copy(), step))
                    values.fill(np.nan)
                case Become(values, step):
                    assert node.waits or node.finishing
                    node.x, node.base, node.steps = values.copy(), values.copy(), step
                    values.fill(np.nan)
                case Publish() if node.waits:
                    node.publish()
                    report = StepReport(node.steps, 0.0, 1.0, published=True, finishing=False)
                    rest.append(effect)
                    self.perform(name, node.core.on_step(report, self.now))
                case _:
                    super().perform(name, [effect])
        assert len(rest) <= 1

    def _go_on(self, name: str, mean: Vector) -> None:
        node, layout = self.nodes[name], self.layout
        assert node.waits, "nobody waits"
        node.waits = False
        node.steps += 1
        order = node.core._rounds.order
        assert order.attempt == node.core._basis
        parameters, states = layout.parameters, layout.total - layout.states
        if np.isnan(mean[0]):
            assert np.isnan(mean[:parameters]).all()
            node.skipped += 1
            return
        shortened, node.shortened = node.shortened, node.core.counts["rounds_shortened"]
        if node.shortened == shortened:
            self._check(order, mean)
        used = np.repeat(mean[self.flags] > 0, np.diff([0, *[end for end in layout.tensors if end <= parameters]]))
        used = np.concatenate([used, np.ones(parameters - used.size, bool)])
        momentum, x = node.x[states:], node.x[:parameters]
        momentum[used] = MOMENTUM * momentum[used] + mean[:parameters][used]
        x[used] -= LR * momentum[used]
        node.x[parameters:states] = mean[parameters : parameters + BUFFERS]
        assert self.after.setdefault(order.attempt, node.x.tobytes()) == node.x.tobytes(), "two models of one attempt"

    def _check(self, order: Any, mean: Vector) -> None:
        """That it is the mean of what the order's members had."""
        if not self.exact:
            return
        parts = [self.given[order.attempt, member] for member in order.roster]
        factors = scales(order.weights)
        parameters = self.layout.parameters
        summands = [np.float64(factor) * part[:parameters] for factor, part in zip(factors, parts, strict=True)]
        wanted = np.sum(summands, axis=0, dtype=np.float64) / sum(factors)
        if set(factors) <= {0.0, 1.0}:
            assert (mean[:parameters] == wanted.astype(np.float32)).all(), "one rounding, of the division"
        else:
            assert np.allclose(mean[:parameters], wanted, rtol=1e-6, atol=1e-4)
        counts = [part for factor, part in zip(factors, parts, strict=True) if factor > 0]
        assert (mean[self.flags] == sum(part[self.flags] for part in counts)).all()
        assert (mean[parameters : parameters + BUFFERS] == counts[0][parameters : parameters + BUFFERS]).all()

    def one_model(self) -> None:
        """All hold the same bits."""
        models = {node.x.tobytes() for node in self.nodes.values()}
        assert len(models) == 1
