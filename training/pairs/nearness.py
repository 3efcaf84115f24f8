"""Are two partners' models near? At a run's end they say where they are, and exchange only where that is far apart.

An exchange costs each end half a byte a value, a sketch (training/sketch.py) 488 bytes; the distance of two sketches is
that of the models within some 9 %. What the references of a link say of it is a bound: all that each model has moved
since, by exchanges with others, counts there as if it led away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from peerd.training.sketch import Sketch, packed, unpacked
from peerd.transport.errors import PeerError
from peerd.transport.messages import LinkSketch

SEED = b"peerd: at the end of a run"
"""Of all sketches: a partner says of itself what it likes, so nothing is gained by one that it does not know."""


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """Where a model was, shape (2, WIDTH), after so many exchanges of a link."""

    number: int
    seq: int
    finishing: bool
    sums: Sketch
    at: float

    def message(self, link: int, *, asks: bool) -> LinkSketch:
        """As the peer is told."""
        return LinkSketch(link, self.number, self.seq, self.finishing, asks, packed(self.sums))

    def apart(self, there: Sketch, norm: float) -> float:
        """About how far the model is from another: their parameters, over that norm of theirs, or their buffers, over
        the norm of this one's, if that is further. Infinite: the norm is 0."""
        norms = norm, float(np.linalg.norm(self.sums[1]))
        off = np.linalg.norm(self.sums - there, axis=1)
        return max(
            (float(one / whole) if whole else np.inf for one, whole in zip(off, norms, strict=True) if one), default=0
        )


def can_be_said(sums: Sketch) -> bool:
    """Whether a peer would take it: its model is finite."""
    return bool(np.abs(sums).max() <= np.finfo(np.float32).max)


def heard(message: LinkSketch, now: float) -> Told:
    """What the peer says. Raises PeerError."""
    try:
        sums = unpacked(message.sums)
    except ValueError:
        raise PeerError(f"a sketch of {len(message.sums)} bytes") from None
    if not np.isfinite(sums).all():
        raise PeerError("a sketch of a model that is not finite")
    return Told(message.number, message.seq, message.finishing, sums, now)


class Nearness:
    """What the two ends of a link have last said."""

    __slots__ = ("asks", "heard", "newest", "number", "told")

    def __init__(self) -> None:
        self.number = self.newest = 0  # of the last one told, and heard
        self.forget()

    def forget(self) -> None:
        """What was said is so no more."""
        self.told: Told | None = None
        self.heard: Told | None = None
        self.asks = False  # and has had no answer

    def hear(self, said: Told) -> bool:
        """Whether it is news."""
        if said.number <= self.newest:
            return False
        self.heard, self.newest, self.asks = said, said.number, False
        return True

    def tell(self, seq: int, sums: Sketch, now: float, *, finishing: bool, asks: bool) -> Told:
        """From now on the peer is told this; a question that still waits to leave makes way for this one."""
        self.number += 1
        self.told = Told(self.number, seq, finishing, sums, now)
        self.asks |= asks
        return self.told

    def is_known(self, version: int) -> bool:
        """Whether both have, since exchange `version`; who has applied the next one may say so before it is here."""
        return self.told is not None and self.heard is not None and version <= self.heard.seq <= version + 1

    @property
    def is_said(self) -> bool:
        """Whether both have, at some time."""
        return self.told is not None and self.heard is not None

    @property
    def distance(self) -> float:
        """Of the two models' parameters, by what was said."""
        told, heard = self._both()
        return float(np.linalg.norm(told.sums[0] - heard.sums[0]))

    def apart(self, norm: float) -> float:
        """See `Told`: of the two models, by what was said."""
        told, heard = self._both()
        return told.apart(heard.sums, norm)

    def _both(self) -> tuple[Told, Told]:
        assert self.told is not None
        assert self.heard is not None
        return self.told, self.heard
