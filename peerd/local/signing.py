"""What this node signs for others to pass on, with its own key (Ed25519, RFC 8032), and whether others' word is theirs.

Swarm and run are in all that is signed: of a node that is in two, what it says in one is worth nothing in the other.
"""

from __future__ import annotations

import functools

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from peerd.local.node_key import ID_DIGITS, NodeKey, fingerprint_of, purposed
from peerd.transport.ids import NodeId

_KEYS_MAX = 4096  # as many as members


class NodeSigning:
    """See `Signing` (transport/secure/signing.py)."""

    def __init__(self, key: NodeKey, swarm: str, run: str) -> None:
        self.key = key.public.public_bytes_raw()
        self._node_key = key
        self._where: bytes = msgpack.packb((swarm, run))  # says how long it is: no message reads like the end of it

    def sign(self, purpose: str, message: bytes) -> bytes:
        """See `Signing`."""
        return self._node_key.sign(purpose, self._where + message)

    def verify(self, key: bytes, signature: bytes, purpose: str, message: bytes) -> bool:
        """See `Signing`."""
        try:
            _public(key).verify(signature, purposed(purpose, self._where + message))
        except (InvalidSignature, ValueError):  # ValueError: not the length of a key
            return False
        return True

    def id_of(self, key: bytes) -> NodeId:
        """See `Signing`; of any KEY_BYTES."""
        return fingerprint_of(_public(key))[:ID_DIGITS]


@functools.lru_cache(maxsize=_KEYS_MAX)
def _public(key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(key)
