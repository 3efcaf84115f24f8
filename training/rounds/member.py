"""How do members agree that a round took place? One member's side of the round protocol; leader.py is the other.

A round is a numbered roster whose contributions are summed. Each member goes through the phases of `TRANSITIONS`; every
message names round and attempt.

A member that missed a commit because it was away, a newcomer with a snapshot, and both sides of a healed partition hold
models that were agreed in different rounds. They need no state of the others: a round whose members do not all hold the
same agreed model sums whole models exactly (RoundBegin.whole), and after it they do. Members that have all just begun,
from models that are the same to the bit, hold one already. A round's number is one more than any
that a member has applied. A member whose trainer does not come to the round within the leader's patience is left out,
and its contribution enters the next; so is one that lives but cannot be heard.

Every order is repeated until the report that follows from it comes, every report on a timer while something is due.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from peerd.training.batch_sizes import Work
from peerd.training.codecs.vector import Layout, NotFinite
from peerd.training.effects import Effect, Log, Publish, Send, Vector
from peerd.training.mode_settings import GRADIENTS, ModeSettings
from peerd.training.rounds.attempt import WINDOW, Attempt, Pace
from peerd.training.rounds.leader import PATIENCE_SHARE, Leader, waits_s
from peerd.training.rounds.lengths import Lengths
from peerd.training.rounds.passing import ALONE_PATIENCES, Passing, Patience
from peerd.training.rounds.words import UNREACHED_MAX, Hearer, check_limit
from peerd.training.scratch import Lent
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import (
    Connected,
    LeaderPassed,
    Message,
    PiecesTaken,
    RoundBegin,
    RoundCommit,
    RoundPhase,
    RoundPieces,
    RoundReport,
    RoundsWithout,
)

ASIDE_TOLD_S = 60.0  # a leader may lie, and a log is not to be filled
REPEAT_S = 2.0
EARLY_MAX = 64  # messages of an attempt whose beginning has not been heard of: the windows of 16 neighbours at least
EARLY_OF_ONE = 2 * WINDOW  # pieces of one member: its window, and the same of another attempt

TRANSITIONS: dict[RoundPhase, dict[RoundPhase, str]] = {
    RoundPhase.IDLE: {
        RoundPhase.READY: "the mode has a contribution, or the run has ended: RoundReport to the leader",
    },
    RoundPhase.READY: {
        RoundPhase.RUNNING: "RoundBegin: the collective runs, pieces in a window to each peer (attempt.py)",
    },
    RoundPhase.RUNNING: {
        RoundPhase.HELD: "the sum is here: RoundReport",
        RoundPhase.RUNNING: "RoundBegin of a later attempt: a member died",
        RoundPhase.READY: "another leader, pieces that cannot be, a run's end in a gradient: the attempt is over",
        RoundPhase.IDLE: "a value was not finite: the contribution is withdrawn",
    },
    RoundPhase.HELD: {
        RoundPhase.IDLE: "RoundCommit: the sum is handed to the mode, once",
        RoundPhase.READY: "RoundCommit to one whose run has ended: it is in every round that follows",
        RoundPhase.RUNNING: "RoundBegin of a later attempt: a member died before it held the sum",
    },
}
"""What a phase may be followed by, and why."""


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """A round took place: the mean of its contributions (see `Attempt.mean`), and what our encoding lost of them (None:
    nothing)."""

    begin: RoundBegin
    where: slice  # of the model: the values that were summed
    mean: Vector
    lost: Vector | None
    limit: float  # the longest that a mean of gradients may be; 0: of any length; NO_MEAN


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """This member's contribution was of no use: a value on its way was not finite."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a member says of its gradient before a round."""

    step: int = 0  # of its trainer
    weight: float = 0.0  # 0: it counts nothing
    nonfinite: bool = False  # it is not finite
    copied: bool = False  # there is a copy of the model as it stands


Outcome = Effect | Committed | Withdrawn

WHOLE = (0, sys.maxsize)
"""All values of a contribution, from the first to before the last."""


class Rounds:
    """One member's part in all rounds."""

    def __init__(
        self,
        me: NodeId,
        layout: Layout,
        rng: random.Random,
        settings: ModeSettings,
        contribute: Callable[[RoundBegin, slice], Vector],
        counts: Counter[str],
        *,
        differences: bool,
        fragments: int,
    ) -> None:
        """`contribute(begin, where)` makes this member's summand, which is then the attempt's, or lends it to that read
        only; only after `reach`. Of gradients it need only hold what `reach` and `come` have said is there."""
        self.phase = RoundPhase.IDLE
        self.round = 0  # the last one applied
        self.finished = False
        self.given = False  # a round has had what this member's finished run had to give
        self.settled = False  # and the final round has been applied
        self._is_early = False  # what is contributed to the next round
        self._lengths: deque[Lengths] = deque([()], maxlen=4)  # of our contribution, the last last
        self._blames: NodeId = ""
        self._leader_spoils = False  # what it has sent for an attempt cannot be
        self._unreached: set[NodeId] = set()  # to whom no connection can be made
        self._said_cut_off = False  # that it is to the leader that none can be
        self._left_out_life: int | None = None  # the life of which a leader has said so
        self._set_aside_at = float("-inf")  # when one last said that it is for a while
        self.concentration = 0.0  # of our contribution's own progress
        self.work = Work()  # behind our contribution
        self._me = me
        self._layout = layout
        self._rng = rng
        self._settings = settings
        self._contribute = contribute
        self._counts = counts
        counts["rounds"] += 0  # who reads them sees from the start what this mode counts in
        self._differences = differences
        self._gradients = settings.exchange == GRADIENTS
        of_gradients = layout.gradients
        self._fragments = [(slice(0, of_gradients.total), of_gradients)] if self._gradients else layout.cut(fragments)
        self._offer = Offer()
        self._there = WHOLE  # of our contribution
        self._is_void = False  # what an attempt has of it is another one's
        self._limit = 0.0  # of the mean of the last round
        self._room = Lent()  # for the sum of what is lent
        self._awaited: RoundBegin | None = None  # an order to give our model, until there is a copy as it stands
        self.order: RoundBegin | None = None  # of the last attempt begun
        self._pace = Pace()
        self._life = rng.getrandbits(62)
        self._alive: frozenset[NodeId] = frozenset()
        self._start = b""
        self._leads = me
        self._leader = self._leadership()
        self._passing = Passing(me)
        self._patience = Patience()
        self._asked_by: tuple[NodeId, int, float] = "", 0, float("-inf")  # the leader that was answered last, and when
        self._agreed = 0  # the attempt of the last applied round
        self._seen = 0  # the highest attempt begun
        self._attempt: Attempt | None = None
        self._gives = False  # this attempt has the model of a finished run
        self._early: list[tuple[NodeId, RoundPieces]] = []
        self._said_at = self._reached_at = 0.0
        self._round_since = 0.0  # when our contribution was there, or an attempt began after one that was in vain
        self._committed_at: float | None = None
        self._begun_at: float | None = None  # when our RoundBegin went out

    # ---------------------------------------------------------------- from the mode

    def reach(
        self, now: float, offer: Offer | None = None, there: tuple[int, int] = WHOLE, *, early: bool = False
    ) -> list[Outcome]:
        """There is a contribution to the next round, or `there` of it.

        `early`: nobody is to wait for it, nor for a round that all have come to so.
        """
        assert self.phase == RoundPhase.IDLE
        self._offer, self._there, self._is_early = offer or self._offer, there, early
        self._enter(RoundPhase.READY)
        self._reached_at = self._round_since = now
        self._patience.comes(now)
        return self.say(now)

    def made_steps(self, now: float) -> list[Outcome]:
        """This member had come early, and its contribution is one of its own steps now."""
        assert self.came_early
        self._is_early = False
        self._reached_at = now
        return self.say(now)

    @property
    def came_early(self) -> bool:
        """Whether this member is at the next round without having made its steps."""
        return self._is_early and self.phase == RoundPhase.READY and not self.finished

    def come(self, there: tuple[int, int], now: float, offer: Offer) -> list[Outcome]:
        """More of the contribution is there."""
        self._there, self._offer = there, offer
        if self._attempt is None or not self._takes_ours:
            return []
        try:
            outcomes: list[Outcome] = [*self._attempt.come(there, now)]
        except NotFinite:
            return self._withdraw(now)
        outcomes += self._advance(now)
        return outcomes + (self.say(now) if self._leads == self._me and self.phase == RoundPhase.HELD else [])

    def void(self, now: float, offer: Offer, there: tuple[int, int]) -> list[Outcome]:
        """The contribution is another one. An attempt that has begun goes on, so that nobody waits, to no mean."""
        self._is_void = self._takes_ours
        return [*self.come(there, now, offer), *self.say(now)]

    @property
    def _takes_ours(self) -> bool:
        """Whether there is an attempt to which the contribution goes: one of whole models has a copy."""
        return self._attempt is not None and not self._attempt.begin.whole

    def finish(self, finished: bool, now: float, offer: Offer | None = None) -> list[Outcome]:
        """The trainer has ended, or another has come. Who has finished is in every round, so nobody waits for it.

        `offer` is what it has at its end, where rounds are of gradients."""
        if offer is not None:
            self._offer = offer
        if finished and self._there != WHOLE:  # the rest does not come
            self._there = WHOLE
            if self.phase == RoundPhase.RUNNING and self._takes_ours:
                self._give_up()
        self.finished, self.given, self.settled, self._gives = finished, False, False, False
        self._patience.ended()
        if finished and self.phase == RoundPhase.IDLE:
            self._enter(RoundPhase.READY)
            self._reached_at = self._round_since = now
        if self.phase != RoundPhase.IDLE:
            self._patience.comes(now)
        return self.say(now)

    def succeeds(self, last: Rounds) -> None:
        """What the rounds of this member's last trainer knew of leaders still holds."""
        self._passing = last._passing

    def go_on_from(self, last: Rounds) -> None:
        """The rounds of another plan, from whose last model all go on."""
        self.succeeds(last)
        self.round, self._agreed, self._seen, self._pace = last.round, last._agreed, last._seen, last._pace

    def copied(self, now: float) -> list[Outcome]:
        """There is a copy of the model as it stands, which Publish has asked for."""
        self._offer = replace(self._offer, copied=True)
        order, self._awaited = self._awaited, None
        if order is None:
            return []
        outcomes = self._begin(order, now)
        return outcomes + (self.say(now) if self._leads == self._me else [])

    def starts_from(self, start: bytes) -> None:
        """The digest of the model that this member's progress counts from until it has been in a round."""
        self._start = start

    def measured(self, lengths: Lengths) -> None:
        """How long the contribution is; reports say it."""
        self._lengths.append(lengths)

    def say(self, now: float) -> list[Outcome]:
        """Report to the leader; when that is this member, decide."""
        self._said_at = now
        if self._leads != self._me:
            return [Send(self._leads, self._report(now))]
        outcomes: list[Outcome] = []
        while True:
            self._leader.heard(self._me, self._report(now), now)
            before, aside = set(self._leader.left_out), self._leader.set_aside(self._pace, now)
            orders = self._leader.decide(self._alive | {self._me}, self._pace, now)
            outcomes += self._left_out(set(self._leader.left_out) - before)
            outcomes += self._set_aside(self._leader.set_aside(self._pace, now) - aside)
            outcomes += [Send(to, order) for to, order in orders if to != self._me]
            own = [order for to, order in orders if to == self._me]
            if any(isinstance(order, RoundBegin) for _, order in orders):
                self._begun_at = now
            for order in own:
                outcomes += self._obey(order, now)
            if any(isinstance(outcome, Committed) for outcome in outcomes):
                self._said_at = float("-inf")  # what comes next may only be decided once the mode has applied this
                return outcomes
            if not own:
                return outcomes

    def _left_out(self, members: set[NodeId]) -> list[Outcome]:
        self._counts["members_left_out"] += len(members)
        why = "what it contributes is far longer than what others do, or cannot be summed; restart it to have it back"
        return [Log(f"rounds go on without member {member}: {why}") for member in sorted(members)]

    def _set_aside(self, members: frozenset[NodeId]) -> list[Outcome]:
        self._counts["members_set_aside"] += len(members)
        why = "no round with it has come to its end; it is tried again"
        outcomes: list[Outcome] = []
        for member in sorted(members):
            outcomes.append(Log(f"rounds go on without member {member} for a while: {why}"))
            if member != self._me:
                outcomes.append(Send(member, RoundsWithout(self._leader.life(member), again=True)))
        return outcomes

    def deadline(self) -> float:
        """When to call `on_timer`."""
        under_way = self.phase in (RoundPhase.RUNNING, RoundPhase.HELD)
        due = under_way or (self.phase == RoundPhase.READY and not self.settled) or self._said_at == float("-inf")
        waits = self._leads == self._me and self._leader.waits
        return min(self._passing.due_at, self._said_at + REPEAT_S if due or waits else float("inf"))

    # ---------------------------------------------------------------- events

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Outcome]:
        """Members came or went."""
        came, gone, self._alive = alive - self._alive, self._alive - alive, alive
        outcomes: list[Outcome] = []
        for peer in gone:
            self._leader.forget(peer)
        for peer in sorted(came):
            outcomes += self._repeat(peer, now)
        self._passing.forget(gone)
        self._unreached -= gone
        outcomes += self._passed(self._passing.counts, came)
        limit_s = ALONE_PATIENCES * waits_s(self._pace, self._settings)
        outcomes += self._passed(self._passing.join(alive, limit_s, now), alive)
        asked = self._follow(now) or came
        if self._leads == self._me:
            outcomes += [Send(peer, self._report(now)) for peer in sorted(asked)]
        return outcomes + self.say(now)

    def _follow(self, now: float) -> frozenset[NodeId]:
        """Who leads now? If it has become this member, whom it must ask where they are."""
        leads = self._passing.leader(self._alive)
        if leads == self._leads:
            return frozenset()
        self._leads, self._awaited = leads, None
        self._leader_spoils = self._said_cut_off = False
        if self.phase == RoundPhase.RUNNING:
            self._give_up()
        self._leader = self._leadership()
        self._patience.begins_anew(now)
        return self._alive if leads == self._me else frozenset()

    def _pass_by(self, now: float) -> list[Outcome]:
        """Say whom this member has waited for in vain, and follow whom the others do."""
        told: list[NodeId] = []
        limit_s = waits_s(self._pace, self._settings)
        if self.finished:  # the others come to a round by their steps, as many as lie between two
            limit_s = max(limit_s, PATIENCE_SHARE * self._pace.usual_period_s)
        waits = self._leads != self._me and 1 + len(self._alive) >= self._settings.min_peers
        waits &= self._there == WHOLE  # else the rest of ours may be what is awaited
        if not waits:
            self._patience.begins_anew(now)
        elif self._is_cut_off():
            self._said_cut_off = True
            self._passing.complain(self._leads, self._alive, unreached=True)
            told += [member for member in (self._leads, self._me) if member in self._passing.counts]
        elif self._leader_spoils or self._patience.is_over(limit_s, now, finished=self.finished):
            self._leader_spoils = False
            self._passing.complain(self._leads, self._alive)
            told += [self._leads, self._me]
        told += self._passing.join(self._alive, ALONE_PATIENCES * limit_s, now)
        if not told:
            return self._changed_leader(now)
        return [*self._passed(told, self._alive), *self._changed_leader(now)]

    def _is_cut_off(self) -> bool:
        """It can make no connection to its leader, and has not complained of it; but to others it can."""
        waits = self.phase != RoundPhase.IDLE and not self.settled and not self._said_cut_off
        return waits and self._leads in self._unreached and not self._alive <= self._unreached

    def _on_passed(self, sender: NodeId, word: LeaderPassed, now: float) -> list[Outcome]:
        """Heed it, or say that this member has no such count: it may have had one in its last life."""
        if not self._passing.heard(sender, word.leader, word.times, unreached=word.unreached):
            return []
        outcomes = self._pass_by(now)
        ours = self._passing.counts.get(word.leader, 0)
        answer = LeaderPassed(word.leader, ours, word.leader in self._passing.unreached)
        return outcomes if ours >= word.times else [*outcomes, Send(sender, answer)]

    def _changed_leader(self, now: float) -> list[Outcome]:
        before, asked = self._leads, self._follow(now)
        if self._leads == before:
            return []
        self._counts["leaders_passed_by"] += 1
        why = f"it kept members waiting in vain, or one cannot reach it; {self._leads} leads them"
        outcomes: list[Outcome] = [Log(f"rounds go on without member {before} as their leader: {why}")]
        return [*outcomes, *(Send(peer, self._report(now)) for peer in sorted(asked)), *self.say(now)]

    def _passed(self, leaders: Iterable[NodeId], to: frozenset[NodeId]) -> list[Outcome]:
        passing = self._passing
        words = [
            LeaderPassed(leader, passing.counts[leader], leader in passing.unreached) for leader in sorted(leaders)
        ]
        return [Send(peer, word) for word in words for peer in sorted(to)]

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Outcome]:
        """A peer's message. Raises PeerError."""
        match message:
            case RoundReport():
                return self._on_report(sender, message, now)
            case RoundBegin() | RoundCommit():
                return self._obey(message, now) if sender == self._leads else []
            case RoundPieces():
                before = self.phase
                outcomes = self._on_pieces(sender, message, now)
                if self._leads == self._me and self.phase != before:
                    outcomes += self.say(now)
                return outcomes
            case PiecesTaken():
                if self._attempt is None or message.attempt != self._attempt.begin.attempt:
                    return []
                return list(self._attempt.on_taken(sender, message, now))
            case LeaderPassed():
                return self._on_passed(sender, message, now)
            case RoundsWithout():
                return self._without(message, now) if sender == self._leads else []
            case Connected():
                self._leader.untold(sender)
                self._unreached.discard(sender)
                self._said_cut_off &= sender != self._leads
                outcomes = [*self._passed(self._passing.counts, frozenset({sender})), *self._repeat(sender, now)]
                if self._leads == self._me:
                    return [*outcomes, Send(sender, self._report(now)), *self.say(now)]
                return outcomes + (self.say(now) if sender == self._leads else [])
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning in a mode of rounds")

    def on_unreached(self, peer: NodeId, now: float) -> list[Outcome]:
        """No connection to this peer can be made."""
        if peer in self._unreached or peer not in self._alive:
            return []
        self._unreached.add(peer)
        return [*self._pass_by(now), *self.say(now)]

    def on_timer(self, now: float) -> list[Outcome]:
        """Say again what has had no answer."""
        if now < self.deadline():
            return []
        overdue = self._attempt.repeat_overdue(now) if self._attempt is not None else []
        return [*overdue, *self._pass_by(now), *self.say(now)]

    # ---------------------------------------------------------------- one round

    def _on_report(self, sender: NodeId, report: RoundReport, now: float) -> list[Outcome]:
        if self._leads != self._me:
            return self._answer_leader(sender, report, now)
        self._hearer().check_report(report)
        if self._begun_at is not None and report.phase == RoundPhase.RUNNING:
            self._pace.answered(now - self._begun_at)  # the first answer to a RoundBegin
            self._begun_at = None
        self._leader.heard(sender, report, now)
        outcomes = self.say(now)
        is_left_out = self._leader.left_out.get(sender) == report.life
        return [*outcomes, Send(sender, RoundsWithout(report.life, again=False))] if is_left_out else outcomes

    def _without(self, word: RoundsWithout, now: float) -> list[Outcome]:
        if word.life != self._life or word.life == self._left_out_life:
            return []
        if word.again:
            if now - self._set_aside_at < ASIDE_TOLD_S:
                return []
            self._set_aside_at = now
            why = "no round with it has come to its end; it is tried again. All members must be able to dial each other"
            return [Log(f"rounds go on without this node for a while: {why}")]
        self._left_out_life = word.life
        self._counts["left_out_of_rounds"] += 1
        why = "what it contributed is far longer than what the others did, or cannot be summed"
        cure = "look at its learning rate, loss and data, and restart it to have it back"
        return [Log(f"rounds go on without this node: {why}; {cure}")]

    def _answer_leader(self, sender: NodeId, report: RoundReport, now: float) -> list[Outcome]:
        """Where this member is, as it was asked: by one life once in a while.

        Two that take each other for the leader, as each knows of other complaints, would answer each other for ever.
        """
        asked, life, at = self._asked_by
        if sender != self._leads or (asked == sender and life == report.life and now - at < REPEAT_S):
            return []
        self._asked_by = sender, report.life, now
        return [Send(sender, self._report(now))]

    def _obey(self, order: RoundBegin | RoundCommit, now: float) -> list[Outcome]:
        if isinstance(order, RoundBegin):
            return self._begin(order, now)
        if self.phase != RoundPhase.HELD or self._attempt is None or self._attempt.begin.attempt != order.attempt:
            return []
        check_limit(order.limit)
        attempt, self._attempt = self._attempt, None
        self._limit = order.limit
        self.round, self._agreed = attempt.begin.round, attempt.begin.attempt
        self.given, self.settled = self._gives, self._gives and attempt.begin.final
        self._enter(RoundPhase.READY if self.finished else RoundPhase.IDLE)
        self._counts["rounds"] += 1
        self._pace.round_took(now - self._round_since)
        self._leader_spoils = False
        if self._committed_at is not None:
            self._pace.committed_after(now - self._committed_at)
        self._committed_at = now
        self._reached_at = self._round_since = now
        self._patience.ended()
        if self.finished and not self.settled:
            self._patience.comes(now)
        where, _ = self.summed(attempt.begin)
        return [Committed(attempt.begin, where, attempt.mean(), attempt.lost, order.limit), *self._answer(now)]

    def _begin(self, begin: RoundBegin, now: float) -> list[Outcome]:
        meant = (self._me, self._life) in zip(begin.roster, begin.lives, strict=False)
        if self._me in begin.roster and len(begin.lives) == len(begin.roster) and not meant:  # of an earlier life
            return self._answer(now)
        if self._leads != self._me:  # our own leader goes on from what it has heard, which was checked
            self._hearer().check_order(begin, self._settings, differences=self._differences)
        meant &= begin.whole or not (self._gradients and self.finished)  # then there is no gradient to give
        meant &= begin.whole or self._agreed > 0 or self._start != b""  # else what would a difference be from?
        fits = meant and begin.attempt > self._seen and begin.round > self.round
        if not fits or len(set(begin.roster)) < len(begin.roster) or self.phase == RoundPhase.IDLE:
            return self._answer(now)
        if begin.source == self._me and len(begin.roster) > 1 and not self._offer.copied:
            self._awaited = begin
            return [Publish()]  # pieces that come meanwhile are kept
        self._awaited, self.order = None, begin
        self._seen, self._is_void = begin.attempt, False
        if self.phase != RoundPhase.READY:
            self._round_since = now
        self._gives = self.finished
        self._patience.ordered()
        self._enter(RoundPhase.RUNNING)
        self._counts["attempts"] += 1
        early, self._early = self._early, []
        where, layout = self.summed(begin)
        try:
            summand = self._contribute(begin, where)
            room = None if summand.flags.writeable else self._room.take(summand)
            self._attempt = Attempt(begin, self._me, summand, layout, self._pace, room)
            there = WHOLE if begin.whole else self._there
            outcomes: list[Outcome] = [*self._answer(now), *self._attempt.come(there, now)]
        except NotFinite:
            return self._withdraw(now)
        outcomes += self._advance(now)
        for sender, pieces in early:
            if pieces.attempt >= begin.attempt:
                with suppress(PeerError):  # the one to blame is not the leader, whom we hear now; our report names it
                    outcomes += self._on_pieces(sender, pieces, now)
        return outcomes

    def summed(self, begin: RoundBegin) -> tuple[slice, Layout]:
        """The values that a round is of: the model, or the fragment whose turn it is by the round's number."""
        if begin.whole or begin.final:
            return slice(0, self._layout.total), self._layout
        return self._fragments[begin.round % len(self._fragments)]

    def _on_pieces(self, sender: NodeId, pieces: RoundPieces, now: float) -> list[Outcome]:
        """Pieces that are not confirmed are sent again, so those that come early may be dropped."""
        if not 0 < len(pieces.seqs) <= WINDOW or len(pieces.chunks) != len(pieces.seqs):
            raise PeerError(f"{len(pieces.seqs)} pieces at once, in {len(pieces.chunks)} chunks")
        if pieces.attempt > self._seen:
            held = sum(len(early.seqs) for peer, early in self._early if peer == sender)
            if len(self._early) < EARLY_MAX and held + len(pieces.seqs) <= EARLY_OF_ONE:
                self._early.append((sender, pieces))
            return []
        if self._attempt is None or pieces.attempt != self._attempt.begin.attempt:
            return [Send(sender, PiecesTaken(pieces.round, pieces.attempt, pieces.seqs))]
        try:
            outcomes: list[Outcome] = [*self._attempt.on_pieces(sender, pieces, now)]
        except NotFinite:
            return self._withdraw(now)
        except PeerError:
            if self.phase == RoundPhase.RUNNING and sender in self._attempt.begin.roster:
                self._blames = sender  # an honest one would have blamed whom it had this from
                self._leader_spoils = sender == self._leads
                self._give_up()
            raise
        return [*outcomes, *self._advance(now)]

    def _advance(self, now: float) -> list[Outcome]:
        if self._attempt is None or not self._attempt.done or self.phase != RoundPhase.RUNNING:
            return []
        self._enter(RoundPhase.HELD)
        return self._answer(now)

    def _answer(self, now: float) -> list[Outcome]:
        """Report; the leader's own loop in `say` sees where it is."""
        return self.say(now) if self._leads != self._me else []

    def _withdraw(self, now: float) -> list[Outcome]:
        self._give_up(RoundPhase.IDLE)
        return [Withdrawn(), *self._answer(now)]

    def _give_up(self, phase: RoundPhase = RoundPhase.READY) -> None:
        self._attempt = None
        self._enter(phase)

    def _enter(self, phase: RoundPhase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase.name} -> {phase.name}"
        self.phase = phase

    def _repeat(self, peer: NodeId, now: float) -> list[Outcome]:
        return [*self._attempt.repeat(peer, now)] if self._attempt is not None else []

    def _hearer(self) -> Hearer:
        return Hearer(self._me, self.round, self._seen, self._lengths)

    def _leadership(self) -> Leader:
        size_bytes = 4 * self._fragments[0][1].total  # of most rounds
        every = self.order.every if self.order is not None else 0
        return Leader(self._me, self._rng, self._settings, size_bytes, differences=self._differences, every=every)

    def _report(self, now: float) -> RoundReport:
        return RoundReport(
            self._life, self.phase, self.round, self._agreed, self._seen,
            self._attempt.taken if self._attempt is not None else 0, self.finished, self.given, self.settled,
            self._blames, self._lengths[-1] if self.phase != RoundPhase.IDLE else (),
            now - self._reached_at if self.phase != RoundPhase.IDLE else 0.0,
            self._offer.step, self._offer.weight, self._offer.nonfinite, b"" if self._agreed else self._start,
            self._limit, self.came_early, self._is_void, self.concentration, self.work.samples, self.work.steps,
            tuple(sorted(self._unreached)[:UNREACHED_MAX]),
        )  # fmt: skip
