"""Ids to draw from at random, in no particular order: each comes, goes and is drawn in O(1)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from peerd.transport.ids import NodeId


class Lot:
    """Each id once, however often it comes."""

    def __init__(self) -> None:
        self._ids: list[NodeId] = []
        self._at: dict[NodeId, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._ids)

    def __contains__(self, id: object) -> bool:
        return id in self._at

    def add(self, id: NodeId) -> None:
        """It may be drawn from now on."""
        if id not in self._at:
            self._at[id] = len(self._ids)
            self._ids.append(id)

    def discard(self, id: NodeId) -> None:
        """It is not drawn any more."""
        at = self._at.pop(id, None)
        if at is None:
            return
        last = self._ids.pop()
        if last != id:  # the last one fills the hole
            self._ids[at] = last
            self._at[last] = at

    def draw(self, rng: random.Random) -> NodeId:
        """Any of them, and there is one."""
        return self._ids[int(rng.random() * len(self._ids))]
