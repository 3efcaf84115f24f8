"""How does a token become a certificate? What each side says and checks; who carries it is elsewhere.

The newcomer has no certificate: in the handshake it sees one, and knows only that the other end holds its key. It is
told of the authority above it, compares that with the token's pin, and checks that the certificate is of this
authority. Now it knows whom it speaks to, and asks, with a proof that is worth nothing to anybody else: a member that
poses as the issuer learns neither the secret nor a proof that the issuer would take, for the proof names what was shown
in the handshake.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from cryptography.x509 import Certificate

from peerd.local.node_key import NodeKey
from peerd.security import certificates
from peerd.security.authority import Authority, request_of, requested_key
from peerd.security.certificates import Untrusted, check_chain, der, is_authority, pin_of, public_key, read_der
from peerd.security.token import EXPIRED, UNKNOWN, USED_UP, WRONG_SECRET, Token, proof
from peerd.transport.ids import NodeId
from peerd.transport.messages import AuthorityShown, Enrolled, EnrolmentRequest, RenewalRequest

NO_ISSUER, REVOKED, BROKEN = "no-issuer", "revoked", "broken"
REASONS = {  # what a newcomer is told of the other end, and what that end says of the newcomer
    UNKNOWN: ("it never made this token, or forgot it long ago", "it never was given its token here"),
    WRONG_SECRET: ("the token's secret is wrong", "it does not know its token's secret"),
    EXPIRED: ("the token has expired", "its token has expired"),
    USED_UP: ("the token was used already", "its token was used already"),
    NO_ISSUER: ("it issues no certificates", "it has no certificate, and this node issues none"),
    REVOKED: ("this node's key is revoked", "its key is revoked"),
    BROKEN: ("it failed, as its log says", "its token could not be looked up"),
}


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What makes a node one of a swarm."""

    chain: tuple[Certificate, ...]  # the node's, and the issuers above it
    authorities: tuple[Certificate, ...]  # above them
    issuer: Certificate | None = None  # by which it issues others

    def message(self) -> Enrolled:
        """As it travels."""
        issuer = der(self.issuer) if self.issuer else b""
        return Enrolled(tuple(map(der, self.chain)), issuer)


def shown(chain: Iterable[Certificate], authority: Certificate) -> AuthorityShown:
    """What a stranger is told by a node that showed this chain."""
    return AuthorityShown(der(authority), tuple(map(der, list(chain)[1:])))


def authority_shown(token: Token, said: AuthorityShown, leaf: Certificate, now: datetime) -> Certificate:
    """The token's authority, if `leaf`, which the handshake showed, is of it. Raises Untrusted."""
    authority = read_der(said.authority)
    if not hmac.compare_digest(pin_of(authority), token.pin) or not is_authority(authority):
        raise Untrusted("of another authority than the token's")
    check_chain([leaf, *map(read_der, said.issuers)], [authority], now)
    return authority


def asked(token: Token, key: NodeKey, leaf: Certificate) -> EnrolmentRequest:
    """What the newcomer says to who showed `leaf`."""
    request = request_of(key)
    return EnrolmentRequest(token.id, request, proof(token.secret, token.id, token.pin, der(leaf), request))


def expected_proof(authority: Certificate, leaf: Certificate, request: EnrolmentRequest, secret: bytes) -> bytes:
    """The same, as the issuer computes it, who showed `leaf`."""
    return proof(secret, request.token, pin_of(authority), der(leaf), request.request)


def granted(
    by: Authority, request: bytes, now: datetime, *, issuer: bool, renewed_from: Collection[NodeId] = ()
) -> Enrolment:
    """What is given for a request; `renewed_from` as of `Authority.issue`. Raises PeerError for one that is none."""
    may_issue = by.make_issuer(request, now) if issuer and by.is_root else None
    return Enrolment(by.issue(request, now, renewed_from), (by.root,), may_issue)


def node_of(request: bytes) -> NodeId:
    """The id of who asks. Raises PeerError."""
    return certificates.id_of_key(requested_key(request))


def checked(said: Enrolled, key: NodeKey, authorities: Sequence[Certificate], now: datetime) -> Enrolment:
    """What came in answer, if it is for this key, and of an authority that is believed already. Raises Untrusted."""
    if not 0 < len(said.chain) <= 2:
        raise Untrusted("missing, or below too many issuers")
    chain = tuple(map(read_der, said.chain))
    if public_key(chain[0]) != key.public:
        raise Untrusted("another node's")
    check_chain(chain, authorities, now)
    above = tuple(one for one in authorities if certificates.signed(chain[-1], one))[:1]
    issuer = read_der(said.issuer) if said.issuer else None
    if issuer is not None and not is_issuer_of(issuer, key.id, above):
        raise Untrusted("beside an issuer's that is not this node's")
    return Enrolment(chain, above, issuer)


def renewed_from(
    request: RenewalRequest, node: NodeId, authorities: Iterable[Certificate], now: datetime
) -> frozenset[NodeId]:
    """The issuers of what this node is a member by now, as its request shows it. Raises Untrusted."""
    if not 0 < len(request.chain) <= 2:
        raise Untrusted("missing, or below too many issuers")
    chain = tuple(map(read_der, request.chain))
    if certificates.id_of(chain[0]) != node:
        raise Untrusted("another node's")
    check_chain(chain, authorities, now)
    return certificates.issuers_of(chain[0])


def is_issuer_of(certificate: Certificate, node: NodeId, authorities: Iterable[Certificate]) -> bool:
    """Whether one of these has made this node an issuer. Until when is not looked at: it may be renewed."""
    known = any(certificates.signed(certificate, authority) for authority in authorities)
    return known and certificates.may_issue(certificate) and certificates.id_of(certificate) == node
