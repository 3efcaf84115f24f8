"""All members average their models every few steps, by an all-reduce among those who are there.

With one step a round and plain SGD this is synchronous SGD with the batches of all members: from one model all of them
step by their own gradients, and the mean of the steps is the step of the mean gradient. So it is with momentum: buffers
that differ are averaged by the same linear rule, and the models never see anything but their mean.

What training does meanwhile, `overlap`:

    blocking  the trainer waits at its step; then x += average - x
    delayed   it goes on: x += average - contribution, its progress since then stays; one round at most is under way
    hpsgd     it goes on from the model of a window's beginning. At the window's end x becomes the agreed model, which
              now holds the progress of one window before; that of this window is rolled back and is the next
              contribution (HPSGD, arXiv:2009.02701). A window ends with a commit: its number is the same for all

A lossy codec carries differences from the last agreed model, and what a member's encoding loses is added to its next
contribution. A run ends with one exact round, in which x becomes the average itself, to the bit.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import numpy as np

from peerd.effects import Apply, Effect, Log, NodeId, Proceed, Publish, Resume, StepReport, UserError, Vector
from peerd.messages import Connected, Message, RoundPhase
from peerd.training.collectives import parse_topology
from peerd.training.delta import Layout
from peerd.training.modes.attempt import EXACT_CODEC
from peerd.training.modes.mode import LinkStatus, ModeSettings
from peerd.training.modes.rounds import Committed, Outcome, Rounds, Withdrawn
from peerd.training.reference import norm_of_difference

OVERLAPS = ("blocking", "delayed", "hpsgd")
LAND_AGAIN_S = 0.1  # a correction is rounded: whether the model is the average to the bit is seen when it is applied


class AllReduce:
    """The mode's core for one node."""

    EVERY = 1  # steps between rounds, unless the settings say otherwise
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
        """A round that sums differences is of one of `fragments` parts of the model, in turn. Raises UserError."""
        if settings.overlap not in OVERLAPS:
            raise UserError(f"overlap {settings.overlap!r}: not one of {', '.join(OVERLAPS)}")
        if settings.topology != "auto":
            parse_topology(settings.topology)
        assert fragments == 1 or settings.overlap != "hpsgd", "check_options refuses it"
        self.counts: Counter[str] = Counter()
        self.deadline = float("inf")
        self._every = max(1, (settings.every if settings.every > 1 else self.EVERY) // fragments)
        self._overlap = settings.overlap
        self.barrier = self._every if settings.overlap == "blocking" else 0
        self._layout = layout
        self._values = values
        self._lossy = settings.codec != EXACT_CODEC
        self._keeps_agreed = self._lossy or self.DIFFERENCES
        self._rounds = Rounds(
            me, layout, rng, settings, self._contribution, self.counts,
            differences=self._keeps_agreed, fragments=fragments,
        )  # fmt: skip
        self._me = me
        self._taken: Vector | None = None  # the model that this member contributes
        self._agreed: Vector | None = None  # the last round's model, the same on all
        self._origin: Vector | None = None  # hpsgd: where this window's progress began
        self._merge: Vector | None = None  # hpsgd: the agreed model that the next published copy is replaced by
        self._lost: Vector | None = None  # what our encoding dropped, to be contributed
        self._landing: Vector | None = None  # the final average, until the model is it
        self._unapplied: Vector | None = None  # the correction that this event's effects will bring
        self._due = False  # a round should begin
        self._step = 0
        self._taken_at = 0  # the step of the last contribution
        self._waits = False  # the trainer is at its barrier
        self._distance = 0.0
        self._norm = 0.0
        self._partners: list[NodeId] = []

    # ---------------------------------------------------------------- events

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """Take part in the next round, when it is time."""
        self._unapplied = None
        if report.finishing:
            return self._end_run(now)
        outcomes: list[Outcome] = []
        if self._rounds.finished:  # a new run
            outcomes += self._rounds.finish(False, now)
            self._landing = None
        self._waits = bool(self.barrier) and report.step % self.barrier == 0
        self._step = report.step
        self._due |= report.step % self._every == 0
        if report.published and self._due and self._free_in() <= 0:
            outcomes += self._take(now)
        outcomes += self._ask()
        return self._perform(outcomes, now)

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """One message of a round."""
        self._unapplied = None
        return self._perform(self._rounds.on_message(sender, message, now), now)

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """Members came or went."""
        self._unapplied = None
        return self._perform(self._rounds.on_peers(alive, now), now)

    def on_timer(self, now: float) -> list[Effect]:
        """Repeat what waits, and see whether the final correction has landed."""
        self._unapplied = None
        return self._perform([*self._land(), *self._rounds.on_timer(now)], now)

    # ---------------------------------------------------------------- what there is to see

    def links(self) -> list[LinkStatus]:
        """One row a member of the last round."""
        share = 1 / (1 + len(self._partners))
        said = f"round {self._rounds.round}"
        return [LinkStatus(peer, self.counts["rounds"], self._distance, share, said) for peer in self._partners]

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
        return self._taken_at + self._every - self._step if self._merge is not None else 0

    def _ask(self) -> list[Effect]:
        """Have the model published at the step that contributes it, which is known one step ahead."""
        soon = self._due or (self._step + 1) % self._every == 0
        return [Publish()] if soon and self._free_in() <= 1 and not self._waits else []

    def _take(self, now: float) -> list[Outcome]:
        values = self._current()
        if not np.isfinite(values).all():
            return [Withdrawn()]
        self._due, self._taken_at = self._overlap == "hpsgd", self._step
        outcomes: list[Outcome] = []
        if self._merge is not None:
            assert self._origin is not None, "set with the first contribution"
            outcomes.append(self._apply(self._merge - values))
            values += self._merge - self._origin
            self._origin, self._merge = self._merge, None
        elif self._overlap == "hpsgd":
            self._origin = values.copy()
        self._taken = values
        return outcomes + self._rounds.reach(now)

    def _contribution(self, whole: bool, where: slice) -> Vector:
        """This member's summand. A member that has finished gives its model as it is."""
        if self._rounds.finished or self._taken is None:  # or: the next run, which has no contribution yet
            self._taken = self._current()
            self._origin = self._taken
        summand = self._taken[where].copy()
        if not whole:
            assert self._agreed is not None, "all of the roster have agreed in the same round"
            summand -= self._agreed[where]
        if self._lost is not None:
            summand += self._lost[where]
        return summand

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
                    effects += self._on_committed(outcome)
                case Withdrawn():
                    effects += self._on_withdrawn()
                case _:
                    effects.append(outcome)
        self.deadline = max(now, self._rounds.deadline())
        if self._landing is not None:
            self.deadline = min(self.deadline, now + LAND_AGAIN_S)
        return effects

    def _on_committed(self, committed: Committed) -> list[Effect]:
        begin, where, mean = committed.begin, committed.where, committed.total
        mean /= len(begin.roster)
        assert self._taken is not None, "nobody is in a round without a contribution"
        taken = self._taken[where]
        target = self._agree(mean, where, whole=begin.whole)
        if self._lost is not None or committed.lost is not None:
            lost = np.zeros_like(mean) if committed.lost is None else committed.lost
            self._lost = self._with(self._lost, where, lost)
        if self._keeps_agreed:
            self._agreed = self._with(self._agreed, where, target)
        self._partners = [peer for peer in begin.roster if peer != self._me]
        self._distance = norm_of_difference(target, taken)
        self._norm = norm_of_difference(target)
        if begin.final:
            self._landing = target
            return self._land()
        effects: list[Effect] = []
        if self._overlap == "hpsgd" and not self._rounds.finished:
            self._merge = target
        else:
            start = self._origin if self._overlap == "hpsgd" else taken
            assert start is not None, "set with the first contribution"
            effects.append(self._apply(self._with(None, where, target - start)))
        if self._rounds.given:
            effects.append(Proceed(settled=False))
        return [*effects, *self._resume(), *(self._ask() if not self._rounds.finished else [])]

    def _agree(self, mean: Vector, where: slice, *, whole: bool) -> Vector:
        """What all members now hold there, from the mean of the contributions."""
        if whole:
            return mean
        assert self._agreed is not None, "contributions were differences from it"
        return mean + self._agreed[where]

    def _with(self, held: Vector | None, where: slice, part: Vector) -> Vector:
        """`held` (None: zeros) with `part` in its place."""
        if len(part) == self._layout.total:
            return part
        held = np.zeros(self._layout.total, part.dtype) if held is None else held
        held[where] = part
        return held

    def _on_withdrawn(self) -> list[Effect]:
        self.counts["withdrawn"] += 1
        said = Log("warning", "the model holds a value that is not finite: nothing of it is sent")
        return [*([said] if self.counts["withdrawn"] == 1 else []), *self._resume()]

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
        return self._perform(outcomes, now) + self._perform(self._rounds.finish(True, now), now)

    def _land(self) -> list[Effect]:
        """x + (average - x) is rounded, the same again from there is not: at the second time x is the average."""
        if self._landing is None:
            return []
        left = self._landing - self._current()
        if left.any():
            return [self._apply(left)]
        self._landing = None
        return [Proceed(settled=False), Proceed(settled=True)]
