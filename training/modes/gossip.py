"""Whom do I tell of my change, and when? Paired-reference gossip, the default mode.

After each step one random partner of a small view is drawn, and the trigger decides whether the model has changed
enough since the last exchange with that partner. The decision is made twice: first on a bound that the trainer
measures where the model lives (a quiet node copies nothing), then, if that fires, on the exact change of a fresh copy.

How links to partners come and go is links.py's. A run ends with a flush: exchanges with a fine codec until every
partner that has also ended agrees.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np

from peerd.effects import Apply, Effect, Log, NodeId, PeerError, Proceed, Publish, Send, StepReport, Vector
from peerd.messages import Connected, Delta, LinkClose, LinkClosed, LinkOpen, LinkSnapshot, Message
from peerd.training.delta import GAIN_MOST, Gain, Layout, NotFinite
from peerd.training.modes.deciding import Decider, distance_from_mean
from peerd.training.modes.links import Link, Links
from peerd.training.modes.mode import LinkStatus, ModeSettings
from peerd.training.reference import Half, LinkMismatch, PairedReference, norm_of_difference
from peerd.training.scratch import Scratch
from peerd.training.trigger import MAX_SILENCE_S, WAKE_AFTER_S

FLUSH_CODEC = "int8"  # its contraction is above 0.999, so a handful of exchanges reach agreement
FLUSH_TOLERANCE = 1e-2  # relative distance at which two models count as one; a test accuracy does not resolve it
ROTATE_AFTER_EXCHANGES = 64  # a new link costs a bfloat16 snapshot, about 16 one-bit deltas: a quarter on top at most


class Gossip:
    """The mode's core for one node."""

    barrier = 0
    tolerance = FLUSH_TOLERANCE

    def __init__(
        self,
        me: NodeId,
        layout: Layout,
        rng: random.Random,
        settings: ModeSettings,
        values: Callable[[], Vector],
        *,
        opens: bool = True,
        counts: Counter[str] | None = None,
    ) -> None:
        """The last two are for modes that are made of this one: whether it looks for partners, where it counts."""
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.gain_limit = GAIN_MOST  # of an exchange while this node trains
        self.handed_over = False  # at the end of a run: every partner has what this node had not yet sent
        self.settled = False  # and all models agree
        self.deadline = float("inf")
        self._layout = layout
        self._settings = settings
        self._values = values
        self._scratch = Scratch()
        self._links = Links(me, layout, rng, settings.view, values, self._scratch, self.counts, opens=opens)
        self._unapplied: Vector | None = None  # the correction that this event's effects will bring
        self._lent: list[Vector] = []  # corrections in the effects of the last event: applied by the next one
        self._gains: dict[str, Gain] = {}
        self._report = StepReport(0, 0.0, 1.0, published=False, finishing=False)
        self._decider = Decider(layout, rng, settings.trigger, self.counts)
        self._wanted: Link | None = None  # for whose sake a publish was asked
        self._warned_not_finite = False

    # ---------------------------------------------------------------- events

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """Draw a partner, decide, and perhaps begin an exchange."""
        self._reclaim()
        self._report = report
        if report.published:
            for link in self._links.held.values():
                link.moved += report.change  # the triangle inequality: exact only for the partner decided on below
        if report.finishing:
            return self._rearm(self._flush(now), now)
        if self.handed_over:  # a new run follows a flush
            self.handed_over = self.settled = False
            for link in self._links.held.values():
                link.flushed = False
        wanted = self._wanted
        if wanted is None or self._links.held.get(wanted.peer) is not wanted:
            return self._rearm(self._draw(now), now)
        if not report.published:
            return []
        self._wanted = None
        return self._rearm(self._decide(wanted, now) if wanted.idle else [], now)

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """One event of one link."""
        self._reclaim()
        match message:
            case Delta():
                effects = self._on_delta(sender, message, now)
            case LinkOpen():
                effects = self._on_open(sender, message.link, now)
            case LinkSnapshot():
                effects = self._links.on_snapshot(sender, message, now) + self._flush(now)
            case LinkClose():
                effects = self._links.on_close(sender, message, now)
            case LinkClosed():
                effects = self._links.on_closed(sender, message.link, now) + self._flush(now)
            case Connected():
                effects = self._links.repeat(sender, now)
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning in gossip")
        return self._rearm(effects, now)

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Peers came or went."""
        self._reclaim()
        return self._rearm(self._links.on_peers(alive, now) + self._flush(now), now)

    def on_timer(self, now: float) -> list[Effect]:
        """Never silence: repeat what has had no answer for long, and send what the trigger calls overdue."""
        self._reclaim()
        effects = self._links.on_timer(now)
        if not self._report.finishing:
            for link in self._links.idle():
                if now - max(link.last_exchange, link.declined_at) >= MAX_SILENCE_S:
                    link.declined_at = now
                    effects += self._decide(link, now)
        return self._rearm(effects, now)

    def seek_partners(self, seek: bool, now: float) -> list[Effect]:
        """From now on look for partners, or no more."""
        self._links.opens = seek
        return self._rearm(self._links.fill_view(now), now)

    # ---------------------------------------------------------------- what there is to see

    def links(self) -> list[LinkStatus]:
        """One row a live link."""
        gain = min(self._gains.get(self._codec(), Gain()).value, self.gain_limit)
        return [
            LinkStatus(link.peer, link.exchanges, link.distance, gain, link.last_reason)
            for link in self._shown()
            if link.active
        ]

    def references(self) -> dict[NodeId, PairedReference]:
        """What each partner knows of this model, and this node of its; absent partners too."""
        return {link.peer: link.reference for link in self._shown()}

    def holds(self, peer: NodeId, link: int) -> bool:
        """Whether there is a link of this number with `peer`."""
        held = self._links.held.get(peer)
        return held is not None and held.reference.link == link

    def end(self) -> Vector | None:
        """References only say who knows what of the model."""
        return None

    @property
    def under_way(self) -> bool:
        """Whether an exchange is."""
        return any(link.reference.under_way is not None for link in self._shown() if link.active)

    @property
    def consensus_distance(self) -> float:
        """See `distance_from_mean`."""
        return distance_from_mean([link for link in self._shown() if link.active])

    def _shown(self) -> list[Link]:
        return list(self._links.held.values())  # a copy: the lane's thread may change it meanwhile

    # ---------------------------------------------------------------- deciding

    def _draw(self, now: float) -> list[Effect]:
        self._wanted = self._decider.draw(self._links.idle(), self._report, now)
        return [Publish()] if self._wanted is not None else []

    def _decide(self, link: Link, now: float) -> list[Effect]:
        values = self._current()
        reason = self._decider.reason(link, values, self._report, now)
        if reason is None:
            return []
        self.counts[f"trigger_{reason}"] += 1
        return self._begin(link, values, reason, now)

    # ---------------------------------------------------------------- exchanges

    def _on_open(self, sender: NodeId, number: int, now: float) -> list[Effect]:
        try:
            return self._links.on_open(sender, number, now)
        except NotFinite:
            return [*self._not_finite(), Send(sender, LinkClosed(number))]

    def _begin(self, link: Link, values: Vector, reason: str, now: float) -> list[Effect]:
        half = self._half(flush=self._report.finishing)
        try:
            message = link.reference.begin(values, half)
        except NotFinite:
            return self._not_finite()
        self._decider.began_step = self._report.step
        link.sent_at = now
        link.last_reason = reason
        return [Send(link.peer, message)]

    def _on_delta(self, sender: NodeId, message: Delta, now: float) -> list[Effect]:
        link = self._links.held.get(sender)
        if link is None or link.reference.link != message.link:
            # while our own LinkOpen is under way the peer's half is early, not wrong: it will be repeated
            return [] if sender in self._links.opening else [Send(sender, LinkClosed(message.link))]
        half = self._half(flush=message.finishing)  # a peer that trains on comes back; one that ends needs it all now
        values = self._current()
        try:
            outcome = link.reference.receive(message, values, half)
        except LinkMismatch:
            self.counts["link_mismatches"] += 1
            self._links.drop(sender)
            return [Send(sender, LinkClosed(message.link)), *self._links.fill_view(now)]
        except NotFinite:
            self._links.drop(sender)
            return [*self._not_finite(), Send(sender, LinkClosed(message.link))]
        effects: list[Effect] = []
        if outcome.reply is not None:
            effects.append(Send(sender, outcome.reply))
        if outcome.correction is not None:
            effects += self._completed(link, message, values, outcome.correction, now)
        if link.closing:
            effects.append(Send(sender, LinkClose(link.reference.link, link.reference.version)))
        return effects + self._flush(now)

    def _completed(self, link: Link, theirs: Delta, values: Vector, correction: Vector, now: float) -> list[Effect]:
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
        for other in self._links.held.values():
            if other is not link:
                other.moved += shift
        self.counts["exchanges"] += 1
        self._unapplied = correction
        self._lent.append(correction)
        effects: list[Effect] = [Apply(correction)]
        if self.counts["exchanges"] % ROTATE_AFTER_EXCHANGES == 0 and not self._report.finishing:
            effects += self._links.rotate(now)
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
        if self._report.finishing:
            limit = self._flush_limit()
        else:
            overlapping = sum(link.reference.under_way is not None for link in self._links.live())
            limit = min(self.gain_limit, 1 / (2 + overlapping))
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
        """At a run's end: exchange with whoever does not yet agree; say when all have what we held, when all agree."""
        if not self._report.finishing:
            return []
        effects: list[Effect] = []
        live = [link for link in self._links.live() if not link.closing]
        unsettled = [link for link in live if not self._agrees(link)]
        under_way = any(link.reference.under_way is not None for link in live)
        if not under_way:  # then with all at once: a round
            for link in self._round(sorted(live, key=lambda link: link.peer)):
                effects += self._begin(link, self._current(), "finishing", now)
                self.counts["trigger_finishing"] += 1
        if not self.handed_over and not self._links.opening and all(link.flushed for link in live):
            self.handed_over = True
            effects.append(Proceed(settled=False))
        if not self.settled and self.handed_over and not unsettled and not under_way:
            self.settled = True
            effects.append(Proceed(settled=True))
        return effects

    def _round(self, live: list[Link]) -> list[Link]:
        """Who is exchanged with next: a partner still training gets our model once, and comes back when it ends too."""
        return [link for link in live if not self._agrees(link) and (link.peer_finishing or not link.flushed)]

    def _flush_limit(self) -> float:
        """Metropolis weights: all links at once still contract (Xiao, Boyd 2004)."""
        return 1 / (1 + max(1, len(self._links.live())))

    def _agrees(self, link: Link) -> bool:
        close = link.distance + link.moved <= self.tolerance * link.anchor_norm
        return link.flushed and link.peer_finishing and close

    def _rearm(self, effects: list[Effect], now: float) -> list[Effect]:
        self._unapplied = None
        silences = (
            [] if self._report.finishing else [max(link.last_exchange, link.declined_at) for link in self._links.idle()]
        )
        overdue = min(silences, default=float("inf")) + WAKE_AFTER_S
        self.deadline = max(now, min(overdue, self._links.deadline(now)))
        return effects
