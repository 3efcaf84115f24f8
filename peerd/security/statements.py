"""What the authority, or an issuer, says to all: whose word is it, and is it believed?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgpack

from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId

DIGEST_BYTES = 16

AUTHORITY: NodeId = ""
"""The signer of what the authority said itself."""

SignerOf = Callable[[str, bytes, bytes, bytes], NodeId | None]
"""Of a purpose, a message, its signature and an issuer's certificate (DER; empty: the authority's own word), who signed
it: AUTHORITY, an issuer's id, or None for nobody whom we believe. 74 us and more."""

Sign = Callable[[str, bytes], bytes]
"""Sign a message for a purpose, as the authority or as an issuer."""


def digest(rows: object) -> bytes:
    """Of what one member holds, for another to compare."""
    return hashlib.sha256(msgpack.packb(rows)).digest()[:DIGEST_BYTES]


class Unbelieved(PeerError):
    """Nobody whom this node believes has signed it.

    Not always a lie: members stop to believe an authority that is replaced one after the other.
    """
