"""What does a worker of a parameter server push, and what has it pulled? One node's own half, without whom it talks to.

A push is by how much the optimizer's step moved the model from the weights that were pulled, or a gradient at those
weights, plus what the codec dropped of earlier pushes (error feedback). It is kept until it is in weights that this
worker has pulled: then no death of a server can lose it. That is at most the pushes of one update.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from peerd.training.codecs import vector
from peerd.training.codecs.codec import fits
from peerd.training.codecs.difference import norm_of_difference
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.parameter_server.optimizer import DIFFERENCE, Optimizer
from peerd.transport.ids import NodeId
from peerd.transport.messages import Applied, Chunks, Pass, ShardPull, ShardPush

Ballot = tuple[int, NodeId]
"""Who serves a shard: the term and the member; the higher ballot wins."""

NOBODY: Ballot = (0, "")
NEVER = -1
"""The clock of a model that came from no server. It may hold steps that will be pushed, so no server starts from it
while there is another, and drops a push that was made from it."""


@dataclass(slots=True, eq=False)
class Part:
    """One shard, as its worker sees it."""

    number: int
    where: slice  # of the flat model
    layout: Layout
    pushed: Layout  # of a push; behind a gradient is a flag for each tensor
    flags: slice  # those of its tensors, in a flat gradient
    clock: int = NEVER  # of the weights that were pulled, which the worker's base holds
    applied: dict[NodeId, Applied] = field(default_factory=dict)  # what they hold of each worker
    seq: int = 0  # of the last push
    moved: float = 0.0  # norm of the last step, here; where gradients are pushed, of the weights' last change a clock
    gradient: float = 0.0  # norm of the last one, here
    state: Vector = field(init=False)  # what the server's optimizer remembers, behind the weights of this clock
    pushes: deque[ShardPush] = field(default_factory=deque)  # those not known to be in the weights
    told: Ballot = NOBODY  # who was told of them,
    said: int = 0  # up to this one
    awaiting: bool = False
    skips: bool = False  # the server need not wait for the next push
    pushed_at: float = 0.0
    asked_at: float = 0.0
    repeats: int = 0
    final: bool = False

    @property
    def flagged(self) -> tuple[int, ...]:
        """Where the tensors end that have flags."""
        return self.layout.tensors[: self.flags.stop - self.flags.start]


class Worker:
    """`base`, shape (total,), is what was pulled of all shards: also the copy of each that outlives its server."""

    def __init__(
        self, me: NodeId, life: int, layout: Layout, shards: int, codec: str, start: Vector,
        optimizer: Optimizer | None = None,
    ) -> None:  # fmt: skip
        """Start from the model that all start from, or that was fetched, until the first pull.

        `optimizer` is the servers', to which gradients are pushed.
        """
        self.base = start
        self.shift: Vector | None = None  # from `start` to the first weights, if those came between two reports
        self.moved = 0.0  # norm of the last step
        self.norm = 0.0  # of the weights
        self.parts = parts_of(layout, shards, gradients=optimizer is not None)
        self._me = me
        self.life = life
        self._codec = codec
        self._residual = np.zeros_like(start)
        self._optimizer = optimizer
        for part in self.parts:
            rows = optimizer.rows if optimizer is not None else 0
            part.state = np.zeros(rows * part.layout.parameters, start.dtype)

    @property
    def awaiting(self) -> bool:
        """Whether some shard has not been answered."""
        return any(part.awaiting for part in self.parts)

    def step(self, values: Vector, now: float) -> bool:
        """Make the pushes of one optimizer step, which led to `values`. Says whether they were finite."""
        moved = values - self.base
        self.moved = norm_of_difference(moved)
        self.norm = norm_of_difference(self.base)
        finite = self._made_whole(moved)
        for part in self.parts:
            part.moved = norm_of_difference(moved[part.where])
            self._push(part, moved, part.clock, DIFFERENCE, now, finite=finite)
        return finite

    def differentiate(self, gradient: Vector, rate: float, now: float) -> bool:
        """Make the pushes of a gradient at the weights, of this learning rate; float buffers may have moved beside it.

        `gradient` is as `Layout.gradients` has it. Says whether it was finite: if not, the servers know by the clock
        that there is nothing to count.
        """
        cut = sum(part.layout.parameters for part in self.parts)
        moved = gradient[: len(self.base)].astype(self.base.dtype)
        moved[cut:] -= self.base[cut:]
        finite = self._made_whole(moved)
        self.norm = norm_of_difference(self.base)
        for part in self.parts:
            part.gradient = norm_of_difference(moved[part.where][: part.layout.parameters])
            clock = part.clock if finite else NEVER
            self._push(part, moved, clock, rate, now, gradient[part.flags], finite=finite)
        return finite

    def _made_whole(self, moved: Vector) -> bool:
        """Add what was dropped before. What is not finite then becomes nothing: the others must not wait for it."""
        moved += self._residual
        if not (finite := fits(moved)):
            moved.fill(0.0)
        return finite

    def _push(
        self,
        part: Part,
        moved: Vector,
        clock: int,
        rate: float,
        now: float,
        flags: Vector | None = None,
        *,
        finite: bool,
    ) -> None:
        chunks = self._encoded(part, moved[part.where], flags, finite=finite)
        part.seq += 1
        part.pushes.append(
            ShardPush(part.number, part.seq, self.life, 0, clock, self._codec, False, False, rate, chunks)
        )
        part.awaiting, part.final, part.repeats = True, False, 0
        part.pushed_at = part.asked_at = now

    def _encoded(self, part: Part, moved: Vector, flags: Vector | None, *, finite: bool) -> Chunks:
        pushed = moved if flags is None else np.concatenate([moved, flags], dtype=moved.dtype)
        arrives = np.empty_like(pushed)
        chunks, _ = vector.encode(self._codec, part.pushed, pushed, decoded=arrives)
        if finite:  # else what was dropped before waits for a push that counts
            np.subtract(moved, arrives[: len(moved)], out=self._residual[part.where])
        return chunks

    def to_say(
        self, part: Part, leader: Ballot, *, finishing: bool, taken: int = 0, after: int | None = None
    ) -> list[ShardPush | ShardPull]:
        """What the shard's server must hear: pushes that it has not been told of, or a reminder of the last.

        Those up to `taken` are in a new server's weights; one that we know said that it has those up to `after`.
        """
        if after is not None:
            part.said = after
        elif part.told != leader:
            part.told, part.said = leader, taken
        said = [push for push in part.pushes if push.seq > part.said]
        part.said = part.seq
        oldest = part.pushes[0].seq if part.pushes else 0
        pushes: list[ShardPush | ShardPull] = [
            replace(push, oldest=oldest, finishing=finishing, wants_answer=part.awaiting and push is said[-1])
            for push in said
        ]
        wants = part.awaiting or part.clock == NEVER or (finishing and not part.final)
        return pushes or ([ShardPull(part.number, part.seq, self.life, Pass.NONE, True)] if wants else [])

    def held(self, part: Part) -> Vector:
        """The weights of the last pull, and behind them what the optimizer remembers."""
        base = self.base[part.where]
        return np.concatenate([base, part.state]) if len(part.state) else base

    def take(
        self, part: Part, clock: int, seq: int, applied: Iterable[Applied], held: Vector, final: bool
    ) -> bool | None:
        """The server's answer. True: taken; None: not wanted (any more); False: the server lacks pushes."""
        weights, state = held[: part.layout.total], held[part.layout.total :]
        if part.awaiting and any(push.seq > seq for push in part.pushes):
            return False
        if not part.awaiting and part.clock == NEVER:
            self.shift = np.zeros_like(self.base) if self.shift is None else self.shift
            self.shift[part.where] = weights - self.base[part.where]
        elif not part.awaiting and not final:
            return None
        if self._optimizer is not None and part.clock != NEVER:
            part.moved = norm_of_difference(weights, self.base[part.where]) / max(1, clock - part.clock)
            self.moved = math.hypot(*(each.moved for each in self.parts))
        np.copyto(self.base[part.where], weights)
        np.copyto(part.state, state)
        part.clock, part.applied, part.awaiting, part.final = (
            clock,
            {mark.worker: mark for mark in applied},
            False,
            final,
        )
        mine = part.applied.get(self._me)
        while mine is not None and mine.life == self.life and part.pushes and part.pushes[0].seq <= mine.seq:
            part.pushes.popleft()
        return True


def parts_of(layout: Layout, shards: int, *, gradients: bool) -> list[Part]:
    """The flat model in `shards` equal pieces. A tensor that is cut has its flag in each."""
    parts = []
    for number, (where, piece) in enumerate(layout.cut(shards)):
        pushed = piece.gradients if gradients else piece
        first = layout.total + bisect_right(layout.tensors, where.start)
        parts.append(Part(number, where, piece, pushed, slice(first, first + pushed.total - piece.total)))
    return parts


def pushed_values(part: Part, codec: str, chunks: Chunks, like: Vector, pushes: int = 1) -> Vector:
    """What so many pushes bring together, shape (part.pushed.total,), of the dtype of `like`. Raises PeerError.

    A push is as its worker made it; a sum is exact, float buffers too. A flag is 1 where any worker has a gradient.
    """
    total = part.pushed.total
    values = np.empty(total, like.dtype)
    vector.decode(codec, part.pushed if pushes == 1 else Layout(total, total), chunks, values)
    flags = values[part.layout.total :]
    flags[:] = flags > 0
    return values
