"""How does push-sum keep the swarm's mean on links that lose and repeat? The arithmetic alone, for any numbers.

A node has a weight w and a model z; its mass is (w z, w). Over each one-way link it gives mass away: a part m of its
weight, and with it m y, where y is whatever the receiver will decode (not z: what a codec drops stays here):

    giver   x - m y = w z - m y,  w - m        z += m / (w - m) (z - y)
    taker   w z + m y,            w + m        z += m / (w + m) (y - z)

A link counts weight in totals: the taker takes a total less the last total it saw, so what comes twice or late is
worth nothing. Vectors need no total of their own: sum m y is fixed by the totals and by the y that both ends hold.
Sums are exact for exact numbers (tests/training/one_way/test_mass.py runs this with fractions).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Number = Any
"""float in production; whatever adds, subtracts, multiplies and divides."""
Values = npt.NDArray[Any]


class WeightAccount:
    """One node's weight. A correction overwrites `out` and is to be added to z."""

    def __init__(self, weight: Number) -> None:
        self.weight = weight

    def give(self, part: Number, model: Values, sent: Values, out: Values) -> None:
        """Mass part * (sent, 1) leaves."""
        self.weight = self.weight - part
        np.subtract(model, sent, out=out)
        out *= part / self.weight

    def take(self, part: Number, model: Values, came: Values, out: Values) -> None:
        """Mass part * (came, 1) comes, or comes back."""
        self.weight = self.weight + part
        np.subtract(came, model, out=out)
        out *= part / self.weight


class Outflow:
    """What ever left over one link, and the part of it that is not known to have arrived."""

    def __init__(self, nothing: Number) -> None:
        self.total = nothing
        self.under_way = nothing
        self._nothing = nothing

    def send(self, part: Number) -> Number:
        """Add about `part` to the total, and return what exactly: with floats, the difference of two totals."""
        before = self.total
        self.total = before + part
        self.under_way = self.total - before
        return self.under_way

    def answered(self) -> None:
        """All of the total has arrived."""
        self.under_way = self._nothing


class Inflow:
    """What ever came over one link."""

    def __init__(self, nothing: Number) -> None:
        self.total = nothing

    def part(self, total: Number) -> Number:
        """What a message of this total brings; not above nothing for one that came before."""
        return total - self.total

    def taken(self, total: Number) -> None:
        """It was merged."""
        self.total = total
