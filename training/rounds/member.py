"""How do members agree that a round took place? One member's side of the round protocol; leader.py is the other.

A round is a numbered roster whose contributions are summed. Seen from one member (every message names round, attempt):

    IDLE    -> READY    the mode has a contribution: RoundReport to the leader
    READY   -> RUNNING  RoundBegin: the collective runs, pieces in a window to each peer (attempt.py)
    RUNNING -> HELD     the sum is here: RoundReport
    HELD    -> IDLE     RoundCommit: the sum is handed to the mode, once
    RUNNING -> READY    another leader, whom a death or a newcomer made one: the attempt is over, the contribution stays
    HELD    -> RUNNING  RoundBegin of a later attempt: a member died before it held the sum

A member that missed a commit because it was away, a newcomer with a snapshot, and both sides of a healed partition hold
models that were agreed in different rounds. They need no state of the others: a round whose members do not all hold the
same agreed model sums whole models exactly (RoundBegin.whole), and after it they do. Its number is one more than any
that a member has applied. A member whose trainer does not come to the round within the leader's patience is left out,
and its contribution enters the next. One that lives but cannot be heard stops all rounds until it is heard or declared
failed: a leader that knows less than all might number a round again.

Every order is repeated until the report that follows from it comes, every report on a timer while something is due.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from peerd.training.codecs import CODECS
from peerd.training.codecs.vector import Layout, NotFinite
from peerd.training.counts import within_step
from peerd.training.effects import Effect, Send, Vector
from peerd.training.mode import ModeSettings
from peerd.training.rounds.attempt import EXACT_CODEC, WINDOW, Attempt, Pace
from peerd.training.rounds.leader import Leader
from peerd.training.rounds.topology import parse_topology
from peerd.transport.errors import PeerError, UserError
from peerd.transport.ids import NodeId
from peerd.transport.messages import (
    Connected,
    Message,
    PiecesTaken,
    RoundBegin,
    RoundCommit,
    RoundPhase,
    RoundPieces,
    RoundReport,
)

REPEAT_S = 2.0
EARLY_MAX = 64  # messages of an attempt whose beginning has not been heard of: the windows of 16 neighbours at least
EARLY_OF_ONE = 2 * WINDOW  # pieces of one member: its window, and the same of another attempt


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """A round took place: the mean of its contributions, and what our encoding lost of them (None: nothing)."""

    begin: RoundBegin
    where: slice  # of the model: the values that were summed
    mean: Vector
    lost: Vector | None


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """This member's contribution was of no use: a value on its way was not finite."""


Outcome = Effect | Committed | Withdrawn


class Rounds:
    """One member's part in all rounds."""

    def __init__(
        self,
        me: NodeId,
        layout: Layout,
        rng: random.Random,
        settings: ModeSettings,
        contribute: Callable[[bool, slice], Vector],
        counts: Counter[str],
        *,
        differences: bool,
        fragments: int,
    ) -> None:
        """`contribute(whole, where)` makes this member's summand, which is then the attempt's; only after `reach`."""
        self.phase = RoundPhase.IDLE
        self.round = 0  # the last one applied
        self.finished = False
        self.given = False  # a round has had what this member's finished run had to give
        self.settled = False  # and the final round has been applied
        self._me = me
        self._layout = layout
        self._rng = rng
        self._settings = settings
        self._contribute = contribute
        self._counts = counts
        self._differences = differences
        self._fragments = layout.cut(fragments)
        self._pace = Pace()
        self._life = rng.getrandbits(62)
        self._alive: frozenset[NodeId] = frozenset()
        self._leads = me
        self._leader = self._leadership()
        self._agreed = 0  # the attempt of the last applied round
        self._seen = 0  # the highest attempt begun
        self._attempt: Attempt | None = None
        self._gives = False  # this attempt has the model of a finished run
        self._early: list[tuple[NodeId, RoundPieces]] = []
        self._said_at = self._reached_at = 0.0
        self._committed_at: float | None = None
        self._begun_at: float | None = None  # when our RoundBegins went out

    # ---------------------------------------------------------------- from the mode

    def reach(self, now: float) -> list[Outcome]:
        """There is a contribution to the next round."""
        assert self.phase == RoundPhase.IDLE
        self.phase = RoundPhase.READY
        self._reached_at = now
        return self.say(now)

    def finish(self, finished: bool, now: float) -> list[Outcome]:
        """The trainer has ended, or another has come. Who has finished is in every round, so nobody waits for it."""
        self.finished, self.given, self.settled = finished, False, False
        if finished and self.phase == RoundPhase.IDLE:
            self.phase = RoundPhase.READY
            self._reached_at = now
        return self.say(now)

    def say(self, now: float) -> list[Outcome]:
        """Report to the leader; when that is this member, decide."""
        self._said_at = now
        if self._leads != self._me:
            return [Send(self._leads, self._report(now))]
        outcomes: list[Outcome] = []
        while True:
            self._leader.heard(self._me, self._report(now), now)
            orders = self._leader.decide(self._alive | {self._me}, self._pace, now)
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

    def deadline(self) -> float:
        """When to call `on_timer`."""
        under_way = self.phase in (RoundPhase.RUNNING, RoundPhase.HELD)
        due = under_way or (self.phase == RoundPhase.READY and not self.settled) or self._said_at == float("-inf")
        waits = self._leads == self._me and self._leader.waits
        return self._said_at + REPEAT_S if due or waits else float("inf")

    # ---------------------------------------------------------------- events

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Outcome]:
        """Members came or went."""
        came, gone, self._alive = alive - self._alive, self._alive - alive, alive
        outcomes: list[Outcome] = []
        for peer in gone:
            self._leader.forget(peer)
        for peer in sorted(came):
            outcomes += self._repeat(peer, now)
        before, self._leads = self._leads, min(alive | {self._me})
        if self._leads != before:
            if self.phase == RoundPhase.RUNNING:
                self._give_up()
            self._leader = self._leadership()
        if self._leads == self._me:
            asked = alive if before != self._me else came
            outcomes += [Send(peer, self._report(now)) for peer in sorted(asked)]
        return outcomes + self.say(now)

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
            case Connected():
                self._leader.untold(sender)
                outcomes = self._repeat(sender, now)
                if self._leads == self._me:
                    return [*outcomes, Send(sender, self._report(now)), *self.say(now)]
                return outcomes + (self.say(now) if sender == self._leads else [])
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning in a mode of rounds")

    def on_timer(self, now: float) -> list[Outcome]:
        """Say again what has had no answer."""
        if now < self.deadline():
            return []
        overdue = self._attempt.repeat_overdue(now) if self._attempt is not None else []
        return [*overdue, *self.say(now)]

    # ---------------------------------------------------------------- one round

    def _on_report(self, sender: NodeId, report: RoundReport, now: float) -> list[Outcome]:
        if self._leads != self._me:
            return [Send(sender, self._report(now))] if sender == self._leads else []
        for what, told, ours in (
            ("a round", report.round, self.round), ("an agreed attempt", report.agreed, self._seen),
            ("an attempt", report.attempt, self._seen),
        ):  # fmt: skip
            within_step(what, told, ours)
        if self._begun_at is not None and report.phase == RoundPhase.RUNNING:
            self._pace.answered(now - self._begun_at)  # the first answer to a RoundBegin
            self._begun_at = None
        self._leader.heard(sender, report, now)
        return self.say(now)

    def _obey(self, order: RoundBegin | RoundCommit, now: float) -> list[Outcome]:
        if isinstance(order, RoundBegin):
            return self._begin(order, now)
        if self.phase != RoundPhase.HELD or self._attempt is None or self._attempt.begin.attempt != order.attempt:
            return []
        attempt, self._attempt = self._attempt, None
        self.round, self._agreed = attempt.begin.round, attempt.begin.attempt
        self.given, self.settled = self._gives, attempt.begin.final
        self.phase = RoundPhase.READY if self.finished else RoundPhase.IDLE
        self._counts["rounds"] += 1
        self._pace.round_took(now - self._reached_at)
        if self._committed_at is not None:
            self._pace.committed_after(now - self._committed_at)
        self._committed_at = now
        self._reached_at = now
        where, _ = self._summed(attempt.begin)
        return [Committed(attempt.begin, where, attempt.mean(), attempt.lost), *self._answer(now)]

    def _begin(self, begin: RoundBegin, now: float) -> list[Outcome]:
        self._check(begin)
        meant = (self._me, self._life) in zip(begin.roster, begin.lives, strict=False)
        fits = meant and begin.attempt > self._seen and begin.round > self.round and (begin.whole or self._agreed > 0)
        if not fits or len(set(begin.roster)) < len(begin.roster) or self.phase == RoundPhase.IDLE:
            return self._answer(now)
        self._seen = begin.attempt
        self._gives = self.finished
        self.phase = RoundPhase.RUNNING
        self._counts["attempts"] += 1
        early, self._early = self._early, []
        where, layout = self._summed(begin)
        try:
            self._attempt = Attempt(begin, self._me, self._contribute(begin.whole, where), layout, self._pace)
            outcomes: list[Outcome] = [*self._answer(now), *self._attempt.start(now)]
        except NotFinite:
            return self._withdraw(now)
        outcomes += self._advance(now)
        for sender, pieces in early:
            if pieces.attempt >= begin.attempt:
                outcomes += self._on_pieces(sender, pieces, now)
        return outcomes

    def _check(self, begin: RoundBegin) -> None:
        """What no leader orders of a mode like ours. Raises PeerError."""
        within_step("a round", begin.round, self.round)
        within_step("an attempt", begin.attempt, self._seen)
        if len(begin.lives) != len(begin.roster):
            raise PeerError(f"a roster of {len(begin.roster)} members with {len(begin.lives)} lives")
        if begin.whole and begin.codec != EXACT_CODEC:
            raise PeerError(f"a round of whole models in {begin.codec[:40]!r}")
        if not begin.whole and (begin.final or not self._differences):
            raise PeerError("a round of differences where whole models are due")
        if begin.codec not in CODECS:
            raise PeerError(f"codec {begin.codec[:40]!r} is none of {', '.join(CODECS)}")
        try:
            parse_topology(begin.topology)
        except UserError as error:
            raise PeerError(str(error)) from None

    def _summed(self, begin: RoundBegin) -> tuple[slice, Layout]:
        """The values that a round is of: the model, or the fragment whose turn it is by the round's number."""
        if begin.whole:
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
        return [*outcomes, *self._advance(now)]

    def _advance(self, now: float) -> list[Outcome]:
        if self._attempt is None or not self._attempt.done or self.phase != RoundPhase.RUNNING:
            return []
        self.phase = RoundPhase.HELD
        return self._answer(now)

    def _answer(self, now: float) -> list[Outcome]:
        """Report; the leader's own loop in `say` sees where it is."""
        return self.say(now) if self._leads != self._me else []

    def _withdraw(self, now: float) -> list[Outcome]:
        self._give_up()
        self.phase = RoundPhase.IDLE
        return [Withdrawn(), *self._answer(now)]

    def _give_up(self) -> None:
        self._attempt = None
        self.phase = RoundPhase.READY

    def _repeat(self, peer: NodeId, now: float) -> list[Outcome]:
        return [*self._attempt.repeat(peer, now)] if self._attempt is not None else []

    def _leadership(self) -> Leader:
        size_bytes = 4 * self._layout.total // len(self._fragments)  # of most rounds
        return Leader(self._me, self._rng, self._settings, size_bytes, differences=self._differences)

    def _report(self, now: float) -> RoundReport:
        return RoundReport(
            self._life, self.phase, self.round, self._agreed, self._seen,
            self._attempt.taken if self._attempt is not None else 0, self.finished, self.given, self.settled,
            now - self._reached_at if self.phase != RoundPhase.IDLE else 0.0,
        )  # fmt: skip
