"""What is a mode? The contract that every way of combining models keeps, and the words shared with its shell."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from peerd.effects import Effect, NodeId, StepReport, Vector
from peerd.messages import Connected, Message
from peerd.training.delta import Layout
from peerd.training.trigger import Trigger


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """What `peerd status` shows of one link."""

    peer: NodeId
    exchanges: int
    distance: float
    gain: float
    last_reason: str


class Mode(Protocol):
    """The contract: every call returns its effects, in order, and may move `deadline`. Calls never overlap.

    `values()`, given at construction, reads the model as it stands, with every correction applied so far; the array is
    the mode's own until it asks again. A correction in an Apply is the shell's until the next call.
    """

    deadline: float
    counts: Counter[str]
    barrier: int
    """The trainer publishes at each step that is a multiple of this, and waits there for a Resume; 0: never."""

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """The trainer's optimizer moved, or its run ended."""
        ...

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """A peer's message arrived. Raises PeerError when the peer broke the rules."""
        ...

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """These peers, and no others, are alive and hold the same model."""
        ...

    def on_timer(self, now: float) -> list[Effect]:
        """The deadline came."""
        ...

    def links(self) -> list[LinkStatus]:
        """What there is to show."""
        ...

    def end(self) -> Vector | None:
        """Another mode takes over: what this node learnt that its model has not got, and nobody else either."""
        ...

    @property
    def under_way(self) -> bool:
        """Whether this node owes or awaits the end of something with a living peer: a bad moment to end the mode."""
        ...

    @property
    def consensus_distance(self) -> float:
        """An estimate of the root mean square distance of a model from the swarm's mean, over the model's norm."""
        ...


@dataclass(frozen=True, slots=True)
class ModeSettings:
    """What a mode may be told."""

    codec: str
    trigger: Trigger
    view: int
    every: int = 1  # steps between rounds, of a mode that has rounds
    overlap: str = "delayed"  # of a round and the training: blocking, delayed or hpsgd
    topology: str = "auto"  # of an all-reduce: auto, ring, tree:K, halving; of servers: auto, adv:K
    servers: int = 1  # shards of the parameters, each served by one member, of a mode that has servers
    min_peers: int = 1  # a round of fewer members waits for more


ModeMaker = Callable[[NodeId, Layout, random.Random, ModeSettings, Callable[[], Vector]], Mode]
