"""Gossip-pull: ask one random partner for its model and merge that (Jin et al. 2016, arXiv:1611.04581).

    x_i <- (x_i + x_j) / 2      or less of x_j, where the codec's contraction allows less

The one asked answers with a push and does not move: the swarm's mean is not conserved. A run ends as gossip-push's
does, for a node that is about to leave cannot wait to be asked. A node whose run has ended, or stands still, asks
whoever asks it: it makes no steps at which it would ask, and would hold those who train on to where it is.
"""

from __future__ import annotations

from peerd.training.effects import Effect, Send, Vector
from peerd.training.modes.gossip_push import GossipPush
from peerd.training.one_way.partners import Partner
from peerd.transport.ids import NodeId
from peerd.transport.messages import Connected, Message, Pull


class GossipPull(GossipPush):
    """The mode's core for one node."""

    NAME = "gossip-pull"

    def _begin(self, partner: Partner, values: Vector, reason: str, now: float) -> list[Effect]:
        partner.asked_at = now
        self._began(partner, values, reason, now)
        return [self._request(partner.peer)]

    def _other_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        if not isinstance(message, Pull):
            return super()._other_message(sender, message, now)
        outgoing = self._copies.outgoing.get(sender)
        if outgoing is not None and outgoing.under_way is not None:  # asked again, or while a push is on its way
            return [] if message.back else [Send(sender, outgoing.under_way)]
        if outgoing is not None and message.link == outgoing.link and message.seq < outgoing.version:
            return []  # said again after a reconnect: it was answered long ago
        effects = self._push(sender, self._current(), now, None, "")
        if message.back:
            return effects
        self._came += 1
        if self._is_still():
            self._received = 0  # the answer is worth what it is to one who has just made a step
            effects.append(self._request(sender, back=True))
        return effects

    def _merged(self, sender: NodeId, distance: float, now: float) -> None:
        partner = self._partners.held.get(sender)
        if partner is not None and partner.asked_at is not None:
            self._answers.came(sender, now - partner.asked_at)
            partner.asked_at = None
            partner.distance = distance
            partner.exchanges += 1
            partner.last_exchange = now

    def _repeat(self, peer: NodeId, now: float) -> list[Effect]:
        partner = self._partners.held.get(peer)
        asked = partner is not None and partner.asked_at is not None
        if partner is not None and asked:
            partner.asked_at = now
        return [*super()._repeat(peer, now), *([self._request(peer)] if asked else [])]

    def _request(self, peer: NodeId, *, back: bool = False) -> Send:
        incoming = self._copies.incoming.get(peer)
        link, taken = (incoming.link, incoming.version) if incoming is not None else (0, 0)
        return Send(peer, Pull(link, taken, back))
