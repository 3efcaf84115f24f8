"""Who said this? A node signs what others pass on for it; whoever hears it checks the key, whose hash is the node's id.

What is signed carries the public key, so that nobody need have met the node: a *proof* is the key and the signature.
Only the interface is here: the cores that sign and check are given one, or None where the swarm is plain.
"""

from __future__ import annotations

from typing import Protocol

from peerd.transport.ids import NodeId

KEY_BYTES = 32
SIGNATURE_BYTES = 64
PROOF_BYTES = KEY_BYTES + SIGNATURE_BYTES


class Signing(Protocol):
    """A node's own key, and what others' keys say. What is signed counts in one swarm and run, for one purpose."""

    @property
    def key(self) -> bytes:
        """The node's public key, KEY_BYTES long."""

    def sign(self, purpose: str, message: bytes) -> bytes:
        """SIGNATURE_BYTES under the node's own key; 24 us with Ed25519."""

    def verify(self, key: bytes, signature: bytes, purpose: str, message: bytes) -> bool:
        """Whether the holder of this key signed it; False for any bytes that are no key or no signature; 74 us."""

    def id_of(self, key: bytes) -> NodeId:
        """The id of the node that has this key."""


def proof(signing: Signing, purpose: str, message: bytes) -> bytes:
    """What shows others that this node says so."""
    return signing.key + signing.sign(purpose, message)


def proves(signing: Signing, proof: bytes, by: NodeId, purpose: str, message: bytes) -> bool:
    """Whether it shows that this node said so."""
    key, signature = proof[:KEY_BYTES], proof[KEY_BYTES:]
    of_node = len(proof) == PROOF_BYTES and signing.id_of(key) == by
    return of_node and signing.verify(key, signature, purpose, message)
