"""How do the nodes of a swarm combine what they learn? One file a mode, one line in the table.

A mode is a core: events and `now` come in, effects and a deadline come out. It does no I/O and reads no clock.
"""

from __future__ import annotations

import math
from functools import partial

from peerd.effects import UserError
from peerd.training.collectives import parse_topology
from peerd.training.delta import GAIN_MOST
from peerd.training.modes.allreduce import OVERLAPS, AllReduce
from peerd.training.modes.diloco import FRAGMENTS_MOST, DiLoCo
from peerd.training.modes.elastic import Elastic
from peerd.training.modes.elastic_pairs import ALPHA, ElasticPairs
from peerd.training.modes.gossip import Gossip
from peerd.training.modes.gossip_pull import GossipPull
from peerd.training.modes.gossip_push import GossipPush
from peerd.training.modes.mode import LinkStatus, Mode, ModeMaker, ModeSettings
from peerd.training.modes.noloco import NoLoCo
from peerd.training.modes.parameter_server import ParameterServer
from peerd.training.modes.push_sum import PushSum
from peerd.training.modes.shard_server import RATES, Rule
from peerd.training.modes.tree import parse_arity

__all__ = [
    "AUTO",
    "MODES",
    "LinkStatus",
    "Mode",
    "ModeMaker",
    "ModeSettings",
    "check_options",
    "default_codec",
    "parse_mode",
]

AUTO = "auto"
"""As a codec: the mode's own."""

MODES: dict[str, ModeMaker] = {
    "gossip": Gossip,
    "gossip-push": GossipPush,
    "gossip-pull": GossipPull,
    "push-sum": PushSum,
    "elastic": Elastic,
    "noloco": NoLoCo,
    "allreduce": AllReduce,
    "diloco": DiLoCo,
    "hardsync": partial(ParameterServer, rule=Rule(n=0)),
    "softsync": partial(ParameterServer, rule=Rule(n=1)),
    "async": partial(ParameterServer, rule=Rule(n=None)),
}
"""By name; a name may carry an argument after a colon (`parse_mode`)."""


ARGUMENTS = (
    f"softsync:N[:RATE] with N >= 1 and RATE of {', '.join(RATES)}; diloco:P with P from 1 to {FRAGMENTS_MOST}; "
    f"elastic:pairwise[:ALPHA] with ALPHA above 0 and up to {GAIN_MOST}"
)


SERVED = ("hardsync", "softsync", "async")
"""Modes with a parameter server."""


def parse_mode(text: str) -> ModeMaker:
    """A name in MODES, or one with an argument, as ARGUMENTS says. Raises UserError."""
    if text in MODES:
        return MODES[text]
    name, _, argument = text.partition(":")
    if name not in MODES:
        raise UserError(f"--mode {text}: {name!r} is not one of {', '.join(MODES)}")
    first, _, rest = argument.partition(":")
    number = int(first[:9]) if first.isascii() and first.isdigit() else 0
    if name == "softsync" and number >= 1 and rest in ("", *RATES):
        return partial(ParameterServer, rule=Rule(number, rest or RATES[0]))
    if name == "diloco" and 1 <= number <= FRAGMENTS_MOST and argument == first:
        return partial(DiLoCo, fragments=number)
    if name == "elastic" and first == "pairwise":
        alpha = _number(rest) if ":" in argument else ALPHA
        if 0 < alpha <= GAIN_MOST:
            return partial(ElasticPairs, alpha=alpha)
    raise UserError(f"--mode {text}: what takes an argument is {ARGUMENTS}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def check_options(mode: str, overlap: str, topology: str) -> None:
    """What a mode is told must fit it, and be there at all. Raises UserError."""
    parse_mode(mode)
    if overlap not in OVERLAPS:
        raise UserError(f"overlap {overlap!r}: not one of {', '.join(OVERLAPS)}")
    if mode.startswith("diloco:") and overlap == "hpsgd":
        raise UserError("overlap hpsgd: not with diloco:P, it would roll a fragment back that has no round for long")
    if _is_served(mode):
        parse_arity(topology)
    elif topology != AUTO:
        parse_topology(topology)


def exchanges(mode: str, counted: int) -> int:
    """How many there were, by what all nodes counted: both ends of one do, but with servers the worker alone."""
    return counted if _is_served(mode) else counted // 2


def _is_served(mode: str) -> bool:
    return mode.partition(":")[0] in SERVED


def default_codec(mode: str) -> str:
    """Where links keep what the other end knows, one bit a value is enough; elsewhere nothing is lost unless told."""
    name = mode.partition(":")[0]
    return "sign" if name in ("gossip", "gossip-push", "gossip-pull", "push-sum", "elastic") else "float32"
