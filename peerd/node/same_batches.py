"""Which members draw the batches that this node draws? Then all of them learn what one learns, and nothing shows it.

Each says in its meta by what its model began (peerd/trainer/inputs.py). Anybody may say what another does: at worst a
few lines name who did.
"""

from __future__ import annotations

from collections.abc import Mapping

from peerd.node.meta import NodeMeta
from peerd.transport.ids import NodeId

TOLD_MAX = 3
"""Members named in the log, in a node's life: with one seed for all, each would name each. The status names all."""


class SameBatches:
    """What this node has heard, and said."""

    def __init__(self) -> None:
        self.found: frozenset[NodeId] = frozenset()
        """Who trains now, on the batches that this node trains on."""
        self._told: set[NodeId] = set()

    def heard(self, own: NodeMeta, partners: Mapping[NodeId, NodeMeta]) -> list[NodeId]:
        """Take in what those who live say now; returns those to tell of, each once."""
        mine = own.draws if _trains(own) else b""
        self.found = frozenset(id for id, meta in partners.items() if mine and meta.draws == mine and _trains(meta))
        new = sorted(self.found - self._told)[: TOLD_MAX - len(self._told)]
        self._told.update(new)
        return new


def _trains(meta: NodeMeta) -> bool:
    return meta.expects and not meta.ended
