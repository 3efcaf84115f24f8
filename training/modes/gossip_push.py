"""Gossip-push: the model goes one way, to one random partner, which merges it (Jin et al. 2016, arXiv:1611.04581).

    x_j <- (x_j + sum of received) / (1 + #received)

The receiver merges each model when it comes: the k-th since its own last step gets 1 / (1 + k), which makes the same
mean, or less where the codec's contraction allows less. From the fifth on each gets 1/6: a member that makes no step
for long follows the others, where in the paper what comes would weigh ever less. The swarm's mean is not conserved, so
what is beyond the sender's allowance (training/one_way/allowance.py) is left out.
"""

from __future__ import annotations

import numpy as np

from peerd.training.codecs.vector import GAIN_MAX
from peerd.training.effects import Effect, Vector
from peerd.training.one_way.core import OneWay
from peerd.training.one_way.partners import Partner
from peerd.training.one_way.public_copy import Incoming
from peerd.transport.errors import PeerError
from peerd.transport.messages import Push

MEAN_OF_MAX = 4  # pushes since the last own step that all weigh alike


class GossipPush(OneWay):
    """The mode's core for one node."""

    NAME = "gossip-push"

    def _begin(self, partner: Partner, values: Vector, reason: str, now: float) -> list[Effect]:
        return self._push(partner.peer, values, now, partner, reason)

    def _correction(self, incoming: Incoming, push: Push, came: Vector, values: Vector, distance: float) -> Vector:
        if not 0 < push.gain <= GAIN_MAX:
            raise PeerError(f"a gain of {push.gain} is outside (0, {GAIN_MAX}]")
        correction = self._scratch.take(came)
        np.subtract(came, values, out=correction)
        received = self._received if push.finishing else min(self._received, MEAN_OF_MAX)
        share = min(push.gain, 1 / (2 + received))
        if not self._robust:
            correction *= share
            return correction
        cut = self._layout.parameters
        part, of_buffers = self._allowances.shares(incoming.peer, distance, correction, values, cut, share)
        self.counts["pushes_shortened"] += part < share
        correction[:cut] *= part
        correction[cut:] *= of_buffers
        return correction
