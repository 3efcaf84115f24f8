"""Push-sum: the swarm's mean is kept on one-way links (SGP, Assran et al. 2019, arXiv:1811.10792).

A node has a weight w (at first 1) besides its model z. A push gives part of both away, the receiver averages by
weight (training/one_way/mass.py), and the sum of w z over all nodes and links moves only by the nodes' own steps: a
step dz enters as w dz, with the w that the node has when its copy is next published. A correction is z's: x = w z is
never stored.

The part is a half, or what the codec's contraction delta allows: what it drops stays with the sender and grows there
by w / (w - part), so (1 - part / w) must exceed sqrt(1 - delta).

A member that has finished, or makes no step for long, gives weight back to whoever pushes to it: else all of the
swarm's would gather where nobody learns.

What a push may do at once is limited (training/one_way/allowance.py); what is over waits here, weight and model.

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

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.effects import Apply, Effect, StepReport, Vector
from peerd.training.one_way.allowance import (
    BUFFERS_MAX,
    GONE,
    WEIGHT_SHARE,
    Waiting,
    part_within,
)
from peerd.training.one_way.core import OneWay
from peerd.training.one_way.mass import Outflow, WeightAccount
from peerd.training.one_way.partners import Partner
from peerd.training.one_way.public_copy import Incoming
from peerd.training.room import room
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import Push

PART_SHARE = 0.8  # of the largest stable part: as GAIN_SHARE of codecs/vector.py
WEIGHT_MIN = 1e-3  # a node that gave away all but this waits for some to come
WEIGHT_MAX = 1e6  # more than a swarm has


class PushSum(OneWay):
    """The mode's core for one node."""

    NAME = "push-sum"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._account = WeightAccount(1.0)
        self._outflows: dict[NodeId, Outflow] = {}
        self._waiting: dict[NodeId, Waiting] = {}

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """A step of this node lets more of what has come in."""
        return super().on_step(report, now) + self._let_in()

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """What waits of a peer that went goes on waiting, with that of all who went."""
        for peer in sorted(self._waiting.keys() - alive - {GONE}):
            self._wait_with_gone(peer)
        return super().on_peers(alive, now)

    @property
    def weight(self) -> float:
        """This node's share of the swarm's mean is this over the sum of all."""
        return float(self._account.weight)

    @property
    def waiting(self) -> list[tuple[float, Vector]]:
        """Mass that has come and is not merged yet: weight, and the model that comes with it."""
        return [(one.weight, one.model) for one in self._waiting.values()]

    @property
    def leaving(self) -> list[tuple[NodeId, Push, float, Vector]]:
        """Mass that has left and is not known to have arrived: to whom, in which push, weight and model."""
        outgoing = self._copies.outgoing.items()
        return [
            (peer, one.under_way, self._outflows[peer].under_way, one.next_known)
            for peer, one in outgoing
            if one.under_way is not None and one.next_known is not None
        ]

    def has_taken(self, sender: NodeId, push: Push) -> bool:
        """Whether this push of that node is part of this node's mass."""
        held, ended = self._copies.incoming.get(sender), self._copies.ended.get(sender, (-1, 0))
        if held is not None and held.link == push.link:
            return push.seq <= held.version
        return ended[0] == push.link and push.seq <= ended[1]

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
        self._account.give(part, values, outgoing.next_known, correction)
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
        self._account.take(outflow.under_way, self._current(), outgoing.next_known, correction)
        self._lend(correction)
        return [Apply(correction)]

    def _owes(self, sender: NodeId, push: Push, distance: float, values: Vector) -> bool:
        if push.back and self.weight < WEIGHT_MIN:
            return False  # it asks for weight, and has none either: so they would go on for ever
        trains_on = not push.finishing and not push.back
        return (trains_on and self._is_still()) or super()._owes(sender, push, distance, values)

    def _correction(self, incoming: Incoming, push: Push, came: Vector, values: Vector, distance: float) -> Vector:
        part = incoming.inflow.part(push.weight)
        if not 0 <= part <= WEIGHT_MAX:
            raise PeerError(f"a push of weight {part}")
        sender = incoming.peer
        waiting = self._waiting.get(sender)
        offered = part + (waiting.weight if waiting is not None else 0.0)
        if offered > WEIGHT_MAX:
            raise PeerError(f"a push of weight {part}, where {offered - part} of the sender's waits")
        if waiting is None:
            correction = self._take_part(sender, offered, came, values, distance)
        else:
            waiting.join(part, came)
            correction = self._take_part(sender, offered, waiting.model, values)
        self._came += not push.back
        incoming.inflow.taken(push.weight)
        return correction

    # ---------------------------------------------------------------- what a peer may do to this model

    def _take_part(
        self, peer: NodeId, offered: float, model: Vector, values: Vector, distance: float | None = None
    ) -> Vector:
        """Merge what the peer's allowance covers of mass offered * (model, 1), and keep the rest.

        `distance` is that of the two models' parameters, if it is known.
        """
        part = self._allowed(peer, offered, model, values, distance) if self._robust else offered
        correction = self._scratch.take(model)
        self._account.take(part, values, model, correction)
        if self._robust:
            self._allowances.moved(peer, self._norm(correction))
        if part < offered:
            self.counts["pushes_late"] += 1
            if peer in self._waiting:
                self._waiting[peer].weight = offered - part
            else:
                self._waiting[peer] = Waiting(offered - part, model.copy())
                named = [each for each in self._waiting if each != GONE]
                if len(named) > room(self._settings.view, self._layout.total).active:
                    self._wait_with_gone(named[0])  # each is a whole model, and any number of members may push
        else:
            self._waiting.pop(peer, None)
        return correction

    def _wait_with_gone(self, peer: NodeId) -> None:
        left = self._waiting.pop(peer)
        if GONE in self._waiting:
            self._waiting[GONE].join(left.weight, left.model)
        else:
            self._waiting[GONE] = left

    def _allowed(self, peer: NodeId, offered: float, model: Vector, values: Vector, distance: float | None) -> float:
        cut, weight = self._layout.parameters, self.weight
        most = max(0.0, WEIGHT_SHARE * (1 + len(self._partners.alive)) - weight)
        if distance is None:
            distance = norm_of_difference(model[:cut], values[:cut])
        limit = self._allowances.of(peer, self._norm(values), distance)
        part = part_within(weight, offered, distance, limit)
        if cut < len(values):
            limit = BUFFERS_MAX * norm_of_difference(values[cut:])
            part = part_within(weight, part, norm_of_difference(model[cut:], values[cut:]), limit)
        return min(part, most)

    def _let_in(self) -> list[Effect]:
        effects: list[Effect] = []
        for peer, waiting in sorted(self._waiting.items()):
            values = self._current()
            if not self._is_finite(values):
                break
            correction = self._take_part(peer, waiting.weight, waiting.model, values)
            self._lend(correction)
            effects.append(Apply(correction))
        return effects
