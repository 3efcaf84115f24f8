"""Which authorities are in force? A set of signed statements, each of which puts one in another's place.

How this works. An authority is known by its pin, the hash of its key. A statement (`Successor`) says that `new` takes
the place of `old`, and is signed by both: who believes either believes the other. Until it ends both are in force, so
that nobody is shut out who has not heard of it, or still has a certificate of the old one; from then on the old one is
in force no more, whoever says so. Certificates are given under the newest ones, which no statement replaces.

Statements only come, and of two about the same pair the one that ends first is kept, whatever the order in which they
come. One that has ended is believed from one's own disk alone: who has stolen an old authority can make no more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from peerd.security.statements import Unbelieved, digest
from peerd.transport.messages import Successor

SUCCESSORS_MAX = 16  # an authority is good for ten years


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a statement says. Pins are SHA-256 of keys."""

    old: bytes
    new: bytes
    ends: int  # unix seconds


class Succession:
    """The authorities that one node knows. Methods that take `now` want the wall clock's unix seconds."""

    def __init__(self, believed: Iterable[bytes], read: Callable[[Successor], Replacement]) -> None:
        """`believed` are the pins that it begins with; `read` checks a statement's signatures, or raises PeerError."""
        self._believed = list(believed)
        self._read = read
        self._kept: dict[tuple[bytes, bytes], tuple[Replacement, Successor]] = {}

    def recall(self, said: Iterable[Successor]) -> None:
        """Take in what was kept on the disk, whether it has ended or not. Raises PeerError.

        What no statement links to an authority that the node begins with is another swarm's, in which it was before.
        """
        left = [(self._read(one), one) for one in said]
        while linked := [pair for pair in left if {pair[0].old, pair[0].new} & self.known]:
            for replacement, one in linked:
                self._keep(replacement, one)
            left = [pair for pair in left if pair not in linked]

    def add(self, said: Sequence[Successor], now: float) -> bool:
        """Believe what was heard; True where that changed anything. Raises PeerError, and believes what it can."""
        changed, progress = False, True
        todo = [one for one in said if all(one != kept for _, kept in self._kept.values())]
        replacements = [(replacement, one) for one in todo if (replacement := self._read(one)).ends > now]
        while progress:
            progress = False
            for replacement, one in list(replacements):
                if {replacement.old, replacement.new} & set(self.in_force(now)):
                    replacements.remove((replacement, one))
                    progress = True
                    changed |= self._keep(replacement, one)
        if replacements:
            raise Unbelieved("an authority that no other one vouches for which this node believes")
        return changed

    def _keep(self, replacement: Replacement, said: Successor) -> bool:
        pair = replacement.old, replacement.new
        if pair in self._kept:
            if _order(*self._kept[pair]) <= _order(replacement, said):
                return False
        elif len(self._kept) >= SUCCESSORS_MAX:
            return False
        self._kept[pair] = replacement, said
        return True

    @property
    def known(self) -> set[bytes]:
        """The pins of all that it has ever believed."""
        return {*self._believed, *(pin for pair in self._kept for pin in pair)}

    def in_force(self, now: float) -> list[bytes]:
        """The pins to be believed, those of the newest first."""
        left = [pin for pin in sorted(self.known) if now < self.retires_at(pin)]
        newest = self.newest(now)
        return [*newest, *(pin for pin in left if pin not in newest)]

    def newest(self, now: float) -> list[bytes]:
        """The pins under which certificates are given: one, unless an authority was copied and replaced twice."""
        replaced = {replacement.old for replacement, _ in self._kept.values()}
        return [pin for pin in sorted(self.known) if pin not in replaced and now < self.retires_at(pin)]

    def retires_at(self, pin: bytes) -> float:
        """Unix seconds; infinity: nothing takes its place."""
        return min(
            (replacement.ends for replacement, _ in self._kept.values() if replacement.old == pin), default=math.inf
        )

    def statements(self) -> list[Successor]:
        """All, for the disk."""
        return [said for _, said in self._kept.values()]

    def live(self, now: float) -> list[Successor]:
        """Those that have not ended, for others."""
        return [said for replacement, said in self._kept.values() if now < replacement.ends]

    def digest(self, now: float) -> bytes:
        """Equal where the same live ones are kept."""
        rows = sorted(_order(replacement, said) for replacement, said in self._kept.values() if now < replacement.ends)
        return digest(rows)

    def deadline(self, now: float) -> float:
        """When `in_force` says something else by itself; infinity: never."""
        return min(
            (replacement.ends for replacement, _ in self._kept.values() if now < replacement.ends), default=math.inf
        )


def _order(replacement: Replacement, said: Successor) -> tuple[int, bytes]:
    return replacement.ends, hashlib.sha256(b"".join((said.old, said.new, said.new_by_old, said.old_by_new))).digest()
