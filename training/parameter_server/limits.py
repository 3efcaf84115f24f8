"""How much may one member change a shard? As much as the others say that a step is: clipped, not believed.

A push is clipped to PUSH_LIMIT times the median of what the *others* pushed last, so that no worker widens its own
limit (Karimireddy, He, Jaggi 2021, arXiv:2012.10333, clip for the same reason: the scale must come from the honest).
Parameters and float buffers have limits of their own: a few statistics must not hide behind many weights. A sum of k
pushes has k limits: what is in it, only who summed it knows. While no other worker is known it is a share of the
weights themselves, of a gradient as its learning rate makes it; that rate has a limit of the same kind. What an
optimizer remembers must be near, too, and such as gradients can make it (`remembers_alike`).

A model that comes as the answer to a ballot is near another one if no more lies between them than the steps between
their clocks can be (`are_near`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import median

from peerd.training.codecs.difference import norm_of_difference
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.kernels.passes import squares_by
from peerd.training.parameter_server.optimizer import DIFFERENCE
from peerd.training.sample import evened_length, groups_of
from peerd.transport.ids import NodeId

PUSH_LIMIT = 2.0
"""Times the others' median. Steps on unlike batches differ by as much; a quarter of honest swarms' time would be lost
at a limit of one, and at 4 one liar of eight took 1 to 20 points (RESULTS.md)."""
FIRST_SHARE = 1 / 16
"""Of the weights' norm: a first push, before any other has come."""
MODEL_LIMIT = 4.0
"""Times a step of one's own, for each clock between two models."""
MODEL_SHARE = 1 / 64
"""Of a model's norm: what two may differ by in any case, for who has made no step yet knows no scale."""


class PushLimits:
    """What each worker pushed last, and what follows for the others."""

    def __init__(self, me: NodeId, layout: Layout) -> None:
        """`me`: whose own pushes need no limit."""
        self._me = me
        self._groups = groups_of(layout)
        self._cut = layout.parameters
        self._last: dict[NodeId, list[float]] = {}  # norms of the groups, as they were taken
        self._rates: dict[NodeId, float] = {}  # learning rates, as they were taken

    def clip(self, workers: Sequence[NodeId], update: Vector, weights: Vector, rate: float = DIFFERENCE) -> bool:
        """Shorten `update`, the sum of one push of each of these workers, in place; says whether it was too long."""
        others = [norms for worker, norms in self._last.items() if worker not in workers]
        taken, was_clipped = [], False
        for number, (group, stops) in enumerate(self._groups):
            are_parameters = group.stop <= self._cut
            known = [norms[number] for norms in others if norms[number] > 0]
            scale = rate if rate > 0 and are_parameters else 1.0
            one = PUSH_LIMIT * median(known) if known else FIRST_SHARE / scale * norm_of_difference(weights[group])
            squared = squares_by(update[group], None, stops)
            limit, norm = one * len(workers), math.sqrt(squared.sum())
            # who trains what others leave would be far beyond them
            length = evened_length(squared, stops) if are_parameters else norm
            if norm > limit > 0 and any(worker != self._me for worker in workers):
                update[group] *= limit / norm
                length, was_clipped = length * (limit / norm), True
            taken.append(length / len(workers))
        self._last |= dict.fromkeys(workers, taken)
        return was_clipped

    def rate(self, workers: Sequence[NodeId], rate: float, weights: Vector, *, adaptive: bool) -> float:
        """The learning rate, or as much of it as counts, that these workers said on average.

        With an optimizer that is `adaptive` it is how far a step moves each weight, whatever the gradient.
        """
        known = [other for worker, other in self._rates.items() if worker not in workers and other > 0]
        if any(worker != self._me for worker in workers):
            if known:
                rate = min(rate, PUSH_LIMIT * median(known))
            elif adaptive and (norm := norm_of_difference(weights)) > 0:
                rate = min(rate, FIRST_SHARE * norm / math.sqrt(len(weights)))
        self._rates |= dict.fromkeys(workers, rate)
        return rate

    def keep(self, workers: Collection[NodeId]) -> None:
        """Forget all but these, as a scale comes from those who are there: last words may come after one went."""
        for known in (self._last, self._rates):
            for gone in known.keys() - workers:
                del known[gone]


def are_near(one: Vector, other: Vector, clocks: int, step: float) -> bool:
    """Whether so many clocks can lie between two models, where a step of ours is so long."""
    reach = max(MODEL_LIMIT * step * (abs(clocks) + 1), MODEL_SHARE * norm_of_difference(one))
    return norm_of_difference(one, other) <= reach


def remembers_alike(one: Vector, other: Vector, clocks: int, gradient: float) -> bool:
    """Whether so many gradients, ours is so long, can lie between what an optimizer remembers; of shape (rows, n)."""
    return all(
        norm_of_difference(other[row]) <= MODEL_LIMIT * (abs(clocks) + 1) * max(norm_of_difference(one[row]), scale)
        for row, scale in zip(range(len(one)), (gradient, gradient * gradient), strict=False)
    )
