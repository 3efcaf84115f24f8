"""Who may say that a node belongs to a swarm? An authority, and the issuers that it has made.

An authority is a key and a certificate in a folder of its own, on one machine: who has the folder lets in whom they
like. An issuer is a node whose own key the authority has certified for issuing, too.

One key makes two kinds of signatures, which are never taken for each other: certificates are DER and begin with the
byte 0x30, what `NodeKey.sign` signs begins with "peerd " and its purpose.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from peerd.local.node_key import NodeKey
from peerd.security import certificates
from peerd.security.certificates import CLOCKS_DIFFER, Untrusted, der, pin_of, read_der
from peerd.security.succession import Replacement
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import Successor

AUTHORITY_LIFE = timedelta(days=3650)
ISSUER_LIFE = timedelta(days=365)
NODE_LIFE = timedelta(days=90)

PATH_LENGTH = 2  # below an authority: the one that takes its place, and that one's issuers


class Authority:
    """What issues certificates: an authority, or a node that it made an issuer."""

    def __init__(self, key: NodeKey, certificate: x509.Certificate, root: x509.Certificate) -> None:
        """`certificate` is that of `key`; `root` the authority's, the same one where this is the authority."""
        self.key = key
        self.certificate = certificate
        self.root = root

    def become(self, other: Authority) -> None:
        """Issue as that one from now on, wherever this one is held."""
        self.key, self.certificate, self.root = other.key, other.certificate, other.root

    @property
    def is_root(self) -> bool:
        """Whether it is the authority itself."""
        return self.certificate == self.root

    @property
    def issuer_certificate(self) -> bytes:
        """What a statement of it carries, for `Trust.verify`: DER, or nothing where it is the authority."""
        return b"" if self.is_root else certificates.der(self.certificate)

    def sign(self, purpose: str, message: bytes) -> bytes:
        """64 bytes, which `Trust.verify` takes for the same purpose and message only."""
        return self.key.sign(purpose, message)

    def issue(
        self, request: bytes, now: datetime, renewed_from: Collection[NodeId] = ()
    ) -> tuple[x509.Certificate, ...]:
        """A node's certificate for the key in its request (PKCS #10, DER), and the issuers above it.

        `renewed_from` are the issuers (`certificates.issuers_of`) of the one that it has. Raises PeerError for what is
        no such request.
        """
        earlier = set(renewed_from) - {certificates.id_of(self.certificate)}
        leaf = self._issue(requested_key(request), NODE_LIFE, now, issues=False, renewed_from=earlier)
        return (leaf,) if self.is_root else (leaf, self.certificate)

    def issue_own(self, key: NodeKey, now: datetime) -> tuple[x509.Certificate, ...]:
        """The same for a key that is here."""
        return self.issue(request_of(key), now)

    def make_issuer(self, request: bytes, now: datetime) -> x509.Certificate:
        """A certificate by which the node issues others. Only the authority itself makes one."""
        assert self.is_root
        return self._issue(requested_key(request), ISSUER_LIFE, now, issues=True)

    def vouch(self, other: x509.Certificate, now: datetime, until: datetime) -> x509.Certificate:
        """For another authority: who believes this one believes it, too (RFC 4210, section 4.4)."""
        own = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        key = certificates.public_key(other)
        return (
            x509.CertificateBuilder(self.certificate.subject, other.subject, key, x509.random_serial_number())
            .not_valid_before(now - CLOCKS_DIFFER)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=True, path_length=PATH_LENGTH - 1), critical=True)
            .add_extension(_usage(issues=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False)
            .sign(self.key.private, None)
        )

    def _issue(
        self,
        key: Ed25519PublicKey,
        life: timedelta,
        now: datetime,
        *,
        issues: bool,
        renewed_from: Collection[NodeId] = (),
    ) -> x509.Certificate:
        ends = min(now + life, self.certificate.not_valid_after_utc)
        above = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        name = _name(certificates.id_of_key(key))
        builder = (
            x509.CertificateBuilder(self.certificate.subject, name, key, x509.random_serial_number())
            .not_valid_before(now - CLOCKS_DIFFER)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=issues, path_length=0 if issues else None), critical=True)
            .add_extension(_usage(issues=issues), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(above), critical=False)
        )
        if renewed_from:
            builder = builder.add_extension(certificates.renewed_from(renewed_from), critical=False)
        return builder.sign(self.key.private, None)


def generate(now: datetime) -> Authority:
    """A new one."""
    return self_signed(NodeKey.generate(), now)


def succeed(old: Authority, new: Authority, now: datetime, until: datetime) -> Successor:
    """Put a new authority in the place of an old one, which stays in force `until` then."""
    vouched = old.vouch(new.certificate, now, until), new.vouch(old.certificate, now, until)
    return Successor(*map(der, (old.certificate, new.certificate, *vouched)))


def read_successor(said: Successor) -> Replacement:
    """What is said, if both authorities say it. Raises Untrusted."""
    old, new, new_by_old, old_by_new = map(read_der, (said.old, said.new, said.new_by_old, said.old_by_new))
    replacement = Replacement(pin_of(old), pin_of(new), int(new_by_old.not_valid_after_utc.timestamp()))
    both = ((new, new_by_old, old), (old, old_by_new, new))
    if replacement.old == replacement.new or not all(_vouched(*each) for each in both):
        raise Untrusted("of an authority in another's place, and the two do not vouch for each other")
    if old_by_new.not_valid_after_utc != new_by_old.not_valid_after_utc:
        raise Untrusted("of an authority in another's place, and the two do not say until when")
    return replacement


def _vouched(one: x509.Certificate, its: x509.Certificate, by: x509.Certificate) -> bool:
    is_authority = certificates.is_authority(one) and certificates.may_issue(its) and certificates.signed(its, by)
    return is_authority and its.subject == one.subject and pin_of(its) == pin_of(one)


def self_signed(key: NodeKey, now: datetime) -> Authority:
    """An authority with this key."""
    name = _name(f"peerd authority {key.id}")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public)
    certificate = (
        x509.CertificateBuilder(name, name, key.public, x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=PATH_LENGTH), critical=True)
        .add_extension(_usage(issues=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key.private, None)
    )
    return Authority(key, certificate, certificate)


def request_of(key: NodeKey) -> bytes:
    """Ask for a certificate, and prove that the key is held (PKCS #10, DER)."""
    builder = x509.CertificateSigningRequestBuilder(_name(key.id))
    return builder.sign(key.private, None).public_bytes(Encoding.DER)


def requested_key(request: bytes) -> Ed25519PublicKey:
    """The key that a request asks for; nothing else in it counts. Raises PeerError."""
    try:
        with certificates.strictly():
            asked = x509.load_der_x509_csr(request)
            key, proved = asked.public_key(), asked.is_signature_valid
    except certificates.UNREADABLE:
        raise PeerError("its request for a certificate cannot be read") from None
    if not isinstance(key, Ed25519PublicKey) or not proved:
        raise PeerError("its request for a certificate is not signed with an Ed25519 key")
    return key


def _usage(*, issues: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not issues, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=issues, crl_sign=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
