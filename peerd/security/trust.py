"""Whom does this node believe, and what does it show of itself? `Credentials` (peerd/transport/secure/credentials.py).

The key never lies in a file but its own: OpenSSL, which only reads files, is given one that has no name and is gone
when it has been read.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence

from cryptography.x509 import Certificate

from peerd.local.node_key import NodeKey, verified
from peerd.security import certificates
from peerd.security.certificates import Untrusted, der, issuers_of, may_issue, pin_of, public_key, read_der
from peerd.security.succession import Succession
from peerd.transport.ids import NodeId
from peerd.transport.secure.credentials import STRANGER, PutOut
from peerd.transport.secure.reasons import REVOKED, REVOKED_ISSUER

SEEN_MAX = 4096  # nodes; 224 connections are open at most that others have dialled


class _Out(Untrusted, PutOut):
    """Its certificate counts no more."""


class Trust:
    """One node's credentials. They may be renewed while it runs; connections that are open stay open."""

    def __init__(
        self,
        key: NodeKey,
        chain: Sequence[Certificate],
        authorities: Sequence[Certificate],
    ) -> None:
        """`chain` is the node's certificate and the issuers above it."""
        self._key = key
        self.revoked: Callable[[NodeId], bool] = lambda node: False  # asked at every handshake
        self.proof_of: Callable[[NodeId], bytes] = lambda node: b""  # by whose word it is revoked, for itself to read
        self.newest: tuple[Certificate, ...] = ()  # under which certificates are given, where that is known
        self._bridges: tuple[bytes, ...] = ()  # from one authority in force to another (DER)
        self._seen: dict[NodeId, frozenset[NodeId]] = {}  # the issuers of each, who came last at the end
        self.renew(chain, authorities)

    def renew(self, chain: Sequence[Certificate], authorities: Sequence[Certificate]) -> None:
        """Show these certificates from now on, and believe these authorities, the newest first."""
        self.chain = tuple(chain)
        self.authorities = tuple(authorities)
        self._contexts: dict[bool, ssl.SSLContext] = {}

    def follow(self, succession: Succession, now: float) -> bool:
        """Believe the authorities that are in force, and show what they say of each other; whether that is new."""
        known = {pin_of(one): one for one in self.authorities}
        for said in succession.statements():
            known |= {pin_of(one): one for one in map(read_der, (said.old, said.new))}
        authorities = tuple(known[pin] for pin in succession.in_force(now))
        bridges = tuple(one for said in succession.live(now) for one in (said.new_by_old, said.old_by_new))
        self.newest = tuple(known[pin] for pin in succession.newest(now))
        if (authorities, bridges) == (self.authorities, self._bridges):
            return False
        self._bridges = bridges
        self.renew(self.chain, authorities)
        return True

    @property
    def outdated(self) -> bool:
        """Whether the node's certificate is of an authority that is being replaced."""
        return bool(self.newest) and not any(certificates.signed(self.chain[-1], one) for one in self.newest)

    @property
    def certificate(self) -> Certificate:
        """The node's own."""
        return self.chain[0]

    def context(self, *, server: bool) -> ssl.SSLContext:
        """See `Credentials.context`. A client must show a certificate of ours or none, a server one of ours."""
        if server not in self._contexts:
            self._contexts[server] = self._context(server=server)
        return self._contexts[server]

    def identity(self, certificate: bytes | None) -> NodeId:
        """See `Credentials.identity`; the rest of what a certificate must be OpenSSL has seen to."""
        if certificate is None:
            return STRANGER
        shown = read_der(certificate)
        if may_issue(shown):
            raise Untrusted("an issuer's, not a node's")
        node, issuers = certificates.id_of(shown), issuers_of(shown)
        if self.revoked(node):
            raise _Out(REVOKED, self.proof_of(node))
        for issuer in sorted(issuers):
            if self.revoked(issuer):
                raise _Out(f"{REVOKED_ISSUER}, {issuer}", self.proof_of(issuer))
        self._seen.pop(node, None)
        if len(self._seen) >= SEEN_MAX:
            del self._seen[next(iter(self._seen))]
        self._seen[node] = issuers
        return node

    def resting_on(self, issuer: NodeId) -> list[NodeId]:
        """The nodes whose certificates, as they last showed them here, count no more without this issuer."""
        return [node for node, issuers in self._seen.items() if issuer in issuers]

    def verify(self, purpose: str, message: bytes, signature: bytes, issuer_certificate: bytes = b"") -> bool:
        """Whether `Authority.sign` of an authority that we believe, or of an issuer of one, signed this.

        `issuer_certificate` (DER) is the issuer's, empty where the authority itself signed. What it once said holds
        when its certificate has ended; whether the issuer is revoked is for the caller to ask.
        """
        if not issuer_certificate:
            return any(verified(public_key(one), signature, purpose, message) for one in self.authorities)
        try:
            issuer = read_der(issuer_certificate)
        except Untrusted:
            return False
        known = may_issue(issuer) and any(certificates.signed(issuer, one) for one in self.authorities)
        return known and verified(public_key(issuer), signature, purpose, message)

    def _context(self, *, server: bool) -> ssl.SSLContext:
        context = bare_context(server=server)
        context.load_verify_locations(cadata=b"".join(map(der, self.authorities)))
        if server:
            context.verify_mode = ssl.CERT_OPTIONAL  # who has none may enrol, and no more
            context.num_tickets = 0
        else:
            context.verify_mode = ssl.CERT_REQUIRED
        _load(context, self._key.pem + certificates.pem([*self.chain, *map(read_der, self._bridges)]))
        return context


class Newcomer:
    """The credentials of who has no certificate yet, for one connection: it keeps what the other end shows."""

    def __init__(self) -> None:
        self.shown: Certificate | None = None

    def context(self, *, server: bool) -> ssl.SSLContext:
        """See `Credentials.context`. What the other end shows is checked when its authority is known."""
        assert not server
        return bare_context(server=False)

    def identity(self, certificate: bytes | None) -> NodeId:
        """See `Credentials.identity`: the handshake has shown that the other end holds the key, and no more."""
        if certificate is None:
            return STRANGER
        self.shown = read_der(certificate)
        return certificates.id_of(self.shown)


def bare_context(*, server: bool) -> ssl.SSLContext:
    """TLS 1.3, no names, no certificates asked for yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # ids are compared, not names
    context.verify_mode = ssl.CERT_NONE
    return context


def _load(context: ssl.SSLContext, pem: str) -> None:
    fd = os.memfd_create("peerd", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
