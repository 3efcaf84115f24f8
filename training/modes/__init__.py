"""How do the nodes of a swarm combine what they learn? One file a mode, one line in the table.

A mode is a core: events and `now` come in, effects and a deadline come out. It does no I/O and reads no clock.
"""

from __future__ import annotations

from functools import partial

from peerd.effects import UserError
from peerd.training.modes.allreduce import AllReduce
from peerd.training.modes.diloco import DiLoCo
from peerd.training.modes.elastic import Elastic
from peerd.training.modes.gossip import Gossip
from peerd.training.modes.gossip_pull import GossipPull
from peerd.training.modes.gossip_push import GossipPush
from peerd.training.modes.mode import LinkStatus, Mode, ModeMaker, ModeSettings
from peerd.training.modes.noloco import NoLoCo
from peerd.training.modes.parameter_server import ParameterServer
from peerd.training.modes.push_sum import PushSum
from peerd.training.modes.shard_server import RATES, Rule

__all__ = ["AUTO", "MODES", "LinkStatus", "Mode", "ModeMaker", "ModeSettings", "default_codec", "parse_mode"]

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


def parse_mode(text: str) -> ModeMaker:
    """A name in MODES, or `softsync:N[:RATE]`. Raises UserError."""
    if text in MODES:
        return MODES[text]
    name, _, argument = text.partition(":")
    if name not in MODES:
        raise UserError(f"--mode {text}: {name!r} is not one of {', '.join(MODES)}")
    n, _, rate = argument.partition(":")
    if name != "softsync" or not (n.isascii() and n.isdigit() and int(n[:9]) >= 1 and rate in ("", *RATES)):
        raise UserError(f"--mode {text}: only softsync:N[:RATE] has an argument, N >= 1, RATE of {', '.join(RATES)}")
    return partial(ParameterServer, rule=Rule(int(n[:9]), rate or RATES[0]))


def default_codec(mode: str) -> str:
    """Where links keep what the other end knows, one bit a value is enough; elsewhere nothing is lost unless told."""
    return "sign" if mode in ("gossip", "gossip-push", "gossip-pull", "push-sum", "elastic") else "float32"
