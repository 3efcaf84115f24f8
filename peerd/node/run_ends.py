"""When is a run over, of which each node makes its part at its own speed? When most others have ended theirs.

What that does is in training/model/over.py. Nodes say it of themselves in their meta: no mode has a word with everyone.
"""

from __future__ import annotations

from collections.abc import Mapping

from peerd.node.meta import NodeMeta
from peerd.transport.ids import NodeId


class RunEnds:
    """The others that have trained while this node's run was on, and which of them have ended theirs."""

    def __init__(self) -> None:
        self._ended: dict[NodeId, bool] = {}

    def heard(self, partners: Mapping[NodeId, NodeMeta]) -> bool:
        """Take in what those who live say now; whether most have ended.

        Who had ended before says nothing of this run, nor does who trains no more without an end: its script died or
        hangs, or it left. Who ended and left has ended.
        """
        ended = {id for id, had in self._ended.items() if (partners[id].ended if id in partners else had)}
        trains = {id for id, meta in partners.items() if meta.expects and not (meta.ended or meta.stalled)}
        self._ended = dict.fromkeys(ended, True) | dict.fromkeys(trains, False)
        return len(ended) > len(trains)
