"""What a node shows of itself when it connects, and whom it takes: the interface.

Certificates, authorities and files are peerd.security's business; here is only what a handshake asks of them.
"""

from __future__ import annotations

import ssl
from typing import Protocol

from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId

STRANGER: NodeId = ""
"""The identity of a peer that has shown no certificate: it may enrol, and no more."""


class PutOut(PeerError):
    """Of a peer that is out by a signed word, the `proof`: it is shown that, as it need not believe whoever refuses."""

    def __init__(self, why: str, proof: bytes) -> None:
        super().__init__(why)
        self.proof = proof


class Credentials(Protocol):
    """Asked anew for every connection: certificates are renewed and peers revoked while a node runs."""

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return how to shake hands: TLS 1.3, our certificate, whose authorities we believe."""

    def identity(self, certificate: bytes | None) -> NodeId:
        """Return who has shown this certificate (DER), which OpenSSL has verified; STRANGER for None.

        Raises PeerError, with the reason in a few words ("revoked"), for one that we do not take; PutOut, with what
        it is told of it, for one that was put out.
        """
