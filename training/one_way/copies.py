"""Which public copies does a node hold? As many in either direction as room.py says; the oldest makes room."""

from __future__ import annotations

import random
from collections import OrderedDict

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.mode import ENDED_MAX
from peerd.training.one_way.public_copy import Incoming, Outgoing
from peerd.training.room import room
from peerd.training.scratch import Scratch
from peerd.transport.ids import NodeId
from peerd.transport.messages import Push, PushForgotten

LINKS_OF_A_LIFE = 1 << 20  # a link's number is life * this + count: of one life the higher number is the later link


class Copies:
    """Both ends' worth of links of one node."""

    def __init__(self, layout: Layout, rng: random.Random, view: int, scratch: Scratch) -> None:
        self.outgoing: dict[NodeId, Outgoing] = {}
        self.incoming: dict[NodeId, Incoming] = {}
        self._layout = layout
        self._most = room(view, layout.total).active
        self._scratch = scratch
        self._next_link = rng.getrandbits(42) * LINKS_OF_A_LIFE
        # the last link from a peer that made room, and what was taken: also of a peer that went, for it may be back
        self.ended: OrderedDict[NodeId, tuple[int, int]] = OrderedDict()

    def pushers(self) -> list[NodeId]:
        """Whose pushes were taken, of those who made room, too."""
        return sorted(self.incoming.keys() | self.ended.keys())

    def is_under_way(self, peer: NodeId) -> bool:
        """Whether a push to this peer waits for its answer."""
        return peer in self.outgoing and self.outgoing[peer].under_way is not None

    def open(self, peer: NodeId, like: Vector) -> Outgoing:
        """A new link to `peer`."""
        outgoing = self.outgoing[peer] = Outgoing(self._next_link, like, self._layout, self._scratch)
        self._next_link += 1
        return outgoing

    def in_the_way(self, alive: frozenset[NodeId]) -> NodeId | None:
        """To whom we pushed longest ago, when there is no room: it learns of it from the next push, a snapshot.

        Links to peers that went have as much room as those to the living.
        """
        gone = [peer for peer in self.outgoing if peer not in alive]
        here = [peer for peer in self.outgoing if peer in alive]
        if max(len(gone), len(here)) < self._most:
            return None
        full = gone if len(gone) >= self._most else here
        idle = [peer for peer in full if not self.is_under_way(peer)]
        return min(idle or full, key=lambda peer: (self.outgoing[peer].sent_at, peer))

    def accept(self, sender: NodeId, push: Push, like: Vector) -> Incoming | PushForgotten | None:
        """The end that a push belongs to, held or new; or what to say to its sender, if anything."""
        held = self.incoming.get(sender)
        if held is not None and held.link == push.link:
            if push.seq <= held.version + 1:
                return held
            self.forget(sender)
            return PushForgotten(push.link, held.version)
        if held is not None and _is_later(held.link, push.link):
            return None  # said again, of a link that its sender has given up
        link, taken = self.ended.get(sender, (-1, 0))
        if push.seq != 1 or push.link == link or _is_later(link, push.link):
            return PushForgotten(push.link, taken if push.link == link else 0)
        return Incoming(sender, push.link, like, self._layout, self._scratch)

    def hold(self, incoming: Incoming) -> Incoming | None:
        """Keep an end that has taken a push; returns the one that makes room for it, if one must."""
        self.incoming[incoming.peer] = incoming
        if len(self.incoming) <= self._most:
            return None
        oldest = min(self.incoming.values(), key=lambda one: (one.taken_at, one.peer))
        self.forget(oldest.peer)
        return oldest

    def forget(self, sender: NodeId) -> None:
        """Let go of what we know of this peer, but for what was taken of it."""
        held = self.incoming.pop(sender)
        self.ended[sender] = (held.link, held.version)
        self.ended.move_to_end(sender)
        if len(self.ended) > ENDED_MAX:
            self.ended.popitem(last=False)


def _is_later(link: int, other: int) -> bool:
    """Whether `link` was opened after `other`, by the same life of the same sender."""
    return link // LINKS_OF_A_LIFE == other // LINKS_OF_A_LIFE and link > other
