"""Whom do I tell of my change, and when? Paired-reference gossip, the default mode.

One random partner of a small view is drawn, and the trigger decides whether the model has changed enough since the last
exchange with that partner. The decision is made twice: first on a bound, by the trainer, which measures where the model
lives (a quiet node copies nothing and says nothing), then, if that fires, here, on the exact change of the copy that
comes with the trainer's word.

How links to partners come and go is links.py's. A run ends with a flush: exchanges with a fine codec until every
partner that has also ended agrees.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.codecs.vector import Layout, NotFinite
from peerd.training.effects import Apply, Effect, Send, Vector
from peerd.training.flush import FLUSH_CODEC, ROTATE_AFTER_EXCHANGES
from peerd.training.mode import ModeSettings, not_finite
from peerd.training.pairs.links import PairLink, PairLinks
from peerd.training.pairs.reference import ExchangeHalf, LinkMismatch, PairedReference
from peerd.training.partnered import PartneredMode
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import (
    Connected,
    Delta,
    DeltaTaken,
    LinkClose,
    LinkClosed,
    LinkOpen,
    LinkSnapshot,
    Message,
)


class Gossip(PartneredMode[PairLink]):
    """The mode's core for one node."""

    NAME = "gossip"

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
        super().__init__(layout, rng, settings, values, counts)
        self._links = PairLinks(me, layout, rng, settings.view, values, self._scratch, self.counts, opens=opens)

    # ---------------------------------------------------------------- events

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
                effects = self._links.on_closed(sender, message, now) + self._flush(now)
            case DeltaTaken():
                effects = self._links.on_taken(sender, message.link, message.seq)
            case Connected():
                effects = self._links.repeat(sender, now)
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning in gossip")
        self._rearm(now)
        return effects

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Peers came or went."""
        self._reclaim()
        effects = self._links.on_peers(alive, now) + self._flush(now)
        self._rearm(now)
        return effects

    def seek_partners(self, seek: bool, now: float) -> list[Effect]:
        """From now on look for partners, or no more."""
        self._links.opens = seek
        effects = self._links.fill_view(now)
        self._rearm(now)
        return effects

    # ---------------------------------------------------------------- what there is to see

    def references(self) -> dict[NodeId, PairedReference]:
        """What each partner knows of this model, and this node of its; absent partners too."""
        return {link.peer: link.reference for link in self._held()}

    def holds(self, peer: NodeId, link: int) -> bool:
        """Whether there is a link of this number with `peer`, or was."""
        return self._links.knows(peer, link)

    @property
    def under_way(self) -> bool:
        """Whether an exchange is, or may be for a living peer that has not told of its end."""
        return self._links.unsettled

    # ---------------------------------------------------------------- partners

    def _held(self) -> list[PairLink]:
        return list(self._links.held.values())

    def _live(self) -> list[PairLink]:
        return [link for link in self._held() if link.active]

    def _idle(self) -> list[PairLink]:
        return self._links.idle()

    def _say_again(self, now: float) -> list[Effect]:
        return self._links.on_timer(now)

    def _say_again_at(self, now: float) -> float:
        return self._links.deadline(now)

    # ---------------------------------------------------------------- exchanges

    def _on_open(self, sender: NodeId, number: int, now: float) -> list[Effect]:
        try:
            return self._links.on_open(sender, number, now)
        except NotFinite:
            return [*not_finite(self.counts), Send(sender, LinkClosed(number, 0))]

    def _begin(self, link: PairLink, values: Vector, reason: str, now: float) -> list[Effect]:
        half = self._half(flush=self._report.finishing)
        try:
            message = link.reference.begin(values, half)
        except NotFinite:
            return not_finite(self.counts)
        self._decider.began_step = self._report.step
        link.sent_at = now
        link.last_reason = reason
        return [Send(link.peer, message)]

    def _on_delta(self, sender: NodeId, message: Delta, now: float) -> list[Effect]:
        link = self._links.held.get(sender)
        if link is None or link.reference.link != message.link:
            return self._on_late(sender, message, now)
        half = self._half(flush=message.finishing)  # a peer that trains on comes back; one that ends needs it all now
        values = self._current()
        try:
            outcome = link.reference.receive(message, values, half)
        except LinkMismatch:
            self.counts["link_mismatches"] += 1
            return [*self._links.end(sender, now), *self._links.fill_view(now)]
        except NotFinite:
            return [*not_finite(self.counts), *self._links.end(sender, now)]
        effects: list[Effect] = []
        if outcome.reply is not None:
            effects.append(Send(sender, outcome.reply))
            link.sent_at = now
        under_way = link.reference.under_way
        if message.seq == link.reference.version and message.wants_answer and under_way is not None:
            effects.append(Send(sender, under_way))  # it came too early for a peer that lacked our last half
        if outcome.correction is not None:
            effects += self._completed(link, message, values, outcome.correction, now)
        if link.closing:
            effects.append(Send(sender, LinkClose(link.reference.link, link.reference.version)))
        return effects + self._flush(now)

    def _completed(self, link: PairLink, theirs: Delta, values: Vector, correction: Vector, now: float) -> list[Effect]:
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
        self.counts["exchanges"] += 1
        self._lend(correction, link)
        effects: list[Effect] = [Apply(correction)]
        if self.counts["exchanges"] % ROTATE_AFTER_EXCHANGES == 0 and not self._report.finishing:
            effects += self._links.rotate(now)
        return effects

    def _on_late(self, sender: NodeId, message: Delta, now: float) -> list[Effect]:
        """A half of a link that we do not hold (any more)."""
        correction, effects = self._links.on_late(sender, message, now)
        if correction is None:
            return effects
        self.counts["exchanges"] += 1
        self._lend(correction)
        return [*effects, Apply(correction), *self._flush(now)]

    def _half(self, *, flush: bool) -> ExchangeHalf:
        codec = FLUSH_CODEC if flush else self._settings.codec
        if self._report.finishing:
            limit = self._flush_limit()
        else:
            overlapping = sum(link.reference.under_way is not None for link in self._links.live())
            limit = min(self.gain_limit, 1 / (2 + overlapping))
        return ExchangeHalf(codec, self._gain(codec), limit, self._report.finishing)

    # ---------------------------------------------------------------- the final flush

    def _flush(self, now: float) -> list[Effect]:
        """At a run's end: exchange with whoever does not yet agree; say when all have what we held, when all agree."""
        if not self._report.finishing:
            return []
        effects: list[Effect] = []
        live = [link for link in self._links.live() if not link.closing]
        under_way = any(link.reference.under_way is not None for link in live)
        if not under_way:  # then with all at once: a round
            for link in self._round(sorted(live, key=lambda link: link.peer)):
                effects += self._begin(link, self._current(), "finishing", now)
                self.counts["trigger_finishing"] += 1
        return effects + self._proceed(live, expects_more=bool(self._links.opening), under_way=under_way)

    def _round(self, live: list[PairLink]) -> list[PairLink]:
        """Who is exchanged with next: a partner still training gets our model once, and comes back when it ends too."""
        return [link for link in live if not self._agrees(link) and (link.peer_finishing or not link.flushed)]

    def _flush_limit(self) -> float:
        """Metropolis weights: all links at once still contract (Xiao, Boyd 2004)."""
        return 1 / (1 + max(1, len(self._links.live())))
