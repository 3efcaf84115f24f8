"""Ids to draw from at random, in no particular order: each comes, goes and is drawn in O(1)."""

from __future__ import annotations

import random

from peerd.transport.ids import NodeId


class Lot(dict[NodeId, int]):
    """Each id once, however often it comes; its place in the list is the value: asked for at every datagram, in C."""

    def __init__(self) -> None:
        super().__init__()
        self._ids: list[NodeId] = []

    def add(self, id: NodeId) -> None:
        """It may be drawn from now on."""
        if id not in self:
            self[id] = len(self._ids)
            self._ids.append(id)

    def discard(self, id: NodeId) -> None:
        """It is not drawn any more."""
        at = self.pop(id, None)
        if at is None:
            return
        last = self._ids.pop()
        if last != id:  # the last one fills the hole
            self._ids[at] = last
            self[last] = at

    def draw(self, rng: random.Random) -> NodeId:
        """Any of them, and there is one."""
        return self._ids[int(rng.random() * len(self._ids))]
