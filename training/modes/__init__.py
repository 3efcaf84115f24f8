"""How do the nodes of a swarm combine what they learn? One file a mode, one line in the table.

A mode is a core: events and `now` come in, effects and a deadline come out. It does no I/O and reads no clock. Its
class says all that there is to know of it (`ModeClass`): settings, help and checks are made from that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from peerd.training.mode import LinkStatus, Mode, ModeClass, ModeMaker
from peerd.training.mode_settings import ALIKE_AT_START, OPTIONS, PLANNED, WEIGHTS, ModeSettings
from peerd.training.model.quiet import EVERY_STEP, Quiet
from peerd.training.modes.allreduce import AllReduce
from peerd.training.modes.diloco import DiLoCo
from peerd.training.modes.elastic import Elastic
from peerd.training.modes.gossip import Gossip
from peerd.training.modes.gossip_pull import GossipPull
from peerd.training.modes.gossip_push import GossipPush
from peerd.training.modes.noloco import NoLoCo
from peerd.training.modes.parameter_server import Async, HardSync, SoftSync
from peerd.training.modes.push_sum import PushSum
from peerd.training.trigger import parse_trigger
from peerd.transport.errors import UserError, WrongSetting

__all__ = [
    "EVERY_STEP",
    "MODES",
    "LinkStatus",
    "Mode",
    "ModeClass",
    "ModeMaker",
    "ModeSettings",
    "Quiet",
    "alike_at_start",
    "check_given",
    "check_options",
    "class_of",
    "exchanges",
    "heeds",
    "in_full",
    "in_one_form",
    "parse_mode",
    "settings_of",
    "shown_settings",
]

MODES: dict[str, type[ModeClass]] = {
    mode.NAME: mode
    for mode in (
        Gossip,
        GossipPush,
        GossipPull,
        PushSum,
        Elastic,
        NoLoCo,
        AllReduce,
        DiLoCo,
        HardSync,
        SoftSync,
        Async,
    )
}
"""By name; those of a user's own file join them when `--mode FILE.py:CLASS` names it (`own_mode.py`)."""


def class_of(mode: str) -> type[ModeClass]:
    """Of a mode's name, with or without an argument. Raises UserError."""
    name = mode.partition(":")[0]
    if name not in MODES:
        raise WrongSetting(f"--mode {mode}: {name!r} is not one of {', '.join(MODES)}", "mode")
    return MODES[name]


def parse_mode(text: str, exchange: str = WEIGHTS) -> ModeMaker:
    """NAME, or NAME:ARGUMENT as its class says. Raises UserError."""
    mode, argument = class_of(text).exchanging(exchange), text.partition(":")[2]
    if argument or not text.endswith(":"):
        maker = mode.of(argument)
        if maker is not None:
            return maker
    if mode.ARGUMENT:
        raise WrongSetting(f"--mode {text}: with an argument it is {text.partition(':')[0]}:{mode.ARGUMENT}", "mode")
    arguments = ", ".join(f"{name}:{one.ARGUMENT}" for name, one in MODES.items() if one.ARGUMENT)
    raise WrongSetting(f"--mode {text}: what takes an argument is {arguments}", "mode")


def in_one_form(mode: str) -> str:
    """The same mode as all write it who mean it. Raises UserError."""
    parse_mode(mode)
    name, _, argument = mode.partition(":")
    form = class_of(mode).in_one_form(argument)
    return f"{name}:{form}" if form else name


def in_full(mode: str) -> str:
    """As users are shown it, with the number that none stands for; a name that is no mode's is theirs who said it."""
    known = MODES.get(mode)
    return f"{mode}:{known.USUAL}" if known is not None and known.USUAL else mode


def settings_of(mode: str, told: ModeSettings) -> ModeSettings:
    """What the mode's core is given and users are shown: the settings of modes among `told`, as they take effect."""
    of_modes = ModeSettings(**{name: getattr(told, name) for name in OPTIONS})
    return class_of(mode).exchanging(told.exchange).in_force(of_modes)


def shown_settings(mode: str, told: ModeSettings) -> dict[str, Any]:
    """What the mode heeds of what may change while it runs, as it takes effect."""
    in_force = settings_of(mode, told)
    return {name: getattr(in_force, name) for name in PLANNED if heeds(mode, name, in_force.exchange)}


def alike_at_start(mode: str, told: ModeSettings) -> str:
    """The mode and what all members must be told alike, where it does not take effect as if they were told nothing."""
    own, usual = asdict(settings_of(mode, told)), asdict(settings_of(mode, ModeSettings()))
    return "+".join(
        [in_one_form(mode), *(f"{name}={own[name]}" for name in ALIKE_AT_START if own[name] != usual[name])]
    )


def check_options(mode: str, told: ModeSettings) -> None:
    """What a mode is told must fit it, and be there at all. Raises UserError."""
    parse_mode(mode)
    parse_trigger(told.trigger)
    exchange = told.exchange
    if exchange not in class_of(mode).EXCHANGES:
        able = ", ".join(name for name, other in MODES.items() if exchange in other.EXCHANGES)
        raise WrongSetting(f"exchange {exchange}: not with mode {mode}; modes that do so: {able}", "exchange")
    class_of(mode).check(mode.partition(":")[2], told)


def check_peers(told: ModeSettings, peers: int) -> None:
    """What so many members could never do. Raises UserError."""
    for option, wanted in (("--servers", told.servers), ("--min-peers", told.min_peers)):
        if wanted > peers:
            raise UserError(f"{option} {wanted}: the swarm has {peers} peers")


def heeds(mode: str, setting: str, exchange: str = WEIGHTS) -> bool:
    """Whether a setting has an effect in this mode; what is no setting of modes, or no mode, is not ours to judge."""
    known = MODES.get(mode.partition(":")[0])
    if known is None or all(setting not in other.TAKES for other in MODES.values()):
        return True
    return setting in known.exchanging(exchange).TAKES


def check_given(mode: str, given: Iterable[str], exchange: str = WEIGHTS, among: Iterable[str] = OPTIONS) -> None:
    """What a user gives, defaults aside, must have an effect in the mode; it may be `among` these. Raises UserError."""
    if idle := [setting for setting in given if not heeds(mode, setting, exchange)]:
        takes = ", ".join(name for name in class_of(mode).exchanging(exchange).TAKES if name in among)
        told = f"{mode} with gradients" if exchange != WEIGHTS else mode
        raise WrongSetting(
            f"{', '.join(idle)}: without effect in mode {told}, which takes {takes}; leave it out", idle[0]
        )


def exchanges(mode: str, counted: int) -> int:
    """How many there were, by what all nodes counted."""
    return counted // class_of(mode).ENDS_THAT_COUNT
