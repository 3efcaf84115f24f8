"""What does a certificate (X.509, RFC 5280) say, and is it one of ours?

Three kinds, all on Ed25519 keys (RFC 8410): an authority's, which it signed itself; an issuer's, which the authority
signed and which may sign no further issuer; a node's. The name of an issuer or a node is its id, the hash of its key,
so that the issuer that a certificate names is a node that can be revoked.

A node's certificate that renews another one also names all issuers that the other one rested on (`issuers_of`). Issuers
renew each other's nodes, and one that was revoked must not leave any behind who have been renewed elsewhere meanwhile.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from peerd.local.node_key import ID_DIGITS, fingerprint_of
from peerd.security.wall_clock import shown
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId

DER_BYTES_MAX = 512  # what a field of a message holds; ours have 300 to 400
CLOCKS_DIFFER = timedelta(hours=1)  # certificates begin so long ago
RENEWED_AT = 2 / 3  # of a certificate's life
RENEWED_FROM = x509.ObjectIdentifier("2.25.147607877232962824760902734595941693969")
"""An extension of a node's certificate: ids of issuers, sorted, 16 bytes each. Of nobody's arc: a UUID (X.667)."""
ISSUERS_MAX = 6  # in it, which keeps certificates below DER_BYTES_MAX
_ISSUER = re.compile(rf"(peerd authority )?[0-9a-f]{{{ID_DIGITS}}}", re.ASCII)


UNREADABLE = (
    ValueError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion, x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType, UserWarning,
)  # fmt: skip
"""What `cryptography` raises for bytes that are no certificate, `strictly`."""


class Untrusted(PeerError):
    """A certificate that is not to be believed; the text goes on from "it is"."""


def read_der(der: bytes) -> x509.Certificate:
    """A certificate from the wire. Raises Untrusted."""
    try:
        if len(der) > DER_BYTES_MAX:
            raise ValueError
        with strictly():
            return _whole(x509.load_der_x509_certificate(der))
    except UNREADABLE:
        raise Untrusted("unreadable") from None


def read_pem(content: bytes) -> list[x509.Certificate]:
    """The certificates of a file. Raises Untrusted."""
    try:
        with strictly():
            return list(map(_whole, x509.load_pem_x509_certificates(content)))
    except UNREADABLE:
        raise Untrusted("unreadable") from None


def _whole(certificate: x509.Certificate) -> x509.Certificate:
    """The same; parts of it are read late, and may be damaged alone."""
    public_key(certificate)
    try:
        _ = certificate.extensions, certificate.subject, certificate.issuer
        _ = certificate.not_valid_before_utc, certificate.not_valid_after_utc  # of the year 0 there is no such thing
    except TypeError as error:  # by the library, for a name of bits
        raise ValueError(str(error)) from None
    return certificate


@contextmanager
def strictly() -> Iterator[None]:
    """What RFC 5280 forbids, and `cryptography` only warns of, is an error, one of UNREADABLE."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def public_key(certificate: x509.Certificate) -> Ed25519PublicKey:
    """Whose certificate it is. Raises Untrusted for a key of another kind."""
    try:
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise Untrusted("on no Ed25519 key")
    return key


def id_of(certificate: x509.Certificate) -> NodeId:
    """The node, issuer or authority that it is about. Raises Untrusted."""
    return id_of_key(public_key(certificate))


def id_of_key(key: Ed25519PublicKey) -> NodeId:
    """The id of who holds it."""
    return fingerprint_of(key)[:ID_DIGITS]


def pin_of(certificate: x509.Certificate) -> bytes:
    """SHA-256 of its key (SubjectPublicKeyInfo), by which an authority is pinned (RFC 7469)."""
    der = public_key(certificate).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).digest()


def issued_by(certificate: x509.Certificate) -> NodeId:
    """The name of who issued it: a node's id where that is an issuer. Raises Untrusted for one that we do not give.

    OpenSSL takes names for the same that differ in case or in spaces (RFC 5280, section 7.1). An issuer that has been
    revoked under its id must not go on under another spelling of it.
    """
    names = certificate.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
    name = names[0].value if len(names) == 1 else ""
    if not isinstance(name, str) or not _ISSUER.fullmatch(name):
        raise Untrusted("of an issuer whose name is no id")
    return name


def issuers_of(certificate: x509.Certificate) -> frozenset[NodeId]:
    """The ids of those whose word makes its node a member: who issued it, and who issued what it renews.

    Authorities are no nodes, and are left out. Raises Untrusted for what we do not write.
    """
    issuer = issued_by(certificate)
    own = {issuer} if len(issuer) == ID_DIGITS else set()
    try:
        extension = certificate.extensions.get_extension_for_oid(RENEWED_FROM).value
    except x509.ExtensionNotFound:
        return frozenset(own)
    assert isinstance(extension, x509.UnrecognizedExtension)
    digits = extension.value.hex()
    earlier = [digits[start : start + ID_DIGITS] for start in range(0, len(digits), ID_DIGITS)]
    if not 0 < len(earlier) <= ISSUERS_MAX or len(digits) % ID_DIGITS or earlier != sorted(set(earlier)):
        raise Untrusted("of issuers that it does not name as it should")
    return frozenset(own.union(earlier))


def renewed_from(issuers: Iterable[NodeId]) -> x509.UnrecognizedExtension:
    """What `issuers_of` reads. Raises Untrusted where they are too many."""
    ids = sorted(set(issuers))
    if len(ids) > ISSUERS_MAX:
        raise Untrusted(f"of more than {ISSUERS_MAX} issuers, one after the other; a new token clears that")
    return x509.UnrecognizedExtension(RENEWED_FROM, bytes.fromhex("".join(ids)))


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether it signed itself, and may sign others."""
    return may_issue(certificate) and certificate.subject == certificate.issuer and signed(certificate, certificate)


def may_issue(certificate: x509.Certificate) -> bool:
    """Whether it is an authority's or an issuer's."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def signed(certificate: x509.Certificate, by: x509.Certificate) -> bool:
    """Whether `by` is named as the issuer, and its key signed."""
    try:
        certificate.verify_directly_issued_by(by)
    except (TypeError, *UNREADABLE):
        return False
    return True


def check_chain(chain: Sequence[x509.Certificate], authorities: Iterable[x509.Certificate], now: datetime) -> None:
    """Whether a node's certificate, with an issuer's behind it or none, leads to one of these. Raises Untrusted.

    Handshakes leave this to OpenSSL; here it is for what is kept, and for the newcomer that believes nobody yet.
    """
    leaf, *issuers = chain
    if may_issue(leaf):
        raise Untrusted("an issuer's, not a node's")
    if len(issuers) > 1:
        raise Untrusted("below too many issuers")
    for below, above in zip(chain, issuers, strict=False):
        if not may_issue(above) or not signed(below, above):
            raise Untrusted("not of the issuer that it names")
    known = list(authorities)
    if not any(may_issue(authority) and signed(chain[-1], authority) for authority in known):
        raise Untrusted("of another authority")
    for certificate in chain:
        check_time(certificate, now)


def check_time(certificate: x509.Certificate, now: datetime) -> None:
    """Raises Untrusted for one that has ended, or has not begun."""
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        raise Untrusted(f"not valid before {shown(begins)}, and here it is {shown(now)}")
    if now > ends:
        raise Untrusted(f"expired since {shown(ends)}, and here it is {shown(now)}")


def made_at(certificate: x509.Certificate) -> datetime:
    """When, by the clock of its maker. That it begins earlier is for the clocks' sake."""
    return certificate.not_valid_before_utc + CLOCKS_DIFFER


def renews_at(certificate: x509.Certificate) -> datetime:
    """When two thirds of its life are over."""
    begins = made_at(certificate)
    return begins + (certificate.not_valid_after_utc - begins) * RENEWED_AT


def pem(certificates: Iterable[x509.Certificate]) -> str:
    """As files have them."""
    return "".join(certificate.public_bytes(Encoding.PEM).decode() for certificate in certificates)


def der(certificate: x509.Certificate) -> bytes:
    """As it travels."""
    return certificate.public_bytes(Encoding.DER)
