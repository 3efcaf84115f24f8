"""What becomes of an event in the daemon: the mode's events, and those of the copy that it shares with its trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peerd.node.model_copy import ModelCopy
from peerd.training.effects import Apply, Averaged, Become, Effect, Log
from peerd.training.mode_core import ModeCore, ModeEvent, PeersChanged, Stepped, TrainerLost
from peerd.transport.errors import PeerError


@dataclass(frozen=True, slots=True)
class BufferTaken:
    """The trainer has added this buffer of corrections to its model."""

    buffer: int


@dataclass(frozen=True, slots=True)
class TrainerGone:
    """The session is over: the daemon owns the model now."""


@dataclass(frozen=True, slots=True)
class ModelMoves:
    """The same model goes on in another trainer's memory."""

    fresh: ModelCopy


@dataclass(frozen=True, slots=True)
class ModelComes:
    """Another trainer brings the model, which is of a later step."""

    fresh: ModelCopy
    step: int


@dataclass(frozen=True, slots=True)
class ModelWanted:
    """Somebody looks at the model as it stands."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """Whoever waits for it knows that all earlier events have been handled."""


NodeEvent = ModeEvent | BufferTaken | TrainerGone | ModelMoves | ModelComes | ModelWanted | Nothing


@dataclass(frozen=True, slots=True)
class TakeBuffer:
    """The trainer should add this buffer of corrections."""

    buffer: int


@dataclass(frozen=True, slots=True)
class LoadCopy:
    """The trainer's model is this copy now, as after this step."""

    copy: int
    step: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """The trainer goes on with the gradient that stands in its memory now, or without any."""

    gradient: bool


@dataclass(frozen=True, slots=True)
class CopyRead:
    """The copy that the trainer was asked for is here."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelIs:
    """A copy of the model, shape (total,), and the step that it is of."""

    values: npt.NDArray[np.float32]
    step: int


NodeEffect = Effect | TakeBuffer | LoadCopy | GoOn | CopyRead | ModelIs


class NodeCore(ModeCore):
    """The mode of a node and its copy of the trainer's model. Used by one thread at a time."""

    model: ModelCopy | None

    def handle_all(self, event: NodeEvent, now: float) -> list[NodeEffect]:
        """`handle`, corrections applied; the trainer is told until when it has nothing to report."""
        effects = self._applied(event, now)
        for early in self.came_early() if isinstance(event, PeersChanged) else ():
            try:
                effects += self._applied(early, now)
            except PeerError as error:  # its connection may be another one by now
                effects.append(Log(f"dropped what came early from {early.sender!r:.80}: {error}"))
        if self.model is None:
            return effects
        if self.mode is not None:
            self.model.be_quiet(self.mode.quiet)
        buffer = self.model.drain()
        return effects if buffer is None else [*effects, TakeBuffer(buffer)]

    def _applied(self, event: NodeEvent, now: float) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        for effect in self._follow(event, now):
            match effect:
                case Apply(correction) if self.model is not None:
                    self.model.add(correction)
                case Become(values, step) if self.model is not None:
                    effects.append(LoadCopy(self.model.load(values, step), step))
                case Averaged(gradient) if self.model is not None:
                    effects.append(GoOn(gradient is not None))
                case Apply() | Become() | Averaged():
                    pass
                case _:
                    effects.append(effect)
        return effects

    def _follow(self, event: NodeEvent, now: float) -> Sequence[NodeEffect]:
        model = self.model
        match event:
            case BufferTaken(buffer) if model is not None:
                model.taken(buffer)
            case TrainerGone():
                self.untold = 0
                if model is not None:
                    model.owned_here()
                return self.handle(TrainerLost(), now)
            case ModelMoves(fresh) if model is not None:
                fresh.load(model.look(), model.step)
                self.model = fresh
            case ModelComes(fresh, step) if model is not None:
                fresh.step = step
                fresh.take_over(model)
                self.model = fresh
            case ModelWanted() if model is not None:
                return [ModelIs(model.look().astype(np.float32), model.step)]
            case Stepped(_, copy) if copy is not None:
                return [CopyRead(), *self.handle(event, now)]
            case Nothing():
                pass
            case BufferTaken() | ModelMoves() | ModelComes() | ModelWanted():
                raise AssertionError("said of a model that there is")
            case _:
                return self.handle(event, now)
        return []
