"""Push-sum: the swarm's mean is kept on one-way links (SGP, Assran et al. 2019, arXiv:1811.10792).

A node has a weight w (at first 1) besides its model z. A push gives part of both away, the receiver averages by
weight (training/one_way/mass.py), and the sum of w z over all nodes and links moves only by the nodes' own steps: a
step dz enters as w dz, with the w that the node has when its copy is next published. A correction is z's: x = w z is
never stored.

The part is a half, or what the codec's contraction delta allows: what it drops stays with the sender and grows there
by w / (w - part), so (1 - part / w) must exceed sqrt(1 - delta).

A member that has finished, or makes no step for long, gives weight back to whoever pushes to it: else all of the
swarm's would gather where nobody learns.

Exact, but for rounding: losses, repeats, restarts of a link, partitions. A push to a peer that went unanswered waits
for it: the peer may live on, and have taken it. It is said again when the peer is back, and taken back when that is
its next life, which knows nothing of the link; or when its place is needed for a link to another (exchanges_cut
counts that: if it had arrived, and the peer lives on, its mass is there twice, weight and model alike, so no model is
biased but the mean counts it twice). A crash takes the node's own mass with it, and so does a clean leave: after its
flush that mass has the swarm's mean, but for what the swarm learns meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from peerd.training.effects import Apply, Effect, Vector
from peerd.training.one_way.core import OneWay
from peerd.training.one_way.mass import Outflow, WeightAccount
from peerd.training.one_way.partners import Partner
from peerd.training.one_way.public_copy import Incoming
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import Push

PART_SHARE = 0.8  # of the largest stable part: as delta.GAIN_SHARE
WEIGHT_MIN = 1e-3  # a node that gave away all but this waits for some to come
WEIGHT_MAX = 1e6  # more than a swarm has


class PushSum(OneWay):
    """The mode's core for one node."""

    NAME = "push-sum"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._purse = WeightAccount(1.0)
        self._outflows: dict[NodeId, Outflow] = {}

    @property
    def weight(self) -> float:
        """This node's share of the swarm's mean is this over the sum of all."""
        return float(self._purse.weight)

    def _begin(self, partner: Partner, values: Vector, reason: str, now: float) -> list[Effect]:
        if self.weight < WEIGHT_MIN:
            self.counts["trigger_light"] += 1
            return []
        return self._push(partner.peer, values, now, partner, reason)

    def _sending(self, peer: NodeId, push: Push, values: Vector) -> tuple[Push, list[Effect]]:
        outgoing = self._copies.outgoing[peer]
        assert outgoing.next_known is not None, "encoded just now"
        if push.seq == 1:
            self._outflows[peer] = Outflow(0.0)
        outflow = self._outflows[peer]
        part: float = outflow.send(self.weight * self._part(push.codec))
        correction = self._scratch.take(values)
        self._purse.give(part, values, outgoing.next_known, correction)
        self._lend(correction)
        return replace(push, weight=outflow.total), [Apply(correction)]

    def _part(self, codec: str) -> float:
        if self.weight < WEIGHT_MIN:
            return 0.0  # of a flush: it tells the model, and asks whoever is far from it for a push
        if self._report.finishing:
            return 1 / (1 + max(1, self._to_flush))  # then all partners and this node keep the same
        lost = 1 - self._gain(codec).contraction
        return min(0.5, PART_SHARE * (1 - math.sqrt(lost)))

    def _answered(self, peer: NodeId) -> None:
        self._outflows[peer].answered()

    def _may_drop(self, peer: NodeId) -> bool:
        """What is under way would be taken back here, and merged there."""
        return not self._copies.is_under_way(peer)

    def _untaken(self, peer: NodeId) -> list[Effect]:
        outgoing, outflow = self._copies.outgoing[peer], self._outflows.pop(peer, None)
        if outflow is None or outgoing.next_known is None:
            return []
        correction = self._scratch.take(outgoing.next_known)
        self._purse.take(outflow.under_way, self._current(), outgoing.next_known, correction)
        self._lend(correction)
        return [Apply(correction)]

    def _owes(self, sender: NodeId, push: Push, distance: float, values: Vector) -> bool:
        trains_on = not push.finishing and not push.back
        return (trains_on and self._is_still()) or super()._owes(sender, push, distance, values)

    def _correction(self, incoming: Incoming, push: Push, came: Vector, values: Vector) -> Vector:
        part = incoming.inflow.part(push.weight)
        if not 0 <= part <= WEIGHT_MAX:
            raise PeerError(f"a push of weight {part}")
        correction = self._scratch.take(came)
        self._purse.take(part, values, came, correction)
        self._came += not push.back
        incoming.inflow.taken(push.weight)
        return correction
