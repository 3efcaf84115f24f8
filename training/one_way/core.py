"""Who pushes to whom, when is it said again, and how does a run end? What gossip-push, gossip-pull and push-sum share.

Its partners are partners.py's, and what each end of a link knows copies.py's.

Each answer says how far the two models were apart and whether the receiver has finished. A run ends with rounds of
pushes with a fine codec, until every partner has finished and none is further away than FLUSH_TOLERANCE.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.codecs.vector import Layout, NotFinite
from peerd.training.effects import Apply, Effect, Send, StepReport, Vector
from peerd.training.flush import FLUSH_CODEC, FLUSH_TOLERANCE
from peerd.training.mode import not_finite
from peerd.training.mode_settings import ModeSettings
from peerd.training.model.quiet import Quiet
from peerd.training.one_way.allowance import Allowances
from peerd.training.one_way.answer_time import AnswerTime
from peerd.training.one_way.copies import Copies
from peerd.training.one_way.partners import Partner, Partners
from peerd.training.one_way.public_copy import Incoming, Outgoing
from peerd.training.partnered import PartneredMode
from peerd.training.trigger import SILENCE_MAX_S, WAKE_AFTER_S
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import Connected, Message, Pull, Push, Pushed, PushForgotten

STILL_AFTER = 4  # pushes that came, or were asked for, since the last own exchange: of equals one in 270 gets more
DISTANCE_MAX = 1e100  # what is said of one; its square is a float
TELL_AGAIN_S = 1.0  # of the end of our run, then twice as long each time
TELL_AGAIN_MAX = 5  # where three of ten messages are lost, all six are with one in 1400
ROTATE_AFTER_EXCHANGES = 64  # a snapshot for 3 to 9 % of the bytes; fewer cost unlike shards 4 points (RESULTS.md)
ROUNDS_UNHEARD = 4  # of the flush, to partners that send nothing back: then one such in SILENCE_MAX_S


class OneWay(PartneredMode[Partner]):
    """A core without the one thing that differs: what firing, sending and merging mean."""

    PUSHES = True
    MAY_BE_LOST = (Push, Pushed, PushForgotten, Pull)

    def __init__(
        self, me: NodeId, layout: Layout, rng: random.Random, settings: ModeSettings, values: Callable[[], Vector]
    ) -> None:
        super().__init__(layout, rng, settings, values)
        self._copies = Copies(layout, rng, settings.view, self._scratch)
        self._partners = Partners(me, layout, rng, settings.view, self._current)
        self._answers = AnswerTime()
        self._robust = settings.robust
        self._allowances = Allowances(2 * settings.view)
        self._received = 0  # pushes merged since the last own step, or round of the flush
        self._came = 0  # pushes, or asks for one, since this member last began an exchange itself
        self._to_flush = 0  # partners of this round that have not had their push yet
        self._unheard = 0  # rounds of the flush since a push last came: nobody's model moves ours meanwhile
        self._round_at = float("-inf")
        self._untold: set[NodeId] = set()  # pushers that may not know that our run has ended
        self._told_times, self._tell_at = 0, float("inf")  # told again how often, and when they will be next

    # ---------------------------------------------------------------- what a mode adds

    def _correction(self, incoming: Incoming, push: Push, came: Vector, values: Vector, distance: float) -> Vector:
        """What x changes by, in scratch, as the peer's model `came`, with parameters so far from those of `values`.

        Raises PeerError, having changed nothing.
        """
        raise NotImplementedError

    def _sending(self, peer: NodeId, push: Push, values: Vector) -> tuple[Push, list[Effect]]:
        """A push is about to leave."""
        return push, []

    def _answered(self, peer: NodeId) -> None:
        """The push under way to `peer` was taken."""

    def _may_drop(self, peer: NodeId) -> bool:
        """Whether the link to `peer` may end, to make room for another one or because the peer went."""
        return True

    def _untaken(self, peer: NodeId) -> list[Effect]:
        """The link to `peer` ends; what is under way, if anything, was not taken."""
        return []

    def _merged(self, sender: NodeId, distance: float, now: float) -> None:
        """A push has come."""

    def _other_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """A message of this mode alone."""
        raise PeerError(f"{type(message).__name__} has no meaning in this mode")

    # ---------------------------------------------------------------- events

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """What came until the last own step counts for that one alone."""
        if not report.finishing:
            self._received = self._unheard = 0
        ends = report.finishing and not self._report.finishing
        self._answers.hurries = report.finishing
        self._allowances.walked(report.change, published=report.published)
        if not report.finishing:
            self._allowances.trains(now)
            self._untold.clear()
            if self._report.finishing:
                self._allowances.keep(self._partners.alive)
        elif ends:
            self._will_tell(self._pushers(), now)
        effects = super().on_step(report, now)
        if ends:
            self._allowances.ended(self._norm(self._current()), now)
        return effects

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """One event of one link."""
        self._reclaim()
        match message:
            case Push():
                effects = self._on_push(sender, message, now) + self._flush(now)
            case Pushed():
                self._on_pushed(sender, message, now)
                effects = self._flush(now)
            case PushForgotten():
                effects = self._on_forgotten(sender, message, now) + self._flush(now)
            case Connected():
                if partner := self._partners.held.get(sender):
                    partner.flushed = False  # it may have begun anew, and know nothing of our end
                effects = self._repeat(sender, now) + self._flush(now)
            case _:
                effects = self._other_message(sender, message, now)
        self._rearm(now)
        return effects

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Peers came or went."""
        self._reclaim()
        effects: list[Effect] = []
        came = alive - self._partners.alive
        self._allowances.keep(alive)
        self._answers.keep(alive)
        for peer in sorted(self._copies.outgoing.keys() - alive):  # one may have been answered after it went, too
            if self._may_drop(peer):
                effects += self._drop_outgoing(peer)
        self._partners.on_peers(alive, now)
        for peer in sorted(came & self._copies.outgoing.keys()):
            effects += self._repeat(peer, now)
        effects += self._flush(now)
        self._rearm(now)
        return effects

    # ---------------------------------------------------------------- what there is to see

    @property
    def quiet(self) -> Quiet:
        """Each step is news: what is pushed to one that steps weighs less the more has come since its last."""
        return replace(super().quiet, step=0)

    @property
    def under_way(self) -> bool:
        """Whether a push is."""
        return any(self._copies.is_under_way(peer) for peer in self._partners.alive)

    # ---------------------------------------------------------------- pushes that leave

    def _began(self, partner: Partner, values: Vector, reason: str, now: float) -> None:
        """From now on the partner's change is measured from `values`."""
        self._came = 0
        if not self._report.finishing:
            self._allowances.exchanged()
        self._sample.refresh(partner.anchor, values)
        partner.anchor_norm = norm_of_difference(values[: self._layout.parameters])
        partner.moved = 0.0
        partner.last_exchange = now
        partner.last_reason = reason
        self._policy.began_step = self._report.step

    def _push(
        self, peer: NodeId, values: Vector, now: float, partner: Partner | None, reason: str, *, back: bool = False
    ) -> list[Effect]:
        """Begin one to `peer`; for the sake of `partner`, if it is one of the view that the trigger chose."""
        effects: list[Effect] = []
        outgoing = self._copies.outgoing.get(peer)
        if outgoing is None:
            oldest = self._copies.in_the_way(self._partners.alive)
            if oldest is not None:
                is_cut = not self._may_drop(oldest)
                if is_cut and (oldest in self._partners.alive or not self._is_finite(values)):
                    return []
                self.counts["exchanges_cut"] += is_cut
                effects += self._drop_outgoing(oldest)
                values = self._current()  # what is taken back is in it
            outgoing = self._copies.open(peer, values)
        finishing = self._report.finishing
        held = self._partners.held.get(peer)
        flush = finishing or (held is not None and held.peer_finishing)
        codec = FLUSH_CODEC if flush else self._settings.codec
        try:
            push = outgoing.begin(values, codec, self._gains, finishing=finishing, back=back)
        except NotFinite:
            return effects + not_finite(self.counts)
        if push.seq == 1:
            self.counts["snapshots"] += 1
        if partner is not None:
            self._began(partner, values, reason, now)
        outgoing.under_way, more = self._sending(peer, push, values)
        outgoing.sent_at = now
        return [*effects, Send(peer, outgoing.under_way), *more]

    def _drop_outgoing(self, peer: NodeId) -> list[Effect]:
        effects = self._untaken(peer)
        self._copies.outgoing.pop(peer).drop()
        return effects

    def _on_pushed(self, sender: NodeId, message: Pushed, now: float) -> None:
        if not 0 <= message.distance <= DISTANCE_MAX:
            raise PeerError(f"a distance of {message.distance}")
        outgoing, partner = self._copies.outgoing.get(sender), self._partners.held.get(sender)
        if outgoing is None or outgoing.link != message.link:
            if outgoing is None and partner is not None and message.finishing:
                partner.peer_finishing = True  # it has made room, and ends all the same: our flush waits for that
            return
        if partner is not None:
            partner.peer_finishing = message.finishing
            partner.distance = message.distance
            self._note_progress(partner, partner.distance)
        if outgoing.under_way is not None and outgoing.under_way.seq == message.taken:
            self._completed(outgoing, outgoing.under_way, sender, now)

    def _completed(self, outgoing: Outgoing, push: Push, peer: NodeId, now: float) -> None:
        self._answers.came(peer, now - outgoing.sent_at)
        outgoing.answered()
        self._answered(peer)
        self.counts["exchanges"] += 1
        if partner := self._partners.held.get(peer):
            partner.exchanges += 1
            partner.last_exchange = now
            partner.flushed |= push.finishing and self._report.finishing
        if self.counts["exchanges"] % ROTATE_AFTER_EXCHANGES == 0 and not self._report.finishing:
            self._rotate(now)

    def _on_forgotten(self, sender: NodeId, message: PushForgotten, now: float) -> list[Effect]:
        """The receiver made room, or lost everything: start anew, or with somebody who has room."""
        outgoing, partner = self._copies.outgoing.get(sender), self._partners.held.get(sender)
        if outgoing is None or outgoing.link != message.link:
            return []
        push = outgoing.under_way
        if push is not None and push.seq <= message.seq:
            self._completed(outgoing, push, sender, now)
            push = None
        if push is not None and not self._is_finite(self._current()):
            return not_finite(self.counts)  # nothing can be taken back: it will be said, and forgotten, again
        self.counts["links_forgotten"] += 1
        effects = self._drop_outgoing(sender)
        if push is not None and sender in self._partners.alive:
            reason = partner.last_reason if partner else ""
            return effects + self._push(sender, self._current(), now, partner, reason, back=push.back)
        if partner is not None and not self._report.finishing:  # a flush among ever new strangers would not end
            self._partners.replace(partner, now)
        return effects

    # ---------------------------------------------------------------- pushes that come

    def _on_push(self, sender: NodeId, push: Push, now: float) -> list[Effect]:
        held = self._copies.accept(sender, push, self._values())
        if held is None:
            return []
        if isinstance(held, PushForgotten):
            self.counts["link_mismatches"] += 1
            return [Send(sender, held)]
        if push.seq <= held.version:
            return [self._answer(held, held.distance)]  # said again, not measured anew
        self._untold.discard(sender)  # our answer tells it, and is asked for until it has come
        came = held.decode(push)
        values = self._current()
        parameters = self._layout.parameters
        distance = norm_of_difference(came[:parameters], values[:parameters])
        if not np.isfinite(distance):
            self._scratch.give(came)
            return not_finite(self.counts)  # and no answer: it will be said again
        if self._report.finishing:
            self._allowances.stood(now)
        try:
            correction = self._correction(held, push, came, values, distance)
        except PeerError:
            self._scratch.give(came)
            raise
        held.take(came, distance, now)
        forgotten = self._copies.hold(held)
        self._received += push.finishing or not self._report.finishing  # the mean is of one's own step, or of a flush
        self._unheard = 0
        self.counts["exchanges"] += 1
        self._merged(sender, distance, now)
        self._lend(correction)
        effects: list[Effect] = [self._answer(held, distance), Apply(correction)]
        if forgotten is not None:
            effects.append(Send(forgotten.peer, PushForgotten(forgotten.link, forgotten.version)))
            if self._report.finishing:  # an answer with the word of our end is not said again any more
                self._will_tell([forgotten.peer], now)
        if partner := self._partners.held.get(sender):
            partner.peer_finishing = push.finishing
            if push.finishing:
                partner.distance = distance
        if self._owes(sender, push, distance, values):
            effects += self._push_back(sender, now)
        return effects

    def _owes(self, sender: NodeId, push: Push, distance: float, values: Vector) -> bool:
        """Whether a push is answered by another one. In a flush its sender may be no partner of ours, and its push
        alone may move us little (push-sum: the sender may have hardly any weight left)."""
        flushes = self._report.finishing and push.finishing and sender not in self._partners.held
        return flushes and distance > FLUSH_TOLERANCE * norm_of_difference(values)

    def _is_still(self) -> bool:
        """Whether this member makes no step, or hardly any, while others do."""
        return self._report.finishing or self._came > STILL_AFTER

    def _push_back(self, sender: NodeId, now: float) -> list[Effect]:
        if self._copies.is_under_way(sender):
            return []
        if self._report.finishing:  # a round of its own
            self._to_flush, self._received = 1, 0
        return self._push(sender, self._current(), now, None, "", back=True)

    def _answer(self, incoming: Incoming, distance: float | None = None) -> Send:
        if distance is None:
            parameters = self._layout.parameters
            distance = norm_of_difference(incoming.known[:parameters], self._current()[:parameters])
        if not distance <= DISTANCE_MAX:  # or NaN: of a model that is not finite (any more)
            distance = DISTANCE_MAX
        return Send(incoming.peer, Pushed(incoming.link, incoming.version, distance, self._report.finishing))

    def _norm(self, values: Vector) -> float:
        return norm_of_difference(values[: self._layout.parameters])

    # ---------------------------------------------------------------- partners

    def _held(self) -> list[Partner]:
        return self._partners.all()

    def _idle(self) -> list[Partner]:
        return [
            partner
            for partner in self._partners.all()
            if partner.asked_at is None and not self._copies.is_under_way(partner.peer)
        ]

    def _rotate(self, now: float) -> None:
        """Change the most used partner for a stranger."""
        idle = self._idle()
        if idle:
            self.counts["rotations"] += 1
            self._partners.replace(max(idle, key=lambda partner: (partner.exchanges, partner.peer)), now)

    # ---------------------------------------------------------------- repeats

    def _repeat(self, peer: NodeId, now: float) -> list[Effect]:
        """Say again what may have been lost with a connection."""
        effects: list[Effect] = []
        outgoing = self._copies.outgoing.get(peer)
        if outgoing is not None and outgoing.under_way is not None:
            outgoing.sent_at = now
            effects.append(Send(peer, outgoing.under_way))
        return effects + self._told(peer)

    def _told(self, peer: NodeId) -> list[Effect]:
        """What one who pushes to us may have missed: the answer to its last push, and whether our run has ended."""
        if (incoming := self._copies.incoming.get(peer)) is not None:
            return [self._answer(incoming)]
        ended = self._copies.ended.get(peer)
        if ended is None or not self._report.finishing:
            return []
        link, taken = ended
        return [Send(peer, Pushed(link, taken, 0.0, True))]

    def _waits(self) -> dict[NodeId, float]:
        """Who owes an answer, since when."""
        asked = {peer: one.asked_at for peer, one in self._partners.held.items() if one.asked_at is not None}
        sent = {peer: one.sent_at for peer, one in self._copies.outgoing.items() if one.under_way is not None}
        return asked | {peer: sent_at for peer, sent_at in sent.items() if peer in self._partners.alive}

    def _say_again(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for peer, since in sorted(self._waits().items()):
            if now - since >= self._answers.wait_s(peer):
                self._answers.repeated(peer)
                self.counts["repeats"] += 1
                effects += self._repeat(peer, now)
        return effects + self._tell_again(now) + self._flush(now)

    def _will_tell(self, peers: Iterable[NodeId], now: float) -> None:
        self._untold.update(peers)
        self._told_times, self._tell_at = 0, now + TELL_AGAIN_S

    def _tell_again(self, now: float) -> list[Effect]:
        """A partner of ours that has not heard of our end waits for it, and sends nothing that we would answer."""
        if not self._untold or now < self._tell_at:
            return []
        told = [said for peer in self._pushers() if peer in self._untold for said in self._told(peer)]
        self._told_times += 1
        self._tell_at = now + TELL_AGAIN_S * 2.0**self._told_times
        if self._told_times == TELL_AGAIN_MAX:
            self._untold.clear()
        return told

    def _say_again_at(self, now: float) -> float:
        due = [since + self._answers.wait_s(peer) for peer, since in self._waits().items()]
        round_waits = self._unheard >= ROUNDS_UNHEARD and not self._round_under_way() and bool(self._due())
        if self._report.finishing and round_waits:
            due.append(self._round_at + SILENCE_MAX_S)
        if self._untold:
            due.append(self._tell_at)
        return min(due, default=float("inf")) + (WAKE_AFTER_S - SILENCE_MAX_S)

    # ---------------------------------------------------------------- the final flush

    def _is_finite(self, values: Vector) -> bool:
        return bool(np.isfinite(norm_of_difference(values)))

    def _end_run(self, now: float) -> list[Effect]:
        return [said for peer in self._pushers() for said in self._told(peer)]

    def _pushers(self) -> list[NodeId]:
        return [peer for peer in self._copies.pushers() if peer in self._partners.alive]

    def _flush(self, now: float) -> list[Effect]:
        """At a run's end: push to whoever does not yet agree; say when all have what we held, when all agree."""
        if not self._report.finishing:
            return []
        effects: list[Effect] = []
        due = self._due()
        if self._unheard >= ROUNDS_UNHEARD and now - self._round_at < SILENCE_MAX_S:
            due = [partner for partner in due if not partner.flushed]
        if due and not self._round_under_way():  # to all at once: a round
            self._received = 0
            for index, partner in enumerate(due):
                self._to_flush = len(due) - index
                effects += self._push(partner.peer, self._current(), now, partner, "finishing")
                self.counts["trigger_finishing"] += 1
            if effects:  # else there is no room before some answers have come
                self._unheard += 1
                self._round_at = now
        under_way = self._round_under_way()
        return effects + self._proceed(self._partners.all(), expects_more=False, under_way=under_way)

    def _round_under_way(self) -> bool:
        return any(self._copies.is_under_way(peer) for peer in self._partners.held)

    def _due(self) -> list[Partner]:
        """A partner that trains on gets our model once; it tells us when it ends too."""
        return [
            partner
            for partner in self._partners.all()
            if not partner.flushed or (partner.peer_finishing and not self._agrees(partner))
        ]
