"""What does the receiver of a one-way link know of my model? One public copy, the same bits on both ends.

    q = C(x - known)     C: any lossy codec; what it drops stays in x - known
    known += q           on both ends

Number 1 of a link starts from zeros: it is a snapshot. One push at a time is under way, and it is said again, the same
bytes, until it is answered; the receiver takes each number once, in order. Neither end can be more than one ahead.
"""

from __future__ import annotations

import numpy as np

from peerd.training.codecs.difference import decode_onto, encode_difference
from peerd.training.codecs.vector import Gain, Layout
from peerd.training.effects import Vector
from peerd.training.kernels.passes import parts
from peerd.training.one_way.mass import Inflow
from peerd.training.scratch import Scratch
from peerd.transport.ids import NodeId
from peerd.transport.messages import Push

FIRST_CODEC = "bfloat16"  # a first push holds the whole model: 1 bit a value would be no model


class Outgoing:
    """The sender's end."""

    def __init__(self, link: int, like: Vector, layout: Layout, scratch: Scratch) -> None:
        self.link = link
        self.version = 0  # what the receiver has answered
        self.known = np.zeros_like(like)
        self.next_known: Vector | None = None  # once the push under way is answered
        self.under_way: Push | None = None
        self.sent_at = float("-inf")
        self._layout = layout
        self._scratch = scratch

    def begin(self, values: Vector, codec: str, gains: dict[str, Gain], *, finishing: bool, back: bool) -> Push:
        """Encode push version + 1 from the model `values`. Raises NotFinite; call only when none is under way."""
        assert self.under_way is None, "one push at a time"
        codec = codec if self.version else FIRST_CODEC
        gain = gains.setdefault(codec, Gain())
        chunks, following = encode_difference(codec, self._layout, values, self.known, gain, self._scratch)
        for part in parts(len(following)):
            following[part] += self.known[part]
        self.next_known = following
        self.under_way = Push(self.link, self.version + 1, codec, gain.value, 0.0, finishing, back, chunks)
        return self.under_way

    def answered(self) -> None:
        """The receiver has taken the push under way."""
        assert self.next_known is not None, "something was under way"
        self._scratch.give(self.known)
        self.known, self.next_known, self.under_way = self.next_known, None, None
        self.version += 1

    def drop(self) -> None:
        """The link ends; what was under way has not been taken."""
        if self.next_known is not None:
            self._scratch.give(self.next_known)
        self.next_known = self.under_way = None


class Incoming:
    """The receiver's end."""

    def __init__(self, peer: NodeId, link: int, like: Vector, layout: Layout, scratch: Scratch) -> None:
        self.peer = peer
        self.link = link
        self.version = 0  # what was taken
        self.inflow = Inflow(0.0)  # push-sum's
        self.taken_at = float("-inf")
        self.distance = 0.0  # of the last push that was merged, from the model then
        self.known = np.zeros_like(like)
        self._layout = layout
        self._scratch = scratch

    def decode(self, push: Push) -> Vector:
        """What `known` becomes with this push, in scratch: `take` it or give it back. Raises PeerError."""
        return decode_onto(push.codec, self._layout, push.chunks, self.known, self._scratch)

    def take(self, following: Vector, distance: float, now: float) -> None:
        """The push was merged, which came from so far away."""
        self._scratch.give(self.known)
        self.known = following
        self.version += 1
        self.taken_at = now
        self.distance = distance
