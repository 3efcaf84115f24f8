"""Who is out for ever? A set of signed statements that only grows.

A node is named by its id, the hash of its key, so there is no way back but a new key, which needs a new token. Of two
statements about one node the smaller is kept, the authority's before an issuer's: whatever the order in which they
come, all end with the same ones. An issuer that is revoked itself has said what it has said; its certificates and keys
count no more (trust.py, keyring.py), its revocations do: if they ended, a set would shrink, and nodes that hear in
different orders would differ.
"""

from __future__ import annotations

from collections import Counter

import msgpack

from peerd.security.statements import AUTHORITY, Sign, SignerOf, Unbelieved, digest
from peerd.transport.ids import NodeId
from peerd.transport.messages import Revocation

REVOKED_MAX = 4096
"""As many by the authority, and as many by all issuers: one of those that went wrong leaves the authority its room."""

_PURPOSE = "revocation 1"


class Revocations:
    """Those that one node knows; `node in revocations` is asked at every handshake."""

    def __init__(self, signer_of: SignerOf) -> None:
        self.counts: Counter[str] = Counter()
        self._signer_of = signer_of
        self._kept: dict[NodeId, Revocation] = {}
        self._orphaned: dict[NodeId, Revocation] = {}  # the word of an authority that is in force no more
        self._by_issuers: Counter[bool] = Counter()  # how many of them are theirs, and how many the authority's
        self._digest: bytes | None = None

    def __contains__(self, node: NodeId) -> bool:
        return node in self._kept or node in self._orphaned

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, node: NodeId) -> Revocation | None:
        """The one by which it is out, unless that is of an authority which is in force no more."""
        return self._kept.get(node)

    def all(self) -> list[Revocation]:
        """All of them."""
        return list(self._kept.values())

    def add(self, revocation: Revocation) -> bool:
        """Keep it; True where its node was not revoked so far. Raises Unbelieved. What is known costs nothing.

        So does what was believed until its authority retired: by another's clock it may not have yet.
        """
        known, past = self._kept.get(revocation.node), self._orphaned.get(revocation.node)
        if revocation == past or (known is not None and _order(known) <= _order(revocation)):
            return False
        signer = self._signer(revocation)
        if signer is None:
            raise Unbelieved("a revocation that nobody has signed whom this node believes")
        if (known is None or known.issuer) and self._is_full(signer):
            self.counts["revocations_refused"] += 1
            return False
        if known is not None:
            self._by_issuers[bool(known.issuer)] -= 1
        self._by_issuers[bool(revocation.issuer)] += 1
        self._kept[revocation.node] = revocation
        self._digest = None
        return known is None and past is None

    def forget_unbelieved(self) -> list[Revocation]:
        """Remove what nobody has signed whom this node still believes, and tell others of it no more.

        Its nodes stay out here for as long as this node runs; whoever may sign does so again. What was removed comes
        back where its authority does: a clock was ahead. It verifies all, 74 us each.
        """
        for one in [one for one in self._orphaned.values() if self._signer(one) is not None]:
            del self._orphaned[one.node]
            self.add(one)
            if one.node not in self._kept:  # there is no room any more
                self._orphaned[one.node] = one
        gone = [one for one in self._kept.values() if self._signer(one) is None]
        for one in gone:
            del self._kept[one.node]
            self._by_issuers[bool(one.issuer)] -= 1
            self._orphaned[one.node] = one
            self._digest = None
        return gone

    def _signer(self, one: Revocation) -> NodeId | None:
        return self._signer_of(_PURPOSE, _said(one), one.signature, one.issuer)

    @property
    def digest(self) -> bytes:
        """Equal where the same ones are kept."""
        if self._digest is None:
            rows = sorted(_order(one) for one in self._kept.values())
            self._digest = digest(rows)
        return self._digest

    def _is_full(self, signer: NodeId) -> bool:
        return self._by_issuers[signer != AUTHORITY] >= REVOKED_MAX


def make(node: NodeId, revoked_at: int, sign: Sign, issuer: bytes) -> Revocation:
    """State that a node is out; `issuer` is the certificate of who signs, empty for the authority."""
    revocation = Revocation(node, revoked_at, issuer, b"")
    return Revocation(node, revoked_at, issuer, sign(_PURPOSE, _said(revocation)))


def _said(revocation: Revocation) -> bytes:
    said: bytes = msgpack.packb((revocation.node, revocation.revoked_at))
    return said


def _order(one: Revocation) -> tuple[bool, int, bytes, bytes, NodeId]:
    return bool(one.issuer), one.revoked_at, one.issuer, one.signature, one.node
