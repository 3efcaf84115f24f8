"""When is a run over, of which each node makes its part at its own speed? When most others have ended theirs.

What that does is in training/model/over.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from peerd.node.meta import NodeMeta
from peerd.transport.ids import NodeId


class RunEnds:
    """The others that have trained while this node's trainer did, and which of them have ended."""

    def __init__(self) -> None:
        self._ended: dict[NodeId, bool] = {}

    def have_most(self, partners: Mapping[NodeId, NodeMeta]) -> bool:
        """Whether most have ended, from what those who live now say.

        Who had ended before says nothing of this run, nor does who died in it; who ended and left has ended.
        """
        train = {id for id, meta in partners.items() if meta.expects and not meta.ended}
        here = {id: partners[id].ended for id in (self._ended.keys() & partners.keys()) | train}
        self._ended = {id: True for id, ended in self._ended.items() if ended} | here
        return 2 * sum(self._ended.values()) > len(self._ended)
