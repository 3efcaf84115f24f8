"""Authorities and nodes with certificates, for tests of sealed connections."""

from __future__ import annotations

import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.secure.credentials import STRANGER

DAY = timedelta(days=1)


def id_of(certificate: x509.Certificate) -> NodeId:
    spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return sha256(spki).hexdigest()[:32]


class Authority:
    """Issues certificates; all have the same name, so that only their keys tell them apart."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
        self.certificate = self._sign(self._name, self._key, -DAY, 100 * DAY, x509.BasicConstraints(True, 1))

    def _sign(
        self,
        subject: x509.Name,
        key: Ed25519PrivateKey,
        begins: timedelta,
        ends: timedelta,
        constraints: x509.BasicConstraints,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now + begins).not_valid_after(now + ends)
        return builder.add_extension(constraints, critical=True).sign(self._key, None)

    def issue(self, key: Ed25519PrivateKey, begins: timedelta, ends: timedelta) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "node")])
        return self._sign(name, key, begins, ends, x509.BasicConstraints(False, None))


class TestCredentials:
    """A node's: by default with a certificate of `authority`, which it believes."""

    __test__ = False

    def __init__(
        self,
        authority: Authority,
        *,
        key: Ed25519PrivateKey | None = None,
        certified: bool = True,
        begins: timedelta = -DAY,
        ends: timedelta = DAY,
    ) -> None:
        self._believed = authority
        self._key = key or Ed25519PrivateKey.generate()
        self._certificate = authority.issue(self._key, begins, ends)
        self._certified = certified
        self.id = id_of(self._certificate)
        self.refused: set[NodeId] = set()
        self._contexts: dict[bool, ssl.SSLContext] = {}

    def context(self, *, server: bool) -> ssl.SSLContext:
        if server not in self._contexts:
            self._contexts[server] = self._made(server)
        return self._contexts[server]

    def _made(self, server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_OPTIONAL if server else ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._believed.certificate.public_bytes(Encoding.DER))
        if server:
            context.num_tickets = 0
        if self._certified:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "certificate"
                key = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
                path.write_bytes(self._certificate.public_bytes(Encoding.PEM) + key)
                context.load_cert_chain(path)
        return context

    def identity(self, certificate: bytes | None) -> NodeId:
        if certificate is None:
            return STRANGER
        found = id_of(x509.load_der_x509_certificate(certificate))
        if found in self.refused:
            raise PeerError("revoked")
        return found
