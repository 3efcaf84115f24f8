"""What can a mode be told? One table: settings, plans, scenarios and command lines are made from its fields.

Adding an option is a field here and its name in TAKES of the modes that heed it.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from peerd.training.codecs import CODECS
from peerd.training.plain_numbers import number
from peerd.training.trigger import TRIGGERS
from peerd.transport.errors import wrong

AUTO = "auto"
"""Left to the mode."""

QUORUM = "quorum"
OVERLAPS = ("blocking", QUORUM, "delayed", "hpsgd")
STANDING = ("blocking", QUORUM)
"""Of these the ones where a trainer stands still from its contribution until the round is over."""
WEIGHTS, GRADIENTS = EXCHANGES = ("weights", "gradients")
"""What the members of a swarm give each other: models after their steps, or gradients before them."""
SGD = "sgd"
"""What servers make of gradients, unless told otherwise: optimizer.py."""


ROSTER_MAX = 512
"""Members of one round: its order has two lengths of each, and an array of a message 1024 items."""
OUTER_LR_MAX = 10.0  # beyond 2 a plain outer step already throws the model back and forth


class Scope(Enum):
    """Who must be told the same."""

    PLAN = "all members; it may change while they train"
    START = "all members, from the start"
    ALIKE = "all members, from the start; it may change while they train"


def _option(default: Any, help: str, scope: Scope = Scope.PLAN, least: int = 1, most: int | None = None) -> Any:
    """`least` and `most` are of a whole number."""
    return field(default=default, metadata={"help": help, "scope": scope, "least": least, "most": most})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeSettings:
    """What a mode may be told; a core is given its codec by name."""

    codec: str = _option(AUTO, "how deltas are compressed; auto: the mode's own")
    trigger: str = _option("change:0.05", f"when to send: {', '.join(kind.example for kind in TRIGGERS.values())}")
    view: int = _option(3, "partners at a time", most=1024)
    every: int = _option(
        0, "steps between rounds; 0: the mode's own number, or as many as it measures", least=0, most=10**9
    )
    overlap: str = _option(AUTO, "training during a round: blocking, quorum, delayed, hpsgd; auto: the mode's own")
    topology: str = _option(AUTO, "of an all-reduce: auto, ring, tree:K, halving; of servers: adv:K")
    servers: int = _option(1, "parts of the parameters, each served by some member", most=128)
    outer_lr: str = _option(
        AUTO, f"of the outer step: a number above 0, at most {OUTER_LR_MAX:g}; auto: the mode's own", Scope.ALIKE
    )
    outer_momentum: str = _option(
        AUTO, "of the outer step: a number from 0 to below 1; auto: the mode's own", Scope.ALIKE
    )
    min_peers: int = _option(1, "a round of fewer members waits for more", most=ROSTER_MAX)
    exchange: str = _option(WEIGHTS, "weights after a step, or gradients before it", Scope.START)
    server_optimizer: str = _option(
        SGD, "of servers that get gradients: sgd or adamw, with options as in sgd:momentum=0.9", Scope.START
    )
    robust: bool = _option(True, "bound what one member can do to this node's model", Scope.START)

    def __post_init__(self) -> None:
        """All that a mode is told passes here. Raises UserError for a name that is none or a count out of range."""
        check_choice("codec", self.codec, [AUTO, *CODECS])
        check_choice("overlap", self.overlap, [AUTO, *OVERLAPS])
        check_choice("exchange", self.exchange, EXCHANGES)
        for option in OPTIONS.values():
            if option.metadata["most"] is not None:
                least, most = option.metadata["least"], option.metadata["most"]
                check_count(option.name, getattr(self, option.name), most, least)


def outer_step(told: ModeSettings, lr: float, momentum: float) -> tuple[float, float]:
    """Learning rate and momentum of an outer step; `auto` stands for these. Raises UserError."""
    lr = _number("outer_lr", told.outer_lr, lr)
    if not 0 < lr <= OUTER_LR_MAX:
        raise wrong("outer_lr", f"{lr:g} must be above 0 and at most {OUTER_LR_MAX:g}")
    momentum = _number("outer_momentum", told.outer_momentum, momentum)
    if not 0 <= momentum < 1:
        raise wrong("outer_momentum", f"{momentum:g} must be from 0 to below 1")
    return lr, momentum


def with_outer_step(told: ModeSettings, lr: float, momentum: float) -> ModeSettings:
    """The same with numbers for `auto`, as all would write them. Raises UserError."""
    lr, momentum = outer_step(told, lr, momentum)
    return replace(told, outer_lr=repr(lr), outer_momentum=repr(momentum))


def _number(name: str, text: str, auto: float) -> float:
    try:
        return auto if text == AUTO else number(text)
    except ValueError:
        raise wrong(name, f"{text[:40]!r} is neither a number nor {AUTO}") from None


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises UserError for what is none of them, with the nearest."""
    if value not in choices:
        near = difflib.get_close_matches(value, choices, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise wrong(name, f"{value[:40]!r} is not one of {', '.join(choices)}{hint}")


def check_count(name: str, value: int, most: int, least: int = 1) -> None:
    """Raises UserError for one below `least`, or above `most`."""
    if value < least:
        raise wrong(name, f"{value} must be at least {least}")
    if value > most:
        raise wrong(name, f"{value} must be at most {most}")


OPTIONS: dict[str, Field[Any]] = {option.name: option for option in fields(ModeSettings)}
"""By name; `metadata` has `help`, `scope`, `least` and `most`."""
PLANNED = tuple(name for name, option in OPTIONS.items() if option.metadata["scope"] is not Scope.START)
"""What a plan says of its mode."""
ALIKE_AT_START = tuple(name for name, option in OPTIONS.items() if option.metadata["scope"] is not Scope.PLAN)
"""What all members must be told alike when they start."""
