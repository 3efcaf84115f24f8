"""How does one rank take part in summing all ranks' vectors? The state machine of one attempt.

A segment is cut into pieces, which go their way alone: a piece is sent on as soon as it is reduced. A piece's partial
sum goes up its tree, children added in a fixed order. The root packs the sum once; all others hand on these very
bytes and unpack them, as the root does itself, so the result is the same to the bit everywhere.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.vector import PIECE_VALUES
from peerd.training.rounds.topology import Topology
from peerd.transport.errors import PeerError

Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """Something for another rank; the tag says which part of the vector, and whether it is a partial sum or the sum."""

    to: int
    tag: int
    payload: Any


class Packing(Protocol):
    """How values travel. It may lose something, and may remember what."""

    @property
    def exact(self) -> bool:
        """Whether `values`, given to `pack`, are what `unpack` makes of them: afterwards, if not before."""
        ...

    def pack(self, start: int, values: Values) -> Any:
        """The payload for values [start, start + len) of the vector; each value is packed once by each rank."""
        ...

    def unpack(self, start: int, payload: Any, out: Values, onto: Values | None = None) -> None:
        """Overwrite `out` with the values, or with `onto` plus these. Raises PeerError when the payload is not as
        `pack` makes it."""
        ...


@dataclass(slots=True)
class _Part:
    """A piece of the vector, as one rank sees it."""

    start: int
    stop: int
    parent: int | None
    children: list[int]
    giver: int | None
    takers: list[int]
    has_own: bool = False  # our own values are there
    added: int = 0  # children whose partial sums are in ours
    early: dict[int, Any] = field(default_factory=dict)  # of children whose turn has not come
    complete: bool = False


class Collective:
    """One rank's part in one all-reduce."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        size: int,
        own: Values,
        packing: Packing,
        cut: int = 0,
        room: Values | None = None,
    ) -> None:
        """`own` is this rank's contribution, which becomes the sum, unless there is `room` for that, which is as long.

        What of it is there, `come` says. No piece has values from both sides of `cut`.
        """
        assert 0 <= rank < size
        self.vector = own if room is None else room
        self._own = own
        self._packing = packing
        self._parts = [
            _Part(
                start,
                stop,
                parent=topology.parent(segment, rank, size),
                children=topology.children(segment, rank, size),
                giver=topology.giver(segment, rank, size),
                takers=topology.takers(segment, rank, size),
            )
            for segment, start, stop in _pieces(len(own), topology.segments(size), cut)
        ]
        self._incomplete = len(self._parts)
        self._lacking = list(range(len(self._parts)))  # whose own values are not there, in the order of these

    @property
    def done(self) -> bool:
        """Whether the sum is in `vector`."""
        return self._incomplete == 0

    def come(self, first: int, last: int) -> list[Piece]:
        """This rank's own values [first, last) are there; each value may come again, and is what it was."""
        pieces = []
        begin = bisect_left(self._lacking, first, key=lambda index: self._parts[index].start)
        end = bisect_right(self._lacking, last, key=lambda index: self._parts[index].stop)
        for index in self._lacking[begin:end]:
            if not self._parts[index].has_own:
                self._parts[index].has_own = True
                pieces += self._reduce(index)
        del self._lacking[begin:end]
        return pieces

    def receive(self, source: int, tag: int, payload: Any) -> list[Piece]:
        """Take a piece in; one that came before is ignored. Raises PeerError for one that cannot be."""
        index, is_sum = divmod(tag, 2)
        if not 0 <= index < len(self._parts):
            raise PeerError(f"a piece tagged {tag} of {len(self._parts)} pieces")
        part = self._parts[index]
        if is_sum:
            if source != part.giver or part.added < len(part.children):
                raise PeerError(f"a sum tagged {tag} from rank {source}, which cannot have it")
            return [] if part.complete else self._finish(part, index, payload)
        if source not in part.children:
            raise PeerError(f"a partial sum tagged {tag} from rank {source}, whose parent this rank is not")
        if part.children.index(source) >= part.added:
            part.early.setdefault(source, payload)
        return self._reduce(index)

    def _reduce(self, index: int) -> list[Piece]:
        """Add the children whose turn it is; if these were the last, send the partial sum on."""
        part = self._parts[index]
        if not part.has_own:
            return []
        sums, own = self.vector[part.start : part.stop], self._own[part.start : part.stop]
        before = part.added
        while part.added < len(part.children) and part.children[part.added] in part.early:
            partial = part.early.pop(part.children[part.added])
            self._packing.unpack(part.start, partial, sums, onto=sums if part.added else own)
            part.added += 1
        if part.added < len(part.children) or (part.children and part.added == before):
            return []
        if not part.children and self._own is not self.vector:
            np.copyto(sums, own)  # `own` may change before the last piece has left
        payload = self._packing.pack(part.start, sums)
        if part.parent is None:
            return self._finish(part, index, payload)
        return [Piece(part.parent, 2 * index, payload)]

    def _finish(self, part: _Part, index: int, payload: Any) -> list[Piece]:
        if part.parent is not None or not self._packing.exact:
            self._packing.unpack(part.start, payload, self.vector[part.start : part.stop])
        part.complete = True
        self._incomplete -= 1
        return [Piece(taker, 2 * index + 1, payload) for taker in part.takers]


def _pieces(length: int, segments: int, cut: int) -> Iterator[tuple[int, int, int]]:
    """Segment, start and stop of every piece, the same on all ranks.

    Segments take turns, so that any part of the vector keeps all ranks busy: it may come a part at a time.
    """
    for begin, end in ((0, min(cut, length)), (min(cut, length), length)):
        count = math.ceil((end - begin) / PIECE_VALUES)
        if 2 * (end - begin) >= length:  # of this side of the cut each segment gets as much
            count = math.ceil(count / segments) * segments
        bounds = [begin + (end - begin) * index // max(1, count) for index in range(count + 1)]
        for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
            if stop > start:
                yield index % segments, start, stop
