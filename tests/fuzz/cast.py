"""Who meets in the targets about certificates: an authority, an issuer, members, a newcomer, and another authority.

Keys and numbers are the same in every run, so that a failure is found again.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from datetime import timedelta
from unittest.mock import patch

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.local.node_key import NodeKey
from peerd.security import authority, revocations, wall_clock
from peerd.security.authority import Authority, request_of
from peerd.security.certificates import der, pin_of
from peerd.security.enrolment import Enrolment
from peerd.security.keyring import Keyring
from peerd.security.token import Token
from peerd.security.trust import Trust
from peerd.transport.ids import NodeId
from peerd.transport.messages import KeyGeneration, Revocation, Successor

NOW = wall_clock.now()  # by which OpenSSL goes
SWARM = ("peerd", "")
TOKEN_USES = 3


def key(number: int) -> NodeKey:
    """One of a few."""
    return NodeKey(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32))


@dataclass(frozen=True, slots=True)
class Cast:
    """`let_in` are what nodes have that came in by the authority, by the issuer, and by another authority."""

    root: Authority
    issuer: Authority
    other: Authority
    member: NodeKey
    newcomer: NodeKey
    let_in: tuple[Enrolment, Enrolment, Enrolment]
    token: Token
    revocations: tuple[Revocation, ...]
    generations: tuple[KeyGeneration, ...]
    successors: tuple[Successor, Successor]  # of the authority, and of the other one

    @property
    def ids(self) -> set[NodeId]:
        """Of all that the authority has anything to do with."""
        return {each.id for each in (self.member, self.newcomer, key(1), key(2))}

    def certificates(self) -> list[bytes]:
        """All there are, DER."""
        found = [*(one for each in self.let_in for one in each.chain), self.root.root, self.other.root]
        return [*map(der, [*found, self.issuer.certificate])]

    def trust(self) -> Trust:
        """A member's."""
        return Trust(self.member, self.let_in[0].chain, [self.root.root])


@functools.cache
def cast() -> Cast:
    """The same in every run."""
    with patch.object(x509, "random_serial_number", itertools.count(1 << 150).__next__):
        root, other = (authority.self_signed(key(number), NOW) for number in (1, 3))
        successors = [
            authority.succeed(old, authority.self_signed(key(number), NOW), NOW, NOW + timedelta(days=90))
            for old, number in ((root, 6), (other, 7))
        ]
        issuer = Authority(key(2), root.make_issuer(request_of(key(2)), NOW), root.root)
        member, newcomer = key(4), key(5)
        let_in = [
            Enrolment(by.issue_own(member, NOW), (by.root,), by.certificate if by is issuer else None)
            for by in (root, issuer, other)
        ]
    token = Token((("127.0.0.1", 7946),), pin_of(root.root), b"token id", bytes(range(16)), int(NOW.timestamp()) + 3600)
    signers = (root, issuer, other)
    out = [
        revocations.make(f"{number:032x}", 1_700_000_000 + number, by.sign, by.issuer_certificate)
        for number, by in enumerate(3 * signers)
    ]
    ring = Keyring(SWARM, lambda *_: "", lambda _: False)
    keys = [
        ring.make(bytes([number]) * 32, level, by.sign, by.issuer_certificate)
        for number, (level, by) in enumerate(itertools.product((0, 1, 3), signers))
    ]
    return Cast(
        root, issuer, other, member, newcomer, (*let_in,), token, tuple(out), tuple(keys), (*successors,)  # type: ignore[arg-type]
    )  # fmt: skip
