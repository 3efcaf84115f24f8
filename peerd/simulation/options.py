"""What is simulated, and for how long? The settings of one run, and how they are written as text and as a command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, fields
from typing import Any

from peerd.simulation.byzantine import parse_byzantine
from peerd.simulation.outcome import Target, parse_target
from peerd.training.mode_settings import GRADIENTS, OPTIONS, ModeSettings
from peerd.training.modes import MODES, check_given, check_options, check_peers, class_of
from peerd.training.modes.own_mode import as_told
from peerd.training.plain_numbers import number, whole
from peerd.transport.errors import UserError

QUASI_GLOBAL = "quasi-global"
OPTIMIZERS = ("sgd", "nesterov", QUASI_GLOBAL, "adamw")
SCHEDULES = ("constant", "cosine")
LOOK_MIN_S = 0.001  # between looks: each is kept until the run's end


@dataclass(frozen=True, slots=True)
class Learning:
    """Settings of the optimizer; None: as the problem has it."""

    optimizer: str | None = None
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    batch: int | None = None
    schedule: str | None = None

    def check(self) -> None:
        """Raises UserError for what makes no sense by itself."""
        for option, value, choices in (
            ("--optimizer", self.optimizer, OPTIMIZERS),
            ("--schedule", self.schedule, SCHEDULES),
        ):
            if value is not None and value not in choices:
                raise UserError(f"{option} {value}: not one of {', '.join(choices)}")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise UserError(f"--lr {self.lr:g}: wanted a number above 0")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise UserError(f"--momentum {self.momentum:g}: wanted a number from 0 to below 1")
        if self.weight_decay is not None and not 0 <= self.weight_decay < 1:
            raise UserError(f"--weight-decay {self.weight_decay:g}: wanted a number from 0 to below 1")
        if self.batch is not None and self.batch < 1:
            raise UserError(f"--batch {self.batch}: wanted at least 1 sample")
        if self.optimizer in ("nesterov", QUASI_GLOBAL) and self.momentum == 0:
            raise UserError(f"--optimizer {self.optimizer}: needs a momentum above 0")
        if self.optimizer == "adamw" and self.momentum is not None:
            raise UserError("--momentum: without effect with --optimizer adamw, whose betas are fixed; leave it out")

    def given(self) -> list[str]:
        """The names of what is said."""
        return [setting.name for setting in fields(self) if getattr(self, setting.name) is not None]

    def only(self, problem: str, *known: str) -> None:
        """Raises UserError where something is said that the problem has not got."""
        if idle := [name for name in self.given() if name not in known]:
            options = ", ".join("--" + name.replace("_", "-") for name in idle)
            has = ", ".join("--" + name.replace("_", "-") for name in known) or "none of these"
            raise UserError(f"{options}: without effect on --problem {problem}, which takes {has}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(ModeSettings):
    """The settings; every name is an option of `peerd simulate`. `codec` may be `auto`."""

    peers: int = 16
    seed: int = 0
    minutes: float | None = None
    problem: str = "consensus"
    steps: int | None = None
    parameters: int = 125_000_000
    compute: str = "fixed:2"
    network: str = "lan"
    uplink_mbit: float | None = None
    downlink_mbit: float | None = None
    mode: str = "gossip"
    shard: str = "iid"
    faults: str = "crash"
    fault_every: float = 60.0
    join_over: float | None = None
    byzantine: str = "none"
    slow_node: float = 1.0
    ends_together: bool = False
    optimizer: str | None = None
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    batch: int | None = None
    schedule: str | None = None
    target: str | None = None
    look_every: float | None = None
    drop: float = 0.0

    def __post_init__(self) -> None:
        """Check what options say together. Raises UserError."""
        ModeSettings.__post_init__(self)
        check_options(self.mode, self)
        parse_byzantine(self.byzantine, self.peers)
        check_peers(self, self.peers)
        if self.join_over is not None and self.minutes is not None and self.join_over > 60 * self.minutes:
            raise UserError(f"--join-over {self.join_over:g}: the run ends after {60 * self.minutes:g} s")
        if self.look_every is not None and not (math.isfinite(self.look_every) and self.look_every >= LOOK_MIN_S):
            raise UserError(f"--look-every {self.look_every:g}: wanted at least {LOOK_MIN_S:g} virtual seconds")
        if not 0 <= self.drop < 1:
            raise UserError(f"--drop {self.drop:g}: wanted a share of the messages, from 0 to below 1")
        if self.drop and not class_of(self.mode).MAY_BE_LOST:
            able = ", ".join(name for name, mode in MODES.items() if mode.MAY_BE_LOST)
            raise UserError(f"--drop {self.drop:g}: mode {self.mode} needs every message; those that do not: {able}")
        check_given(self.mode, [setting.name for setting in fields(self) if self._says(setting)], self.exchange)
        self._check_optimizer()
        self.learning.check()
        self.wanted()

    def _check_optimizer(self) -> None:
        given = [name for name in ("optimizer", "momentum", "weight_decay") if getattr(self, name) is not None]
        if self.optimizer == QUASI_GLOBAL and self.exchange == GRADIENTS:
            raise UserError(
                f"--optimizer {QUASI_GLOBAL}: nodes that exchange gradients have one momentum already; leave it out"
            )
        if given and self.exchange == GRADIENTS and not self.shares_optimizer:
            options = ", ".join("--" + name.replace("_", "-") for name in given)
            raise UserError(
                f"{options}: without effect in mode {self.mode} with gradients, where the servers have the optimizer; "
                "say --server-optimizer"
            )

    def refuse(self, names: Collection[str], where: str) -> None:
        """Raises UserError where one of these settings is said, which have no effect there."""
        if idle := [setting.name for setting in fields(self) if setting.name in names and self._says(setting)]:
            options = ", ".join("--no-robust" if name == "robust" else "--" + name.replace("_", "-") for name in idle)
            raise UserError(f"{options}: without effect {where}; leave it out")

    @property
    def learning(self) -> Learning:
        """How each node learns, as far as it is said."""
        return Learning(self.optimizer, self.lr, self.momentum, self.weight_decay, self.batch, self.schedule)

    @property
    def shares_optimizer(self) -> bool:
        """Whether an optimizer's state is a part of the model, which members take over from each other."""
        return self.exchange == GRADIENTS and class_of(self.mode).exchanging(GRADIENTS).SHARES_OPTIMIZER

    @property
    def scores(self) -> bool:
        """Whether looks at the run score the averaged model."""
        return self.look_every is not None or self.target is not None

    def wanted(self) -> Target | None:
        """The target, parsed. Raises UserError."""
        return None if self.target is None else parse_target(self.target)

    @property
    def label(self) -> str:
        """What tells this run from others that are compared with it: MODE;KEY=VALUE... as `parse_modes` reads it."""
        said = [setting.name for setting in fields(self) if setting.name in OF_A_MODE and self._says(setting)]
        return ";".join([self.mode, *(f"{name.replace('_', '-')}={getattr(self, name)}" for name in said)])

    def command(self) -> str:
        """The command line that runs this again."""
        words = ["peerd", "simulate"]
        for setting in fields(self):
            value, option = getattr(self, setting.name), setting.name.replace("_", "-")
            if not self._says(setting) and setting.name != "seed":
                continue
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            else:
                words += [f"--{option}", as_told(self.mode) if setting.name == "mode" else str(value)]
        return shlex.join(words)

    def _says(self, setting: Field[Any]) -> bool:
        return bool(getattr(self, setting.name) != setting.default)


def _switch(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


_READ: dict[type, Callable[[str], Any]] = {bool: _switch, int: whole, float: number, str: str}
OF_A_MODE: dict[str, Callable[[str], Any]] = {
    **{name: _READ[type(option.default)] for name, option in OPTIONS.items()},
    "optimizer": str, "lr": number, "momentum": number, "weight_decay": number, "batch": whole, "schedule": str,
}  # fmt: skip
"""What can be said for one of several modes that are compared, by how its text is read."""

OF_TRAINING = {*OF_A_MODE, "mode", "steps", "compute", "slow_node", "ends_together", "byzantine"}


def parse_modes(text: str) -> list[tuple[str, dict[str, Any]]]:
    """`MODE;KEY=VALUE...,MODE...`, as `gossip;codec=top_k_3,diloco;every=50`: each mode, and what is said for it alone.

    Raises UserError for a key that no mode has and for a value that is none; not for one that this mode does not heed.
    """
    found = []
    for part in text.split(","):
        mode, *said = part.split(";")
        settings: dict[str, Any] = {}
        for one in said:
            key, equals, value = one.partition("=")
            name = key.strip().replace("-", "_")
            if not equals or name not in OF_A_MODE:
                keys = ", ".join(OF_A_MODE).replace("_", "-")
                raise UserError(f"--mode {text}: {one!r} is not KEY=VALUE with a KEY of {keys}")
            try:
                settings[name] = OF_A_MODE[name](value)
            except (ValueError, KeyError) as error:
                raise UserError(f"--mode {text}: {key}={value}: not a value of {key} ({error})") from None
        found.append((mode, settings))
    return found


SEEDS_MAX = 10_000


def parse_seeds(text: str) -> list[int]:
    """`0..4` (both included) or `0,3,7`. Raises UserError."""
    try:
        first, dots, last = text.partition("..")
        seeds = (
            list(range(whole(first), whole(last) + 1)[: SEEDS_MAX + 1])
            if dots
            else [whole(one) for one in text.split(",")]
        )
        if not seeds or min(seeds) < 0 or len(seeds) > SEEDS_MAX or len(set(seeds)) < len(seeds):
            raise ValueError(text)
    except ValueError:
        raise UserError(
            f"--seeds {text}: wanted FIRST..LAST or a list such as 0,3,7, each once, none below 0"
        ) from None
    return seeds
