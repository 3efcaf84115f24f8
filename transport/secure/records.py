"""What a sealed connection's bytes are, after its handshake: records of AES-256-GCM.

A record is the length of its plaintext (4 bytes, little endian), the ciphertext, and the tag (16 bytes). Why not TLS's
own records: `ssl` seals 16 KiB at a time, holds the interpreter and copies, 1.6 GB/s where sockets do 5.

Why this is sound:

- Secrets. Each end draws 32 random bytes and tells them to the other inside TLS 1.3, once it knows who that is. Nobody
  else learns either, so nobody else knows what HKDF-SHA256 (RFC 5869) makes of both; and as one honest end suffices to
  make them new, no two connections have the same keys.
- Each direction has a key of its own: what is reflected does not open. No nonce is used twice with a key, because it is
  the record's number, which never goes back; so what is left out, doubled or has changed places does not open either,
  nor does a record cut off or lengthened: its length is authenticated, and where the next one begins follows from it.
- A key seals at most `KEY_RECORDS` records, 2^35 blocks at most: what GCM then loses is below the 2^-57 that TLS 1.3
  allows itself (RFC 8446 section 5.5). The next one follows from the same chain, which does not run backwards; both
  ends count alike, so no message says so.
- Nothing is handed on before its tag was right. The first that is not ends the connection; no second guess.
- An end that is cut off is not told from one that has died: no message is complete before its last record, and modes
  live with links that break at any point. So no record says goodbye.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from peerd.transport.errors import Blameless, PeerError
from peerd.transport.messages import Chunk

RECORD_MAX = 4 << 20  # bytes of plaintext, a whole chunk: shorter ones cost more processor time (benchmarks/RESULTS.md)
SHARE_BYTES = 32  # what each end adds to the secrets
LENGTH_BYTES, TAG_BYTES = 4, 16
OVERHEAD_BYTES = LENGTH_BYTES + TAG_BYTES
KEY_RECORDS = 1 << 17
_LENGTH = struct.Struct("<I")
_SECRET_BYTES, _NONCE_BYTES = 32, 12


@dataclass(frozen=True, slots=True)
class Secrets:
    """From what one end's keys are made."""

    sending: bytes
    receiving: bytes

    @classmethod
    def of(cls, purpose: str, dialler: bytes, acceptor: bytes, *, dialled: bool) -> Secrets:
        """Those of the end that has `dialled` or of the other, from both ends' shares of `SHARE_BYTES`."""
        ways = [_secret(f"peerd {purpose} {way} 1".encode(), dialler + acceptor) for way in ("out", "back")]
        return cls(*ways) if dialled else cls(*reversed(ways))


class Sealer:
    """Seals one direction."""

    def __init__(self, secret: bytes) -> None:
        self._key = _Key(secret)

    def seal(self, plaintext: Chunk, into: memoryview) -> int:
        """Write a record of it to the beginning of `into`; return how long that is."""
        end = OVERHEAD_BYTES + len(plaintext)
        length = into[:LENGTH_BYTES] = _LENGTH.pack(len(plaintext))
        cipher, nonce = self._key.next()
        cipher.encrypt_into(nonce, plaintext, length, into[LENGTH_BYTES:end])
        return end


class Opener:
    """Opens what the other end's Sealer has sealed."""

    def __init__(self, secret: bytes) -> None:
        self._key = _Key(secret)

    def open(self, record: memoryview, into: memoryview) -> None:
        """Write the plaintext of a whole record to `into`, which is as long. Raises Blameless if it is another's.

        Whoever has a hand on the line can bring that about: it tells nothing of the peer.
        """
        cipher, nonce = self._key.next()
        try:
            cipher.decrypt_into(nonce, record[LENGTH_BYTES:], record[:LENGTH_BYTES], into)
        except InvalidTag:
            raise Blameless("a seal is broken: what came is not what was sent") from None


def length_of(record: memoryview) -> int:
    """Return the bytes of plaintext in the record that begins so. Raises PeerError for what no end seals."""
    length: int = _LENGTH.unpack_from(record)[0]
    if not 0 < length <= RECORD_MAX:
        raise PeerError(f"a sealed record of {length} bytes")
    return length


class _Key:
    """The keys of one direction, one after the other."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._cipher = AESGCM(_next(b"key", secret))
        self._count = 0

    def next(self) -> tuple[AESGCM, bytes]:
        """Return the cipher and the nonce of the next record."""
        if self._count and self._count % KEY_RECORDS == 0:
            self._secret = _next(b"next", self._secret)
            self._cipher = AESGCM(_next(b"key", self._secret))
        self._count += 1
        return self._cipher, self._count.to_bytes(_NONCE_BYTES, "little")


def _secret(purpose: bytes, shares: bytes) -> bytes:
    return HKDF(SHA256(), _SECRET_BYTES, salt=None, info=purpose).derive(shares)


def _next(purpose: bytes, secret: bytes) -> bytes:
    return HKDFExpand(SHA256(), _SECRET_BYTES, info=purpose).derive(secret)
