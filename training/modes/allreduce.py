"""All members average their models every few steps, by an all-reduce among those who are there.

With one step a round and plain SGD this is synchronous SGD with the batches of all members: from one model all of them
step by their own gradients, and the mean of the steps is the step of the mean gradient. So it is with momentum: buffers
that differ are averaged by the same linear rule, and the models never see anything but their mean.

What training does meanwhile, `overlap`:

    blocking  the trainer waits at its step; then x += average - x
    quorum    the same, but nobody waits for a member that is slower than most: that one gives what it has, between two
              of its steps, and its trainer goes on (training/rounds/quorum.py)
    delayed   it goes on: x += average - contribution, its progress since then stays; one round at most is under way,
              and unless `every` says otherwise 20 steps lie between one and the next: meanwhile each optimizer has
              pulled against what differed, and must have lost that momentum before the difference is taken again
    hpsgd     it goes on from the model of a window's beginning. At the window's end x becomes the agreed model, which
              now holds the progress of one window before; that of this window is rolled back and is the next
              contribution (HPSGD, arXiv:2009.02701). A window ends with a commit: its number is the same for all.
              For SGD without momentum, as published: a window that leaves a share r of the way to an optimum adds
              (1 - r) of it one window late, so x(n+1) = x(n) - (1 - r) x(n-1), which dies out where r > 0 and grows
              where momentum has carried the window beyond it, r < 0, however momentum itself is rolled back

Where nobody says codec or steps, a leader chooses both (training/rounds/choice.py), with `quorum`.

A lossy codec carries differences from the last agreed model, or from the one that all have begun with, and what a
member's encoding loses is added to its next contribution (along a ring or a tree that is also what its encoding of a
partial sum loses). With a DENSE codec that was chosen it is added to the member's own model.

A run ends with one more round, in which x becomes the average, the same to the bit on all.
Without loss it is of whole models; else of differences in LAST_CODEC, and what was lost before, which is old, is left
out: `every` steps of training stand behind it, so what is lost there is hundredths of those.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np

from peerd.training.batch_sizes import Work
from peerd.training.codecs.concentration import Concentration
from peerd.training.codecs.difference import digest, norm_of_difference
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Apply, Effect, Proceed, Resume, StepReport, Vector
from peerd.training.kernels.passes import is_finite
from peerd.training.mode import LAND_AGAIN_S, LinkStatus, ModeClass, not_finite
from peerd.training.mode_settings import AUTO, EXCHANGES, GRADIENTS, QUORUM, STANDING, ModeSettings
from peerd.training.model.quiet import EVERY_STEP, NEVER, Quiet
from peerd.training.modes.gradients import GradientAllReduce
from peerd.training.rounds.attempt import EXACT_CODEC
from peerd.training.rounds.choice import DENSE, EVERY_AT_FIRST, is_left_to_leader
from peerd.training.rounds.lengths import GROUPS, Usual, lengths_of, limits_of, shorten
from peerd.training.rounds.member import Committed, Outcome, Rounds, Withdrawn
from peerd.training.rounds.quorum import Quorum
from peerd.training.rounds.topology import parse_topology
from peerd.transport.ids import NodeId
from peerd.transport.messages import Connected, Message, RoundBegin, RoundPhase

SETTLE_STEPS = 20
"""From a correction to the next contribution. What differs between two members swings under SGD with momentum; taken
away half a period late it doubles. With a momentum m none grows if 2 / (1 - m) steps lie between; this is for 0.9."""
LANDS_WITHIN = 2  # steps: a correction comes between two of them, and the trainer may have begun the next


class AllReduce(ModeClass):
    """The mode's core for one node."""

    NAME = "allreduce"
    TAKES: ClassVar[tuple[str, ...]] = ("codec", "every", "overlap", "topology", "min_peers", "exchange")
    EXCHANGES: ClassVar[tuple[str, ...]] = EXCHANGES

    EVERY = 0  # steps between rounds, unless the settings say otherwise; 0: as rounds cost, or as its overlap asks for
    OVERLAP = QUORUM
    CHOOSES = True  # whether a leader may choose the codec of a round
    DIFFERENCES = False  # whether a round needs an agreed model even without loss

    def __init__(
        self,
        me: NodeId,
        layout: Layout,
        rng: random.Random,
        settings: ModeSettings,
        values: Callable[[], Vector],
        *,
        fragments: int = 1,
    ) -> None:
        """A round that sums differences is of one of `fragments` parts of the model, in turn: each has its round every
        `settings.every` steps.
        """
        assert fragments == 1 or settings.overlap != "hpsgd", "check_options refuses it"
        self._settings = settings
        self.counts: Counter[str] = Counter()
        self.deadline = float("inf")
        self._concentration = Concentration(layout) if settings.codec == AUTO else None  # then a leader chooses
        self._every = EVERY_AT_FIRST if is_left_to_leader(settings) else max(1, settings.every // fragments)
        self._overlap = settings.overlap
        self._settles = self.settle_steps(str(fragments), settings) > 0
        self.barrier = 1 if settings.overlap in STANDING else 0
        self._quorum = Quorum(self._every) if settings.overlap == QUORUM else None
        self._layout = layout
        self._values = values
        self._lossy = settings.codec != EXACT_CODEC
        self._robust = settings.robust
        self._keeps_agreed = self._lossy or self.DIFFERENCES
        # what lengths and differences count from before there is an agreed one
        self._start = values().copy() if settings.robust or self._keeps_agreed else None
        if self._concentration is not None:
            self._concentration.begins(self._start)
        self._rounds = Rounds(
            me, layout, rng, settings, self._contribution, self.counts,
            differences=self._keeps_agreed, fragments=fragments,
        )  # fmt: skip
        self._usual = Usual()
        self._me = me
        self._taken: Vector | None = None  # the model that this member contributes
        self._agreed: Vector | None = None  # the last round's model, the same on all
        self._origin: Vector | None = None  # hpsgd: where this window's progress began
        self._merge: Vector | None = None  # hpsgd: the agreed model that the next published copy is replaced by
        self._lost: Vector | None = None  # what our encoding dropped, to be contributed
        self._landing: Vector | None = None  # the final average, until the model is it
        self._land_at = 0.0  # when to look whether it is
        self._unapplied: Vector | None = None  # the correction that this event's effects will bring
        self._due = False  # a round should begin
        self._due_step = self._every  # the next step after which one should
        self._step = 0
        self._taken_at = self._given_at = 0  # the step of the last contribution, and of the last that was in a round
        self._samples = 0.0  # of a step of our trainer's; 0: it does not say
        self._settled_at = 0  # the step from which there may be another
        self._lands = False  # a correction is on its way to the trainer, whose next report tells the step
        self._waits = False  # the trainer is at its barrier
        self._distance = 0.0
        self._norm = 0.0
        self._partners: list[NodeId] = []
        self._codec = settings.codec  # of the last round

    @classmethod
    def exchanging(cls, exchange: str) -> type[ModeClass]:
        """See `ModeClass`."""
        return GradientAllReduce if exchange == GRADIENTS else cls

    @classmethod
    def check(cls, argument: str, told: ModeSettings) -> None:
        """See `ModeClass`."""
        super().check(argument, told)
        if told.topology != AUTO:
            parse_topology(told.topology)

    @classmethod
    def in_force(cls, told: ModeSettings) -> ModeSettings:
        """See `ModeClass`."""
        overlap = cls.OVERLAP if told.overlap == AUTO else told.overlap
        codec = AUTO if cls.CHOOSES and overlap == QUORUM and told.codec == AUTO else super().in_force(told).codec
        own = cls.EVERY or (0 if overlap in (QUORUM, "delayed") else 1)
        return replace(told, codec=codec, overlap=overlap, every=told.every or own)

    @classmethod
    def settle_steps(cls, argument: str, in_force: ModeSettings) -> int:
        """See `ModeClass`. Who sets another `every` than the mode's own, or streams, has chosen how often."""
        own = in_force.overlap == "delayed" and in_force.every == cls.EVERY and argument in ("", "1")
        return SETTLE_STEPS if own else 0

    # ---------------------------------------------------------------- events

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """Take part in the next round, when it is time."""
        self._unapplied = None
        if report.finishing:
            return self._end_run(now)
        outcomes: list[Outcome] = []
        effects: list[Effect] = []
        if self._rounds.finished:  # a new run; who is alone ends a round by that
            effects += self._perform(self._rounds.finish(False, now), now)
            self._landing, self._usual = None, Usual()
        self._waits = report.stands
        self._samples = report.samples
        if report.step < self._step:  # another trainer went on from an earlier one
            self._settled_at = self._taken_at = 0
            self._given_at = report.step - 1
            self._lands = False
        if report.step < self._step or (self._step == 0 and self._quorum is None):
            self._due_after(report.step - 1)
        self._step = report.step
        if self._lands:
            self._lands, self._settled_at = False, report.step + LANDS_WITHIN + SETTLE_STEPS
        if report.step >= self._due_step:
            self._due = True
            self._due_after(report.step)
        if report.published and self._due and (self._free_in() <= 0 or self._rounds.came_early):
            outcomes += self._take(now)
        elif self._rounds.phase == RoundPhase.IDLE or (
            self._quorum is not None and (self._rounds.phase != RoundPhase.READY or self._rounds.came_early)
        ):  # a round without this step, or none yet
            effects += self._resume()
        return [*effects, *self._perform(outcomes, now)]

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """One message of a round."""
        self._unapplied = None
        return self._perform(self._rounds.on_message(sender, message, now), now)

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Members came or went."""
        self._unapplied = None
        return self._perform(self._rounds.on_peers(alive, now), now)

    def on_unreached(self, peer: NodeId, now: float) -> list[Effect]:
        """Rounds may have to go on without one of the two."""
        self._unapplied = None
        return self._perform(self._rounds.on_unreached(peer, now), now)

    def on_timer(self, now: float) -> list[Effect]:
        """Repeat what waits, and see whether the final correction has landed."""
        self._unapplied = None
        outcomes: list[Outcome] = []
        if self._quorum is not None and self._rounds.phase == RoundPhase.IDLE and now >= self._quorum.due_at:
            self.counts["rounds_early"] += 1
            outcomes += self._take(now, early=True)
        landed = self._land(now) if now >= self._land_at else []
        return self._perform([*landed, *outcomes, *self._rounds.on_timer(now)], now)

    # ---------------------------------------------------------------- what there is to see

    def links(self) -> list[LinkStatus]:
        """One row a member of the last round."""
        share = 1 / (1 + len(self._partners))
        said = f"round {self._rounds.round}" + (f", every {self._every}, {self._codec}" if self._concentration else "")
        return [LinkStatus(peer, self.counts["rounds"], self._distance, share, said) for peer in self._partners]

    @property
    def quiet(self) -> Quiet:
        """Until the next round's step, which brings the copy for it."""
        if self._rounds.finished:
            return EVERY_STEP
        free_in = math.inf if self._waits else self._free_in()
        due = self._step + 1 if self._due else self._due_step
        copy_step = NEVER if free_in == math.inf else max(due, self._step + int(free_in))
        if self._overlap == "hpsgd":
            return Quiet(copy_step=copy_step, step=0)  # a window's end is counted in steps
        if self._settles and (self._lands or self._rounds.phase != RoundPhase.IDLE):
            return Quiet(step=0)  # the step of the commit must be known
        return Quiet(copy_step=copy_step, step=copy_step if self._due else due, stand_step=self._due_step)

    def end(self) -> Vector | None:
        """What was rolled back for a round, or has come of it, and what our encoding dropped."""
        left = np.zeros(self._layout.total, self._values().dtype)
        if self._overlap == "hpsgd" and self._taken is not None and not self._rounds.finished:
            assert self._origin is not None, "set with the first contribution"
            if self._merge is not None:
                left += self._merge - self._origin
            elif self._rounds.phase != RoundPhase.IDLE:
                left += self._taken - self._origin
        if self._lost is not None:
            left += self._lost
        return left

    @property
    def under_way(self) -> bool:
        """Whether an attempt at a round is."""
        return self._landing is not None or self._rounds.phase in (RoundPhase.RUNNING, RoundPhase.HELD)

    @property
    def consensus_distance(self) -> float:
        """How far this member's contribution to the last round was from the average, relative."""
        return self._distance / self._norm if self._norm > 0 else 0.0

    # ---------------------------------------------------------------- contributing

    def _free_in(self) -> float:
        """Steps until there may be a contribution; one round at a time."""
        if self._rounds.phase != RoundPhase.IDLE:
            return math.inf
        if self._merge is not None:
            return self._taken_at + self._every - self._step
        return math.inf if self._lands else max(0, self._settled_at - self._step)

    def _due_after(self, step: int) -> None:
        """Where all wait for all they come at multiples of `every`; else so many steps after each came last."""
        self._due_step = step + self._every - (0 if self._quorum is not None else step % self._every)

    def _take(self, now: float, *, early: bool = False) -> list[Outcome]:
        if self._quorum is not None:
            self._quorum.reached(now)
        values = self._current()
        if not is_finite(values):
            return [Withdrawn()]
        self._due, self._taken_at = self._overlap == "hpsgd" or (early and self._due), self._step
        outcomes: list[Outcome] = []
        if self._merge is not None:
            assert self._origin is not None, "set with the first contribution"
            outcomes.append(self._apply(self._merge - values))
            values += self._merge - self._origin
            self._origin, self._merge = self._merge, None
        elif self._overlap == "hpsgd":
            self._origin = values.copy()
        self._taken = values
        self._rounds.work = Work(self._samples, self._step - self._given_at)
        if self._start is not None and self._keeps_agreed and self._rounds.round == 0:
            self._rounds.starts_from(digest(self._start, self._layout))
        if early:
            self._rounds.measured((0.0,) * GROUPS)  # which says nothing of how far members come
            return outcomes + self._rounds.reach(now, early=True)
        self._measure(values)
        if self._concentration is not None:
            self._rounds.concentration = self._concentration.of(values)
        reach = self._rounds.made_steps if self._rounds.came_early else self._rounds.reach
        return outcomes + reach(now)

    def _measure(self, values: Vector, *, ends: bool = False) -> None:
        """Say how far our contribution is from what all had last.

        Of who `ends` and has not moved since then what encoding dropped is no way: beside it others' would be too long.
        """
        since = self._agreed if self._agreed is not None else self._start
        if self._robust and since is not None:
            lost = None if self._rounds.finished else self._lost
            lengths = lengths_of(values, self._layout, since, lost)
            if ends and lost is not None:
                own = lengths_of(values, self._layout, since)
                lengths = tuple(length if way > 0 else 0.0 for length, way in zip(lengths, own, strict=True))
            if ends or self._rounds.finished:
                lengths = self._usual.or_longer(lengths)
            else:
                self._usual.note(lengths)
            self._rounds.measured(lengths)

    def _bounded(self, committed: Committed) -> Vector:
        """The mean, no further from the last agreed model than the members' lengths allow."""
        begin, where, mean = committed.begin, committed.where, committed.mean
        if not (self._robust and begin.lengths and self._agreed is not None):
            return mean
        agreed = self._agreed[where]
        difference = mean - agreed if begin.whole else mean
        (_, layout) = self._rounds.summed(begin)
        if not shorten(difference, layout, limits_of(begin.lengths)):
            return mean
        self.counts["rounds_shortened"] += 1
        return difference + agreed if begin.whole else difference

    def _contribution(self, begin: RoundBegin, where: slice) -> Vector:
        """This member's summand. A member that has finished gives its model as it is."""
        if self._rounds.finished or self._taken is None:  # or: the next run, which has no contribution yet
            self._taken = self._current()
            self._origin = self._taken
        summand = self._taken[where].copy()
        if begin.whole:
            return summand
        since = self._agreed if self._agreed is not None else self._start
        assert since is not None, "all of the roster have agreed in the same round, or begun alike"
        summand -= since[where]
        if begin.shares:
            summand[: self._rounds.summed(begin)[1].parameters] *= self._share(begin)
        if self._lost is not None and not begin.final:
            summand += self._lost[where]
        return summand

    def _share(self, begin: RoundBegin) -> float:
        """Of our progress in the mean of parameters, where members have shares: float buffers have no samples."""
        return begin.shares[begin.roster.index(self._me)]

    def _look(self) -> Vector:
        """The model as it is, to be read at once."""
        return self._values() if self._unapplied is None else self._current()

    def _current(self) -> Vector:
        values = self._values().copy()
        if self._unapplied is not None:
            values += self._unapplied
        return values

    def _apply(self, correction: Vector) -> Apply:
        self._unapplied = correction if self._unapplied is None else self._unapplied + correction
        return Apply(correction)

    # ---------------------------------------------------------------- what a round brings

    def _perform(self, outcomes: list[Outcome], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for outcome in outcomes:
            match outcome:
                case Committed():
                    effects += self._on_committed(outcome, now)
                    if self._quorum is not None:
                        self._quorum.committed(outcome.begin, self._me, now, self._every)
                case Withdrawn():
                    effects += [*not_finite(self.counts), *self._resume()]
                case _:
                    effects.append(outcome)
        self.deadline = max(now, self._rounds.deadline())
        if self._quorum is not None and self._rounds.phase == RoundPhase.IDLE:
            self.deadline = min(self.deadline, max(now, self._quorum.due_at))
        if self._landing is not None:
            self.deadline = min(self.deadline, max(now, self._land_at))
        return effects

    def _on_committed(self, committed: Committed, now: float) -> list[Effect]:
        if self._agreed is None and not committed.begin.whole:
            self._agreed = self._start
        begin, where, mean = committed.begin, committed.where, self._bounded(committed)
        assert self._taken is not None, "nobody is in a round without a contribution"
        taken, self._given_at = self._taken[where], self._taken_at
        target = self._agree(mean, where, begin)
        stays = committed.lost if self._concentration is not None and begin.codec == DENSE else None
        if begin.final:
            self._lost = None
        elif stays is not None:  # and comes to the next round by our share, as all that the model has
            self._lost = (1 - self._share(begin)) * stays if begin.shares else None
        elif begin.whole and self._codec == DENSE and self._concentration is not None:
            self._lost = None  # the rest of what has stayed in the model, which was contributed whole
        elif not begin.whole and (self._lost is not None or committed.lost is not None):
            lost = np.zeros_like(mean) if committed.lost is None else committed.lost
            self._lost = self._with(self._lost, where, lost)
        if begin.every:
            self._due_step += begin.every - self._every
            self._every = begin.every
        self._codec = begin.codec
        if self._concentration is not None:
            self._concentration.begins(target, stays)
            if not (begin.whole or begin.final):
                self.counts[f"rounds_{begin.codec}"] += 1
        if self._keeps_agreed or self._robust:
            self._start = None
            self._agreed = self._with(self._agreed, where, target)
        self._partners = [peer for peer in begin.roster if peer != self._me]
        self._distance = norm_of_difference(target, taken)
        self._norm = norm_of_difference(target)
        if begin.final and self._rounds.given:  # else another run has begun, whose steps stay
            self._taken, self._landing = None, target
            self._rounds.measured((0.0,) * GROUPS)
            return self._land(now)
        self._landing = None  # of one who trains on the round goes on from there
        effects: list[Effect] = []
        if self._overlap == "hpsgd" and not self._rounds.finished:
            self._merge = target
        else:
            start = self._origin if self._overlap == "hpsgd" else taken
            assert start is not None, "set with the first contribution"
            again = self._overlap != "hpsgd" and len(start) == self._layout.total
            correction = np.subtract(target, start, out=start if again else None)
            if stays is not None:
                correction += stays
            if again:
                self._taken = None  # its memory is the correction's now: nobody asks for a contribution after its round
            effects.append(self._apply(self._with(None, where, correction)))
            self._lands = self._settles
        leftover = self._rounds.given and stays is not None  # ever less: who still trains would be too long beside it
        if self._rounds.finished and not leftover:
            self._measure(self._look())
        if self._rounds.given:
            effects.append(Proceed(settled=False))
        return [*effects, *self._resume()]

    def _agree(self, mean: Vector, where: slice, begin: RoundBegin) -> Vector:
        """What all members now hold there: the mean of the contributions becomes it."""
        if not begin.whole:
            assert self._agreed is not None, "contributions were differences from it"
            mean += self._agreed[where]
        return mean

    def _with(self, held: Vector | None, where: slice, part: Vector) -> Vector:
        """`held` (None: zeros) with `part` in its place."""
        if len(part) == self._layout.total:
            return part
        held = np.zeros(self._layout.total, part.dtype) if held is None else held
        held[where] = part
        return held

    def _resume(self) -> list[Effect]:
        waited, self._waits = self._waits, False
        return [Resume()] if waited else []

    # ---------------------------------------------------------------- the end of a run

    def _end_run(self, now: float) -> list[Effect]:
        outcomes: list[Outcome] = []
        if self._merge is not None:
            assert self._origin is not None, "set with the first contribution"
            outcomes.append(self._apply(self._merge - self._origin))  # no window comes to roll this one's progress into
            self._merge = None
        self._waits = False
        effects = self._perform(outcomes, now)
        self._measure(self._look(), ends=True)
        return effects + self._perform(self._rounds.finish(True, now), now)

    def _land(self, now: float) -> list[Effect]:
        """x + (average - x) is rounded, the same again from there is not: at the second time x is the average."""
        if self._landing is None:
            return []
        left = self._current()
        np.subtract(self._landing, left, out=left)
        if left.any():
            self._land_at = now + LAND_AGAIN_S
            return [self._apply(left)]
        self._landing = None
        return [Proceed(settled=False), Proceed(settled=True)]
