"""What of this node's model do its partners not know yet? With sparse codecs that waits beside the model.

What a codec drops stays in x - mine (reference.py), and with it in the model: one that trains goes on from steps of its
own that nobody else has heard of. A few values of an exchange leave most of them there, and where nodes see different
classes each is soon at home with its own. So the model x that trains is what both ends of the last exchange know, the
middle of their references, and the rest e waits:

    y = x + e                          what exchanges tell of, correct and conserve: nothing about them is different
    x = mine + (theirs - mine) / 2     after an exchange; e = y - x

as what a member's encoding drops waits for its next contribution to a round (allreduce.py), and in SGD with error
feedback (Stich, Cordonnier, Jaggi 2018, arXiv:1809.07599; Karimireddy et al. 2019, arXiv:1901.09847). x is moved from
`mine` by no more than the bounds of that exchange allow y to be (robust.py): by twice as much, one liar of eight who
shows the opposite of his model takes the others' to where their own steps are long, which allows him ever more, and
all ends at .30 in place of .93. When a run ends nothing waits any more: x = y.

Digits by class, by `top_k_3`: 4 nodes end at .957 in place of .917, 16 nodes at .89 in place of .74. Where every value
moves as much as others (a transformer by Adam) half a point is lost by it, and with `sign`, which tells something of
every value, more: dense codecs leave what they drop in the model (RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from peerd.training.codecs.codec import BATCH
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.pairs.reference import PairedReference
from peerd.training.pairs.robust import Norms, tensors_of

MIDDLE = 0.5  # of the way between two models


class Feedback:
    """e of one node. Not thread-safe: one thread owns it."""

    def __init__(self, layout: Layout, values: Callable[[], Vector]) -> None:
        """`values()` is x, shape (layout.total,), as its shell has it."""
        self._tensors = tensors_of(layout)
        self._x = values
        self._e = np.zeros_like(values())
        self._y = np.empty_like(self._e)

    def whole(self) -> Vector:
        """y, of the same shape and type: valid until the next call."""
        return np.add(self._x(), self._e, out=self._y)

    @property
    def rest(self) -> Vector:
        """e: not to be changed."""
        return self._e

    def exchanged(
        self, reference: PairedReference, towards: Norms, whole: Vector, correction: Vector, shift: Vector
    ) -> None:
        """After an exchange: into `shift` comes what x moves by, beside `correction`; e moves by the negative.

        `whole` is y before it; `towards`, of each tensor, what share of theirs - mine x is to be away from mine.
        Buffers, of which no codec drops anything, wait for nobody.
        """
        np.copyto(shift, self._e)
        start = 0
        for stop, share in zip(self._tensors.stops[: self._tensors.of_parameters].tolist(), towards, strict=False):
            for at in range(start, stop, BATCH):
                where = slice(at, min(at + BATCH, stop))
                mine, left = reference.mine[where], self._e[where]
                np.subtract(mine, reference.theirs[where], out=left)
                left *= share
                left -= mine
                left += whole[where]
                left += correction[where]
            start = stop
        shift -= self._e

    def give_back(self) -> Vector:
        """Nothing waits any more: e, which x is to move by."""
        given = self._e
        self._e = np.zeros_like(given)
        return given
