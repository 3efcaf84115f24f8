"""When a link is worth an exchange.

The default follows the change of the local model (Ho, Wu and Liu 2018; SPARQ-SGD, Singh et al. 2020): a threshold on
the relative change since the last exchange with that peer, scaled by the learning rate's decay. A constant threshold
goes silent once the learning rate falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from peerd.training.model.quiet import NEVER
from peerd.training.plain_numbers import number, whole
from peerd.transport.errors import WrongSetting

SILENCE_MAX_S = 60.0
"""A link that has said nothing for this long speaks, however little has changed."""
WAKE_AFTER_S = SILENCE_MAX_S + 1e-3
"""When a mode asks to be woken for it. Times round: woken a hair early, it would ask for the same moment for ever."""


@dataclass(frozen=True, slots=True)
class LinkChange:
    """What happened to our model x since the last exchange over one link."""

    change: float  # ||x - x at that exchange||: of the difference, for a difference of norms misses rotation
    norm: float  # ||x at that exchange||
    worth: float  # how many times the threshold this exchange is to wait for
    lr_ratio: float  # learning rate / the largest learning rate so far
    steps: int
    silence_s: float
    finishing: bool  # no further step will come


class Trigger(Protocol):
    """A pure rule; see `fires`, which asks it."""

    def reason(self, link: LinkChange) -> str | None:
        """Why this link should exchange now ("change", "silence", "period", "always"), or None, while its run is on."""

    def quiet(self, link: LinkChange) -> tuple[float, int]:
        """How much more change, and how many more steps, there may be before it fires; its silence is not in it."""


def fires(trigger: Trigger, link: LinkChange) -> str | None:
    """Why this link should exchange now, or None: for no change that is not finite; else always when the run ends."""
    if not math.isfinite(link.change):
        return None
    return "finishing" if link.finishing else trigger.reason(link)


@dataclass(frozen=True, slots=True)
class ChangeTrigger:
    """Fires when change > threshold * worth * lr_ratio * norm, or after SILENCE_MAX_S."""

    threshold: float

    def reason(self, link: LinkChange) -> str | None:
        """See `Trigger.reason`."""
        if link.change > self._limit(link):
            return "change"
        return "silence" if link.silence_s >= SILENCE_MAX_S else None

    def quiet(self, link: LinkChange) -> tuple[float, int]:
        """See `Trigger.quiet`."""
        return self._limit(link) - link.change, NEVER

    def _limit(self, link: LinkChange) -> float:
        return self.threshold * link.worth * link.lr_ratio * link.norm


@dataclass(frozen=True, slots=True)
class PeriodTrigger:
    """Fires every `period` steps: the honest control for an adaptive rule. It knows no silence: steps end it."""

    period: int

    def reason(self, link: LinkChange) -> str | None:
        """See `Trigger.reason`."""
        return "period" if link.steps >= self.period else None

    def quiet(self, link: LinkChange) -> tuple[float, int]:
        """See `Trigger.quiet`."""
        return math.inf, self.period - link.steps


ONLY_FINISHING = f"period:{NEVER}"
"""Of what only answers until its run ends."""


@dataclass(frozen=True, slots=True)
class AlwaysTrigger:
    """Fires whenever it is asked."""

    def reason(self, link: LinkChange) -> str | None:
        """See `Trigger.reason`."""
        return "always"

    def quiet(self, link: LinkChange) -> tuple[float, int]:
        """See `Trigger.quiet`."""
        return -1.0, 0


def _change(text: str) -> Trigger:
    threshold = number(text)
    if threshold < 0:
        raise ValueError
    return ChangeTrigger(threshold)


def _period(text: str) -> Trigger:
    period = whole(text)
    if period < 1:
        raise ValueError
    return PeriodTrigger(period)


def _always(text: str) -> Trigger:
    if text:
        raise ValueError
    return AlwaysTrigger()


@dataclass(frozen=True, slots=True)
class TriggerKind:
    """How a user writes a trigger, and how that is read."""

    example: str
    meaning: str
    parse: Callable[[str], Trigger]  # what follows the colon; raises ValueError


TRIGGERS: dict[str, TriggerKind] = {
    "change": TriggerKind("change:0.05", "when the model has moved by that share of its norm", _change),
    "period": TriggerKind("period:10", "every so many steps", _period),
    "always": TriggerKind("always", "as often as there can be an exchange: at every second step", _always),
}


def parse_trigger(text: str) -> Trigger:
    """The trigger that `text` describes, such as "change:0.05", "period:10" or "always".

    Raises:
        UserError: it describes none; the message is one line and gives the choices.
    """
    name, _, value = text.partition(":")
    try:
        return TRIGGERS[name].parse(value)
    except (KeyError, ValueError):
        choices = ", ".join(f"{kind.example} ({kind.meaning})" for kind in TRIGGERS.values())
        raise WrongSetting(f"trigger {text[:40]!r} is not one; write one of: {choices}", "trigger") from None
