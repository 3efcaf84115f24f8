"""How does a link to a partner begin, rest and end? What is exchanged over it is another file's business (gossip.py).

A link's life, seen from one end (`peer` is the other):

    opening   -> open      LinkOpen sent; LinkSnapshot came: both references start from that vector
    open      -> open      exchanges (training/reference.py)
    open      -> dormant   the peer is not alive: an exchange under way is kept, to be finished when it is back
    dormant   -> open      the peer is back
    open      -> closing   rotated out: LinkClose sent when no exchange is under way
    closing   -> (gone)    LinkClosed came
    any       -> (gone)    the peer does not know the link, or is at another version; a new one is opened

Every message of a link may come twice: what has had no answer is said again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from peerd.effects import Effect, NodeId, Send, Vector
from peerd.messages import LinkClose, LinkClosed, LinkOpen, LinkSnapshot
from peerd.training import delta
from peerd.training.delta import Layout
from peerd.training.reference import PairedReference, norm_of_difference
from peerd.training.scratch import Scratch
from peerd.training.trigger import MAX_SILENCE_S, WAKE_AFTER_S

SNAPSHOT_CODEC = "bfloat16"  # any vector may start a pair of references; this one costs half of float32


@dataclass(slots=True, eq=False)
class Link:
    """One end of a link, with what gossip notes of it."""

    peer: NodeId
    reference: PairedReference
    anchor: Vector  # x after the last exchange
    anchor_norm: float
    last_exchange: float
    sent_at: float  # when something that waits for an answer was last sent
    active: bool  # the peer is alive
    declined_at: float = float("-inf")  # when it was overdue, and the trigger had no reason
    moved: float = 0.0  # at most ||x at the last publish - anchor||
    exchanges: int = 0
    distance: float = 0.0  # between the two models, at the last exchange
    closing: bool = False
    peer_finishing: bool = False
    flushed: bool = False  # exchanged since our own trainer ended
    last_reason: str = ""

    @property
    def idle(self) -> bool:
        """Whether an exchange may begin."""
        return self.active and not self.closing and self.reference.under_way is None

    @property
    def waits(self) -> bool:
        """Whether a living peer owes an answer."""
        return self.active and (self.closing or self.reference.under_way is not None)


class Links:
    """The links of one node: those it holds, and those it has asked for."""

    def __init__(
        self,
        me: NodeId,
        layout: Layout,
        rng: random.Random,
        view: int,
        values: Callable[[], Vector],
        scratch: Scratch,
        counts: Counter[str],
        *,
        opens: bool,
    ) -> None:
        """Open links until there are `view`, and accept up to twice that; one that does not open accepts all."""
        self.held: dict[NodeId, Link] = {}
        self.opening: dict[NodeId, tuple[int, float]] = {}  # link number, when it was last asked for
        self.opens = opens
        self._me = me
        self._layout = layout
        self._rng = rng
        self._view = view
        self._values = values
        self._scratch = scratch
        self._counts = counts
        self._alive: frozenset[NodeId] = frozenset()
        self._declined: set[NodeId] = set()

    def live(self) -> list[Link]:
        """Those whose peer is alive."""
        return [link for link in self.held.values() if link.active]

    def idle(self) -> list[Link]:
        """Those over which an exchange may begin, by peer."""
        return [link for _, link in sorted(self.held.items()) if link.idle]

    def deadline(self, now: float) -> float:
        """When something must be said again, should nothing come until then."""
        unanswered = [link.sent_at for link in self.held.values() if link.waits]
        unanswered += [asked_at for _, asked_at in self.opening.values()]
        if self._places_taken() < self._wanted():
            unanswered.append(now)  # those who declined are asked again
        return min(unanswered, default=float("inf")) + WAKE_AFTER_S

    # ---------------------------------------------------------------- events

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Wake the links of those who came, rest those of who went, and fill the view."""
        effects: list[Effect] = []
        for peer in sorted(alive - self._alive):
            if link := self.held.get(peer):
                link.active = True
                link.last_exchange = now
                effects += self.repeat(peer, now)
        for peer in sorted(self._alive - alive):
            self.opening.pop(peer, None)
            if link := self.held.get(peer):
                link.active = False
        self._alive = alive
        self._declined &= alive
        self._forget_dormant()
        return effects + self.fill_view(now)

    def on_timer(self, now: float) -> list[Effect]:
        """Say again what has had no answer for long, and ask anew those who declined."""
        effects: list[Effect] = []
        asked = {peer: asked_at for peer, (_, asked_at) in self.opening.items()}
        waiting = {peer: link.sent_at for peer, link in self.held.items() if link.waits}
        for peer, since in sorted((asked | waiting).items()):
            if now - since >= MAX_SILENCE_S:
                self._counts["repeats"] += 1
                effects += self.repeat(peer, now)
        self._declined.clear()
        return effects + self.fill_view(now)

    def on_open(self, sender: NodeId, number: int, now: float) -> list[Effect]:
        """Give the peer a link that starts from our model, or decline. Raises NotFinite, having declined nothing."""
        link = self.held.get(sender)
        if link is not None and link.reference.link == number:
            return self.repeat(sender, now) if link.reference.version == 0 else []
        if sender in self.opening:
            if self._me > sender:
                return []  # both ends asked at once: the smaller id answers, the larger's number stands
            del self.opening[sender]
        self.drop(sender)
        if self.opens and self._places_taken() >= 2 * self._view:
            self._counts["links_declined"] += 1
            return [Send(sender, LinkClosed(number))]
        values = self._values()
        start = np.empty_like(values)
        chunks, _ = delta.encode(SNAPSHOT_CODEC, self._layout, values)
        delta.decode(SNAPSHOT_CODEC, self._layout, chunks, start)
        self._hold(sender, number, start, values, now)
        self._counts["snapshots"] += 1
        return [Send(sender, LinkSnapshot(number, SNAPSHOT_CODEC, chunks))]

    def on_snapshot(self, sender: NodeId, message: LinkSnapshot, now: float) -> list[Effect]:
        """The peer gives the link that we asked for. Raises PeerError."""
        if self.opening.get(sender, (None, 0.0))[0] != message.link:
            held = self.held.get(sender)
            known = held is not None and held.reference.link == message.link
            return [] if known else [Send(sender, LinkClosed(message.link))]
        values = self._values()
        start = np.empty_like(values)
        delta.decode(message.codec, self._layout, message.chunks, start)
        del self.opening[sender]
        self._hold(sender, message.link, start, values, now)
        return []

    def on_close(self, sender: NodeId, message: LinkClose, now: float) -> list[Effect]:
        """The peer wants to end its link with us."""
        link = self.held.get(sender)
        if link is None or link.reference.link != message.link:
            return [Send(sender, LinkClosed(message.link))]
        if link.reference.under_way is not None or link.reference.version < message.version:
            return []  # halves are still on their way; the peer says the close again after its answer
        self.drop(sender)
        self._declined.add(sender)  # its place there is somebody else's now
        return [Send(sender, LinkClosed(message.link)), *self.fill_view(now)]

    def on_closed(self, sender: NodeId, number: int, now: float) -> list[Effect]:
        """The peer does not hold the link, or declines to."""
        link = self.held.get(sender)
        if self.opening.get(sender, (None, 0.0))[0] == number:
            del self.opening[sender]
            self._declined.add(sender)
        elif link is not None and link.reference.link == number:
            if link.closing:
                self._declined.add(sender)  # rotated out: somebody else's turn
            self.drop(sender)
        else:
            return []
        return self.fill_view(now)

    # ---------------------------------------------------------------- what gossip asks

    def fill_view(self, now: float) -> list[Effect]:
        """Ask strangers for links while there are fewer than wanted."""
        strangers = sorted(self._alive - set(self.held) - set(self.opening) - self._declined)
        effects: list[Effect] = []
        for peer in self._rng.sample(strangers, max(0, min(self._wanted() - self._places_taken(), len(strangers)))):
            number = self._rng.getrandbits(62)
            self.opening[peer] = (number, now)
            effects.append(Send(peer, LinkOpen(number)))
        return effects

    def rotate(self, now: float) -> list[Effect]:
        """Give the place of the most used idle link to a peer outside the view, if there is one."""
        idle = self.idle()
        self._declined.clear()
        if not self.opens or not idle or not self._alive - set(self.held) - set(self.opening):
            return []
        link = max(idle, key=lambda link: (link.exchanges, link.peer))
        link.closing = True
        link.sent_at = now
        self._counts["rotations"] += 1
        return [Send(link.peer, LinkClose(link.reference.link, link.reference.version))]

    def repeat(self, peer: NodeId, now: float) -> list[Effect]:
        """Say again what may have been lost with a connection."""
        if peer in self.opening:
            number, _ = self.opening[peer]
            self.opening[peer] = (number, now)
            return [Send(peer, LinkOpen(number))]
        link = self.held.get(peer)
        if link is None or not link.active:
            return []
        link.sent_at = now
        reference = link.reference
        effects: list[Effect] = []
        if reference.version == 0:  # both references still are the snapshot, which bfloat16 encodes without loss
            chunks, _ = delta.encode(SNAPSHOT_CODEC, self._layout, reference.mine)
            effects.append(Send(peer, LinkSnapshot(reference.link, SNAPSHOT_CODEC, chunks)))
        elif reference.answered is not None:  # the peer may still wait for it, and must have it before the next half
            effects.append(Send(peer, replace(reference.answered, wants_answer=False)))
        if reference.under_way is not None:
            effects.append(Send(peer, reference.under_way))
        if link.closing:
            effects.append(Send(peer, LinkClose(reference.link, reference.version)))
        return effects

    def drop(self, peer: NodeId) -> None:
        """Forget the link to `peer`, if there is one."""
        if link := self.held.pop(peer, None):
            link.reference.cancel()

    def _hold(self, peer: NodeId, number: int, start: Vector, values: Vector, now: float) -> None:
        reference = PairedReference(number, start, self._layout, self._scratch)
        norm = norm_of_difference(values[: self._layout.parameters])
        # a peer may open before its own news has come; one that membership never confirms holds no place of the view
        active = peer in self._alive
        self.held[peer] = Link(peer, reference, values.copy(), norm, last_exchange=now, sent_at=now, active=active)
        self._forget_dormant()

    def _wanted(self) -> int:
        return min(self._view, len(self._alive)) if self.opens else 0

    def _places_taken(self) -> int:
        return len(self.live()) + len(self.opening)

    def _forget_dormant(self) -> None:
        """Keep at most a view's worth of links to absent peers, those with an exchange to finish first."""
        dormant = sorted(
            (link for link in self.held.values() if not link.active),
            key=lambda link: (link.reference.under_way is None, -link.last_exchange, link.peer),
        )
        for link in dormant[self._view :]:
            self._counts["links_forgotten"] += 1
            self.drop(link.peer)
