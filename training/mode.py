"""What is a mode? The contract that every way of combining models keeps, and the words shared with its shell."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, cast

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Effect, Log, StepReport, Vector
from peerd.training.mode_settings import AUTO, GRADIENTS, WEIGHTS, ModeSettings
from peerd.training.model.quiet import Quiet
from peerd.transport.ids import NodeId
from peerd.transport.messages import Connected, Message

LAND_AGAIN_S = 0.1  # a correction is rounded: whether the model is what it should be is seen when it is applied
ENDED_MAX = 1024  # links that have ended of which the last word is remembered: two integers each


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """What `peerd status` shows of one link."""

    peer: NodeId
    exchanges: int
    distance: float
    gain: float
    last_reason: str
    codec: str = ""  # of the next exchange, where links have codecs of their own


OPTIMIZER_VALUES_MAX = {WEIGHTS: 0, GRADIENTS: 2}
"""Values of an optimizer's for each parameter that come with a model's in one message, at most."""


class ModeClass:
    """What a mode's class says of itself; settings, help, checks and docs/modes.md's table are made from it."""

    NAME: ClassVar[str]
    ARGUMENT: ClassVar[str] = ""
    """What may stand after the name and a colon, as help writes it; `of` reads it."""
    USUAL: ClassVar[str] = ""
    """The argument that none stands for, where users are shown it."""
    TAKES: ClassVar[tuple[str, ...]]
    """Which of ModeSettings have an effect."""
    CODEC: ClassVar[str] = "float32"
    """Unless the settings name one."""
    KEEPS_LINKS: ClassVar[bool] = False
    """Whether its nodes keep what each partner knows of their model."""
    PUSHES: ClassVar[bool] = False
    """Whether a link goes one way: a node has as many to others as from others."""
    MAY_BE_LOST: ClassVar[tuple[type[Message], ...]] = ()
    """Messages that may each be lost though the connection lives: the mode notices by itself, and says them again."""
    ENDS_THAT_COUNT: ClassVar[int] = 2
    """Of one exchange, in the counts of all nodes."""
    EXCHANGES: ClassVar[tuple[str, ...]] = (WEIGHTS,)
    """What its members may give each other."""
    SHARES_OPTIMIZER: ClassVar[bool] = False
    """Whether the optimizer's state is a part of the flat model where gradients are exchanged."""

    @classmethod
    def of(cls, argument: str) -> ModeMaker | None:
        """What makes its core; None: it takes no such argument."""
        return cast(ModeMaker, cls) if not argument else None

    @classmethod
    def in_one_form(cls, argument: str) -> str:
        """An argument that `of` takes, as all write it who mean the same; the default is none."""
        return argument

    @classmethod
    def exchanging(cls, exchange: str) -> type[ModeClass]:
        """The class whose members give each other this; one that can do either is its own."""
        return cls

    @classmethod
    def check(cls, argument: str, told: ModeSettings) -> None:
        """Whether what it is told fits, where what is exchanged is one of EXCHANGES.

        Raises WrongSetting with the name of the setting, so that the user is told where it came from.
        """

    @classmethod
    def in_force(cls, told: ModeSettings) -> ModeSettings:
        """What its core works by: the mode's own values stand for what is left to it, or is not for it."""
        return replace(told, codec=cls.CODEC if told.codec == AUTO else told.codec)

    @classmethod
    def settle_steps(cls, argument: str, in_force: ModeSettings) -> int:
        """How many steps lie between the end of a round and the next one, whatever `every` says."""
        return 0

    def succeeds(self, last: Mode) -> None:
        """See `Mode`: nothing."""

    def works_in_place(self, spares: Callable[[], list[Vector]]) -> bool:
        """See `Mode`."""
        return False

    def on_gradient(
        self, gradient: Vector, samples: float, step: int, now: float, rate: float, *, anew: bool = False
    ) -> list[Effect]:
        """See `Mode`."""
        raise AssertionError(f"{self.NAME} exchanges weights")

    def on_part(
        self, gradient: Vector, first: int, samples: float, step: int, now: float, *, anew: bool
    ) -> list[Effect]:
        """See `Mode`."""
        return []

    def on_trainer_lost(self, now: float) -> list[Effect]:
        """See `Mode`."""
        return []

    def on_unreached(self, peer: NodeId, now: float) -> list[Effect]:
        """See `Mode`: whoever has links alone waits for nobody."""
        return []


class LinkedMode(ModeClass):
    """A mode whose nodes keep what each partner knows of their model: one bit a value is enough then."""

    TAKES = ("codec", "trigger", "view")
    CODEC = "sign"
    KEEPS_LINKS = True


def not_finite(counts: Counter[str], what: str = "the model") -> list[Effect]:
    """It cannot be sent: counted each time, and said the first."""
    counts["not_finite"] += 1
    text = f"{what} holds a value that is not finite: nothing of it is sent"
    return [Log(text)] if counts["not_finite"] == 1 else []


class Mode(Protocol):
    """The contract: every call returns its effects, in order, and may move `deadline`. Calls never overlap.

    `values()`, given at construction, reads the model as it stands, with every correction applied so far; the array is
    the mode's own until it asks again. A correction in an Apply is the shell's until the next call.
    """

    deadline: float
    counts: Counter[str]
    barrier: int
    """The trainer publishes at each step that is a multiple of this, and waits there for a Resume, from `stand_step` of
    `quiet` on; 0: never."""

    def succeeds(self, last: Mode) -> None:
        """Before its first event: take over what still holds of the mode that was in force, on the same model."""

    def works_in_place(self, spares: Callable[[], list[Vector]]) -> bool:
        """Asked once, of a mode just made: whether it never writes to what `values()` gives, and needs it no more once
        an event is over. Then that is the model's own memory, which may be read only: one copy of it less.

        `spares()` gives what memory there is for whole-model temporaries of an event, best of all its correction.
        """
        ...

    def on_step(self, report: StepReport, now: float) -> list[Effect]:
        """The trainer's optimizer moved, or its run ended. Steps of which `quiet` wants nothing may be left out."""
        ...

    @property
    def quiet(self) -> Quiet:
        """Which steps it wants to hear of; that may be others after each event."""
        ...

    def on_message(self, sender: NodeId, message: Message | Connected, now: float) -> list[Effect]:
        """A peer's message arrived. Raises PeerError when the peer broke the rules."""
        ...

    def on_peers(self, alive: frozenset[NodeId], now: float) -> list[Effect]:
        """These peers, and no others, are alive and hold the same model."""
        ...

    def on_unreached(self, peer: NodeId, now: float) -> list[Effect]:
        """No connection to this peer can be made, until Connected says that one is; said again and again meanwhile."""
        ...

    def on_timer(self, now: float) -> list[Effect]:
        """The deadline came."""
        ...

    def on_gradient(
        self, gradient: Vector, samples: float, step: int, now: float, rate: float, *, anew: bool = False
    ) -> list[Effect]:
        """The trainer waits with the gradient of its step `step`, of so many samples; Averaged lets it go on.

        `rate` is the learning rate that its optimizer would make the step with, not negative.
        `gradient`, shape (layout.gradients.total,), is lent until then, and the mean takes its place there.
        Only where `exchange` is gradients. A mode that begins while a trainer waits hears of it at once.
        """
        ...

    def on_part(
        self, gradient: Vector, first: int, samples: float, step: int, now: float, *, anew: bool
    ) -> list[Effect]:
        """A backward pass is under way, and its parameters' gradients from `first` > 0 on are there, which stay.

        `anew`: what was said of a gradient before is void; so it is with `on_gradient`, which says the rest.
        """
        ...

    def on_trainer_lost(self, now: float) -> list[Effect]:
        """No trainer waits (any more), and the model is not what the last Averaged led to: it is gone, or went back.

        Only where gradients are exchanged.
        """
        ...

    def links(self) -> list[LinkStatus]:
        """What there is to show."""
        ...

    def end(self) -> Vector | None:
        """Another mode takes over: what this node learnt that its model has not got, and nobody else either."""
        ...

    @property
    def under_way(self) -> bool:
        """Whether this node owes or awaits the end of something with a living peer: a bad moment to end the mode."""
        ...

    @property
    def consensus_distance(self) -> float:
        """An estimate of the root mean square distance of a model from the swarm's mean, over the model's norm."""
        ...


ModeMaker = Callable[[NodeId, Layout, random.Random, ModeSettings, Callable[[], Vector]], Mode]
