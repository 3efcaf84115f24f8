"""How many links does a node keep at once, and how much of those that went? Each is memory for ever: two models, of a
large one in half their bytes (pairs/block_floats.py).

Of a small model it accepts as many again as it looks for, keeps a view's worth of links to absent peers, and what is
left of twice as many; of a tiny one, of as many as 4 MiB hold. A swarm has places to spare then.

Of a large one it keeps no link more than a swarm needs: a view and one, absent peers in the places that the living
leave free. Where nodes come one by one each finds a partner all the same. Let each have room for c links and look for
v, and s places be free when the next comes. It takes k of them, at least 1 and at most min(v, s), and brings c - k
others: afterwards s + c - 2 k are free, which is c - v or more, so at least 1. A node that dies, or gives a place to
another (`rotate`), only leaves more. Where several come at once they may take all places of each other, five with a
view of 3: one that is turned away then is made a place, once a minute at most (`PairLinks._make_place`).
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.training.sample import WHOLE_MAX

LARGE = 1 << 25
"""Values: each link to such a model takes 128 MB and more."""
LEFT_OF_LINKS = 2  # views: with one-bit codecs that is what is left of six links for each of a view
LEFT_VALUES = 1 << 20  # of all models together: fewer would lose what a tiny one can keep for nothing
LEFT_OF_LARGE = 2  # models: two links that each wait for a half, encoded halves included


def is_large(values: int) -> bool:
    """Whether a model has so many values that what its links remember is kept small."""
    return values >= LARGE


@dataclass(frozen=True, slots=True)
class Room:
    """For the links of one node."""

    of_link: int
    """Models of float32 that one takes."""
    active: int
    """Links to the living that it keeps, opened or accepted."""
    left: int
    """Models that what is left of ended links may take (reference.Unfinished)."""
    absent: int | None
    """Links to absent peers beside those; None: as many as the living leave places free."""

    def dormant(self, active: int) -> int:
        """Links to absent peers that it keeps, beside so many to the living."""
        return max(0, self.active - active) if self.absent is None else self.absent

    @property
    def models(self) -> int:
        """Of float32, that links and what is left of them take at most."""
        return self.of_link * (self.active + (self.absent or 0)) + self.left


def room(view: int, values: int) -> Room:
    """Of a node that looks for so many partners, for a model of so many values."""
    if is_large(values):
        return Room(1, view + 1, LEFT_OF_LARGE, None)
    of_link = 3 if values <= WHOLE_MAX else 2  # both references, and where a small model was at the last exchange
    left = max(LEFT_OF_LINKS * 3 * view, LEFT_VALUES // max(1, values))
    return Room(of_link, 2 * view, left, view)
