"""What becomes of an event at a node that has a model? One `handle` for the daemon and for the simulator.

Whatever happens to the mode, or to the model that it reads, is one of the events below, in one order. What follows is a
list of effects, which the shell performs: in the daemon a thread handles and the loop performs, in the simulator both
are one call. A mode may be followed by another one on the same model. Before, the old one begins nothing new, so that
what is under way comes to its end; after, what the trainer reports before it knows of the new mode's barrier is not
meant for it: it may have gone on since.

A mode hears its members alone: who is ready under its plan, or was until a minute ago. Whatever comes from anybody else
is counted, and waits in early.py for the news that its sender is a member; no mode makes anything of it before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

from peerd.training.codecs import vector
from peerd.training.codecs.difference import digest, digest_of_chunks
from peerd.training.codecs.vector import Layout
from peerd.training.early import EarlyMessages
from peerd.training.effects import Averaged, Effect, Publish, Send, StepReport, Vector
from peerd.training.mode import Mode
from peerd.training.sketch import packed, sketch
from peerd.transport.ids import NodeId
from peerd.transport.messages import (
    AS_STARTED,
    Connected,
    Message,
    ModelEqual,
    ModelPromise,
    ModelSketch,
    ModelSnapshot,
    Plan,
)

NEWCOMER_CODEC = "float32"  # a newcomer starts from exactly the donor's model
SLOWEST_KEPT = 0.9  # of the slowest, at each exchange that was sooner: one of a bad day is forgotten
ODD = 4.0  # times the slowest of late: one that took longer counts as so long
LAST_WORDS_S = 60.0  # how long one who has gone is heard: what it said last may come after the news of its leave


class Model(Protocol):
    """The node's model, as far as its daemon knows it."""

    step: int

    @property
    def gradient(self) -> Vector:
        """The trainer's, while it waits with it: see `Layout.gradients`. Empty where models are exchanged."""
        ...

    def values(self) -> Vector:
        """With every correction so far, shape (total,); the array is used again by the next call."""
        ...

    def look(self) -> Vector:
        """The same, to be read only, and only until the model is corrected."""
        ...

    def spares(self) -> list[Vector]:
        """Memory that nobody needs until the end of an event, if there is any: `add` need not copy the first."""
        ...

    def add(self, correction: Vector) -> None:
        """Have it corrected."""
        ...

    def published(self, copy: int, step: int, *, apart: bool) -> None:
        """The trainer has written this copy after this step; what it has not taken is to be kept `apart`, or added."""
        ...

    def load(self, values: Vector, step: int) -> int:
        """Have it replaced, to the bit; returns the copy that holds it."""
        ...


@dataclass(frozen=True, slots=True)
class ModeBegins:
    """`make` gives the mode that a plan names. It knows its partners at once: one of rounds would begin alone."""

    plan: Plan
    alive: frozenset[NodeId]
    make: Callable[[Callable[[], Vector]], Mode]


@dataclass(frozen=True, slots=True)
class ModeEnds:
    """The mode begins nothing new; said until nothing is under way."""


@dataclass(frozen=True, slots=True)
class BarrierKnown:
    """The trainer knows of a change of the mode: what it reports from now on is for the new one."""

    is_superseded: ClassVar[bool] = False  # and no later report may come before it


@dataclass(frozen=True, slots=True)
class Stepped:
    """The trainer's optimizer moved, or its run ended; `copy` is the one that it published, if it did."""

    report: StepReport
    copy: int | None

    @property
    def is_superseded(self) -> bool:
        """By a later one, where both wait: the mode wants the newest change."""
        return self.copy is None and not self.report.published and not self.report.finishing


@dataclass(frozen=True, slots=True)
class GradientCame:
    """The trainer's gradient of this step, of so many samples, stands in the model's memory, from `first` on.

    With all of it, `first` is 0, the trainer waits."""

    step: int
    samples: float
    rate: float  # the learning rate of its optimizer's next step
    first: int = 0
    anew: bool = True  # what was said of a gradient before is void
    is_superseded: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class TrainerLost:
    """Where gradients are exchanged: the trainer is gone, or went back to an earlier model of its own."""


@dataclass(frozen=True, slots=True)
class RunStands:
    """No trainer makes a step: a mode that has not heard of a run's end does so now, at `step` if it is `anew`."""

    step: int
    anew: bool


@dataclass(frozen=True, slots=True)
class NodeLeaves:
    """Every partner should have what this node has not yet sent."""

    step: int


@dataclass(frozen=True, slots=True)
class PeersChanged:
    """These members, and no others, can exchange."""

    alive: frozenset[NodeId]


@dataclass(frozen=True, slots=True)
class Reconnected:
    """Messages to this peer flow again."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class Unreached:
    """No connection to this peer can be made, until it is reconnected."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class Received:
    """A peer's message to the mode, meant under this plan."""

    sender: NodeId
    message: Message
    plan: Plan = AS_STARTED


@dataclass(frozen=True, slots=True)
class ModelAsked:
    """A newcomer wants the whole model, unless its own, of this digest, is the same."""

    peer: NodeId
    layout: Layout
    digest: bytes


@dataclass(frozen=True, slots=True)
class SketchAsked:
    """A newcomer wants a sketch of the model by this seed."""

    peer: NodeId
    layout: Layout
    seed: bytes


@dataclass(frozen=True, slots=True)
class CopyWanted:
    """Somebody waits for the trainer's model as it is after its next step."""


@dataclass(frozen=True, slots=True)
class TimerDue:
    """The mode's deadline may have come."""


ModeEvent = (
    ModeBegins | ModeEnds | BarrierKnown | Stepped | GradientCame | TrainerLost | RunStands | NodeLeaves
    | PeersChanged | Reconnected | Unreached | Received | ModelAsked | SketchAsked | CopyWanted | TimerDue
)  # fmt: skip


class ModePhase(Enum):
    """How far a mode has come, between the plan that begins it and the next one."""

    RUNS = "it hears and begins what it will"
    ENDS = "it hears, and begins nothing new: another plan is in force, and exchanges are under way"
    ENDED = "nothing is under way, and nothing more is heard until the next mode begins"


TRANSITIONS: dict[ModePhase, dict[ModePhase, str]] = {
    ModePhase.RUNS: {
        ModePhase.RUNS: "ModeBegins: the first one, or after one that nobody asked to end",
        ModePhase.ENDS: "ModeEnds",
    },
    ModePhase.ENDS: {
        ModePhase.ENDS: "ModeEnds, said again while an exchange is under way",
        ModePhase.ENDED: "ModeEnds, and none is",
        ModePhase.RUNS: "ModeBegins: what was under way is waited for no longer",
    },
    ModePhase.ENDED: {
        ModePhase.ENDS: "ModeEnds, said again",
        ModePhase.RUNS: "ModeBegins",
    },
}
"""What a phase may be followed by, and why."""


class ModeCore:
    """The mode of one node, between its model and the events."""

    def __init__(self) -> None:
        self.mode: Mode | None = None
        self.model: Model | None = None
        self.plan = AS_STARTED  # what the mode belongs to
        self.phase = ModePhase.RUNS
        self._in_place = False  # the mode leaves the model that it looks at as it is
        self.untold = 0  # changes of the mode that the trainer does not know of yet
        self._slowest: dict[NodeId, float] = {}  # seconds, of the exchanges of late that this node began with each
        self.slowest_s = 0.0
        self._last_report: StepReport | None = None
        self._ended_at: int | None = None  # the last step of a run of whose end the mode has heard
        self._partners: frozenset[NodeId] = frozenset()
        self._members: frozenset[NodeId] = frozenset()  # as the mode knows them
        self._gone: dict[NodeId, float] = {}  # who was one, and when it went
        self._early = EarlyMessages()
        self._began: dict[NodeId, float] = {}
        self._gradient: GradientCame | None = None  # with which the trainer waits, or will

    def handle(self, event: ModeEvent, now: float) -> list[Effect]:
        """What follows from it. Raises PeerError for a message that breaks the rules, NotFinite for a model asked."""
        effects = self._handle(event, now)
        if self._gradient is not None and any(isinstance(effect, Averaged) for effect in effects):
            self._gradient = None
        return effects

    def _handle(self, event: ModeEvent, now: float) -> list[Effect]:
        mode, model = self.mode, self.model
        match event:
            case ModeBegins():
                return self._begin(event, now)
            case BarrierKnown():
                self.untold = max(0, self.untold - 1)
            case CopyWanted():
                return [Publish()]
            case Stepped(report, copy):
                if copy is not None and model is not None:
                    model.published(copy, report.step, apart=not self._in_place)
                self._last_report = report
                waits = (self.phase is not ModePhase.RUNS or self.untold > 0) and not report.finishing
                return self._report(mode, report, now) if mode is not None and not waits else []
            case GradientCame():
                self._gradient = event
                return self._give_gradient(now)
            case TrainerLost():
                self._gradient = None
                return mode.on_trainer_lost(now) if mode is not None else []
            case ModelAsked(peer, layout, told) if model is not None and told and told == digest(model.look(), layout):
                return [Send(peer, ModelEqual(model.step))]
            case ModelAsked(peer, layout) if model is not None:
                chunks = vector.encode(NEWCOMER_CODEC, layout, model.look())[0]
                promise = ModelPromise(digest_of_chunks(chunks))
                return [Send(peer, promise), Send(peer, ModelSnapshot(model.step, NEWCOMER_CODEC, chunks))]
            case SketchAsked(peer, layout, seed) if model is not None:
                return [Send(peer, ModelSketch(seed, packed(sketch(model.look(), layout, seed))))]
            case PeersChanged(alive):
                came = [Publish()] if alive - self._partners else []  # what they hear of is the model as it is
                self._partners = alive
                self._note_members(alive, now)
                for gone in (self._began.keys() | self._slowest.keys()) - alive:
                    self._began.pop(gone, None)
                    self._slowest.pop(gone, None)
                self.slowest_s = max(self._slowest.values(), default=0.0)
                return [*came, *mode.on_peers(alive, now)] if mode is not None else []
            case _ if mode is not None:
                return self._tell(mode, event, now)
        return []

    def _tell(self, mode: Mode, event: ModeEvent, now: float) -> list[Effect]:
        """What concerns nothing but a mode that there is."""
        match event:
            case Received(sender, message, plan) if plan == self.plan and self.phase is not ModePhase.ENDED:
                if not self._hears(sender, now):
                    mode.counts["unheard"] += 1
                    self._early.keep(sender, message)
                    return []
                if (began := self._began.pop(sender, None)) is not None:
                    before = self._slowest.get(sender, 0.0)
                    # in one that took far longer than any of late this process, or the other, stood still
                    took_s = min(now - began, ODD * (before or self.slowest_s) or now - began)
                    self._slowest[sender] = max(SLOWEST_KEPT * before, took_s)
                    self.slowest_s = max(self._slowest.values())
                return mode.on_message(sender, message, now)
            case Reconnected(peer):
                self._began.pop(peer, None)
                return mode.on_message(peer, Connected(), now)
            case Unreached(peer):
                return mode.on_unreached(peer, now)
            case TimerDue() if self.phase is not ModePhase.ENDED:
                return mode.on_timer(now) if now >= mode.deadline else []  # it may have changed since it came
            case ModeEnds():
                self._enter(ModePhase.ENDS)
                if not mode.under_way:  # at once: what comes before the next mode would be half done for ever
                    self._enter(ModePhase.ENDED)
            case NodeLeaves(step):
                return self._report(mode, _ended(step), now)
            case RunStands(step, anew):
                last = self._last_report
                if anew and (last is None or not last.finishing):
                    last = _ended(step)
                return self._report(mode, last, now) if last is not None and last.finishing else []
        return []

    def came_early(self) -> list[Received]:
        """What those said who have become members by the last event: handle it next, and drop whoever breaks a rule."""
        came = self._early.take(self._members)
        return [Received(sender, message, self.plan) for sender, message in came]

    def sent(self, peer: NodeId, message: Message, now: float) -> None:
        """A message leaves; how long its answer takes is `slowest_s`' business."""
        if getattr(message, "wants_answer", False):
            self._began[peer] = now

    def _begin(self, event: ModeBegins, now: float) -> list[Effect]:
        assert self.model is not None, "a mode runs only on a model"
        if self.mode is not None and (left := self.mode.end()) is not None:
            self.model.add(left)
        self._in_place = False
        last, self.mode = self.mode, event.make(self._values)
        if last is not None:
            self.mode.succeeds(last)
        self._in_place = self.mode.works_in_place(self._spares)
        self.plan = event.plan
        self._ended_at = None
        self._enter(ModePhase.RUNS)
        self._began.clear()
        self._early.clear()
        self._note_members(event.alive, now)
        return [*self.mode.on_peers(event.alive, now), *self._give_gradient(now)]

    def _report(self, mode: Mode, report: StepReport, now: float) -> list[Effect]:
        """Tell of a step. A last one may be said again (who was interrupted at a run's end comes to it once more): a
        mode of rounds would begin another final round."""
        if report.finishing and report.step == self._ended_at and not report.change:
            return []
        self._ended_at = report.step if report.finishing else None
        return mode.on_step(report, now)

    def _give_gradient(self, now: float) -> list[Effect]:
        """To the mode in force; to the next one where this one begins nothing new, but ends what it has begun."""
        came, mode, model = self._gradient, self.mode, self.model
        goes_on = came is not None and not came.anew and self.phase is ModePhase.ENDS
        if came is None or mode is None or model is None or not (goes_on or self.phase is ModePhase.RUNS):
            return []
        if came.first > 0:
            return mode.on_part(model.gradient, came.first, came.samples, came.step, now, anew=came.anew)
        return mode.on_gradient(model.gradient, came.samples, came.step, now, came.rate, anew=came.anew)

    def _enter(self, phase: ModePhase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase.name} -> {phase.name}"
        self.phase = phase

    def _note_members(self, members: frozenset[NodeId], now: float) -> None:
        went = dict.fromkeys(self._members - members, now)
        lately = {id: at for id, at in self._gone.items() if now - at < LAST_WORDS_S and id not in members}
        self._members, self._gone = members, lately | went

    def _hears(self, sender: NodeId, now: float) -> bool:
        return sender in self._members or now - self._gone.get(sender, float("-inf")) < LAST_WORDS_S

    def _values(self) -> Vector:
        """Of the model as it is then: another trainer brings another one."""
        assert self.model is not None, "a mode runs only on a model"
        return self.model.look() if self._in_place else self.model.values()

    def _spares(self) -> list[Vector]:
        return self.model.spares() if self.model is not None else []


def _ended(step: int) -> StepReport:
    return StepReport(step, 0.0, 1.0, published=False, finishing=True)
