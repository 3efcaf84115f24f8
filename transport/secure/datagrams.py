"""How is a datagram sealed with a key that a whole swarm shares? AES-256-GCM under a key of each sender's own.

A sealed datagram is

    key id (4)   stream (12)   check (4)   count (8)   ciphertext   tag (16)

Why not the swarm's key itself. GCM breaks when a key seals twice under one nonce: whoever sees both can then forge
(Joux 2006). Nodes cannot agree on who takes which nonces, and do not remember them when they are killed. With 4 random
bytes a process in front of a counter, 10,000 starts within the life of a key collide with a probability of 1 %. So each
process draws a stream of 12 random bytes for each key, and seals with a key that is derived from both; the nonce is a
plain counter, which begins at 0. Two of n streams are the same with a probability below n**2 / 2**97: 2**-57 for a
million starts. Derived keys are the field's answer: HKDF-Expand (RFC 5869), SP 800-108, AES-GCM-SIV (RFC 8452; its
OpenSSL needs six times as long, and 3.2). Here it is keyed BLAKE2b (RFC 7693), a pseudo-random function in one call.

Why a check. Anybody can send made-up streams. Its 4 bytes come out of the same call as the derived key (they say
nothing of it), so that one that was made up is refused for the price of that call: less than a failed opening, and
nothing is remembered. What is remembered of a stream, its key and its window, is so only once a datagram of it has
opened, and for the STREAMS_MAX that spoke last.

Replay (RFC 4303, section 3.4.3). Each stream has a window of the counts that came: what came already is refused, and
what is older than the window. A datagram that is late by up to WINDOW others of its sender is taken. What was recorded
before this process began, or on its way to another node, opens once here: membership takes the same word twice without
harm (incarnations order records, probes are numbered at random), and keys change daily.

What a shared key cannot do is tell one member from another: records are signed for that.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b, sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from peerd.transport.errors import PeerError

KEY_BYTES = 32
OVERHEAD = 4 + 16 + 8 + 16  # bytes that a seal adds; with a swarm's tag 48, and 72 are free (dissemination.py)
WINDOW = 2048  # counts: a second of a node that tells thousands of members something
STREAMS_MAX = 8192  # of a few hundred bytes: two of each member of the largest swarm

_MASK = (1 << WINDOW) - 1
_PERSON = b"peerd datagrams"


class SealError(PeerError):
    """A datagram that this node does not take; the text is what it is counted under."""


class _Stream:
    """What came of one sender's process under one key."""

    __slots__ = ("aead", "highest", "seen")

    def __init__(self, aead: AESGCM) -> None:
        self.aead = aead
        self.highest = 0
        self.seen = 0  # bit i: the count `highest - i` came

    def has(self, count: int) -> bool:
        """Whether it came, or is so old that this is forgotten."""
        age = self.highest - count
        return age >= 0 and (age >= WINDOW or bool(self.seen >> age & 1))

    def add(self, count: int) -> None:
        """It came."""
        ahead = count - self.highest
        if ahead <= 0:
            self.seen |= 1 << -ahead
        else:
            self.seen = (self.seen << ahead & _MASK | 1) if ahead < WINDOW else 1
            self.highest = count


class DatagramSeal:
    """One process's seal, under the keys of the swarm that `install` names. It has no clock and does no I/O."""

    def __init__(self) -> None:
        self.counts = Counter(datagrams_undecipherable=0, datagrams_replayed=0, datagrams_reflected=0)
        self._keys: dict[bytes, bytes] = {}
        self._streams: OrderedDict[bytes, _Stream] = OrderedDict()  # by key id and stream, the longest silent first
        self._own: dict[bytes, bytes] = {}  # our stream under each key, by its id
        self._head = b""  # of what we seal: key id, stream, check
        self._aead: AESGCM | None = None
        self._count = 0

    def install(self, keys: Iterable[bytes], sealing: bytes | None) -> None:
        """Open what is sealed with any of these keys from now on, and seal with one of them; None: seal nothing."""
        self._keys = {key_id(key): key for key in keys}
        self._own = {id: stream for id, stream in self._own.items() if id in self._keys}
        for name in [name for name in self._streams if name[:4] not in self._keys]:
            del self._streams[name]
        if sealing is None:
            self._head, self._aead = b"", None
        elif self._head[:4] != (id := key_id(sealing)):
            # drawn anew even for a key that was in use before: its count began at 0 as well
            stream = secrets.token_bytes(12)
            check, derived = _derive(sealing, stream)
            self._own[id] = stream
            self._head, self._aead, self._count = id + stream + check, AESGCM(derived), 0

    def seal(self, datagram: bytes, tag: bytes) -> bytes | None:
        """Return it with OVERHEAD bytes more, bound to the swarm's `tag`; None while there is no key. 2 us."""
        if self._aead is None:
            return None
        nonce = self._count.to_bytes(12, "big")
        self._count += 1
        return self._head + nonce[4:] + self._aead.encrypt(nonce, datagram, tag)

    def open(self, sealed: bytes, tag: bytes) -> bytes:
        """Return what was sealed under this tag. Raises SealError. 3 us."""
        name = sealed[:20]
        stream = self._streams.get(name)
        fresh = stream is None
        if stream is None:
            stream = self._begin(name)
        nonce = b"\0\0\0\0" + sealed[20:28]
        count = int.from_bytes(nonce, "big")
        if not fresh and stream.has(count):
            raise self._refused("datagrams_replayed")
        try:
            datagram = stream.aead.decrypt(nonce, sealed[28:], tag)
        except (InvalidTag, ValueError):  # ValueError: it is too short
            raise self._refused("datagrams_undecipherable") from None
        stream.add(count)
        if fresh:
            self._streams[name] = stream
            if len(self._streams) > STREAMS_MAX:
                self._streams.popitem(last=False)  # of what it sent, little is of use to who recorded it: see above
        else:
            self._streams.move_to_end(name)
        return datagram

    def _begin(self, name: bytes) -> _Stream:
        id, stream = name[:4], name[4:16]
        key = self._keys.get(id)
        if key is None:
            raise self._refused("datagrams_undecipherable")
        if self._own.get(id) == stream:
            raise self._refused("datagrams_reflected")
        check, derived = _derive(key, stream)
        if name[16:] != check:  # no secret: whoever finds one that passes has the opening still before them
            raise self._refused("datagrams_undecipherable")
        return _Stream(AESGCM(derived))

    def _refused(self, reason: str) -> SealError:
        self.counts[reason] += 1
        return SealError(reason)


def key_id(key: bytes) -> bytes:
    """Return the 4 bytes by which datagrams name a key. The key is random, so its hash gives nothing away."""
    return sha256(b"peerd key id\0" + key).digest()[:4]


def _derive(key: bytes, stream: bytes) -> tuple[bytes, bytes]:
    """Return the check and the key of a stream."""
    derived = blake2b(stream, digest_size=4 + KEY_BYTES, key=key, person=_PERSON).digest()
    return derived[:4], derived[4:]
