"""How far are most others in a run, of which each node makes its part at its own speed?

What that does is in training/model/over.py. Nodes say it of themselves in their meta: no mode has a word with everyone.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

from peerd.node.meta import NodeMeta
from peerd.training.model.over import OVER, PARTS
from peerd.transport.ids import NodeId


class RunEnds:
    """The others that have trained while this node's run was on, and which of them have ended theirs."""

    def __init__(self) -> None:
        self._ended: dict[NodeId, bool] = {}
        self.are_over = False  # as was heard last

    def heard(self, partners: Mapping[NodeId, NodeMeta]) -> int:
        """Take in what those who live say now: so many parts of their runs have most made, or OVER.

        Who had ended before says nothing of this run, nor does who trains no more without an end: its script died or
        hangs, or it left. Who ended and left has ended.
        """
        ended = {id for id, had in self._ended.items() if (partners[id].ended if id in partners else had)}
        trains = {id for id, meta in partners.items() if meta.expects and not (meta.ended or meta.stalled)}
        self._ended = dict.fromkeys(ended, True) | dict.fromkeys(trains, False)
        self.are_over = len(ended) > len(trains)
        if self.are_over:
            return OVER
        made = [PARTS] * len(ended) + [partners[id].made for id in trains]
        return median_low(made) if made else 0
