"""When do a shard's weights change, and by what? The rules of Rudra's parameter server (Gupta, Zhang, Wang 2016).

The clock counts the updates of the weights. A worker pulls them at clock j, makes one step of its own optimizer, and
pushes by how much that moved them; at clock i that push is i - j stale.

    hardsync      one push of every worker, then their mean is added: synchronous SGD
    softsync:n    the mean of any floor(workers / n), each over its staleness; nobody waits
    async         softsync with n = workers: each push on its own (Downpour)

Workers push optimizer steps where the paper's push gradients. Plain SGD and its momentum are linear, so the mean of
the steps is the step of the mean gradient, and the server needs no optimizer of its own (nor the daemon torch).
Pushes that come as one sum (aggregator.py) are of one clock: each of them is as stale, and counts, as if it came alone.
A push more than 2n clocks stale (in hardsync: stale at all) is dropped; so is one that was made from no weights.

In hardsync a worker whose push is dropped waits with the others, so that its next one is not stale, and the round does
not wait for it. With several shards, servers that heard of a newcomer at different times can each close a round
without a worker that the other one waits for. Such a worker waits long, and then says to those that have answered it
already that they shall not wait for it (a ShardPull).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from peerd.training.effects import Vector
from peerd.training.model.variances import bounded
from peerd.transport.ids import NodeId
from peerd.transport.messages import Applied

WORKERS_MAX = 1000
"""Workers whose last push is remembered, the latest; what a message can hold (64 KiB) at 50 bytes each."""

RATES = ("staleness", "mean", "constant")
"""What a softsync push is divided by: max(1, staleness), n, or 1."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When the server updates."""

    n: int | None  # 0: hardsync; None: as many as there are workers
    rate: str = "staleness"

    def group(self, workers: int) -> int:
        """Pushes in one update of softsync."""
        return max(1, workers // self._n(workers)) if self.n != 0 else workers

    def spread(self, workers: int) -> int:
        """The staleness up to which a push is taken."""
        return 2 * self._n(workers)

    def factor(self, staleness: int, workers: int) -> float:
        """What a push is multiplied with."""
        if self.rate == "staleness":
            return 1 / max(1, staleness)
        return 1 / max(1, self._n(workers)) if self.rate == "mean" else 1.0

    def _n(self, workers: int) -> int:
        return max(1, workers) if self.n is None else self.n


@dataclass(slots=True, eq=False)
class ShardServer:
    """The weights of one shard and what is to be added to them."""

    rule: Rule
    weights: Vector
    clock: int
    applied: dict[NodeId, Applied]  # what the weights hold of each worker
    counts: Counter[str]
    staleness: Counter[int]
    variances: tuple[tuple[int, int], ...] = ()  # where in the weights
    pushers: list[NodeId] = field(default_factory=list)  # of the next update
    dropped: set[NodeId] = field(default_factory=set)  # hardsync: those who wait for it all the same,
    passed: set[NodeId] = field(default_factory=set)  # and those for whom it does not wait
    owed: dict[NodeId, None] = field(default_factory=dict)  # who waits for weights, in order
    come: dict[NodeId, Applied] = field(init=False)  # the last push of each worker
    _sum: Vector = field(init=False)

    def __post_init__(self) -> None:
        """The pushes that are in the weights have come."""
        self.come = dict(self.applied)
        self._sum = np.zeros_like(self.weights)

    def last_of(self, worker: NodeId, life: int) -> int:
        """The number of the worker's last push that has come; 0: none."""
        last = self.come.get(worker)
        return last.seq if last is not None and last.life == life else 0

    def note_incarnation(self, worker: NodeId, life: int) -> None:
        """A worker that was restarted counts its pushes from 1 again."""
        if worker in self.come and self.come[worker].life != life:
            del self.come[worker]

    def is_next(self, worker: NodeId, life: int, seq: int, oldest: int) -> bool:
        """Whether this push must be taken: none comes twice, and none before those that it follows."""
        last = self.last_of(worker, life)
        return last < seq <= max(last + 1, oldest)

    def take(self, marks: Sequence[Applied], clock: int, update: Vector, training: frozenset[NodeId]) -> None:
        """Count pushes made from one clock's weights in, of which `update` is the sum, or drop them."""
        staleness = max(0, self.clock - max(0, clock))
        for mark in marks:
            self.come.pop(mark.worker, None)
            self.come[mark.worker] = mark
            if len(self.come) > WORKERS_MAX:
                del self.come[next(iter(self.come))]
        self.counts["pushes"] += len(marks)
        if clock >= 0:
            self.staleness[staleness] += len(marks)
        if clock < 0 or staleness > self.rule.spread(len(training)):
            self.dropped |= {mark.worker for mark in marks}
            self.counts["pushes_dropped"] += len(marks)
            if not self.pushers:
                self.applied = dict(self.come)
            return
        with np.errstate(over="ignore"):
            self._sum += self.rule.factor(staleness, len(training)) * update
        self.pushers += [mark.worker for mark in marks]

    def due(self, training: frozenset[NodeId]) -> list[NodeId]:
        """Update if it is time, then say who gets the weights. `training` are the workers that will push again."""
        if self.rule.n != 0:
            updates = len(self.pushers) // self.rule.group(len(training))
            if updates:
                self._update(updates)
            answered = list(self.owed)
        else:
            waiting = {*self.pushers, *self.dropped}
            if waiting and training <= waiting | self.passed:
                self._update(1)
            answered = [worker for worker in self.owed if worker not in self.pushers and worker not in self.dropped]
        for worker in answered:
            del self.owed[worker]
        return answered

    def _update(self, updates: int) -> None:
        """With sums from a tree what has come may be several updates at once: as many steps of its mean.

        Pushes that overlap could each take most of a variance away: a tenth of it stays.
        """
        self.dropped.clear()
        self.passed.clear()
        if not self.pushers:
            return
        self._sum /= len(self.pushers) / updates
        with np.errstate(over="ignore"):
            self._sum += self.weights
        for start, stop in self.variances:
            self._sum[start:stop] = bounded(self.weights[start:stop], self._sum[start:stop])
        if np.isfinite(self._sum).all():  # each push is, but a sum of huge ones need not be
            self.weights, self._sum = self._sum, self.weights
        else:
            self.counts["updates_not_finite"] += 1
        self._sum.fill(0.0)
        self.clock += updates
        self.applied = dict(self.come)
        self.pushers.clear()
        self.counts["updates"] += updates
