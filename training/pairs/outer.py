"""Where does a node's outer model go when a pair meets? NoLoCo's outer step, and what a node contributes to it.

With x a node's model, phi its outer model and m its outer momentum, both ends of a pair do

    m = mu m + eta (x - phi) + eta (mean of the pair's x - x)        phi += m

which is NoLoCo's eta mean(x - phi) + eta (mean(phi) - phi) with its terms sorted anew: one vector travels in place of
two, and what its codec loses blurs the difference of the pair alone: own progress is exact, and the pair's mean, too.
It is sent whole, with no reference to code against, so the codec must keep most of each value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from peerd.training.codecs import vector
from peerd.training.codecs.difference import norm_of_difference
from peerd.training.codecs.vector import VALUE_MAX, Layout
from peerd.training.effects import Vector
from peerd.transport.errors import PeerError
from peerd.transport.messages import Chunks

ETA = 0.7  # NoLoCo's own
MU = 0.5
HALF = 0.5  # of what the pair is apart: both come to its mean
WHOLE_MODEL_CODECS = ("float32", "bfloat16", "int8")


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """A model as it was taken, and what the partner sees of it."""

    x: Vector
    seen: Vector
    chunks: Chunks


class Outer:
    """The outer model and momentum of one node. Not thread-safe: one thread owns it."""

    def __init__(self, layout: Layout, codec: str, start: Vector, eta: float = ETA, mu: float = MU) -> None:
        """Both are of shape (total,); phi begins at `start`."""
        self.eta = eta
        self._mu = mu
        self.codec = codec
        self.phi = start.copy()
        self._layout = layout
        self._momentum = np.zeros_like(start)

    def contribute(self, values: Vector) -> Contribution:
        """Take the model as it is now. Raises NotFinite."""
        x, seen = values.copy(), np.empty_like(values)
        chunks, _ = vector.encode(self.codec, self._layout, x, decoded=seen)
        return Contribution(x, seen, chunks)

    def decode(self, codec: str, chunks: Chunks) -> Vector:
        """What the partner contributes. Raises PeerError."""
        theirs = np.empty_like(self.phi)
        vector.decode(codec, self._layout, chunks, theirs)
        if not np.abs(theirs).max() <= VALUE_MAX:
            raise PeerError(f"a value beyond {VALUE_MAX:g}")
        return theirs

    def apart(self, ours: Contribution, theirs: Vector) -> float:
        """Make `theirs` what the partner's model is more than ours; returns the length of its parameters' part."""
        theirs -= ours.seen
        return norm_of_difference(theirs[: self._layout.parameters])

    def step(self, ours: Contribution, apart: Vector, share: float = HALF, of_buffers: float = HALF) -> Vector:
        """Make the step, with so much of what the pair is apart, and overwrite that; returns phi - x.

        Float buffers take the pair's mean: with momentum a variance could become negative.
        """
        parameters, theirs = self._layout.parameters, apart
        theirs[:parameters] *= share
        theirs[parameters:] *= of_buffers
        theirs += ours.x  # the pair's mean
        theirs -= self.phi
        momentum = self._momentum
        momentum *= self._mu
        momentum += self.eta * theirs
        momentum[parameters:] = theirs[parameters:]
        self.phi += momentum
        momentum[parameters:] = 0.0
        moved: Vector = np.subtract(self.phi, ours.x, out=theirs)
        return moved
