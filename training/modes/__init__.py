"""How do the nodes of a swarm combine what they learn? One file a mode, one line in the table.

A mode is a core: events and `now` come in, effects and a deadline come out. It does no I/O and reads no clock.
"""

from __future__ import annotations

from peerd.training.modes.elastic import Elastic
from peerd.training.modes.gossip import Gossip
from peerd.training.modes.mode import LinkStatus, Mode, ModeMaker, ModeSettings
from peerd.training.modes.noloco import NoLoCo

__all__ = ["MODES", "LinkStatus", "Mode", "ModeMaker", "ModeSettings"]

MODES: dict[str, ModeMaker] = {"gossip": Gossip, "elastic": Elastic, "noloco": NoLoCo}
