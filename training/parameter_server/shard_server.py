"""When do a shard's weights change, and by what? The rules of Rudra's parameter server (Gupta, Zhang, Wang 2016).

The clock counts the updates of the weights. A worker pulls them at clock j, makes one step of its own optimizer, and
pushes by how much that moved them; at clock i that push is i - j stale.

    hardsync      one push of every worker, then their mean is added: synchronous SGD
    softsync:n    the mean of any floor(workers / n), each over its staleness; nobody waits
    async         softsync with n = workers: each push on its own (Downpour)

Without an optimizer of its own the server adds what workers' optimizer steps moved. Plain SGD and its momentum are
linear, so the mean of the steps is the step of the mean gradient; of any other optimizer it is not.

With one (optimizer.py) workers push gradients g, as the paper's do, each with its learning rate a. What a step would be
divided by divides the rate: of an update's c pushes with factors f = 1 / max(1, staleness), 1 / n or 1 the gradient is
sum(f g) / sum(f), and the rate mean(f a). So plain SGD adds -mean(f a g), and an optimizer that does not care how long
a gradient is allows for its staleness, too. hardsync can scale the rate by the square root of the batch of all workers
(`batch`), and can go on without the last few (`backup`; Chen et al. 2016, arXiv:1604.00981): what comes from those
later is dropped, and answered at once with the weights that the others have made.

Pushes that come as one sum (aggregator.py) are of one clock: each of them is as stale, and counts, as if it came alone.
A push more than 2n clocks stale (in hardsync: stale at all) is dropped; so is one that was made from no weights.
How stale it was counts all the same, but for one of a worker that has never had these weights: a newcomer serves itself
for a moment, until it hears of the others, and the clock there says nothing here.

In hardsync a worker whose push is dropped waits with the others, so that its next one is not stale, and the round does
not wait for it. With several shards, servers that heard of a newcomer at different times can each close a round
without a worker that the other one waits for. While such a worker waits for one server it tells those that have
answered not to wait for its next push; once all have, those that are a round behind not to wait for it in that one (a
ShardPull that passes). Then its pushes are in the same rounds everywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from peerd.training.codecs.codec import fits
from peerd.training.effects import Vector
from peerd.training.model.variances import bounded
from peerd.training.parameter_server.limits import PushLimits
from peerd.training.parameter_server.optimizer import DIFFERENCE, Optimizer, clip
from peerd.transport.ids import NodeId
from peerd.transport.messages import Applied, Pass

WORKERS_MAX = 1000
"""Workers whose last push is remembered, the latest; what a message can hold (64 KiB) at 50 bytes each."""

RATES = ("staleness", "mean", "constant")
"""What a softsync push is divided by: max(1, staleness), n, or 1."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When the server updates."""

    n: int | None  # 0: hardsync; None: as many as there are workers
    rate: str = "staleness"
    backup: int = 0  # hardsync: how many of the workers a round does without
    batch: int = 0  # hardsync: the samples of the step that the learning rate suits; 0: it suits any

    def group(self, workers: int) -> int:
        """Pushes in one update of softsync."""
        return max(1, workers // self._n(workers)) if self.n != 0 else workers

    def spread(self, workers: int, ended: int = 0) -> int:
        """The staleness up to which a push is taken. Since so many have `ended` updates are of fewer pushes: each of
        them may have made one more.
        """
        return 2 * self._n(workers) + ended if self.n != 0 else 0

    def factor(self, staleness: int, workers: int) -> float:
        """What a push is multiplied with."""
        if self.rate == "staleness":
            return 1 / max(1, staleness)
        return 1 / max(1, self._n(workers)) if self.rate == "mean" else 1.0

    def said_rate(self, rate: float, samples: float) -> float:
        """What a worker says whose optimizer has this learning rate and whose gradient is of so many samples."""
        return rate * math.sqrt(samples / self.batch) if self.batch else rate

    def rate_of_all(self, rate: float, pushes: int) -> float:
        """alpha0 sqrt(mu lambda / B): of an update of so many gradients, whose workers said this rate on average."""
        return rate * math.sqrt(pushes) if self.batch else rate

    def _n(self, workers: int) -> int:
        return max(1, workers) if self.n is None else self.n


def still_passed(passed: dict[NodeId, Pass]) -> dict[NodeId, Pass]:
    """Who need not be waited for, now that a round is over."""
    return {worker: until for worker, until in passed.items() if until is Pass.UNTIL_PUSHED}


@dataclass(slots=True, eq=False)
class ShardServer:
    """The weights of one shard and what is to be added to them."""

    rule: Rule
    held: Vector  # the weights, and behind them what the optimizer remembers
    clock: int
    applied: dict[NodeId, Applied]  # what the weights hold of each worker
    counts: Counter[str]
    staleness: Counter[int]
    variances: tuple[tuple[int, int], ...] = ()  # where in the weights
    limits: PushLimits | None = None  # None: every push is taken as it is
    optimizer: Optimizer | None = None  # None: pushes are by how much steps moved the model
    parameters: int = 0  # of the weights; behind them are float buffers
    tensors: tuple[int, ...] = ()  # where those of the parameters end for which a gradient has flags
    pushers: list[NodeId] = field(default_factory=list)  # of the next update
    dropped: set[NodeId] = field(default_factory=set)  # hardsync: those who wait for it all the same,
    passed: dict[NodeId, Pass] = field(default_factory=dict)  # and those for whom it does not wait
    owed: dict[NodeId, None] = field(default_factory=dict)  # who waits for weights, in order
    pulled: set[NodeId] = field(init=False)  # who has had weights that these follow
    come: dict[NodeId, Applied] = field(init=False)  # the last push of each worker
    _sum: Vector = field(init=False)  # of the pushes of the next update, each times its factor,
    _factors: float = 0.0  # those factors,
    _rates: float = 0.0  # and the learning rates times them
    _next: Vector = field(init=False)  # scratch

    def __post_init__(self) -> None:
        """The pushes that are in the weights have come."""
        self.come = dict(self.applied)
        self.pulled = set(self.applied)
        self._sum = np.zeros(len(self.weights) + len(self.tensors), self.held.dtype)
        self._next = np.empty_like(self.held) if self.optimizer is not None else self._sum

    @property
    def weights(self) -> Vector:
        """Parameters and float buffers, shape (total,)."""
        rows = self.optimizer.rows if self.optimizer is not None else 0
        return self.held[: len(self.held) - rows * self.parameters]

    def last_of(self, worker: NodeId, life: int) -> int:
        """The number of the worker's last push that has come; 0: none."""
        last = self.come.get(worker)
        return last.seq if last is not None and last.life == life else 0

    def note_incarnation(self, worker: NodeId, life: int) -> None:
        """A worker that was restarted counts its pushes from 1 again."""
        if worker in self.come and self.come[worker].life != life:
            del self.come[worker]
            self.pulled.discard(worker)
            self.passed.pop(worker, None)

    def is_next(self, worker: NodeId, life: int, seq: int, oldest: int) -> bool:
        """Whether this push must be taken: none comes twice, and none before those that it follows."""
        last = self.last_of(worker, life)
        return last < seq <= max(last + 1, oldest)

    def take(
        self, marks: Sequence[Applied], clock: int, update: Vector, training: frozenset[NodeId],
        rate: float = DIFFERENCE, *, ended: int = 0,
    ) -> None:  # fmt: skip
        """Count pushes made from one clock's weights in, of which `update` (scratch) is the sum, or drop them.

        `rate` is the mean of their learning rates, if they are gradients; so many workers have `ended`.
        """
        staleness = max(0, self.clock - max(0, clock))
        for mark in marks:
            self.passed.pop(mark.worker, None)
            self.come.pop(mark.worker, None)
            self.come[mark.worker] = mark
            if len(self.come) > WORKERS_MAX:
                del self.come[next(iter(self.come))]
        self.counts["pushes"] += len(marks)
        drops = clock < 0 or staleness > self.rule.spread(len(training), ended)
        if counted := sum(not drops or (clock >= 0 and mark.worker in self.pulled) for mark in marks):
            self.staleness[staleness] += counted
        if drops:
            self.dropped |= {mark.worker for mark in marks}
            self.counts["pushes_dropped"] += len(marks)
            if not self.pushers:
                self.applied = dict(self.come)
            return
        workers = [mark.worker for mark in marks]
        if self.limits is not None:
            if self.optimizer is not None:
                rate = self.limits.rate(workers, rate, self.weights, adaptive=self.optimizer.ADAPTIVE)
            self.counts["pushes_clipped"] += self.limits.clip(workers, update, self.weights, rate)
        factor = self.rule.factor(staleness, len(training))
        with np.errstate(over="ignore"):
            self._sum += factor * update
        self._factors += factor * len(marks)
        self._rates += factor * len(marks) * rate
        self.pushers += workers

    def due(self, training: frozenset[NodeId]) -> list[NodeId]:
        """Update if it is time, then say who gets the weights. `training` are the workers that will push again."""
        if self.rule.n != 0:
            updates = len(self.pushers) // self.rule.group(len(training))
            if updates:
                self._update(updates)
            answered = list(self.owed)
        else:
            if self.rule.backup:  # what is dropped came late: its worker shall be in this round
                self.dropped.clear()
            if (self.pushers or self.dropped) and len(self.missing(training)) <= self.rule.backup:
                self._update(1)
            answered = [worker for worker in self.owed if worker not in self.pushers and worker not in self.dropped]
        for worker in answered:
            del self.owed[worker]
        self.pulled.update(answered)
        return answered

    def missing(self, training: frozenset[NodeId]) -> frozenset[NodeId]:
        """Whose pushes the next round of hardsync waits for."""
        return training - {*self.pushers, *self.dropped} - self.passed.keys()

    def _update(self, updates: int) -> None:
        """With sums from a tree what has come may be several updates at once: as many steps of its mean.

        Pushes that overlap could each take most of a variance away: a tenth of it stays.
        """
        self.dropped.clear()
        self.passed = still_passed(self.passed)
        if not self.pushers:
            return
        after = self._next
        with np.errstate(over="ignore", invalid="ignore"):
            self._move(after, updates)
        for start, stop in self.variances:
            after[start:stop] = bounded(self.weights[start:stop], after[start:stop])
        if fits(after):  # each push is, but a sum of huge ones need not be
            self.held, self._next = after, self.held
            if self.optimizer is None:
                self._sum = self._next
        else:
            self.counts["updates_not_finite"] += 1
        self._sum.fill(0.0)
        self._factors = self._rates = 0.0
        self.clock += updates
        self.applied = dict(self.come)
        self.pushers.clear()
        self.counts["updates"] += updates

    def _move(self, after: Vector, updates: int) -> None:
        """Make `after` what is held after so many updates; without an optimizer it is the sum itself."""
        pushes, cut = len(self.pushers), self.parameters
        if self.optimizer is None:
            after /= pushes / updates
            after += self.held
            return
        np.copyto(after, self.held)
        total = len(self.weights)
        weights, state = after[:total], after[total:].reshape(self.optimizer.rows, cut)
        gradient = self._sum[:cut] / self._factors
        clip(self.optimizer, gradient)
        rate = self.rule.rate_of_all(self._rates / pushes, pushes)
        for number in range(updates):
            for used in self._used():
                self.optimizer.step(weights[used], gradient[used], state[:, used], rate, self.clock + number + 1)
        weights[cut:] += self._sum[cut:total] * (updates / pushes)

    def _used(self) -> Iterator[slice]:
        """Where the next update has gradients: an optimizer leaves a tensor without one as it is, momentum and all."""
        start = stop = 0
        for end, flag in zip(self.tensors, self._sum[len(self.weights) :], strict=True):
            if flag > 0:
                stop = end
                continue
            if stop > start:
                yield slice(start, stop)
            start = stop = end
        yield slice(start, self.parameters)
