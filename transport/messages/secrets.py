"""What members tell each other, over connections whose other end has proved who it is, of keys and of who is out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from peerd.transport.messages.base import COUNT, Message, Name, Within


@dataclass(frozen=True, slots=True)
class Revocation:
    """A node is out for ever (peerd/security/revocations.py)."""

    node: Name
    revoked_at: int  # seconds since 1970, for people
    issuer: bytes  # who says so: a certificate (DER), or nothing where it is the authority itself
    signature: bytes  # 64, Ed25519


@dataclass(frozen=True, slots=True)
class KeyGeneration:
    """One key that seals datagrams (peerd/security/keyring.py)."""

    number: Annotated[int, Within(1, COUNT.high)]
    key: bytes  # 32
    level: int  # the revocations that its maker knew of: those of a lower level are known to somebody who is out
    issuer: bytes  # as of a revocation
    signature: bytes


@dataclass(frozen=True, slots=True)
class Successor:
    """One authority takes the place of another (peerd/security/succession.py). All are certificates (DER)."""

    old: bytes  # which it signed itself
    new: bytes
    new_by_old: bytes  # of the new one's key, signed by the old one: both end when the old one retires
    old_by_new: bytes


@dataclass(frozen=True, slots=True)
class SecretsHeld(Message):
    """Digests of all that the sender holds of the three messages below. The acceptor's is the end of its answer."""

    KIND: ClassVar[int] = 28
    successors: bytes
    revocations: bytes
    keyring: bytes


@dataclass(frozen=True, slots=True)
class Successors(Message):
    """The authorities that replace others, before all that they have signed."""

    KIND: ClassVar[int] = 31
    successors: tuple[Successor, ...]


@dataclass(frozen=True, slots=True)
class RevocationList(Message):
    """Some of the revocations that the sender holds."""

    KIND: ClassVar[int] = 29
    revocations: tuple[Revocation, ...]


@dataclass(frozen=True, slots=True)
class Keys(Message):
    """The sender's keyring; all its revocations have gone before, so that no key comes to whom it is kept from."""

    KIND: ClassVar[int] = 30
    generations: tuple[KeyGeneration, ...]


SecretsMessage = SecretsHeld | Successors | RevocationList | Keys
