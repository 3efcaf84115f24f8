"""How do the nodes of a swarm combine what they learn? One file a mode, one line in the table.

A mode is a core: events and `now` come in, effects and a deadline come out. It does no I/O and reads no clock.
"""

from __future__ import annotations

from peerd.training.modes.allreduce import AllReduce
from peerd.training.modes.diloco import DiLoCo
from peerd.training.modes.gossip import Gossip
from peerd.training.modes.gossip_pull import GossipPull
from peerd.training.modes.gossip_push import GossipPush
from peerd.training.modes.mode import LinkStatus, Mode, ModeMaker, ModeSettings
from peerd.training.modes.push_sum import PushSum

__all__ = ["AUTO", "MODES", "LinkStatus", "Mode", "ModeMaker", "ModeSettings", "default_codec"]

AUTO = "auto"
"""As a codec: the mode's own."""

MODES: dict[str, ModeMaker] = {
    "gossip": Gossip,
    "gossip-push": GossipPush,
    "gossip-pull": GossipPull,
    "push-sum": PushSum,
    "allreduce": AllReduce,
    "diloco": DiLoCo,
}


def default_codec(mode: str) -> str:
    """Where links keep what the other end knows, one bit a value is enough; elsewhere nothing is lost unless told."""
    return "sign" if mode in ("gossip", "gossip-push", "gossip-pull", "push-sum", "elastic") else "float32"
