"""Is the model that a newcomer is offered the swarm's? Some other members say a few numbers of theirs (sketch.py).

A donor may lie, or have lost its way, and who starts from what it gives is no better: the others hardly let such a node
move them, and hardly move it (training/pairs/robust.py). So when a donor has promised a model, by its digest, WITNESSES
others are asked, drawn at random, by a seed that nobody knew before. The model is taken if the median distance of its
parameters from theirs is at most FAR times what is usual between all of them; or CLOSE of their length, as members may
agree to the bit, and train on while a model is copied. What else is in it (buffers, an optimizer's state) may change
wholly from step to step, and has to be of their size. With fewer than three models nobody can say which is the odd one;
where half of those who are asked lie together, they are the usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from peerd.node.donors import ASK_AGAIN_S, ASK_SOON_S
from peerd.training.sketch import Sketch, unpacked
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import ModelSketch, SketchRequest

WITNESSES = 7
OTHERS_MIN = 2  # of which the odd one of three can be told
FAR = 4.0  # as between partners (robust.py)
CLOSE = 0.05
REJECTED_MAX = 7  # models: who finds nobody credible takes what there is
SKETCH_S = 5e-9  # what a value takes who is asked: a good one by one thread, while its script trains
SEED_BYTES = 16
OWN = b"own"  # the promise of a donor that says that its model is the newcomer's: no digest is as short


class _Round:
    """What those say who were asked about one model."""

    def __init__(self, promise: bytes, seed: bytes, asked: list[NodeId], asked_at: float) -> None:
        self.promise = promise
        self.seed = seed
        self.asked = asked
        self.asked_at = asked_at
        self.heard: dict[NodeId, Sketch] = {}


class SecondOpinion:
    """Of one newcomer, from its first request for a model until it has one."""

    def __init__(self, rng: Random) -> None:
        """`rng` draws what nobody is to guess."""
        self._rng = rng
        self._round_of: dict[NodeId, _Round] = {}  # the last of each donor
        self._may_promise: set[NodeId] = set()
        self._asked_at = -ASK_AGAIN_S
        self._rejected = 0

    def can_ask(self, now: float) -> bool:
        """Whether others would answer already (RequestLimit): a donor is to be asked only then."""
        return now - self._asked_at >= ASK_SOON_S

    def donor_asked(self, donor: NodeId) -> None:
        """It may promise a model, once: or it would keep us, and all others, busy for ever."""
        self._may_promise.add(donor)

    def ask(
        self, donor: NodeId, promise: bytes, givers: Sequence[NodeId], now: float
    ) -> list[tuple[NodeId, SketchRequest]]:
        """What to send, now that the donor has promised the model of this digest, and to whom.

        Nothing if it was not asked for one, or it comes too soon: what is promised then is not taken, as nobody would
        answer.
        """
        if donor not in self._may_promise or not self.can_ask(now):
            return []
        self._may_promise.remove(donor)
        others = sorted(set(givers) - {donor})
        asked = self._rng.sample(others, min(WITNESSES, len(others)))
        self._asked_at = now
        self._round_of[donor] = _Round(promise, self._rng.randbytes(SEED_BYTES), asked, now)
        return [(witness, SketchRequest(self._round_of[donor].seed)) for witness in asked]

    def heard(self, witness: NodeId, said: ModelSketch) -> None:
        """What one says of its model. Raises PeerError."""
        for one in self._round_of.values():
            if said.seed == one.seed and witness in one.asked:
                try:
                    one.heard[witness] = unpacked(said.sums)
                except ValueError:
                    raise PeerError(f"a sketch of {len(said.sums)} bytes") from None

    def waits(self, donor: NodeId, came_at: float, now: float, values: int) -> bool:
        """Whether more is to be heard before its model of so many `values` is judged, which came at that time."""
        one = self._round_of[donor]
        asked, heard = len(one.asked), len(one.heard)
        until = came_at + (ASK_AGAIN_S if heard < OTHERS_MIN <= asked else ASK_SOON_S)
        return heard < asked and now < max(until, one.asked_at + SKETCH_S * values)

    def lacks(self, donor: NodeId) -> str:
        """Why its model cannot be judged, though there are enough others; "" if it can be."""
        asked, heard = len(self._round_of[donor].asked), len(self._round_of[donor].heard)
        return f"of {asked} members that were asked about it {heard} answered" if heard < OTHERS_MIN <= asked else ""

    def seed(self, donor: NodeId, promise: bytes) -> bytes:
        """Of the sketch of its model that `accepts` takes. Raises PeerError: this is not the model it has promised."""
        if (one := self._round_of.get(donor)) is None or one.promise != promise:
            raise PeerError("it is not the one that was promised")
        return one.seed

    def accepts(self, donor: NodeId, offered: Sketch) -> bool:
        """Whether the donor's model may be the swarm's."""
        others = list(self._round_of[donor].heard.values())
        if self._rejected >= REJECTED_MAX or is_credible(offered, others):
            return True
        self._rejected += 1
        return False


def is_credible(offered: Sketch, others: Sequence[Sketch]) -> bool:
    """Whether one model is no odd one among the others."""
    if len(others) < OTHERS_MIN:
        return True
    parameters, rest = (np.stack(part) for part in zip(offered, *others, strict=True))
    close = CLOSE * _length(parameters)
    return _is_among(parameters, close) and _is_among(rest, max(close, _length(rest)))


def _is_among(sketches: Sketch, close: float) -> bool:
    """Whether the first row is where the others are."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.linalg.norm(sketches[:, None] - sketches, axis=2)
    apart[~np.isfinite(apart)] = np.inf
    np.fill_diagonal(apart, -1.0)  # sorted to the front, and not counted
    medians = np.sort(apart, axis=1)[:, len(sketches) // 2]
    return bool(medians[0] <= max(FAR * _low_median(medians), close) < np.inf)


def _length(sketches: Sketch) -> float:
    """The usual one."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _low_median(np.linalg.norm(sketches, axis=1))


def _low_median(found: npt.NDArray[np.float64]) -> float:
    return float(np.sort(found)[(len(found) - 1) // 2])
