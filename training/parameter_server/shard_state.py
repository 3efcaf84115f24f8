"""What does one node know of one shard: who serves it, by which tree its pushes come, and who is there to push?"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.parameter_server.aggregator import Aggregator
from peerd.training.parameter_server.limits import are_near, remembers_alike
from peerd.training.parameter_server.shard_server import ShardServer
from peerd.training.parameter_server.tree import Tree
from peerd.training.parameter_server.worker import NEVER, NOBODY, Ballot, Part
from peerd.transport.ids import NodeId
from peerd.transport.messages import Applied, Chunks, Prepare, ShardLeader, ShardSum

WEIGHTS_CODEC = "float32"  # what it dropped would be lost: an answer has no error feedback

DOUBTED_MAX = 3  # models of a shard that wait for another one like them

Newest = tuple[int, dict[NodeId, Applied], Vector]
"""Clock, what of each worker is in the weights, and the weights with what the optimizer remembers behind them."""


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

    @property
    def ended(self) -> int:
        """How many of those there are will push no more."""
        return len(self.everyone & self.finished)

    def hear(self, worker: NodeId, *, finishing: bool) -> None:
        """Its push says whether its run has ended."""
        (self.finished.add if finishing else self.finished.discard)(worker)


@dataclass(slots=True, eq=False)
class Preparing:
    """What a proposer has been promised so far."""

    waiting: set[NodeId]
    best: Newest
    asked_at: float
    lives: dict[NodeId, int]  # of the workers that have answered
    doubted: list[Newest] = field(default_factory=list)  # newer than `best`, and far from all that others say

    def weigh(self, newer: Newest, part: Part, *, sure: bool) -> bool:
        """Take a newer model that is near ours, or near another member's: one alone may say anything.

        `part` knows how long a step of ours is. Of two members nobody can say which is right, so one is `sure` of the
        newer.
        """
        for known in [self.best, *self.doubted]:
            if sure or _are_alike(known, newer, part):
                self.best = max(self.best, known, newer, key=lambda model: model[0])
                return True
        self.doubted = [*self.doubted[1 - DOUBTED_MAX :], newer]
        return False


class Lead(Enum):
    """Who serves a shard, as far as one node knows."""

    VACANT = auto()  # nobody does by the highest ballot that was heard
    PREPARING = auto()  # the highest ballot is this node's, and the others are to promise
    SERVING = auto()  # this node does
    FOLLOWING = auto()  # another one does


TRANSITIONS: dict[Lead, dict[Lead, str]] = {
    Lead.VACANT: {
        Lead.VACANT: "a higher ballot",
        Lead.PREPARING: "the next ballot is this node's, which owns the shard: Prepare to all",
        Lead.FOLLOWING: "ShardLeader: who made the ballot serves",
    },
    Lead.PREPARING: {
        Lead.SERVING: "all alive have promised: ShardLeader to all",
        Lead.VACANT: "a higher ballot, or another member owns the shard now",
    },
    Lead.SERVING: {
        Lead.VACANT: "a higher ballot, be it this node's next: two serve, or the tree has gaps",
    },
    Lead.FOLLOWING: {
        Lead.VACANT: "a higher ballot, or the same of the server's next life",
    },
}
"""What a lead may be followed by, and why."""


@dataclass(slots=True, eq=False)
class ShardState:
    """One shard, and who serves it."""

    part: Part
    leader: Ballot = NOBODY  # the highest ballot that was heard
    lead: Lead = Lead.VACANT
    server: ShardServer | None = None  # while SERVING
    preparing: Preparing | None = None  # while PREPARING
    encoded: tuple[int, Chunks] = (-1, ())  # the weights at this clock
    final_clock: int = NEVER  # of the weights that went as final ones
    final_to: set[NodeId] = field(default_factory=set)  # to these
    tree: Tree | None = None  # of the leader's term; None: it has not said it yet
    aggregator: Aggregator | None = None  # our place in it
    sums: dict[NodeId, int] = field(default_factory=dict)  # the last that has come from each who is next below us
    early: list[tuple[NodeId, ShardSum]] = field(default_factory=list)  # of a term that has not been heard of
    outdated: bool = False  # our tree
    not_owners: dict[NodeId, Prepare | ShardLeader] = field(default_factory=dict)  # proposers, as far as we know
    asked: set[NodeId] = field(default_factory=set)  # who pulled, and is answered without the tree: it may be broken

    def enter(self, lead: Lead) -> None:
        """The only way from one to another; what belongs to the one before it ends."""
        assert lead in TRANSITIONS[self.lead], f"{self.lead.name} -> {lead.name}"
        self.lead, self.server, self.preparing = lead, None, None

    @property
    def announced(self) -> bool:
        """Whether it is known that who made the highest ballot serves."""
        return self.lead in (Lead.SERVING, Lead.FOLLOWING)

    def parent(self, id: NodeId) -> NodeId | None:
        """To whom it gives its sums."""
        return self.tree.parent(id) if self.tree is not None else None


def _are_alike(one: Newest, other: Newest, part: Part) -> bool:
    clocks, cut = other[0] - one[0], part.layout.total
    if not are_near(one[2][:cut], other[2][:cut], clocks, part.moved):
        return False
    rows = [each[2][cut:].reshape(-1, max(1, part.layout.parameters)) for each in (one, other)]
    return remembers_alike(rows[0], rows[1], clocks, part.gradient)


def exact(shard: ShardState) -> Layout:
    """Of weights that travel, and of what the optimizer remembers: float buffers too are exact."""
    count = shard.part.layout.total + len(shard.part.state)
    return Layout(count, count)
