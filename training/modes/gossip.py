"""Whom do I tell of my change, and when? Paired-reference gossip, the default mode.

One random partner of a small view is drawn, and the trigger decides whether the model has changed enough since the last
exchange with that partner. The decision is made twice: first on a bound, by the trainer, which measures where the model
lives (a quiet node copies nothing and says nothing), then, if that fires, here, on the exact change of the copy that
comes with the trainer's word.

How links to partners come and go is links.py's. A run ends with a flush: partners say where their models are
(nearness.py), and those far apart exchange with a fine codec, until all that have also ended are near.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection

import numpy as np

from peerd.training.batch_sizes import Work
from peerd.training.codecs.concentration import Concentration
from peerd.training.codecs.vector import GAIN_MAX, VALUE_MAX, Layout, NotFinite
from peerd.training.effects import Apply, Effect, Log, Send, StepReport, Vector
from peerd.training.flush import FLUSH_CODEC, FLUSH_TOLERANCE
from peerd.training.mode import not_finite
from peerd.training.mode_settings import AUTO, ModeSettings
from peerd.training.pairs.codec_choice import CodecChoice
from peerd.training.pairs.duration import COARSE, StepTime, counts_as
from peerd.training.pairs.graylist import Graylist
from peerd.training.pairs.link import PairLink
from peerd.training.pairs.links import PairLinks
from peerd.training.pairs.nearness import SEED, can_be_said, heard
from peerd.training.pairs.reference import Exchanged, ExchangeHalf, LinkMismatch, PairedReference
from peerd.training.pairs.robust import COMPARED_MIN, PairAllowances, packed, tensors_of, unpacked
from peerd.training.partnered import PartneredMode
from peerd.training.room import is_large
from peerd.training.sketch import Sketch
from peerd.training.trigger import SILENCE_MAX_S, WAKE_AFTER_S
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import (
    Connected,
    Delta,
    DeltaTaken,
    LinkClose,
    LinkClosed,
    LinkEqual,
    LinkOpen,
    LinkSketch,
    LinkSnapshot,
    Message,
)

ROTATE_AFTER_EXCHANGES = 192
"""Of a node, before it changes a partner. A new link costs a bfloat16 snapshot, as much as 6 of its exchanges by one
bit, and as 16 by the largest 1 %. After 64, snapshots were a seventh of the former's bytes, a quarter of the latter's,
and models were no closer; after many more, what the largest 1 % leaves out is never made good (RESULTS.md).
"""
ALONE_TIMES, ALONE_S = 1.2, 10.0
"""The steps of a run whose partners had ended, and seconds since then: then it is long alone."""
ALONE = (
    "all partners' runs have ended: this node trains on alone, on its own data, and their models follow (a loop over "
    "swarm.steps(N) ends with theirs)"
)
STEP_MIN_S = 1e-9
NORM_MIN = 1e-30
ANSWERED_MIN_S, ANSWERED_TIMES = 2.0, 8.0
"""At a run's end an exchange is waited for so long, or so many times what one by one bit a value usually takes, before
another begins: who does not answer would keep all others from agreeing."""
MOVED = 0.1  # tolerances: a model that has moved so far is said to be elsewhere
VALUE_TIMES = 1e4
"""A value of another's model is at most so many times as large as the norm of ours."""


class Gossip(PartneredMode[PairLink]):
    """The mode's core for one node."""

    NAME = "gossip"
    CODEC = AUTO
    tolerance = 0.7 * FLUSH_TOLERANCE  # of what is measured, with some error; others have bounds above it
    COMPARES = True
    """At a run's end partners say where they are, and exchange where that is far apart."""
    answered_min_s = ANSWERED_MIN_S
    """For how long, at least, a run's end waits for an answer before it begins the next exchange."""

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
        gain_limit: float = GAIN_MAX,
    ) -> None:
        """The last three are for modes that are made of this one: whether it looks for partners, where it counts, and
        by how much of its distance a pair comes closer at most, from each end."""
        super().__init__(layout, rng, settings, values, counts)
        self.gain_limit = gain_limit
        self._links = PairLinks(me, layout, rng, settings.view, values, self._scratch, self.counts, opens=opens)
        self._allowances = PairAllowances(layout)
        self._alive: frozenset[NodeId] = frozenset()
        self._step_time = StepTime()
        self._choice = CodecChoice(self.counts, self._step_time)
        self._concentration = Concentration(layout) if settings.codec == AUTO else None  # then it chooses
        self._samples = 0.0  # of a step of our trainer's; 0: it does not say
        self._alone_from: tuple[float, float] | None = None  # the step and the time at which partners' runs had ended
        self._met = False  # another mode brings members together, and flushes by this one
        self._flush_waits = False  # until the next event, at once, when the model has been corrected
        self._sketch: Sketch | None = None  # of the model, while nothing changes it

    # ---------------------------------------------------------------- events

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """See `PartneredMode`."""
        self._reclaim()
        self._sketch = None
        self._step_time.heard(report.step, now)
        if not report.finishing:
            self._samples = report.samples
        if report.finishing and not self._report.finishing and self._settings.robust:
            self._allowances.look(self._current(), report.step, report.lr_ratio)
            self._allowances.end_run(self._compared())
        elif self._report.finishing and not report.finishing:
            self._flush_waits = False
            for link in self._held():
                link.near.forget()
            self._allowances.begin_run()
            self._tell_news()
        return super().on_step(report, now)

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """One event of one link."""
        self._reclaim()
        match message:
            case Delta():
                effects = self._on_delta(sender, message, now)
            case LinkOpen():
                effects = self._on_open(sender, message, now)
            case LinkSnapshot() | LinkEqual():
                effects = self._links.on_start(sender, message, now) + self._flush(now)
            case LinkClose():
                effects = self._links.on_close(sender, message, now)
            case LinkClosed():
                effects = self._links.on_closed(sender, message, now) + self._flush(now)
            case LinkSketch():
                effects = self._on_sketch(sender, message, now)
            case DeltaTaken():
                self._links.on_taken(sender, message.link, message.seq)
                effects = []
            case Connected():
                self._links.returned(sender)
                effects = self._links.repeat(sender, now) + self._flush(now)
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning in gossip")
        self._rearm(now)
        return effects

    def on_timer(self, now: float) -> list[Effect]:
        """See `PartneredMode`."""
        if not self._flush_waits:
            return super().on_timer(now)
        self._reclaim()
        effects = self._flush(now)
        self._rearm(now)
        return effects

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Peers came or went."""
        self._reclaim()
        # what was gone alone nobody has counted the steps of: it is no measure of one
        if self._settings.robust and alive and not self._alive:
            self._allowances.look_anew(self._values())
        self._allowances.keep(alive)
        self._alive = alive
        effects = self._links.on_peers(alive, now) + self._flush(now)
        self._rearm(now)
        return effects

    def met(self, peer: NodeId, apart: Vector) -> None:
        """The mode that flushes by this one brings these two together, which are `apart`: so much is usual."""
        self._met = True
        self._allowances.met(peer, tensors_of(self._layout).norms(apart))

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

    def link_numbers(self) -> list[int]:
        """Of the links that it holds, or did and remembers."""
        return self._links.numbers()

    def disown(self, numbers: list[int]) -> None:
        """Of these links this core knows nothing, and never will: who asks for one again is told so."""
        self._links.disown(numbers)

    def end_link(self, peer: NodeId, now: float) -> list[Effect]:
        """End the link with this one, whose model is none to take."""
        return self._links.end(peer, now)

    @property
    def graylist(self) -> Graylist:
        """Whom this node leaves alone."""
        return self._links.graylist

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

    def _unclosed(self) -> list[PairLink]:
        return [link for link in self._links.live() if not link.closing]

    def _say_again(self, now: float) -> list[Effect]:
        for link in self._unheard():
            if (told := link.near.told) is not None and now - told.at >= SILENCE_MAX_S:
                link.near.told = None
        return self._links.on_timer(now) + self._flush(now)

    def _say_again_at(self, now: float) -> float:
        if self._flush_waits:
            return now
        unheard = [told.at for link in self._unheard() if (told := link.near.told) is not None]
        due_at = min(self._links.deadline(now), min(unheard, default=math.inf) + WAKE_AFTER_S)
        if self._report.finishing and (next_at := self._next_begins_at(self._unclosed())) > now:
            return min(due_at, next_at)
        return due_at

    def _unheard(self) -> list[PairLink]:
        """At the end of our run: who has yet to say where its model is; asked again once a minute."""
        if not self._report.finishing or not self.COMPARES:
            return []
        return [link for link in self._unclosed() if self._is_unheard(link)]

    # ---------------------------------------------------------------- exchanges

    def _on_open(self, sender: NodeId, message: LinkOpen, now: float) -> list[Effect]:
        try:
            return self._links.on_open(sender, message, now)
        except NotFinite:
            return [*not_finite(self.counts), Send(sender, LinkClosed(message.link, 0))]

    def _end_run(self, now: float) -> list[Effect]:
        return self._links.ask_if_none(now)

    def _begin(self, link: PairLink, values: Vector, reason: str, now: float) -> list[Effect]:
        half = self._half(link, values, flush=self._report.finishing)
        try:
            message = link.reference.begin(values, half)
        except NotFinite:
            return not_finite(self.counts)
        self._policy.began_step = self._report.step
        link.began_at = link.sent_at = now
        link.last_reason = reason
        return [Send(link.peer, message)]

    def _on_delta(self, sender: NodeId, message: Delta, now: float) -> list[Effect]:
        link = self._links.held.get(sender)
        if link is None or link.reference.link != message.link:
            return self._on_late(sender, message, now)
        values = self._current()
        ours = link.reference.under_way
        # to a peer that trains on there is a way back; one that ends needs it all now
        half = self._half(link, values, flush=message.finishing, answers=ours is not None, theirs=message.codec)
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
        if outcome.exchanged is not None:
            if ours is not None and self._settings.codec == AUTO:
                self._choice.ended(link, ours.codec, message.codec, now)
            elif ours is not None and self._settings.codec == ours.codec == message.codec:
                known_as = counts_as(ours.codec)
                link.took.ended(known_as, known_as, now - link.began_at)
            effects += self._completed(link, message, values, outcome.exchanged, now)
        if link.closing:
            effects.append(Send(sender, LinkClose(link.reference.link, link.reference.version)))
        return effects + self._flush(now)

    def _completed(self, link: PairLink, theirs: Delta, values: Vector, both: Exchanged, now: float) -> list[Effect]:
        correction = both.correction
        self._links.reminders.answered(link.peer, now - link.began_at)
        link.distance = link.reference.distance()
        norm, length = self._sample.refresh_with_sum(link.anchor, values, correction)
        link.anchor_norm = math.sqrt(norm)
        link.moved = link.news = 0.0
        link.last_exchange = now
        link.exchanges += 1
        if self._concentration is not None:
            self._choice.moved(self._concentration.of(values))
            self._concentration.begins(values)
            self._choice.choose(link)
        if theirs.finishing and not link.may_at_end:
            self._allowances.peer_ended(link.peer, self._compared())
        link.may_at_end = link.peer_finishing = theirs.finishing
        ours = link.reference.answered
        self._allowances.heard(link.peer, both.limits)
        self._allowances.spent(link.peer, both.moved, both.distances)
        norm = max(link.anchor_norm, NORM_MIN)
        # not said: the link was cut meanwhile
        off = link.near.apart(norm) if link.near.is_said else link.distance / norm
        self._note_progress(link, max(min(off, VALUE_MAX), self.tolerance))
        flushed = ours is not None and ours.finishing and ours.codec == FLUSH_CODEC
        link.flushed |= self._report.finishing and flushed
        self.counts["exchanges"] += 1
        self._lend(correction, link, math.sqrt(length))
        effects: list[Effect] = [Apply(correction)]
        if self._settings.robust:
            effects += self._judge(link.peer, link.distance, now, stood=not both.moved.any())
        effects += self._look_around(now)
        if self.counts["exchanges"] % ROTATE_AFTER_EXCHANGES == 0 and not self._ends_around():
            effects += self._links.rotate(now)
        return effects

    def _look_around(self, now: float) -> list[Effect]:
        """Say once that this node trains on alone; not of one that ends a few steps after the others."""
        step = self._report.step
        if self._report.finishing or not self._ends_around():
            self._alone_from = None
        elif self._alone_from is None:
            self._alone_from = step, now
        elif step > ALONE_TIMES * self._alone_from[0] and now > self._alone_from[1] + ALONE_S:
            self._alone_from = math.inf, now
            return [Log(ALONE)]
        return []

    def _ends_around(self) -> bool:
        """Whether this node's run has ended, or those of all its partners: one that is left then has all to tell.

        All, as one alone could say so to keep its place.
        """
        return self._report.finishing or all(link.peer_finishing for link in self._links.live())

    def _on_late(self, sender: NodeId, message: Delta, now: float) -> list[Effect]:
        """A half of a link that we do not hold (any more)."""
        both, effects = self._links.on_late(sender, message, now, self._values_max())
        if both is None:
            return effects
        self.counts["exchanges"] += 1
        self._links.reminders.answered(sender, math.inf)
        self._allowances.spent(sender, both.moved, both.distances)
        self._lend(both.correction)
        effects.append(Apply(both.correction))
        if self._settings.robust:
            distance = tensors_of(self._layout).whole(both.distances)
            effects += self._judge(sender, distance, now, stood=not both.moved.any())
        return effects + self._flush(now)

    def _codec(self, partner: PairLink) -> str:
        return partner.codec if self._settings.codec == AUTO else self._settings.codec

    def _half(
        self, link: PairLink, values: Vector, *, flush: bool, answers: bool = False, theirs: str = ""
    ) -> ExchangeHalf:
        if flush:
            codec = FLUSH_CODEC
        elif self._settings.codec == AUTO and theirs:
            codec = self._choice.answer(link, theirs)
        else:
            codec = self._codec(link)
        limit = self._flush_limit() if self._report.finishing else min(self.gain_limit, self._shared_gain())
        gain = self._gain(codec)
        work = Work(self._samples, 1 / max(STEP_MIN_S, self._step_time.seconds))
        free = self._report.finishing and self._comparable() < COMPARED_MIN
        if not self._settings.robust or answers or free:  # an answer to our half: that one has said its limits
            return ExchangeHalf(codec, gain, limit, self._report.finishing, b"", self._values_max(), work)
        self._allowances.look(values, self._report.step, self._report.lr_ratio)
        may_move = self._allowances.limits(link.peer, self._compared())
        for owed in self._links.may_still_move(link.peer):
            may_move = np.maximum(may_move - unpacked(owed, len(may_move)), 0.0)
        limits = packed(may_move)
        return ExchangeHalf(codec, gain, limit, self._report.finishing, limits, self._values_max(), work)

    def _values_max(self) -> float:
        """What no honest peer's weight is beyond: that of a model this many times as long as ours."""
        if not self._settings.robust:
            return VALUE_MAX
        longest = 1.0
        for link in self._links.held.values():
            longer = max(link.anchor_norm, link.start_norm)
            longest = longer if longer > longest else longest
        return min(VALUE_MAX, VALUE_TIMES * longest)

    def _partners(self) -> list[NodeId]:
        return [link.peer for link in self._links.live()]

    def _comparable(self) -> int:
        """How many of them there are once it has all its links."""
        return len(self._alive) if self._met else min(self._settings.view, len(self._alive))

    def _compared(self) -> Collection[NodeId]:
        """Among whom one is told from the others: partners, or where there were none until a run's end all who live."""
        return self._alive if self._met else self._partners()

    def _lend(self, correction: Vector, but: PairLink | None = None, length: float | None = None) -> None:
        self._sketch = None
        self._allowances.corrected(correction)
        if self._concentration is not None:
            self._concentration.corrected(correction)
        super()._lend(correction, but, length)

    def _shifted(self, by: float, but: PairLink | None = None) -> None:
        """At a run's end what comes of one who trains on is told when that one has ended, too: not at each of its
        steps, to all by all."""
        if not self._report.finishing or but is None or but.peer_finishing:
            super()._shifted(by, but)
            return
        for link in self._held():
            if link is not but:
                link.news += by

    def _tell_news(self) -> None:
        for link in self._held():
            link.moved, link.news = link.moved + link.news, 0.0

    def _judge(self, peer: NodeId, distance: float, now: float, *, stood: bool) -> list[Effect]:
        """A peer that is far away and stays there is left alone for a while.

        Where both models `stood`, one end makes no steps, and lets nobody move it: that says nothing of the other.
        """
        farness = self._allowances.farness(peer, self._partners()) if not self._report.finishing else 0.0
        if farness is None:
            return []
        far = farness > 1
        self.counts["far_away"] += far
        if far and stood:
            return []
        gray_s = self._links.graylist.note(peer, distance, now, farness)
        if not gray_s:
            return []
        self.counts["graylisted"] += 1
        text = f"{peer} shows a model far from all others': no exchanges with it for {gray_s / 60:.0f} min"
        return [Log(text), *self._links.end(peer, now), *self._links.fill_view(now)]

    # ---------------------------------------------------------------- the final flush

    def _flush(self, now: float) -> list[Effect]:
        """At a run's end: exchange with whoever does not yet agree; say when all have what we held, when all agree."""
        # before the next event a large model is corrected: to encode it now would need a copy of it
        self._flush_waits = self._report.finishing and bool(self._lent) and is_large(self._layout.total)
        if self._flush_waits or not self._report.finishing:
            return []
        effects: list[Effect] = []
        live = self._unclosed()
        self._one_trains = not all(link.peer_finishing for link in live)
        if not self._one_trains:
            self._tell_news()
        if self.COMPARES:
            effects += self._compare(live, now)
        under_way = any(link.reference.under_way is not None for link in live)
        if self._next_begins_at(live) <= now:
            for link in self._round(self._idle()):
                effects += self._begin(link, self._current(), "finishing", now)
                self.counts["trigger_finishing"] += 1
        return effects + self._proceed(live, expects_more=self._links.expects_more(now), under_way=under_way)

    def _next_begins_at(self, live: list[PairLink]) -> float:
        """When the next exchange of the flush may begin, though those that are under way have had no answer by then."""
        began = [link.began_at for link in live if link.reference.under_way is not None]
        if not began:
            return -math.inf
        usual = sorted(link.took.of(COARSE) for link in live)[(len(live) - 1) // 2]
        return max(began) + max(self.answered_min_s, ANSWERED_TIMES * usual)

    def _round(self, idle: list[PairLink]) -> list[PairLink]:
        """Who is exchanged with next: the one furthest off (greedy gossip: Ustebay et al. 2010, arXiv:0909.1830).

        One at a time: two that meet alone go half the way each, where all at once would go a fourth or a seventh of it
        for as many bytes. A partner that trains on gets our model once, and comes back when its run ends, too.
        """
        far = [link for link in idle if self._is_known(link) and not self._agrees(link)]
        return sorted([link for link in far if link.peer_finishing or not link.flushed], key=_apart)[-1:]

    def _shared_gain(self) -> float:
        """Exchanges that overlap share the gain."""
        return 1 / (2 + sum([link.reference.under_way is not None for link in self._links.live()]))

    def _flush_limit(self) -> float:
        return self._shared_gain()

    # ---------------------------------------------------------------- who is near

    def _on_sketch(self, sender: NodeId, message: LinkSketch, now: float) -> list[Effect]:
        link = self._links.held.get(sender)
        if link is None or link.reference.link != message.link:
            return self._links.on_unknown(sender, message.link, now)
        if not link.near.hear(heard(message, now)):
            return []
        link.peer_finishing = message.finishing
        effects: list[Effect] = []
        if message.asks:
            # of a model that cannot be said none waits, as with one that cannot be exchanged
            effects += self._tell(link, now) or [*not_finite(self.counts), *self._links.end(sender, now)]
        return effects + self._flush(now)

    def _compare(self, links: list[PairLink], now: float) -> list[Effect]:
        """Say where our model is now, and see who is near."""
        effects: list[Effect] = []
        for link in links:
            if self._is_news(link):
                asks = link.near.told is None and self._is_unheard(link)
                effects += self._tell(link, now, asks=asks) or not_finite(self.counts)
            # while an exchange is under way one that lies could say both in turn, and never be stuck
            if link.idle and self._is_known(link) and self._is_near(link):
                link.distance = link.near.distance
                link.flushed = True
                link.progress.note(link.distance, agree=True)
        return effects

    def _is_news(self, link: PairLink) -> bool:
        """Whether the peer must hear where our model is. What comes of one who trains on is said when that one has
        ended, too: not at each of its steps, to all by all."""
        told = link.near.told
        if told is None or not told.finishing or told.seq != link.reference.version:
            return True
        if self._one_trains and link.flushed:
            return False
        return told.apart(self._where(), link.anchor_norm) > MOVED * self._tolerance

    def _tell(self, link: PairLink, now: float, *, asks: bool = False) -> list[Effect]:
        """Nothing, of a model that is not finite."""
        if not can_be_said(self._where()):
            return []
        version, finishing = link.reference.version, self._report.finishing
        told = link.near.tell(version, self._where(), now, finishing=finishing, asks=asks)
        return [Send(link.peer, told.message(link.reference.link, asks=link.near.asks))]

    def _where(self) -> Sketch:
        if self._sketch is None:
            self._sketch = self._sample.sketch(self._current(), SEED)
        return self._sketch

    def _is_known(self, link: PairLink) -> bool:
        return link.near.is_known(link.reference.version)

    def _is_unheard(self, link: PairLink) -> bool:
        """Whether it has yet to say where its model is, or, of one that trains on, that its run has ended."""
        return not (self._is_known(link) and link.peer_finishing)

    def _is_near(self, link: PairLink) -> bool:
        # what one that trains on has not got by now it may never get: this node may leave
        tolerance = self._tolerance if link.peer_finishing else FLUSH_TOLERANCE
        return _apart(link) <= tolerance

    def _is_close(self, partner: PairLink) -> bool:
        if not self.COMPARES:
            return super()._is_close(partner)
        return partner.peer_finishing and self._is_known(partner) and self._is_near(partner)


def _apart(link: PairLink) -> float:
    return link.near.apart(link.anchor_norm)
