"""Along which trees is a vector summed and the sum handed back, and which of them is the fastest?

How this works. The vector is cut into segments, and each segment has a tree of the ranks: partial sums go up, the sum
comes down the same way, but for the ring's. The three classic algorithms differ in their trees alone:

    ring      a segment a rank; its tree is the chain that goes round and ends at that rank. The sum goes on round
              (reduce-scatter, then all-gather), so that each connection of three ranks or more carries bulk one way,
              and confirmations the other
    tree:K    one segment; a K-nomial tree, so that a level costs its parent K - 1 vectors (FireCaffe, arXiv:1511.00175)
    halving   a segment a rank; the binomial tree of recursive halving (Rabenseifner 2004), and doubling back. Ranks
              beyond the largest power of two are leaves of the ranks within
"""

from __future__ import annotations

import math
from typing import Protocol

from peerd.training.plain_numbers import count
from peerd.transport.errors import WrongSetting

ARITY_MAX = 64
RING_SLACK = 1.1
"""Four nodes with 100 Mbit/s sum 100 MB in 13.0 s by a ring and in 15.4 s by halving (benchmarks/RESULTS.md), which
the model holds to be as fast."""


class Topology(Protocol):
    """The trees of one algorithm; all ranks compute the same ones."""

    name: str
    """What `parse_topology` reads."""

    def segments(self, size: int) -> int:
        """Into how many parts the vector is cut."""
        ...

    def parent(self, segment: int, rank: int, size: int) -> int | None:
        """To whom a rank gives its partial sum of a segment; None: there it is complete."""
        ...

    def children(self, segment: int, rank: int, size: int) -> list[int]:
        """From whom it gets theirs, in the order in which they are added."""
        ...

    def giver(self, segment: int, rank: int, size: int) -> int | None:
        """From whom it gets the sum; None: there it is complete."""
        return self.parent(segment, rank, size)

    def takers(self, segment: int, rank: int, size: int) -> list[int]:
        """To whom it gives the sum: first to the one it waited for last, which has the most below it."""
        return self.children(segment, rank, size)[::-1]

    def seconds(self, size_bytes: float, size: int, latency_s: float, bytes_per_s: float) -> float:
        """What an all-reduce should take where every rank has such a line, both ways at once."""
        ...


class Ring(Topology):
    """Least bytes for any number of ranks, most messages one after the other."""

    name = "ring"

    def segments(self, size: int) -> int:
        """See `Topology.segments`."""
        return size

    def parent(self, segment: int, rank: int, size: int) -> int | None:
        """See `Topology.parent`."""
        return None if rank == segment else (rank + 1) % size

    def children(self, segment: int, rank: int, size: int) -> list[int]:
        """See `Topology.children`."""
        return [] if rank == (segment + 1) % size else [(rank - 1) % size]

    def giver(self, segment: int, rank: int, size: int) -> int | None:
        """See `Topology.giver`."""
        return None if rank == segment else (rank - 1) % size

    def takers(self, segment: int, rank: int, size: int) -> list[int]:
        """See `Topology.takers`."""
        return [] if rank == (segment - 1) % size else [(rank + 1) % size]

    def seconds(self, size_bytes: float, size: int, latency_s: float, bytes_per_s: float) -> float:
        """See `Topology.seconds`."""
        return 2 * (size - 1) * (latency_s + size_bytes / (size * bytes_per_s))


class Tree(Topology):
    """Fewest messages one after the other, but each is the whole vector."""

    def __init__(self, arity: int = 2) -> None:
        self.name = f"tree:{arity}"
        self._arity = arity

    def segments(self, size: int) -> int:
        """See `Topology.segments`."""
        return 1

    def parent(self, segment: int, rank: int, size: int) -> int | None:
        """The rank without its lowest digit that is not zero, in base K."""
        return None if rank == 0 else rank - rank % (self._lowest(rank, size) * self._arity)

    def children(self, segment: int, rank: int, size: int) -> list[int]:
        """See `Topology.children`."""
        found, place, limit = [], 1, self._lowest(rank, size)
        while place < limit:
            found += [rank + digit * place for digit in range(1, self._arity) if rank + digit * place < size]
            place *= self._arity
        return found

    def seconds(self, size_bytes: float, size: int, latency_s: float, bytes_per_s: float) -> float:
        """See `Topology.seconds`."""
        levels, reach = 0, 1  # ceil(log_k size), without a logarithm's rounding
        while reach < size:
            levels, reach = levels + 1, reach * self._arity
        return 2 * levels * (latency_s + (self._arity - 1) * size_bytes / bytes_per_s)

    def _lowest(self, rank: int, size: int) -> int:
        """The place value of the lowest digit that is not zero; beyond `size` for rank 0."""
        place = 1
        while place < size and rank % (place * self._arity) == 0:
            place *= self._arity
        return place


class Halving(Topology):
    """Least bytes and few messages, where the number of ranks is a power of two."""

    name = "halving"

    def segments(self, size: int) -> int:
        """See `Topology.segments`."""
        return 1 << (size.bit_length() - 1)

    def parent(self, segment: int, rank: int, size: int) -> int | None:
        """The partner of the first exchange, from the farthest on, after which the segment is the partner's."""
        core = self.segments(size)
        if rank >= core:
            return rank - core
        return None if rank == segment else rank ^ _highest_bit(rank ^ segment)

    def children(self, segment: int, rank: int, size: int) -> list[int]:
        """See `Topology.children`."""
        core = self.segments(size)
        if rank >= core:
            return []
        found = [rank + core] if rank + core < size else []
        distance = core >> 1
        while distance > _highest_bit(rank ^ segment):
            found.append(rank ^ distance)
            distance >>= 1
        return found

    def seconds(self, size_bytes: float, size: int, latency_s: float, bytes_per_s: float) -> float:
        """See `Topology.seconds`."""
        core = self.segments(size)
        whole_s = size_bytes / bytes_per_s
        aside_s = 2 * (latency_s + whole_s) if core < size else 0.0  # there and back, of those beyond the power of two
        return aside_s + 2 * (core.bit_length() - 1) * latency_s + 2 * (core - 1) / core * whole_s


def _highest_bit(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number else 0


def parse_topology(text: str) -> Topology:
    """`ring`, `tree`, `tree:K` or `halving`. Raises UserError."""
    name, _, rest = text.partition(":")
    if text == "ring":
        return Ring()
    if text == "halving":
        return Halving()
    if name == "tree" and (rest or text == "tree"):
        arity = count(rest, ARITY_MAX) if rest else 2
        if arity >= 2:
            return Tree(arity)
    raise WrongSetting(
        f"topology {text[:40]!r}: not one of ring, halving, tree, tree:K with K from 2 to {ARITY_MAX}", "topology"
    )


def choose(size_bytes: float, peers: int, latency_s: float, bytes_per_s: float) -> str:
    """The fastest topology by FireCaffe's cost model.

    The model does not know that a ring's connections carry bulk one way only: the ring is taken where it is told apart
    by less than `RING_SLACK`.
    """
    assert peers >= 1
    assert bytes_per_s > 0
    candidates: list[Topology] = [Halving(), Ring(), Tree(2)]
    predicted = {each.name: each.seconds(size_bytes, peers, latency_s, bytes_per_s) for each in candidates}
    assert all(math.isfinite(seconds) for seconds in predicted.values())
    fastest = min(predicted, key=lambda name: predicted[name])
    return "ring" if predicted["ring"] <= RING_SLACK * predicted[fastest] else fastest
