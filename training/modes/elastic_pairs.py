"""How do pairs hold a swarm together with no centre? Elastic averaging between peers: `elastic:pairwise[:ALPHA]`.

Two peers that meet move towards each other by the same elastic force, and the mean stays where it is:

    x += alpha (y - x)        y += alpha (x - y)

That is EASGD's step (Zhang et al. 2015) with a peer in the centre's place, as in Elastic Gossip (Pramod 2018,
arXiv:1812.02407), and it is gossip's exchange over paired references, trigger, view and flush, with one difference.
Gossip's gain is the largest that the codec allows, up to one half, where a pair becomes one model. Here it is alpha, as
long as the codec allows that much: of the distance of a pair 1 - 2 alpha is left, and the peers go on exploring apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.mode_settings import ModeSettings
from peerd.training.modes.gossip import Gossip
from peerd.transport.ids import NodeId

ALPHA = 0.25
"""Half of the way to the mean: half of a pair's distance is left."""


class ElasticPairs(Gossip):
    """The mode's core for one node."""

    def __init__(
        self,
        me: NodeId,
        layout: Layout,
        rng: random.Random,
        settings: ModeSettings,
        values: Callable[[], Vector],
        *,
        alpha: float = ALPHA,
    ) -> None:
        """Both ends name their own alpha, and the smaller one counts."""
        super().__init__(me, layout, rng, settings, values)
        self.gain_limit = alpha
