"""Who has signed what in a simulated swarm? As binding as Ed25519 for nodes that keep to its methods, and cheap.

A node's secret is drawn from the seed and its id, and the referee alone knows all of them: a signature is a keyed hash
(BLAKE2b, RFC 7693), which nobody else can make, and which the referee makes again to verify it.
"""

from __future__ import annotations

import hashlib

from peerd.transport.ids import NodeId
from peerd.transport.secure.signing import KEY_BYTES, SIGNATURE_BYTES


class Referee:
    """Knows every node's secret."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._secrets: dict[bytes, bytes] = {}  # by public key
        self._ids: dict[bytes, NodeId] = {}

    def signing(self, id: NodeId) -> RefereedSigning:
        """The one of this node."""
        key = _hash(f"public key of {id} in {self._seed}".encode(), b"", KEY_BYTES)
        self._secrets[key] = _hash(f"secret key of {id} in {self._seed}".encode(), b"", KEY_BYTES)
        self._ids[key] = id
        return RefereedSigning(self, key)

    def signature(self, key: bytes, purpose: str, message: bytes) -> bytes | None:
        """What the holder of this public key would sign; None where nobody holds it."""
        secret = self._secrets.get(key)
        return None if secret is None else _hash(purpose.encode() + b"\0" + message, secret, SIGNATURE_BYTES)

    def id_of(self, key: bytes) -> NodeId:
        """See `Signing`; a key that nobody holds is the key of nobody."""
        return self._ids.get(key, key.hex())


class RefereedSigning:
    """See `Signing` (transport/secure/signing.py)."""

    def __init__(self, referee: Referee, key: bytes) -> None:
        self.key = key
        self._referee = referee

    def sign(self, purpose: str, message: bytes) -> bytes:
        """See `Signing`."""
        signature = self._referee.signature(self.key, purpose, message)
        assert signature is not None, "it was made with its key"
        return signature

    def verify(self, key: bytes, signature: bytes, purpose: str, message: bytes) -> bool:
        """See `Signing`."""
        return signature == self._referee.signature(key, purpose, message)

    def id_of(self, key: bytes) -> NodeId:
        """See `Signing`."""
        return self._referee.id_of(key)


def _hash(message: bytes, key: bytes, size: int) -> bytes:
    return hashlib.blake2b(message, key=key, digest_size=size).digest()
