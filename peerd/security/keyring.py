"""Which keys seal the swarm's datagrams now? A few generations of keys, made by issuers, and the same on all members.

How this works. A generation is 32 random bytes with a number, a level and the signature of who made it. The level is
how many revocations its maker knew of. Generations are ordered by level, number and a hash, and a ring
holds the highest GENERATIONS_MAX that it has heard of. To keep the highest is commutative, associative and idempotent,
so all rings come to be the same, also where two issuers make a generation at once. A generation is

    installed   from when it is heard: what is sealed with it opens here
    used        to seal with, once it has been known for SPREAD_S, by when most know it; the highest such one
    removed     when GENERATIONS_MAX higher ones are there

One that follows a revocation begins a level. It is used at once, and SPREAD_S later those of lower levels are removed
and never come back, for somebody knows them who is out. Whoever has missed it cannot open our datagrams, nor we theirs,
so their probes fail. But what suspects are asked for their last word over, and failed members are dialled over for
ever, are connections, which need a certificate and no key, and bring the ring: nobody stays out who is not revoked.

An issuer makes a generation when it knows of more revocations than the highest level says (`is_behind`). So it does not
matter who dies between a revocation and its key, nor what was made on the other side of a partition: once both sides
have met, there is a level above all keys that a revoked node was ever given.

What an issuer has made counts no more when it is revoked (`forget_unbelieved`), whatever numbers it gave.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgpack

from peerd.security.statements import Sign, SignerOf, Unbelieved, digest
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import COUNT, KeyGeneration

GENERATIONS_MAX = 3
SPREAD_S = 60.0  # tables travel on news: 2 s a hop, and a hop more where the number of members doubles
ROTATE_S = 86400.0  # then an issuer makes the next: what was recorded, or is known to who left, opens no more
KEY_BYTES = 32
_PURPOSE = "datagram key 1"

Order = tuple[int, int, bytes]


@dataclass(frozen=True, slots=True)
class _Held:
    generation: KeyGeneration
    order: Order
    since: float

    @property
    def level(self) -> int:
        return self.generation.level

    @property
    def settled_at(self) -> float:
        return self.since + SPREAD_S


class Keyring:
    """The ring of one node in one swarm. Methods that take `now` want the loop's clock, in seconds."""

    def __init__(self, where: tuple[str, str], signer_of: SignerOf, revoked: Callable[[NodeId], bool]) -> None:
        """`where` is the swarm and the run: an authority's keys for one are worth nothing in another."""
        self.counts: Counter[str] = Counter()
        self._where = where
        self._signer_of = signer_of
        self._revoked = revoked
        self._held: list[_Held] = []  # the highest first
        self._floor = 0  # lower levels are removed for ever

    @property
    def generations(self) -> tuple[KeyGeneration, ...]:
        """What is installed, the highest first."""
        return tuple(held.generation for held in self._held)

    @property
    def digest(self) -> bytes:
        """Equal for equal rings; it tells nothing of the keys, which are random."""
        return digest([held.order for held in self._held])

    def add(self, generation: KeyGeneration, now: float, known_for_s: float = 0.0) -> bool:
        """Install a generation that was heard; True where that changed the ring. Raises PeerError.

        One that was kept on the disk has been `known_for_s`. What is known or too low costs nothing.
        """
        if len(generation.key) != KEY_BYTES:
            raise PeerError(f"a key of {len(generation.key)} bytes for datagrams")
        place = order(generation)
        too_low = len(self._held) >= GENERATIONS_MAX and place < self._held[-1].order
        if too_low or generation.level < self._floor or any(held.order == place for held in self._held):
            return False
        signer = self._signer_of(_PURPOSE, _said(generation, self._where), generation.signature, generation.issuer)
        if signer is None:
            raise Unbelieved("a key for datagrams that nobody has signed whom this node believes")
        if self._revoked(signer):
            self.counts["keys_of_revoked"] += 1
            return False
        self._held.append(_Held(generation, place, now - known_for_s))
        self._held.sort(key=lambda held: held.order, reverse=True)
        del self._held[GENERATIONS_MAX:]
        return True

    def is_behind(self, revocations: int) -> bool:
        """Whether there is no key that was made by who knew of so many revocations."""
        return not self._held or self._held[0].level < revocations

    def make(self, key: bytes, revocations: int, sign: Sign, issuer: bytes) -> KeyGeneration:
        """The next generation; `issuer` is the certificate of who signs, empty for the authority.

        Where `revocations` are more than before it begins a level. It is not installed: `add` it. `key` is 32 random
        bytes.
        """
        number = min(COUNT.high, 1 + max((held.generation.number for held in self._held), default=0))
        level = max([revocations, *(held.level for held in self._held)])
        generation = KeyGeneration(number, key, level, issuer, b"")
        return replace(generation, signature=sign(_PURPOSE, _said(generation, self._where)))

    def forget_unbelieved(self) -> bool:
        """Remove what revoked issuers have made, and what nobody has whom this node still believes.

        True where that changed the ring.
        """
        before = len(self._held)
        self._held = [held for held in self._held if self._believes(held)]
        if len(self._held) == before:
            return False
        self._floor = 0  # one of them may have set it
        return True

    def _believes(self, held: _Held) -> bool:
        said = held.generation
        signer = self._signer_of(_PURPOSE, _said(said, self._where), said.signature, said.issuer)
        return signer is not None and not self._revoked(signer)

    def on_timer(self, now: float) -> bool:
        """Remove what a new level has replaced; True where that changed the ring."""
        level = max((held.level for held in self._held if held.settled_at <= now), default=0)
        self._floor = max(self._floor, level)
        before = len(self._held)
        self._held = [held for held in self._held if held.level >= self._floor]
        return len(self._held) < before

    def sealing(self, now: float) -> KeyGeneration | None:
        """What to seal with; None: there is no key yet.

        Where all of a level are new the others may not have the highest yet, and the one below it is as good.
        """
        level = [held for held in self._held if held.level == self._held[0].level]
        settled = [held for held in level if held.settled_at <= now]
        best = settled[:1] or level[1:2] or level
        return best[0].generation if best else None

    @property
    def newest_since(self) -> float:
        """Since when the newest to come is known; minus infinity: there is none."""
        return max((held.since for held in self._held), default=-math.inf)

    def deadline(self, now: float) -> float:
        """When `on_timer` or `sealing` may say something else by itself; infinity: never."""
        return min((held.settled_at for held in self._held if held.settled_at > now), default=math.inf)


def order(generation: KeyGeneration) -> Order:
    """The total order: of two that were made at once, the hashes decide, which have the issuer in them."""
    return generation.level, generation.number, hashlib.sha256(generation.key + generation.issuer).digest()


def _said(generation: KeyGeneration, where: tuple[str, str]) -> bytes:
    said: bytes = msgpack.packb((*where, generation.number, generation.key, generation.level))
    return said
