"""How do models meet without an all-reduce? NoLoCo (2025): after H local steps, a random pair exchanges its models.

H is drawn anew each time, within half of what it is told.

The outer step is outer.py's: it moves the pair towards each other, and along the outer momentum. The model then goes on
from the outer model, plus the local progress since its contribution was taken. A contribution is a whole model, so a
codec that drops most of it (sign, top_k) gives way to bfloat16.

One exchange, `seq` its number:

    inviter                                          invited
    PairInvite  -------------------------------->    waits for a partner itself: PairAnswer(accepts); else it declines,
    PairHalf    <-- PairAnswer(accepts) ---------    and remembers who asked for when its own H steps are made
                -------------------------------->    both halves are here: applied, and its own half said
    applied     <------------------- PairHalf ---    which it keeps, to say it again, whomever it meets meanwhile,
                --- PairAnswer(accepts) -------->    until it knows that it was applied

So both ends apply an exchange, or neither, and the sum of the models' moves is kept; but where a partner dies, or its
half comes after it has been given up, or more than ANSWERS_MAX answers wait: then the oldest is forgotten, and its
inviter refused.

Nobody waits: training goes on meanwhile. An invitation without an answer lapses after some steps; a partner that dies
makes place for another one, and so does one that lives and keeps us waiting for long: it is left alone for a while.
What has had no answer is said again, and no number is applied twice. A run ends with gossip's flush over links that are
opened for it.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from statistics import median

import numpy as np

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.codecs.vector import Layout, NotFinite
from peerd.training.effects import Apply, Effect, Send, StepReport, Vector
from peerd.training.mode import LinkStatus, ModeClass, not_finite
from peerd.training.mode_settings import ModeSettings, outer_step, with_outer_step
from peerd.training.model.quiet import EVERY_STEP, Quiet
from peerd.training.modes.gossip import Gossip
from peerd.training.one_way.allowance import Allowances
from peerd.training.pairs.graylist import Graylist
from peerd.training.pairs.outer import ETA, HALF, MU, WHOLE_MODEL_CODECS, Contribution, Outer
from peerd.training.pairs.reference import PairedReference
from peerd.training.trigger import ONLY_FINISHING, SILENCE_MAX_S, WAKE_AFTER_S
from peerd.transport.ids import NodeId
from peerd.transport.messages import Connected, Message, PairAnswer, PairHalf, PairInvite

STEPS = 50  # H, NoLoCo's own
PATIENCE_STEPS = 5  # of an invitation: nothing is promised yet, so another partner may be asked
SILENT_S, SILENT_TIMES = 300.0, 8.0
"""One that has promised or had a half is waited for so long, or so many times what an exchange usually takes."""
SILENT_DOUBLINGS_MAX = 6  # of SILENT_S, while no exchange comes to its end: the line may be thin, and the model large
USUAL_OF = 8  # exchanges
REMEMBERED = 64  # numbers of exchanges that have ended
ANSWERS_MAX = 2  # models that are kept for partners that may not have had them


class Stage(Enum):
    """How far an exchange is, at this end."""

    IDLE = auto()  # there is none
    INVITED = auto()  # asked; free to go with another
    ACCEPTED = auto()  # said yes; the inviter's half will come, or its refusal
    SENT = auto()  # our half is there; only its answer, a refusal, long silence or the partner's death ends it


TRANSITIONS: dict[Stage, dict[Stage, str]] = {
    Stage.IDLE: {
        Stage.INVITED: "our local steps are made: PairInvite",
        Stage.ACCEPTED: "PairInvite when they are: PairAnswer(accepts)",
    },
    Stage.INVITED: {
        Stage.SENT: "PairAnswer(accepts): our PairHalf",
        Stage.ACCEPTED: "PairInvite of a smaller id: we turn to it",
        Stage.IDLE: "PairAnswer(declines), no answer for some steps, its death, our run's end, or no finite model",
    },
    Stage.ACCEPTED: {
        Stage.ACCEPTED: "its PairInvite came again, or a later one",
        Stage.IDLE: "PairHalf: applied, and ours said; or a refusal, long silence, its death, or no finite model",
    },
    Stage.SENT: {
        Stage.IDLE: "PairHalf: applied; or a refusal, long silence, or its death",
    },
}
"""What a stage may be followed by, and why."""


@dataclass(slots=True, eq=False)
class _Pair:
    peer: NodeId
    seq: int
    stage: Stage
    said: Message  # what waits for an answer
    said_at: float
    since_step: int
    since: float  # when it came into this stage
    contribution: Contribution | None = None  # from SENT on


class NoLoCo(ModeClass):
    """The mode's core for one node."""

    NAME = "noloco"
    TAKES = ("codec", "view", "every", "outer_lr", "outer_momentum")

    barrier = 0

    @classmethod
    def check(cls, argument: str, told: ModeSettings) -> None:
        """See `ModeClass`."""
        super().check(argument, told)
        outer_step(told, ETA, MU)

    @classmethod
    def in_force(cls, told: ModeSettings) -> ModeSettings:
        """See `ModeClass`."""
        told = with_outer_step(super().in_force(told), ETA, MU)
        codec = told.codec if told.codec in WHOLE_MODEL_CODECS else "bfloat16"
        return replace(told, codec=codec, every=told.every or STEPS)

    def __init__(
        self, me: NodeId, layout: Layout, rng: random.Random, settings: ModeSettings, values: Callable[[], Vector]
    ) -> None:
        """`settings.every` is H."""
        self.counts: Counter[str] = Counter()
        self.deadline = math.inf
        self._me = me
        self._layout = layout
        self._rng = rng
        self._view = settings.view
        self._values = values
        self._every = settings.every
        self._outer = Outer(layout, settings.codec, values(), *outer_step(settings, ETA, MU))
        self._pair: _Pair | None = None
        self._answers: dict[NodeId, PairHalf] = {}  # our halves that the inviter may not have
        self._ended: deque[tuple[NodeId, int]] = deque(maxlen=REMEMBERED)
        self._alive: frozenset[NodeId] = frozenset()
        self._asked_us: set[NodeId] = set()
        self._declined: set[NodeId] = set()
        self.graylist = Graylist()  # who was silent for long
        self._in_vain = 0  # times that somebody was, since an exchange came to its end
        self._took: deque[float] = deque(maxlen=USUAL_OF)  # seconds, of such
        self._invitations = 0  # since the last step: at most a view of them
        self._due: int | None = None  # the step that ends the local steps
        self._ready = False  # they are made, and the model was published since
        self._report = StepReport(0, 0.0, 1.0, published=False, finishing=False)
        self._flushing = False
        self._correction: Vector | None = None  # in this event's effects
        self._met: dict[NodeId, LinkStatus] = {}
        self._robust = settings.robust
        self._allowances = Allowances(1)
        flush_settings = replace(settings, trigger=ONLY_FINISHING)
        self._flush = Gossip(me, layout, rng, flush_settings, self._model, opens=False, counts=self.counts)

    # ---------------------------------------------------------------- events

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """Count local steps; then look for a partner, at every step until there is one."""
        self._correction = None
        was_finishing, self._report = self._report.finishing, report
        if report.finishing:
            return self._rearm(self._flush.on_step(report, now) if self._flushing else self._finish(now))
        self._allowances.walked(report.change, published=report.published)
        effects: list[Effect] = []
        if self._flushing:
            self._flushing = False
            self._flush.seek_partners(False, now)
            effects += self._flush.on_step(report, now)
        if self._due is None or was_finishing:
            self._due = report.step - 1 + self._local_steps()
        if report.step >= self._due and (self._ready or report.published):
            if not self._ready:
                self.counts["trigger_period"] += 1
            self._ready = True
            self._invitations = 0
            effects += self._invite(now)
        return self._rearm(effects)

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """One event of one exchange, or of the flush."""
        self._correction = None
        match message:
            case PairInvite(seq):
                effects = self._on_invite(sender, seq, now)
            case PairAnswer(seq, accepts):
                effects = self._on_accepted(sender, seq, now) if accepts else self._on_declined(sender, seq, now)
            case PairHalf() if message.wants_answer:
                effects = self._on_half(sender, message, now)
            case PairHalf():
                effects = self._on_answer(sender, message, now)
            case Connected():
                effects = self._repeat(sender, now) + self._flush.on_message(sender, message, now)
            case _:
                return self._rearm(self._flush.on_message(sender, message, now))
        return self._rearm(effects + (self._finish(now) if self._report.finishing else []))

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Peers came or went; perhaps the partner."""
        self._correction = None
        self._alive = alive
        self._asked_us &= alive
        self._declined &= alive
        for gone in self._met.keys() - alive:
            del self._met[gone]
        self._allowances.keep(alive)
        for gone in self._answers.keys() - alive:
            del self._answers[gone]
        effects = self._flush.on_peers(alive, now)
        if self._pair is not None and self._pair.peer not in alive:
            self.counts["partners_lost"] += 1
            effects += self._end(now)
        return self._rearm(effects + (self._finish(now) if self._report.finishing else []))

    def on_timer(self, now: float) -> list[Effect]:
        """Say again what has had no answer for long, and give up a partner that has been silent for longer."""
        self._correction = None
        effects = self._flush.on_timer(now)
        if self._pair is not None and now - self._pair.said_at >= SILENCE_MAX_S:
            self.counts["repeats"] += 1
            effects += self._repeat(self._pair.peer, now)
        if self._pair is not None and now >= self._silent_at(self._pair):
            self.counts["partners_silent"] += 1
            self._in_vain += 1
            self.graylist.refuse(self._pair.peer, now)
            effects += self._end(now) + (self._finish(now) if self._report.finishing else [])
        return self._rearm(effects)

    # ---------------------------------------------------------------- what there is to see

    def links(self) -> list[LinkStatus]:
        """One row a living peer that was a partner; at the end the flush's links."""
        return self._flush.links() if self._report.finishing else list(self._met.values())

    def references(self) -> dict[NodeId, PairedReference]:
        """Of the flush's links."""
        return self._flush.references()

    @property
    def quiet(self) -> Quiet:
        """Until the local steps are made; then each step is a chance to find a partner."""
        if self._due is None or self._report.finishing or self._flushing or self._ready:
            return EVERY_STEP
        return Quiet(copy_step=self._due)

    def end(self) -> Vector | None:
        """The outer model lies behind the model, and its momentum goes."""
        return None

    @property
    def under_way(self) -> bool:
        """Whether an exchange is."""
        is_sent = self._pair is not None and self._pair.stage is Stage.SENT
        return self._flush.under_way or is_sent or bool(self._answers)

    @property
    def consensus_distance(self) -> float:
        """As in gossip: two independent members at distance d from their mean are sqrt(2) d apart."""
        if self._report.finishing:
            return self._flush.consensus_distance
        distances = [status.distance for status in list(self._met.values())]
        norm = norm_of_difference(self._outer.phi[: self._layout.parameters])
        if not distances or norm == 0:
            return 0.0
        return math.sqrt(sum(distance**2 for distance in distances) / len(distances) / 2) / norm

    # ---------------------------------------------------------------- finding a partner

    def _local_steps(self) -> int:
        """With as many each time two that have met are due together again, and meet nobody else."""
        most = self._every // 4 * 2
        return self._every + self._rng.randint(-most, most)

    def _invite(self, now: float) -> list[Effect]:
        """Ask somebody, first those who asked us, unless an exchange is promised or under way."""
        pair = self._pair
        if pair is not None:
            if pair.stage is not Stage.INVITED or self._report.step - pair.since_step < PATIENCE_STEPS:
                return []
            self._declined.add(pair.peer)
            self._enter(None)
        if not self._ready or self._invitations >= self._view:
            return []
        left_alone = {peer for peer, _ in self.graylist.refused(now)}
        waiting = sorted(self._asked_us - left_alone) or sorted(self._alive - self._declined - left_alone)
        if not waiting:
            self.counts["trigger_no_idle_link"] += 1
            self._declined.clear()
            return []
        peer = self._rng.choice(waiting)
        self._asked_us.discard(peer)
        self._invitations += 1
        return self._say(peer, Stage.INVITED, PairInvite(self._rng.getrandbits(62)), now)

    def _on_invite(self, sender: NodeId, seq: int, now: float) -> list[Effect]:
        pair = self._pair
        if (sender, seq) in self._ended:
            return []
        self._answers.pop(sender, None)  # it has come to the end of the last exchange, or has forgotten it
        if pair is not None and pair.peer == sender:
            if pair.stage is Stage.SENT:  # it has forgotten our exchange, or its answer is lost: ask it
                return [Send(sender, PairAnswer(seq, False)), *self._repeat(sender, now)]
            if pair.stage is Stage.INVITED and self._me < sender:
                return []  # both asked at once: the smaller id's invitation stands
        elif pair is not None and (pair.stage is not Stage.INVITED or self._me < sender):
            return self._decline(sender, seq)  # only to a smaller id do we turn: no circle of askers turns at once
        if not self._ready or self._report.finishing or self.graylist.refuses(sender, now):
            return self._decline(sender, seq)
        self._asked_us.discard(sender)
        return self._say(sender, Stage.ACCEPTED, PairAnswer(seq, True), now)

    def _decline(self, sender: NodeId, seq: int) -> list[Effect]:
        if sender in self._alive:
            self._asked_us.add(sender)
        return [Send(sender, PairAnswer(seq, False))]

    def _on_declined(self, sender: NodeId, seq: int, now: float) -> list[Effect]:
        self._has_answer(sender, seq)
        if self._is_pair(sender, seq) is None:
            return []
        self._declined.add(sender)
        self.counts["declined"] += 1
        return self._end(now)

    # ---------------------------------------------------------------- the exchange

    def _on_accepted(self, sender: NodeId, seq: int, now: float) -> list[Effect]:
        self._has_answer(sender, seq)
        pair = self._is_pair(sender, seq)
        if pair is None:  # we have turned to another, or this exchange has ended
            return [] if (sender, seq) in self._ended else [Send(sender, PairAnswer(seq, False))]
        if pair.stage is not Stage.INVITED:
            return []
        try:
            ours = self._outer.contribute(self._values())
        except NotFinite:
            return [*self._not_finite(), Send(sender, PairAnswer(seq, False)), *self._end(now)]
        half = PairHalf(seq, self._outer.codec, True, ours.chunks)
        self._enter(replace(pair, stage=Stage.SENT, said=half, said_at=now, contribution=ours, since=now))
        return [Send(sender, half)]

    def _on_half(self, sender: NodeId, half: PairHalf, now: float) -> list[Effect]:
        if (answer := self._answers.get(sender)) is not None and answer.seq == half.seq:
            return [Send(sender, answer)]
        pair = self._is_pair(sender, half.seq)
        if pair is None or pair.stage is not Stage.ACCEPTED:
            return [Send(sender, PairAnswer(half.seq, False))]
        theirs = self._outer.decode(half.codec, half.chunks)
        try:
            ours = self._outer.contribute(self._values())
        except NotFinite:
            return [*self._not_finite(), Send(sender, PairAnswer(half.seq, False)), *self._end(now)]
        answer = PairHalf(half.seq, self._outer.codec, False, ours.chunks)
        self._answers.pop(sender, None)
        while len(self._answers) >= ANSWERS_MAX:
            del self._answers[next(iter(self._answers))]
        self._answers[sender] = answer
        return [Send(sender, answer), *self._update(pair, ours, theirs, now)]

    def _on_answer(self, sender: NodeId, half: PairHalf, now: float) -> list[Effect]:
        pair = self._is_pair(sender, half.seq)
        if pair is None or pair.contribution is None:
            return [Send(sender, PairAnswer(half.seq, (sender, half.seq) in self._ended))]
        effects = self._update(pair, pair.contribution, self._outer.decode(half.codec, half.chunks), now)
        return [*effects, Send(sender, PairAnswer(half.seq, True))]

    def _has_answer(self, sender: NodeId, seq: int) -> None:
        """Or wants none."""
        if (answer := self._answers.get(sender)) is not None and answer.seq == seq:
            del self._answers[sender]

    def _update(self, pair: _Pair, ours: Contribution, theirs: Vector, now: float) -> list[Effect]:
        self._took.append(now - pair.since)
        self._in_vain = 0
        distance = self._outer.apart(ours, theirs)
        self._correction = self._outer.step(ours, theirs, *self._shares(pair.peer, distance, ours, theirs))
        self._ended.append((pair.peer, pair.seq))
        self._enter(None)
        self._ready, self._due = False, self._report.step + self._local_steps()
        self._declined.clear()
        self.counts["exchanges"] += 1
        met = self._met.get(pair.peer)
        if pair.peer in self._alive:
            self._met[pair.peer] = LinkStatus(
                pair.peer, (met.exchanges if met else 0) + 1, distance, self._outer.eta / 2, "period"
            )
        return [Apply(self._correction)]

    def _shares(self, peer: NodeId, distance: float, ours: Contribution, apart: Vector) -> tuple[float, float]:
        """How much of what the pair is apart this end takes: half, or what the partner's allowance covers."""
        if not self._robust:
            return HALF, HALF
        self._flush.met(peer, apart)
        part, of_buffers = self._allowances.shares(peer, distance, apart, ours.x, self._layout.parameters, HALF)
        self.counts["halves_shortened"] += part < HALF
        self._allowances.exchanged()
        return part, of_buffers

    # ---------------------------------------------------------------- small parts

    def _is_pair(self, sender: NodeId, seq: int) -> _Pair | None:
        pair = self._pair
        return pair if pair is not None and (pair.peer, pair.seq) == (sender, seq) else None

    def _say(self, peer: NodeId, stage: Stage, message: PairInvite | PairAnswer, now: float) -> list[Effect]:
        pair = self._pair  # who asks again and again has promised since the first time
        since = pair.since if pair is not None and pair.peer == peer and pair.stage is stage else now
        self._enter(_Pair(peer, message.seq, stage, message, now, self._report.step, since))
        return [Send(peer, message)]

    def _silent_at(self, pair: _Pair) -> float:
        """When it has kept us waiting for long."""
        if pair.stage is Stage.INVITED:
            return math.inf  # that lapses by itself
        usual = SILENT_TIMES * median(self._took) if self._took else 0.0
        return pair.since + max(SILENT_S * 2.0 ** min(self._in_vain, SILENT_DOUBLINGS_MAX), usual)

    def _enter(self, pair: _Pair | None) -> None:
        before, after = (Stage.IDLE if one is None else one.stage for one in (self._pair, pair))
        assert after in TRANSITIONS[before], f"{before.name} -> {after.name}"
        self._pair = pair

    def _repeat(self, peer: NodeId, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if (answer := self._answers.get(peer)) is not None:
            effects.append(Send(peer, answer))
        if ended := [seq for id, seq in self._ended if id == peer]:
            effects.append(Send(peer, PairAnswer(ended[-1], True)))  # it may wait for this word
        if self._pair is not None and self._pair.peer == peer:
            self._pair.said_at = now
            effects.append(Send(peer, self._pair.said))
        return effects

    def _end(self, now: float) -> list[Effect]:
        """The exchange is off: perhaps with another."""
        self._enter(None)
        return [] if self._report.finishing else self._invite(now)

    def _finish(self, now: float) -> list[Effect]:
        """The run has ended: finish what is promised, then flush."""
        if self._flushing or (self._pair is not None and self._pair.stage is not Stage.INVITED):
            return []
        if self._pair is not None:
            self._enter(None)
        self._ready, self._flushing = False, True
        return self._flush.seek_partners(True, now) + self._flush.on_step(self._report, now)

    def _model(self) -> Vector:
        values = self._values()
        if self._correction is not None:
            np.add(values, self._correction, out=values)
        return values

    def _not_finite(self) -> list[Effect]:
        self._ready = False
        return not_finite(self.counts)

    def _rearm(self, effects: list[Effect]) -> list[Effect]:
        pair = self._pair
        silence = math.inf if pair is None else min(pair.said_at + WAKE_AFTER_S, self._silent_at(pair))
        self.deadline = min(silence, self._flush.deadline)
        return effects
