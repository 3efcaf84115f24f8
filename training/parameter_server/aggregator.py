"""What does a member of a tree do with its own push and with those from below? It sums them on their way up.

Rudra-adv (Gupta, Zhang, Wang 2016). Only pushes that were made from weights of one clock are summed, so the staleness
of a sum is that of each of its parts, which it names: the server counts, drops and divides as if they had come alone.
Sums are float32, as a death must not take an encoder's residual with it; a push alone travels as it was made.

When is a sum sent on? In hardsync once nobody below is missing, whom the server would wait for, too; and what is
there goes on when a worker below has waited for long, as the server may have closed its round without some. Otherwise
whenever the last ones have been taken by the next in the tree: so a fast line sums little, and a slow one much. A
sum is kept until it is taken, and its parts by their workers until they are in weights that these have pulled, so that
the next tree, after the death of an aggregator, loses none; no push has two ways in one tree, so none comes twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from peerd.training.codecs import vector
from peerd.training.codecs.vector import Layout, NotFinite
from peerd.training.effects import Vector
from peerd.training.parameter_server.shard_server import still_passed
from peerd.training.parameter_server.tree import Tree
from peerd.training.parameter_server.worker import Ballot, Part, pushed_values
from peerd.transport.ids import NodeId
from peerd.transport.messages import Applied, Chunks, Pass, ShardPush, ShardSum, Weights

SUM_CODEC = "float32"


@dataclass(slots=True, eq=False)
class _Sum:
    clock: int
    finishing: bool
    parts: list[Applied]
    rate: float  # the mean of theirs
    codec: str
    chunks: Chunks  # of the first part
    values: Vector | None  # None: as the chunks say


@dataclass(slots=True, eq=False)
class Aggregator:
    """One member's place in one shard's tree, but for the root."""

    me: NodeId
    part: Part
    ballot: Ballot
    tree: Tree
    waits: bool  # for all below: hardsync
    counts: Counter[str]
    like: Vector  # for its dtype
    passed: dict[NodeId, Pass] = field(default_factory=dict)  # who is not to be waited for,
    hurries: bool = False  # or nobody's in this round: a worker below has waited for long
    clock: int = field(init=False)  # of the last weights that were seen
    _below: set[NodeId] = field(init=False)
    _come: dict[NodeId, int] = field(default_factory=dict)  # the last push of each
    _waiting: set[NodeId] = field(default_factory=set)  # whose push is here or further up, and not answered
    _gathered: list[_Sum] = field(default_factory=list)
    _under_way: list[ShardSum] = field(default_factory=list)
    _seq: int = 0

    def __post_init__(self) -> None:
        self.clock = self.part.clock
        self._below = {self.me, *self.tree.below(self.me)}
        self._come = {member.worker: member.seq for member in self.tree.members if member.worker in self._below}

    def take_push(self, push: ShardPush) -> bool:
        """Our own worker's. Says whether it was new."""
        last = self._come[self.me]
        if not last < push.seq <= max(last + 1, push.oldest):
            return False
        self._gather(
            _Sum(
                push.clock, push.finishing, [Applied(self.me, push.life, push.seq)], push.rate, push.codec,
                push.chunks, None,
            )
        )  # fmt: skip
        return True

    def take_pass(self, worker: NodeId, seq: int, passes: Pass) -> None:
        """For so long its push after this one is not to be waited for."""
        if worker in self._below and seq >= self._come.get(worker, 0):
            self.passed[worker] = passes

    def take_sum(self, message: ShardSum) -> None:
        """One from below, which comes once and in order. Raises PeerError."""
        values = pushed_values(self.part, message.codec, message.chunks, self.like, len(message.parts))
        parts, rate = list(message.parts), message.rate
        self._gather(_Sum(message.clock, message.finishing, parts, rate, message.codec, message.chunks, values))

    def due(self, training: frozenset[NodeId]) -> list[ShardSum]:
        """What to send on now."""
        waits = self.waits and not self.hurries
        missing = (self._below & training) - self._waiting - self.passed.keys() if waits else set()
        if not self._gathered or missing or (self._under_way and not self.waits):
            return []
        sums = [self._message(gathered) for gathered in self._gathered]
        self._gathered.clear()
        self._under_way += sums
        return sums

    def taken(self, seq: int) -> None:
        """The next in the tree has all up to this one."""
        self._under_way = [each for each in self._under_way if each.seq > seq]

    def repeat(self) -> list[ShardSum]:
        """What it may not have."""
        return list(self._under_way)

    def answered(self, weights: Weights) -> None:
        """From above; the workers that it is for go on."""
        if weights.clock > self.clock:  # not what was asked for in between
            self.clock = weights.clock
            self.passed = still_passed(self.passed)
            self.hurries = False
        self._waiting -= {mark.worker for mark in weights.answers if mark.seq >= self._come.get(mark.worker, 0)}

    def _gather(self, new: _Sum) -> None:
        """Add it to one of its clock, but never past another push of the same worker: they stay in order."""
        workers = {part.worker for part in new.parts}
        self._come |= {part.worker: part.seq for part in new.parts}
        self._waiting |= workers
        for worker in workers:
            self.passed.pop(worker, None)
        for held in reversed(self._gathered):
            if (held.clock, held.finishing) == (new.clock, new.finishing):
                with np.errstate(over="ignore"):
                    held.values = self._values(held)
                    held.values += self._values(new)
                rates = held.rate * len(held.parts) + new.rate * len(new.parts)
                held.parts += new.parts
                held.rate = rates / len(held.parts)
                self.counts["summed"] += 1
                return
            if not workers.isdisjoint(part.worker for part in held.parts):
                break
        self._gathered.append(new)

    def _values(self, held: _Sum) -> Vector:
        if held.values is None:
            held.values = pushed_values(self.part, held.codec, held.chunks, self.like)  # a push alone
        return held.values

    def _message(self, held: _Sum) -> ShardSum:
        codec, chunks = held.codec, held.chunks
        if len(held.parts) > 1 and held.values is not None:
            codec = SUM_CODEC
            chunks = self._encoded(held.values)
        self._seq += 1
        term, server = self.ballot
        return ShardSum(
            self.part.number, term, server, self._seq, held.clock, codec, held.finishing, tuple(held.parts), held.rate,
            chunks,
        )  # fmt: skip

    def _encoded(self, values: Vector) -> Chunks:
        layout = Layout(len(values), len(values))
        try:
            return vector.encode(SUM_CODEC, layout, values)[0]
        except NotFinite:  # each part is finite, but a sum of huge ones need not be
            self.counts["updates_not_finite"] += 1
            return vector.encode(SUM_CODEC, layout, np.zeros_like(values))[0]
