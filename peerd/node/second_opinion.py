"""Is the model that a newcomer is offered the swarm's? Some other members say a few numbers of theirs (sketch.py).

A donor may lie, or have lost its way, and who starts from what it gives is no better: the others hardly let such a node
move them, and hardly move it (training/pairs/robust.py). So beside a donor WITNESSES others are asked, drawn at random.
Its model is taken if the median distance from theirs is at most FAR times what is usual between all of them; or if it
is within CLOSE of their length, as members may agree to the bit, and train on while a model is copied. With fewer than
three models nobody can say which is the odd one; where half of those who are asked lie together, they are the usual.
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
FAR = 4.0  # as between partners (robust.py)
CLOSE = 0.05
REJECTED_MAX = 7  # donors: who finds nobody credible takes what there is
SEED_BYTES = 16


class _Round:
    """What those say who were asked at one time."""

    def __init__(self, now: float, seed: bytes, asked: list[NodeId]) -> None:
        self.began = now
        self.seed = seed
        self.asked = asked
        self.heard: dict[NodeId, Sketch] = {}


class SecondOpinion:
    """Of one newcomer, from its first request for a model until it has one."""

    def __init__(self, rng: Random) -> None:
        """`rng` draws what nobody is to guess."""
        self._rng = rng
        self._rounds: list[_Round] = []
        self._round_of: dict[NodeId, _Round] = {}  # a model is as old as what was said when it was asked for
        self._rejected = 0

    def ask(self, donor: NodeId, givers: Sequence[NodeId], now: float) -> list[tuple[NodeId, SketchRequest]]:
        """What to send, now that the donor is asked for its model, and to whom; nothing if it was just sent."""
        if donor in self._round_of:
            return []
        pause_s = ASK_SOON_S if len(self._rounds) == 1 else ASK_AGAIN_S  # no limit of theirs is sooner (RequestLimit)
        sent = []
        if not self._rounds or now - self._rounds[-1].began >= pause_s:
            others = sorted(set(givers) - {donor})
            asked = self._rng.sample(others, min(WITNESSES, len(others)))
            self._rounds.append(_Round(now, self._rng.randbytes(SEED_BYTES), asked))
            sent = [(witness, SketchRequest(self._rounds[-1].seed)) for witness in asked]
        self._round_of[donor] = self._rounds[-1]
        return sent

    def heard(self, witness: NodeId, said: ModelSketch) -> None:
        """What one says of its model. Raises PeerError."""
        for one in self._rounds:
            if said.seed == one.seed and witness in one.asked:
                try:
                    one.heard[witness] = unpacked(said.sums)
                except ValueError:
                    raise PeerError(f"a sketch of {len(said.sums)} bytes") from None

    def waits(self, donor: NodeId) -> bool:
        """Whether somebody has not answered of those who were asked beside this donor."""
        return len(self._round_of[donor].heard) < len(self._round_of[donor].asked)

    def seed(self, donor: NodeId) -> bytes:
        """Of the sketch of its model that `accepts` takes."""
        return self._round_of[donor].seed

    def accepts(self, donor: NodeId, offered: Sketch) -> bool:
        """Whether the donor's model may be the swarm's."""
        others = [found for witness, found in self._round_of[donor].heard.items() if witness != donor]
        if self._rejected >= REJECTED_MAX or is_credible(offered, others):
            return True
        self._rejected += 1
        return False


def is_credible(offered: Sketch, others: Sequence[Sketch]) -> bool:
    """Whether one model is no odd one among the others: its parameters, and whatever else is in it."""
    if len(others) < 2:
        return True
    return all(_is_among(np.stack(part)) for part in zip(offered, *others, strict=True))


def _is_among(sketches: Sketch) -> bool:
    """Whether the first row is where the others are."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.linalg.norm(sketches[:, None] - sketches, axis=2)
        lengths = np.linalg.norm(sketches, axis=1)
    apart[~np.isfinite(apart)] = np.inf
    np.fill_diagonal(apart, -1.0)  # sorted to the front, and not counted
    medians = np.sort(apart, axis=1)[:, len(sketches) // 2]
    return bool(medians[0] <= max(FAR * _low_median(medians), CLOSE * _low_median(lengths)) < np.inf)


def _low_median(found: npt.NDArray[np.float64]) -> float:
    return float(np.sort(found)[(len(found) - 1) // 2])
