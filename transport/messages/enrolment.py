"""How a newcomer gets its certificate, and a member a new one (peerd/security/enrolment.py). Certificates are DER."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from peerd.transport.messages.base import Message, Name


@dataclass(frozen=True, slots=True)
class AuthorityShown(Message):
    """The first message to a stranger: by whom the certificate of the handshake was issued."""

    KIND: ClassVar[int] = 23
    authority: bytes
    issuers: tuple[bytes, ...]  # between the two; none where the authority issued it itself


@dataclass(frozen=True, slots=True)
class EnrolmentRequest(Message):
    """The newcomer's answer, if that is the authority of its token."""

    KIND: ClassVar[int] = 24
    token: bytes  # 8, its id
    request: bytes  # PKCS #10
    proof: bytes  # 32: who sends this knows the token's secret


@dataclass(frozen=True, slots=True)
class Enrolled(Message):
    """The newcomer is a node of the swarm, or a member a while longer."""

    KIND: ClassVar[int] = 25
    chain: tuple[bytes, ...]  # its certificate, and the issuers above it
    issuer: bytes  # a certificate by which it issues others; empty for most


@dataclass(frozen=True, slots=True)
class EnrolmentRefused(Message):
    """In place of any of the others: why not, in a word."""

    KIND: ClassVar[int] = 26
    reason: Name


@dataclass(frozen=True, slots=True)
class RenewalRequest(Message):
    """In place of a greeting, from a member whose certificate ends: Enrolled, please, for the same key."""

    KIND: ClassVar[int] = 27
    request: bytes  # PKCS #10
    chain: tuple[bytes, ...]  # what it is a member by now: its certificate, and the issuers above it
    issuer: bytes  # the certificate by which it issues others, to be renewed, too; empty for most
