"""Whom do I tell of my change, and when? Paired-reference gossip, the default mode.

After each step one random partner of a small view is drawn, and the trigger decides whether the model has changed
enough since the last exchange with that partner. The decision is made twice: first on a bound that the trainer
measures where the model lives (a quiet node copies nothing), then, if that fires, on the exact change of a fresh copy.

A link's life, seen from one end (`peer` is the other):

    opening   -> open      LinkOpen sent; LinkSnapshot came: both references start from that vector
    open      -> open      exchanges (training/reference.py)
    open      -> dormant   the peer is not alive: an exchange under way is kept, to be finished when it is back
    dormant   -> open      the peer is back
    open      -> closing   rotated out: LinkClose sent when no exchange is under way
    closing   -> (gone)    LinkClosed came
    any       -> (gone)    the peer does not know the link, or is at another version; a new one is opened

A run ends with a flush: exchanges with a fine codec until every partner that has also ended agrees.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from peerd.effects import Apply, Effect, Log, NodeId, PeerError, Proceed, Publish, Send, StepReport, Vector
from peerd.messages import Connected, Delta, LinkClose, LinkClosed, LinkOpen, LinkSnapshot, Message
from peerd.training import delta
from peerd.training.delta import Gain, Layout, NotFinite
from peerd.training.modes.mode import LinkStatus, ModeSettings
from peerd.training.reference import Half, LinkMismatch, PairedReference, norm_of_difference
from peerd.training.scratch import Scratch
from peerd.training.trigger import MAX_SILENCE_S, LinkChange

SNAPSHOT_CODEC = "bfloat16"  # any vector may start a pair of references; this one costs half of float32
FLUSH_CODEC = "int8"  # its contraction is above 0.999, so a handful of exchanges reach agreement
FLUSH_TOLERANCE = 1e-2  # relative distance at which two models count as one; a test accuracy does not resolve it
ROTATE_AFTER_EXCHANGES = 64  # a new link costs a bfloat16 snapshot, about 16 one-bit deltas: a quarter on top at most


@dataclass(slots=True, eq=False)
class _Link:
    reference: PairedReference
    anchor: Vector  # x after the last exchange
    anchor_norm: float
    last_exchange: float
    moved: float = 0.0  # at most ||x at the last publish - anchor||
    sent_at: float = 0.0  # when something that waits for an answer was last sent
    exchanges: int = 0
    distance: float = 0.0  # between the two models, at the last exchange
    active: bool = True  # the peer is alive
    closing: bool = False
    peer_finishing: bool = False
    flushed: bool = False  # exchanged since our own trainer ended
    last_reason: str = ""

    @property
    def idle(self) -> bool:
        return self.active and not self.closing and self.reference.under_way is None


class Gossip:
    """The mode's core for one node."""

    def __init__(
        self, me: NodeId, layout: Layout, rng: random.Random, settings: ModeSettings, values: Callable[[], Vector]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.deadline = float("inf")
        self._me = me
        self._layout = layout
        self._rng = rng
        self._settings = settings
        self._values = values
        self._scratch = Scratch()
        self._unapplied: Vector | None = None  # the correction that this event's effects will bring
        self._lent: list[Vector] = []  # corrections in the effects of the last event: applied by the next one
        self._links: dict[NodeId, _Link] = {}
        self._opening: dict[NodeId, tuple[int, float]] = {}  # link number, when it was last asked for
        self._declined: set[NodeId] = set()
        self._alive: frozenset[NodeId] = frozenset()
        self._gains: dict[str, Gain] = {}
        self._report = StepReport(0, 0.0, 1.0, published=False, finishing=False)
        self._wanted: NodeId | None = None  # the partner for whom a publish was asked
        self._last_began_step = 0
        self._handed_over = False
        self._settled = False
        self._warned_not_finite = False

    # ---------------------------------------------------------------- events

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """Draw a partner, decide, and perhaps begin an exchange."""
        self._reclaim()
        self._report = report
        if report.published:
            for link in self._links.values():
                link.moved += report.change  # the triangle inequality: exact only for the partner decided on below
        if report.finishing:
            return self._rearm(self._flush(now), now)
        if self._handed_over:  # a new run follows a flush
            self._handed_over = self._settled = False
            for link in self._links.values():
                link.flushed = False
        if report.published and self._wanted is not None:
            partner, self._wanted = self._wanted, None
            wanted = self._links.get(partner)
            return self._rearm(self._decide(partner, wanted, now) if wanted and wanted.idle else [], now)
        if self._wanted is not None:
            return []
        return self._rearm(self._draw(now), now)

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """One event of one link."""
        self._reclaim()
        match message:
            case Delta():
                effects = self._on_delta(sender, message, now)
            case LinkOpen():
                effects = self._on_open(sender, message.link, now)
            case LinkSnapshot():
                effects = self._on_snapshot(sender, message, now)
            case LinkClose():
                effects = self._on_close(sender, message, now)
            case LinkClosed():
                effects = self._on_closed(sender, message.link, now)
            case Connected():
                effects = self._repeat(sender, now)
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning in gossip")
        return self._rearm(effects, now)

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Peers came or went: wake or rest their links, and fill the view."""
        self._reclaim()
        effects: list[Effect] = []
        for peer in sorted(alive - self._alive):
            if link := self._links.get(peer):
                link.active = True
                link.last_exchange = now
                effects += self._repeat(peer, now)
        for peer in sorted(self._alive - alive):
            self._opening.pop(peer, None)
            if link := self._links.get(peer):
                link.active = False
        self._alive = alive
        self._declined &= alive
        self._forget_dormant()
        effects += self._fill_view(now)
        if self._report.finishing:
            effects += self._flush(now)
        return self._rearm(effects, now)

    def on_timer(self, now: float) -> list[Effect]:
        """Never silence: repeat what has had no answer for long, and send what the trigger calls overdue."""
        effects: list[Effect] = []
        for peer in sorted(set(self._opening) | set(self._links)):
            link = self._links.get(peer)
            sent_at = link.sent_at if link else self._opening[peer][1]
            waits = link is None or link.closing or link.reference.under_way is not None
            if waits and (link is None or link.active) and now - sent_at >= MAX_SILENCE_S:
                self.counts["repeats"] += 1
                effects += self._repeat(peer, now)
            elif link and link.idle and now - link.last_exchange >= MAX_SILENCE_S and not self._report.finishing:
                effects += self._decide(peer, link, now)
        self._declined.clear()
        effects += self._fill_view(now)
        return self._rearm(effects, now)

    def links(self) -> list[LinkStatus]:
        """One row a live link."""
        gain = self._gains.get(self._codec(), Gain()).value
        return [
            LinkStatus(peer, link.exchanges, link.distance, gain, link.last_reason)
            for peer, link in list(self._links.items())  # the lane's thread may change it meanwhile
            if link.active
        ]

    @property
    def consensus_distance(self) -> float:
        """Root mean square distance of a model from the swarm's mean, over the model's norm, as the links show it.

        Two independent members at distance d from their mean are sqrt(2) d apart.
        """
        links = [link for link in list(self._links.values()) if link.active and link.exchanges]
        if not links:
            return 0.0
        squares = sum(link.distance**2 for link in links) / len(links) / 2
        norm = max(link.anchor_norm for link in links)
        return float(np.sqrt(squares)) / norm if norm > 0 else 0.0

    # ---------------------------------------------------------------- deciding

    def _draw(self, now: float) -> list[Effect]:
        idle = sorted(peer for peer, link in self._links.items() if link.idle)
        if not idle:
            self.counts["trigger_no_idle_link"] += 1
            return []
        partner = self._rng.choice(idle)
        link = self._links[partner]
        if self._fires(link, link.moved + self._report.change, now) is None:
            self.counts["trigger_quiet"] += 1
            return []
        self._wanted = partner
        return [Publish()]

    def _decide(self, partner: NodeId, link: _Link, now: float) -> list[Effect]:
        values = self._current()
        parameters = self._layout.parameters
        link.moved = norm_of_difference(values[:parameters], link.anchor[:parameters])
        reason = self._fires(link, link.moved, now)
        if reason is None:
            self.counts["trigger_bound_only"] += 1
            return []
        self.counts[f"trigger_{reason}"] += 1
        return self._begin(partner, link, values, reason, now)

    def _fires(self, link: _Link, change: float, now: float) -> str | None:
        return self._settings.trigger.fires(
            LinkChange(
                change=change,
                norm=link.anchor_norm,
                lr_ratio=self._report.lr_ratio,
                steps=self._report.step - self._last_began_step,
                silence_s=now - link.last_exchange,
                finishing=self._report.finishing,
            )
        )

    # ---------------------------------------------------------------- exchanges

    def _begin(self, partner: NodeId, link: _Link, values: Vector, reason: str, now: float) -> list[Effect]:
        half = self._half(flush=self._report.finishing)
        try:
            message = link.reference.begin(values, half)
        except NotFinite:
            return self._not_finite()
        self._last_began_step = self._report.step
        link.sent_at = now
        link.last_reason = reason
        return [Send(partner, message)]

    def _on_delta(self, sender: NodeId, message: Delta, now: float) -> list[Effect]:
        link = self._links.get(sender)
        if link is None or link.reference.link != message.link:
            # while our own LinkOpen is under way the peer's half is early, not wrong: it will be repeated
            return [] if sender in self._opening else [Send(sender, LinkClosed(message.link))]
        half = self._half(flush=message.finishing)  # a peer that trains on comes back; one that ends needs it all now
        values = self._current()
        try:
            outcome = link.reference.receive(message, values, half)
        except LinkMismatch:
            self.counts["link_mismatches"] += 1
            self._drop(sender)
            return [Send(sender, LinkClosed(message.link)), *self._fill_view(now)]
        except NotFinite:
            self._drop(sender)
            return [*self._not_finite(), Send(sender, LinkClosed(message.link))]
        effects: list[Effect] = []
        if outcome.reply is not None:
            effects.append(Send(sender, outcome.reply))
        if outcome.correction is not None:
            effects += self._completed(link, message, values, outcome.correction, now)
        if link.closing:
            effects.append(Send(sender, LinkClose(link.reference.link, link.reference.version)))
        if self._report.finishing:
            effects += self._flush(now)
        return effects

    def _completed(self, link: _Link, theirs: Delta, values: Vector, correction: Vector, now: float) -> list[Effect]:
        parameters = self._layout.parameters
        np.add(values, correction, out=link.anchor)
        link.anchor_norm = norm_of_difference(link.anchor[:parameters])
        link.distance = link.reference.distance()
        link.moved = 0.0
        link.last_exchange = now
        link.exchanges += 1
        link.peer_finishing = theirs.finishing
        ours = link.reference.answered
        link.flushed |= self._report.finishing and ours is not None and ours.codec == FLUSH_CODEC
        shift = norm_of_difference(correction[:parameters])
        for other in self._links.values():
            if other is not link:
                other.moved += shift
        self.counts["exchanges"] += 1
        self._unapplied = correction
        self._lent.append(correction)
        effects: list[Effect] = [Apply(correction)]
        if self.counts["exchanges"] % ROTATE_AFTER_EXCHANGES == 0 and not self._report.finishing:
            effects += self._rotate(now)
        return effects

    def _current(self) -> Vector:
        values = self._values()
        if self._unapplied is not None:
            np.add(values, self._unapplied, out=values)
        return values

    def _reclaim(self) -> None:
        """Take back the corrections of the last event, which its shell has applied by now."""
        for correction in self._lent:
            self._scratch.give(correction)
        self._lent.clear()

    def _half(self, *, flush: bool) -> Half:
        codec = FLUSH_CODEC if flush else self._settings.codec
        live = [link for link in self._links.values() if link.active]
        if self._report.finishing:
            limit = 1 / (
                1 + max(1, len(live))
            )  # Metropolis weights: all links at once still contract (Xiao, Boyd 2004)
        else:
            limit = 1 / (2 + sum(link.reference.under_way is not None for link in live))
        return Half(codec, self._gain(codec), limit, self._report.finishing)

    def _codec(self) -> str:
        return FLUSH_CODEC if self._report.finishing else self._settings.codec

    def _gain(self, codec: str) -> Gain:
        return self._gains.setdefault(codec, Gain())

    def _not_finite(self) -> list[Effect]:
        self.counts["not_finite"] += 1
        if self._warned_not_finite:
            return []
        self._warned_not_finite = True
        return [Log("warning", "the model holds a value that is not finite: nothing of it is sent")]

    # ---------------------------------------------------------------- the final flush

    def _flush(self, now: float) -> list[Effect]:
        """Exchange with whoever does not yet agree; say when all have what we held, and when all agree."""
        effects: list[Effect] = []
        live = {peer: link for peer, link in self._links.items() if link.active and not link.closing}
        unsettled = [peer for peer, link in live.items() if not self._agrees(link)]
        under_way = any(link.reference.under_way is not None for link in live.values())
        if not under_way:  # then with all at once: a round
            for partner in sorted(unsettled):
                if self._may_flush(live[partner]):
                    effects += self._begin(partner, live[partner], self._current(), "finishing", now)
                    self.counts["trigger_finishing"] += 1
        opening = any(peer in self._alive for peer in self._opening)
        if not self._handed_over and not opening and all(link.flushed for link in live.values()):
            self._handed_over = True
            effects.append(Proceed(settled=False))
        if not self._settled and self._handed_over and not unsettled and not under_way:
            self._settled = True
            effects.append(Proceed(settled=True))
        return effects

    def _agrees(self, link: _Link) -> bool:
        close = link.distance + link.moved <= FLUSH_TOLERANCE * link.anchor_norm
        return link.flushed and link.peer_finishing and close

    def _may_flush(self, link: _Link) -> bool:
        """A partner still training gets our model once; it comes back to us when it ends too."""
        return link.peer_finishing or not link.flushed

    # ---------------------------------------------------------------- links: open, close, repeat

    def _fill_view(self, now: float) -> list[Effect]:
        wanted = min(self._settings.view, len(self._alive))
        strangers = sorted(self._alive - set(self._links) - set(self._opening) - self._declined)
        effects: list[Effect] = []
        for peer in self._rng.sample(strangers, max(0, min(wanted - self._held(), len(strangers)))):
            number = self._rng.getrandbits(62)
            self._opening[peer] = (number, now)
            effects.append(Send(peer, LinkOpen(number)))
        return effects

    def _held(self) -> int:
        return sum(link.active for link in self._links.values()) + len(self._opening)

    def _on_open(self, sender: NodeId, number: int, now: float) -> list[Effect]:
        link = self._links.get(sender)
        if link is not None and link.reference.link == number:
            return self._repeat(sender, now) if link.reference.version == 0 else []
        if sender in self._opening:
            if self._me > sender:
                return []  # both ends asked at once: the smaller id answers, the larger's number stands
            del self._opening[sender]
        self._drop(sender)
        if self._held() >= 2 * self._settings.view:
            self.counts["links_declined"] += 1
            return [Send(sender, LinkClosed(number))]
        values = self._current()
        start = np.empty_like(values)
        try:
            chunks, _ = delta.encode(SNAPSHOT_CODEC, self._layout, values)
        except NotFinite:
            return [*self._not_finite(), Send(sender, LinkClosed(number))]
        delta.decode(SNAPSHOT_CODEC, self._layout, chunks, start)
        self._add_link(sender, number, start, values, now)
        self.counts["snapshots"] += 1
        return [Send(sender, LinkSnapshot(number, SNAPSHOT_CODEC, chunks))]

    def _on_snapshot(self, sender: NodeId, message: LinkSnapshot, now: float) -> list[Effect]:
        if self._opening.get(sender, (None, 0.0))[0] != message.link:
            held = self._links.get(sender)
            known = held is not None and held.reference.link == message.link
            return [] if known else [Send(sender, LinkClosed(message.link))]
        values = self._current()
        start = np.empty_like(values)
        delta.decode(message.codec, self._layout, message.chunks, start)
        del self._opening[sender]
        self._add_link(sender, message.link, start, values, now)
        return self._flush(now) if self._report.finishing else []

    def _add_link(self, peer: NodeId, number: int, start: Vector, values: Vector, now: float) -> None:
        norm = norm_of_difference(values[: self._layout.parameters])
        reference = PairedReference(number, start, self._layout, self._scratch)
        # a peer may open before its own news has come; one that membership never confirms holds no place of the view
        active = peer in self._alive
        self._links[peer] = _Link(reference, values.copy(), norm, now, sent_at=now, active=active)
        self._forget_dormant()

    def _on_close(self, sender: NodeId, message: LinkClose, now: float) -> list[Effect]:
        link = self._links.get(sender)
        if link is None or link.reference.link != message.link:
            return [Send(sender, LinkClosed(message.link))]
        if link.reference.under_way is not None or link.reference.version < message.version:
            return []  # halves are still on their way; the peer says the close again after its answer
        self._drop(sender)
        self._declined.add(sender)  # its place there is somebody else's now
        return [Send(sender, LinkClosed(message.link)), *self._fill_view(now)]

    def _on_closed(self, sender: NodeId, number: int, now: float) -> list[Effect]:
        link = self._links.get(sender)
        if self._opening.get(sender, (None, 0.0))[0] == number:
            del self._opening[sender]
            self._declined.add(sender)
        elif link is not None and link.reference.link == number:
            if link.closing:
                self._declined.add(sender)  # rotated out: somebody else's turn
            self._drop(sender)
        else:
            return []
        effects = self._fill_view(now)
        return [*effects, *self._flush(now)] if self._report.finishing else effects

    def _rotate(self, now: float) -> list[Effect]:
        """Give the place of the most used idle link to a peer outside the view, if there is one."""
        idle = [peer for peer, link in self._links.items() if link.idle]
        self._declined.clear()
        if not idle or not self._alive - set(self._links) - set(self._opening):
            return []
        peer = max(idle, key=lambda peer: (self._links[peer].exchanges, peer))
        link = self._links[peer]
        link.closing = True
        link.sent_at = now
        self.counts["rotations"] += 1
        return [Send(peer, LinkClose(link.reference.link, link.reference.version))]

    def _repeat(self, peer: NodeId, now: float) -> list[Effect]:
        """Say again what may have been lost with a connection; every message of a link may come twice."""
        if peer in self._opening:
            number, _ = self._opening[peer]
            self._opening[peer] = (number, now)
            return [Send(peer, LinkOpen(number))]
        link = self._links.get(peer)
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

    def _drop(self, peer: NodeId) -> None:
        if link := self._links.pop(peer, None):
            link.reference.cancel()
        if self._wanted == peer:
            self._wanted = None

    def _forget_dormant(self) -> None:
        """Keep at most a view's worth of links to absent peers, those with an exchange to finish first."""
        dormant = sorted(
            (peer for peer, link in self._links.items() if not link.active),
            key=lambda peer: (self._links[peer].reference.under_way is None, -self._links[peer].last_exchange, peer),
        )
        for peer in dormant[self._settings.view :]:
            self.counts["links_forgotten"] += 1
            self._drop(peer)

    def _rearm(self, effects: list[Effect], now: float) -> list[Effect]:
        self._unapplied = None
        silences = [link.last_exchange for link in self._links.values() if link.idle and not self._report.finishing]
        waits = [
            link.sent_at
            for link in self._links.values()
            if link.active and (link.closing or link.reference.under_way is not None)
        ]
        asked = [asked_at for _, asked_at in self._opening.values()]
        earliest = min([*silences, *waits, *asked], default=float("inf"))
        if self._held() < min(self._settings.view, len(self._alive)):
            earliest = min(earliest, now)  # those who declined are asked again
        self.deadline = max(now, earliest + MAX_SILENCE_S)
        return effects
