"""The half of a simulated node that trains: its learner, its mode, the copy of the model between them, its first model.

What production spreads over daemon and trainer is here one object. The node's other half (node.py) is its process, its
membership and its connections.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from peerd.membership.effects import MembershipEffect
from peerd.membership.timing import Timing
from peerd.node.meta import NodeMeta, is_partner, partners_said
from peerd.node.run_ends import RunEnds
from peerd.simulation.byzantine import Lie
from peerd.simulation.checkers import Checkers
from peerd.simulation.node_model import FirstModel, LearnersModel, Newcomer
from peerd.simulation.problems import Compute, Learner, Moved
from peerd.simulation.world import Kind, World
from peerd.training.codecs.vector import NotFinite
from peerd.training.effects import (
    Apply,
    Averaged,
    Become,
    Effect,
    Proceed,
    Publish,
    Resume,
    StepReport,
    Vector,
)
from peerd.training.mode_core import (
    GradientCame,
    ModeBegins,
    ModeCore,
    ModeEvent,
    ModelAsked,
    PeersChanged,
    Received,
    Reconnected,
    SketchAsked,
    Stepped,
    TimerDue,
    Unreached,
)
from peerd.training.mode_settings import GRADIENTS
from peerd.training.model.over import is_over, number_of, parts_of
from peerd.training.modes import Mode, ModeSettings, class_of, parse_mode
from peerd.training.modes.gossip import Gossip
from peerd.training.pairs.reference import PairedReference
from peerd.transport.ids import Address, NodeId
from peerd.transport.messages import (
    AS_STARTED,
    Delta,
    Member,
    Message,
    ModelEqual,
    ModelPromise,
    ModelRequest,
    ModelSketch,
    ModelSnapshot,
    SketchRequest,
)

SIGNATURE = "simulated"
READY = NodeMeta(model=SIGNATURE, ready=True, expects=True)
PEERS_EVERY_S = 0.5  # the mode hears of members that came or went at most so often
SETTLE_S = 30.0  # how long an ended run waits for others that train


class Phase(IntEnum):
    """How far a simulated trainer is; the numbers are in the digest."""

    JOINING = 0  # it has no model yet
    WAITING = 1  # for enough members
    TRAINING = 2
    FINISHING = 3  # its last step is made, and the others are to agree
    FINISHED = 4


TRANSITIONS: dict[Phase, dict[Phase, str]] = {
    Phase.JOINING: {Phase.WAITING: "a first model: its own, or a donor's"},
    Phase.WAITING: {Phase.TRAINING: "enough members are ready"},
    Phase.TRAINING: {Phase.FINISHING: "its last step"},
    Phase.FINISHING: {Phase.FINISHED: "all agree, or they take too long"},
    Phase.FINISHED: {},
}
"""What a phase may be followed by, and why; a crash ends the whole trainer."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What all nodes of a swarm share."""

    mode: str
    mode_settings: ModeSettings
    timing: Timing
    compute: Compute
    steps: int | None  # of a run; None trains for ever
    size_scale: float
    slow_node: float = 1.0  # how many times as long the first node's steps take
    ends_together: bool = False  # runs, where some nodes are slower


class Shell(Newcomer, Protocol):
    """What its node does for it."""

    life: int

    def perform(self, effects: Sequence[Effect | MembershipEffect]) -> None:
        """Do what a core asks."""
        ...

    def hears(self, source: NodeId) -> bool:
        """Whether it is not refused for broken rules."""
        ...


class SimulatedTrainer:
    """What one life of a node trains, from its first model to the end of its run."""

    def __init__(
        self,
        node: Shell,
        world: World,
        checkers: Checkers,
        settings: NodeSettings,
        learner: Learner,
        partners: set[NodeId],
        *,
        seeds: Sequence[Address],
        formed: bool,
        wait_for: int,
        lie: Lie | None,
    ) -> None:
        """In a swarm that is `formed` already it has the model, too."""
        self.learner = learner
        self.lie = lie
        self.phase = Phase.JOINING
        self.steps = 0
        self._kept: LearnersModel | None = None
        self.loss = math.nan
        self.computed_s = 0.0  # by the trainer, in whole steps
        self.trained_from = self.trained_until = math.nan
        self.staleness: Counter[int] = Counter()  # own steps between the two ends of an exchange
        self._core = ModeCore()
        self.own: Vector | None = None  # the model that start and own steps alone would make, where sums are checked
        self._node = node
        self._world = world
        self._checkers = checkers
        self._settings = settings
        self._rng = world.rng("node", node.index, node.life)
        self._compute_rng = world.rng("compute", node.index, node.life)
        self._wait_for = wait_for
        self._about = READY if formed else NodeMeta(expects=True, founder=not seeds)
        self._partners = partners
        self._partners_due = False
        self._pending: Vector | None = None  # corrections that the learner has not yet taken
        self._asked_publish = False
        self._at_barrier = False
        self._waits_with: float | None = None  # seconds that its gradient took to compute
        rng = world.rng("second opinion", node.index, node.life)
        self._first = FirstModel(node, learner, rng, seeds=seeds, taken=self._start_from)
        self._began: dict[NodeId, int] = {}
        self._ends = RunEnds()
        self._others = 0  # how far they are in their runs
        self._number = -1  # of the last step

    def begin(self) -> None:
        """Look for a model, if there may be one elsewhere."""
        if self._about is READY:
            self._have_model()
        else:
            self._say_about(model=SIGNATURE)
            self._first.seek()

    # ---------------------------------------------------------------- what there is to see

    @property
    def mode(self) -> Mode | None:
        """Once it has a model."""
        return self._core.mode

    @property
    def references(self) -> Mapping[NodeId, PairedReference]:
        """Of the links that its mode holds, if it has links."""
        return getattr(self.mode, "references", dict)()

    @property
    def is_centre(self) -> bool:
        """Whether its links belong to a centre variable."""
        return getattr(self.mode, "centre_values", None) is not None

    @property
    def counts(self) -> Counter[str]:
        """Of its mode."""
        return self.mode.counts if self.mode is not None else Counter()

    @property
    def waits(self) -> bool:
        """Whether its next step is the mode's to allow."""
        return self._at_barrier or self._waits_with is not None

    @property
    def trained_s(self) -> float:
        """From the first step's begin to the end of the run, its last exchanges included, or until now."""
        until = self._world.now if math.isnan(self.trained_until) else self.trained_until
        return 0.0 if math.isnan(self.trained_from) else until - self.trained_from

    @property
    def received(self) -> Vector | None:
        """What the others have made of the model, where a mode of paired exchanges may only hand it around."""
        return self.values() - self.own if self.own is not None and isinstance(self.mode, Gossip) else None

    @property
    def weight(self) -> float:
        """Of its model in the swarm's mean, of a mode that has weights."""
        return float(getattr(self.mode, "weight", 1.0))

    @property
    def put_by_others(self) -> Vector:
        """What others have put into weight * model, and taken out of it, float64; nothing before the first model."""
        return self._kept.received() if self._kept is not None else np.zeros(())

    def values(self) -> Vector:
        """The model, with every correction that has come, and behind it what of the optimizer is shared."""
        values = self.learner.values()
        return values if self._pending is None else values + self._pending

    def model(self) -> Vector:
        """The model alone."""
        return self.values()[: self._model_stop]

    @property
    def _model_stop(self) -> int:
        return self.learner.layout.total - self.learner.layout.states

    # ---------------------------------------------------------------- events

    @property
    def deadline(self) -> float:
        """Of its mode."""
        mode = self._core.mode  # asked at every event
        return mode.deadline if mode is not None else math.inf

    def on_timer(self, now: float) -> list[Effect]:
        """The deadline has come."""
        return self._core.handle(TimerDue(), now)

    def member_changed(self, member: Member) -> None:
        """A member may have become a partner, or is none any more."""
        if self._settings.ends_together:
            said = partners_said(self._node.membership.members, self._node.id, SIGNATURE)
            self._others = self._ends.heard(said)
        links = class_of(self._settings.mode).KEEPS_LINKS
        heard = not links or self._node.hears(member.id)
        if (heard and is_partner(member, SIGNATURE)) != (member.id in self._partners):
            self._partners ^= {member.id}
            if not self._partners_due:
                self._partners_due = True
                self._node.later(PEERS_EVERY_S, self._tell_partners)

    def _tell_partners(self) -> None:
        self._partners_due = False
        if self.mode is not None:
            self._handle(PeersChanged(frozenset(self._partners)))
            for early in self._core.came_early():
                self.receive(early.sender, early.message)
            self._maybe_go()

    def reconnected(self, peer: NodeId) -> None:
        """Messages to this peer flow again."""
        if self.mode is not None:
            self._node.later(0.0, lambda: self._handle(Reconnected(peer)))

    def unreached(self, peer: NodeId) -> None:
        """No connection to this peer can be made."""
        if self.mode is not None:
            self._node.later(0.0, lambda: self._handle(Unreached(peer)))

    def sent(self, peer: NodeId, message: Message) -> Message:
        """A message leaves for the peer, as it is but for a liar's."""
        if isinstance(message, Delta) and message.wants_answer:
            self._began[peer] = self.steps
        return message if self.lie is None else self.lie.sent(message)

    def receive(self, source: NodeId, message: Message) -> None:
        """A message of the mode, or about a whole model. Raises PeerError."""
        match message:
            case ModelRequest():
                self._tell_of_model(ModelAsked(source, self.learner.layout, message.digest))
            case SketchRequest():
                self._tell_of_model(SketchAsked(source, self.learner.layout, message.seed))
            case ModelPromise() | ModelSketch() | ModelSnapshot() | ModelEqual():
                self._first.receive(source, message)
            case _ if self.mode is not None:
                effects = self._core.handle(Received(source, message), self._node.now)
                if isinstance(message, Delta):
                    self._checkers.exchanged(self._node, source, message, effects)
                    if any(isinstance(effect, Apply) for effect in effects):
                        self.staleness[self.steps - self._began.pop(source, self.steps)] += 1
                self._node.perform(effects)

    def perform(self, effect: Effect) -> None:
        """Do what a core asks of the trainer."""
        match effect:
            case Apply():
                self._apply(effect.correction)
            case Publish() if self._waits_with is not None:  # a copy of the model as it stands
                report = StepReport(self.steps, 0.0, 1.0, published=True, finishing=False)
                self._node.later(0.0, lambda: self._handle(Stepped(report, 0)))
            case Publish():
                self._asked_publish = True
            case Become(values, step) if self._kept is not None:
                self._kept.load(values, step)
                self.steps = step
            case Averaged(gradient) if self._waits_with is not None:
                seconds, self._waits_with = self._waits_with, None
                mean = gradient if gradient is not None and math.isfinite(gradient[0]) else None  # all skip the step
                self._node.later(0.0, lambda: self._stepped(seconds, lambda: self.learner.descend(self.steps, mean)))
            case Resume() if self._at_barrier:
                self._at_barrier = False
                self._take_corrections()
                self._next_step()
            case Proceed() if effect.settled and self.phase is Phase.FINISHING:
                self._finish()

    def _handle(self, event: ModeEvent) -> None:
        self._node.perform(self._core.handle(event, self._node.now))

    def _say_about(self, **changes: Any) -> None:
        self._about = replace(self._about, **changes)
        self._node.perform(self._node.membership.set_meta(self._about.pack(), self._node.now))

    # ---------------------------------------------------------------- the first model

    def _tell_of_model(self, event: ModelAsked | SketchAsked) -> None:
        if self._kept is None:
            return
        self._kept.keep(self.values(), self.steps)  # production asks for it, and waits a step
        kept = self._kept.kept
        self._kept.kept = self._shown(lambda: kept)()
        with suppress(NotFinite):  # who asks finds another donor, if there is one
            self._handle(event)
        self._kept.kept = kept

    def _start_from(self, values: Vector | None, step: int) -> None:
        if values is not None:
            self.learner.load(values)
            self.steps = step
        self._have_model()

    def _have_model(self) -> None:
        learner, settings = self.learner, self._settings
        self._kept = self._core.model = LearnersModel(learner, lambda: self.weight)
        self._kept.step = self.steps
        self._pending = np.zeros_like(self._kept.kept)
        if self._kept.kept.dtype == np.float64:
            self.own = self._kept.kept.copy()
        make = parse_mode(settings.mode, settings.mode_settings.exchange)
        mode_settings = (
            settings.mode_settings
            if self.lie is None
            else self.lie.told(settings.mode_settings, class_of(settings.mode).KEEPS_LINKS)
        )
        self._handle(
            ModeBegins(
                AS_STARTED,
                frozenset(self._partners),
                lambda values: make(self._node.id, learner.layout, self._rng, mode_settings, self._shown(values)),
            )
        )
        if isinstance(staleness := getattr(self.mode, "staleness", None), Counter):
            self.staleness = staleness
        self._enter(Phase.WAITING)
        self._say_about(ready=True)
        self._tell_partners()
        self._maybe_go()

    def _shown(self, values: Callable[[], Vector]) -> Callable[[], Vector]:
        """What the mode takes for the model."""
        return values if self.lie is None else self.lie.shown(values, self._model_stop)

    def _maybe_go(self) -> None:
        if self.phase is Phase.WAITING and 1 + len(self._partners) >= self._wait_for:
            self._enter(Phase.TRAINING)
            self._next_step()

    def _enter(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase.name} -> {phase.name}"
        self.phase = phase
        if phase is Phase.TRAINING:
            self.trained_from = self._world.now
        elif phase is Phase.FINISHED:
            self.trained_until = self._world.now
        self._world.note(Kind.PHASE, self._node.index, phase)

    # ---------------------------------------------------------------- training

    def _next_step(self) -> None:
        seconds = self._settings.compute.draw(self._compute_rng)
        seconds *= self._settings.slow_node if self._node.index == 0 else 1.0
        if self._settings.mode_settings.exchange == GRADIENTS:
            self._node.later(seconds, lambda: self._wait_with_gradient(seconds))
        else:
            self._node.later(seconds, lambda: self._stepped(seconds, lambda: self.learner.step(self._next_number())))

    def _next_number(self) -> int:
        """Of the step that comes now, as its script has it."""
        total = self._settings.steps
        if not self._settings.ends_together or total is None:
            return self.steps
        self._number = number_of(self._number, self.steps, total, self._others)
        return self._number

    def _wait_with_gradient(self, seconds: float) -> None:
        assert self._kept is not None, "a mode runs only on a model"
        self._kept.gradient = self.learner.gradient(self.steps).copy()
        self._waits_with = seconds
        self._handle(GradientCame(self.steps, self.learner.samples, self.learner.rate))

    def _stepped(self, seconds: float, step: Callable[[], Moved]) -> None:
        learner = self.learner
        self.computed_s += seconds
        before = learner.values().copy() if self.own is not None or self.lie is not None else None
        moved = step()
        if self.own is not None and before is not None:
            self.own += learner.values() - before
        if self.lie is not None and before is not None:
            self.lie.stepped(before[: self._model_stop], learner.values()[: self._model_stop])
        self.steps += 1
        self.loss = moved.loss
        self._take_corrections()
        change = learner.change()
        total = self._settings.steps
        ended = total is not None and is_over(self.steps, total, self._others, self._number)
        barrier = self.mode.barrier if self.mode is not None else 0
        self._at_barrier = not ended and self.mode is not None and self.mode.quiet.stands_at(self.steps, barrier)
        published = self._asked_publish or ended or self._at_barrier or self._wants_copy(change)
        if published:
            self._asked_publish = False
        self._world.note(Kind.STEP, self._node.index, self.steps, change)
        report = StepReport(
            self.steps,
            change,
            moved.lr_ratio,
            published,
            finishing=ended,
            stands=self._at_barrier,
            samples=self.learner.samples,
        )
        if ended:
            self._enter(Phase.FINISHING)
            if self._settings.ends_together:
                self._say_about(ended=True)
            self._node.later(SETTLE_S, self._finish)
        waits = self._at_barrier  # Resume, which may come at once, makes the next step
        if self._settings.ends_together and total is not None:
            made = parts_of(self.steps, total)
            if made != self._about.made:
                self._say_about(made=made)
        self._handle(Stepped(report, 0 if published else None))
        if not ended and not waits:
            self._next_step()

    def _wants_copy(self, change: float) -> bool:
        """By the numbers that the mode gives. (A real trainer also copies once a second, for whoever may ask.)"""
        return self.mode is not None and self.mode.quiet.wants_copy(change, self.steps)

    def _apply(self, correction: Vector) -> None:
        assert self._kept is not None, "a mode runs only on a model"
        assert self._pending is not None, "set with it"
        self._world.note(Kind.APPLY, self._node.index, value=float(zlib.crc32(correction.data)))
        self._kept.add(correction)
        self._pending += correction
        if self.phase not in (Phase.TRAINING, Phase.WAITING):
            self._take_corrections()

    def _take_corrections(self) -> None:
        if self._pending is not None:
            self.learner.add(self._pending)
            self._pending.fill(0.0)

    def _finish(self) -> None:
        if self.phase is Phase.FINISHING:
            self._enter(Phase.FINISHED)
            self._world.note(Kind.FINISHED, self._node.index, self.steps)
