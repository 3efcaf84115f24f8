"""Which key is this node's? An Ed25519 key (RFC 8032), made at its first start; the key's hash is the node's id.

Whoever has the file is the node. The key signs for several purposes, and each signature names its own: what was signed
for one is worth nothing for another.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from peerd.local import durable
from peerd.transport.errors import UserError
from peerd.transport.ids import NodeId

ID_DIGITS = 32
"""Hex digits of a node's id, which is in every datagram and log line: the first 128 bits of the key's hash.

To answer to another's id takes a second key with the same 128 bits, 2**128 tries. A birthday search (2**64) only finds
two keys that are both the searcher's.
"""

_FILE_BYTES_MAX = 4096  # a key is 119
_CURE = "restore it from a backup, or remove it: then the node is a new one, and keeps its model"


class NodeKey:
    """The private key of one node, or of an authority."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self.private = private  # for TLS and certificates; all else is signed by `sign`
        self.public = private.public_key()
        self.fingerprint = fingerprint_of(self.public)
        self.id: NodeId = self.fingerprint[:ID_DIGITS]

    def __repr__(self) -> str:
        return f"<NodeKey {self.id}>"

    @classmethod
    def generate(cls) -> NodeKey:
        """A new one."""
        return cls(Ed25519PrivateKey.generate())

    def sign(self, purpose: str, message: bytes) -> bytes:
        """64 bytes, which `verify` takes for the same purpose and message only; 24 us."""
        return self.private.sign(purposed(purpose, message))

    def verify(self, signature: bytes, purpose: str, message: bytes) -> bool:
        """Whether this key signed it; 74 us."""
        return verified(self.public, signature, purpose, message)

    @property
    def pem(self) -> str:
        """The key itself, in clear (PKCS #8)."""
        return self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()

    def write(self, path: Path) -> None:
        """Keep it, for this user's eyes alone. Raises OSError."""
        durable.replace(path, self.pem)


def verified(public: Ed25519PublicKey, signature: bytes, purpose: str, message: bytes) -> bool:
    """Whether the owner of this key signed it, by `NodeKey.sign`."""
    try:
        public.verify(signature, purposed(purpose, message))
    except InvalidSignature:
        return False
    return True


def fingerprint_of(public: Ed25519PublicKey) -> str:
    """SHA-256 of the SubjectPublicKeyInfo (RFC 5280), in hex: as certificates are pinned."""
    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def read(path: Path, whose: str = "the node's key", cure: str = _CURE) -> NodeKey | None:
    """The key kept there; None where there is none. Raises UserError, with the cure, for one that cannot be used.

    No other takes its place: certificates and the other nodes' records are about the key that was, and files are
    written whole or not at all, so what is damaged was damaged by a disk or a hand, which its owner should know of.
    """
    if not os.path.lexists(path):
        return None
    try:
        private = load_pem_private_key(_content(path), None)
    except OSError as error:
        raise UserError(f"{whose} {path}: {error.strerror}; let this user read it") from None
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):  # TypeError: it wants a password
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise UserError(f"{whose} {path} is damaged; {cure}")
    return NodeKey(private)


def _content(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError("not a file")
    return durable.read(path, _FILE_BYTES_MAX)


def purposed(purpose: str, message: bytes) -> bytes:
    """What is signed for this purpose."""
    assert "\0" not in purpose, purpose
    return b"peerd " + purpose.encode() + b"\0" + message
