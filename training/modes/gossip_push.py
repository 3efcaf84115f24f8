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
from peerd.training.one_way.allowance import BUFFERS_MAX, finite_norm
from peerd.training.one_way.core import OneWay
from peerd.training.one_way.partners import Partner
from peerd.training.one_way.public_copy import Incoming
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import Push

MEAN_OF_MAX = 4  # pushes since the last own step that all weigh alike


class GossipPush(OneWay):
    """The mode's core for one node."""

    NAME = "gossip-push"

    def _begin(self, partner: Partner, values: Vector, reason: str, now: float) -> list[Effect]:
        return self._push(partner.peer, values, now, partner, reason)

    def _correction(self, incoming: Incoming, push: Push, came: Vector, values: Vector) -> Vector:
        if not 0 < push.gain <= GAIN_MAX:
            raise PeerError(f"a gain of {push.gain} is outside (0, {GAIN_MAX}]")
        correction = self._scratch.take(came)
        np.subtract(came, values, out=correction)
        received = self._received if push.finishing else min(self._received, MEAN_OF_MAX)
        share = min(push.gain, 1 / (2 + received))
        if self._robust:
            self._shorten(correction, incoming.peer, share, values)
        else:
            correction *= share
        return correction

    def _shorten(self, apart: Vector, peer: NodeId, share: float, values: Vector) -> None:
        """Make a correction of `share` of `apart`, or of less of it."""
        parameters, buffers = slice(self._layout.parameters), slice(self._layout.parameters, None)
        distance = finite_norm(apart[parameters])
        limit = self._allowances.of(peer, self._norm(values), distance, still=self._report.finishing)
        self.counts["pushes_shortened"] += share * distance > limit
        part = min(share, limit / distance) if distance > 0 else share
        apart[parameters] *= part
        self._allowances.moved(peer, part * distance)
        if (length := finite_norm(apart[buffers])) > 0:
            apart[buffers] *= min(part, BUFFERS_MAX * finite_norm(values[buffers]) / length)
