"""Who may sign, without certificates: an authority and issuers by name, whose signatures are hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from peerd.security.statements import Sign

ISSUERS = {b"": "", b"one": "1" * 32, b"two": "2" * 32}
"""The id of each by its certificate; the authority's are empty."""


def signing(issuer: bytes) -> Sign:
    """Its `Authority.sign`."""
    return lambda purpose, message: _signature(purpose, message, issuer)


def signer_of(purpose: str, message: bytes, signature: bytes, issuer: bytes) -> str | None:
    """Who signed, as `SignerOf` says."""
    return ISSUERS.get(issuer) if signature == _signature(purpose, message, issuer) else None


def nobody_is_revoked(node: str) -> bool:
    """As it is at first."""
    return False


def revoked(*nodes: str) -> Callable[[str], bool]:
    """Whether it is one of these."""
    return nodes.__contains__


def _signature(purpose: str, message: bytes, issuer: bytes) -> bytes:
    return hashlib.sha512(repr((purpose, message, issuer)).encode()).digest()
