"""What does one node know of one shard: who serves it, by which tree its pushes come, and who is there to push?"""

from __future__ import annotations

from dataclasses import dataclass, field

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.parameter_server.aggregator import Aggregator
from peerd.training.parameter_server.shard_server import ShardServer
from peerd.training.parameter_server.tree import Tree
from peerd.training.parameter_server.worker import NEVER, NOBODY, Ballot, Part
from peerd.transport.ids import NodeId
from peerd.transport.messages import Applied, Chunks, ShardSum

WEIGHTS_CODEC = "float32"  # what it dropped would be lost: an answer has no error feedback

Newest = tuple[int, dict[NodeId, Applied], Vector]
"""Clock, what of each worker is in the weights, and the weights."""


@dataclass(slots=True, eq=False)
class Members:
    """Who is there."""

    me: NodeId
    alive: frozenset[NodeId] = frozenset()  # the others
    finished: set[NodeId] = field(default_factory=set)  # those whose run has ended, this node too

    @property
    def everyone(self) -> frozenset[NodeId]:
        """The others and this node."""
        return self.alive | {self.me}

    @property
    def training(self) -> frozenset[NodeId]:
        """Workers that will push again."""
        return self.everyone - self.finished

    def hear(self, worker: NodeId, *, finishing: bool) -> None:
        """Its push says whether its run has ended."""
        (self.finished.add if finishing else self.finished.discard)(worker)


@dataclass(slots=True, eq=False)
class Preparing:
    """What a claimant has been answered so far."""

    waiting: set[NodeId]
    best: Newest
    asked_at: float
    lives: dict[NodeId, int]  # of the workers that have answered


@dataclass(slots=True, eq=False)
class ShardState:
    """One shard, and who serves it."""

    part: Part
    leader: Ballot = NOBODY  # the highest bid that was heard
    announced: bool = False  # and it serves
    server: ShardServer | None = None  # here
    claim: Preparing | None = None
    encoded: tuple[int, Chunks] = (-1, ())  # the weights at this clock
    final_clock: int = NEVER  # of the weights that went as final ones
    final_to: set[NodeId] = field(default_factory=set)  # to these
    tree: Tree | None = None  # of the leader's reign; None: it has not said it yet
    aggregator: Aggregator | None = None  # our place in it
    sums: dict[NodeId, int] = field(default_factory=dict)  # the last that has come from each who is next below us
    early: list[tuple[NodeId, ShardSum]] = field(default_factory=list)  # of a reign that has not been heard of
    outdated: bool = False  # our tree
    asked: set[NodeId] = field(default_factory=set)  # who pulled, and is answered without the tree: it may be broken

    def parent(self, id: NodeId) -> NodeId | None:
        """To whom it gives its sums."""
        return self.tree.parent(id) if self.tree is not None else None


def exact(seat: ShardState) -> Layout:
    """Of weights that travel: float buffers too are exact."""
    count = seat.part.layout.total
    return Layout(count, count)
