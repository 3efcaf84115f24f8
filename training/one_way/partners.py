"""Whom may this node choose? The view of a one-way mode: a few members, one of them the next by id.

Because of the next by id the pushes of a swarm reach everybody, whatever is drawn; the others are drawn at random, and
one of the view is changed now and then.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.flush import Progress
from peerd.training.sample import sample_of
from peerd.transport.ids import NodeId


@dataclass(slots=True, eq=False)
class Partner:
    """One member of the view, with what the trigger and the flush need to know."""

    peer: NodeId
    anchor: Vector  # what is kept of x at the last push to it, or request (sample.py)
    anchor_norm: float
    last_exchange: float
    declined_at: float = float("-inf")  # when it was overdue, and the trigger had no reason
    asked_at: float | None = None  # gossip-pull: since when its model is awaited
    moved: float = 0.0  # at most ||x at the last publish - anchor||
    exchanges: int = 0
    distance: float = 0.0  # between the two models, when last measured
    peer_finishing: bool = False
    flushed: bool = False  # took a push since our own trainer ended
    last_reason: str = ""
    progress: Progress = field(default_factory=Progress)  # since our own trainer ended
    worth: float = 1.0  # see `PartnerState`


class Partners:
    """The view of one node."""

    def __init__(
        self, me: NodeId, layout: Layout, rng: random.Random, view: int, current: Callable[[], Vector]
    ) -> None:
        self.held: dict[NodeId, Partner] = {}
        self.alive: frozenset[NodeId] = frozenset()
        self._me = me
        self._layout = layout
        self._rng = rng
        self._view = view
        self._current = current

    def all(self) -> list[Partner]:
        """By id."""
        return [partner for _, partner in sorted(self.held.items())]

    def on_peers(self, alive: frozenset[NodeId], now: float) -> None:
        """Let go of those who went, and fill the view."""
        for gone in self.held.keys() - alive:
            del self.held[gone]
        self.alive = alive
        self._fill(now)

    def replace(self, partner: Partner, now: float) -> None:
        """Give its place to a stranger, if there is one; the next by id stays."""
        strangers = self._strangers()
        if strangers:
            del self.held[partner.peer]
            self._add(self._rng.choice(strangers), now)
            self._fill(now)

    def _fill(self, now: float) -> None:
        following = min((peer for peer in self.alive if peer > self._me), default=min(self.alive, default=None))
        if following is None:
            return
        if following not in self.held:
            if len(self.held) >= self._view:
                del self.held[max(self.held.values(), key=lambda one: (one.exchanges, one.peer)).peer]
            self._add(following, now)
        strangers = self._strangers()
        wanted = min(self._view - len(self.held), len(strangers))
        for peer in self._rng.sample(strangers, max(0, wanted)):
            self._add(peer, now)

    def _strangers(self) -> list[NodeId]:
        return sorted(self.alive - self.held.keys())

    def _add(self, peer: NodeId, now: float) -> None:
        values = self._current()
        norm = norm_of_difference(values[: self._layout.parameters])
        self.held[peer] = Partner(peer, sample_of(self._layout).take(values), norm, now)
