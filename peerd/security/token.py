"""What is a token? One line that lets a newcomer in: where to ask, whom to believe there, and a secret to show.

It is `peerd2.` and base64url (RFC 4648) of the msgpack array [addresses, pin, id, secret, expiry], and of its CRC-32
(RFC 1952), which tells a slip of whoever copies it. The secret never travels: the newcomer shows that it knows it
(HMAC-SHA256, RFC 2104), over all that was said before.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from peerd.transport.errors import UserError, wrong
from peerd.transport.ids import Address, NodeId

PREFIX = "peerd2."
PIN_BYTES, ID_BYTES, SECRET_BYTES, PROOF_BYTES, CHECK_BYTES = 32, 8, 16, 32, 4
ADDRESSES_MAX = 8
TEXT_MAX = 4096  # characters
USES_MAX = 1024
LIFE_MIN_S, LIFE_MAX_S = 60, 365 * 86400
TIME_MAX = (1 << 53) - 1  # unix seconds

UNKNOWN, WRONG_SECRET, EXPIRED, USED_UP = "unknown", "wrong-secret", "expired", "used-up"
_PURPOSE = b"peerd enrolment 1\0"
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DAMAGED = "it is damaged, or was not copied whole; paste the one line that peerd token printed"


@dataclass(frozen=True, slots=True)
class Token:
    """What the line says."""

    addresses: tuple[Address, ...]  # of who issued it
    pin: bytes  # SHA-256 of the authority's key
    id: bytes
    secret: bytes = field(repr=False)
    expires: int  # unix seconds, by the issuer's clock

    def pack(self) -> str:
        """The line."""
        row = [[list(address) for address in self.addresses], self.pin, self.id, self.secret, self.expires]
        packed: bytes = msgpack.packb(row)
        return PREFIX + base64.urlsafe_b64encode(packed + _check(packed)).decode().rstrip("=")


def parse(text: str) -> Token:
    """The token in a line. Raises UserError, which never repeats what was given."""
    text = text.strip()
    if not text.startswith(PREFIX):
        raise wrong("token", f"it does not begin with {PREFIX!r}; paste the line that peerd token printed, or @FILE")
    try:
        if len(text) > TEXT_MAX:
            raise ValueError
        body = text.removeprefix(PREFIX).encode("ascii")
        whole = base64.b64decode(body + b"=" * (-len(body) % 4), b"-_", validate=True)
        packed = whole[:-CHECK_BYTES]
        if whole != packed + _check(packed):
            raise ValueError
        row = msgpack.unpackb(packed, max_array_len=ADDRESSES_MAX, max_bin_len=64, max_str_len=255, max_map_len=0)
        addresses, pin, id, secret, expires = row
        found = Token(tuple((host, port) for host, port in addresses), pin, id, secret, expires)
    except (ValueError, TypeError, binascii.Error, msgpack.UnpackException):
        raise wrong("token", _DAMAGED) from None
    if not _is_whole(found) or found.pack() != text:  # one line for one token: nothing is hidden in it
        raise wrong("token", _DAMAGED)
    return found


def _check(packed: bytes) -> bytes:
    return zlib.crc32(packed).to_bytes(CHECK_BYTES, "big")


def _is_whole(token: Token) -> bool:
    lengths = zip((token.pin, token.id, token.secret), (PIN_BYTES, ID_BYTES, SECRET_BYTES), strict=True)
    return (
        0 < len(token.addresses) <= ADDRESSES_MAX
        and all(_is_address(host, port) for host, port in token.addresses)
        and all(type(part) is bytes and len(part) == length for part, length in lengths)
        and type(token.expires) is int
        and 0 <= token.expires <= TIME_MAX
    )


def _is_address(host: Any, port: Any) -> bool:
    named = type(host) is str and _HOST.fullmatch(host) is not None
    return named and type(port) is int and 0 < port <= 65535


def proof(secret: bytes, id: bytes, pin: bytes, shown: bytes, request: bytes) -> bytes:
    """What shows that the secret is known: of use for this request, and before who `shown` this certificate (DER)."""
    said = _PURPOSE + id + pin + hashlib.sha256(shown).digest() + request  # all but the last have one length
    return hmac.digest(secret, said, "sha256")


# ---------------------------------------------------------------------------------------------------- the issuer's


@dataclass(frozen=True, slots=True)
class Kept:
    """What the issuer knows of a token that it made."""

    id: bytes
    secret: bytes = field(repr=False)
    uses: int
    expires: int  # unix seconds
    issuer: bool = False  # whom it lets in may let in others
    used_by: tuple[NodeId, ...] = ()

    @property
    def left(self) -> int:
        """How many more nodes it lets in."""
        return self.uses - len(self.used_by)


def used(kept: Kept | None, node: NodeId, expected: bytes, given: bytes, now: int) -> Kept | str:
    """The token after `node` has used it, or in a word why it may not.

    `given` is the proof that came, `expected` what it must be. A node that has used it already, and perhaps never
    heard the answer, uses it no second time: it gets what it got.
    """
    if kept is None:
        return UNKNOWN
    if not hmac.compare_digest(expected, given):
        return WRONG_SECRET  # before anything is told of it
    if now >= kept.expires:
        return EXPIRED
    if node in kept.used_by:
        return kept
    if kept.left <= 0:
        return USED_UP
    return replace(kept, used_by=(*kept.used_by, node))


def worth_keeping(tokens: Iterable[Kept], now: int, most: int) -> list[Kept]:
    """Those that can be used, and of the others the last: whoever comes late is told why."""
    by_end = sorted(tokens, key=lambda kept: kept.expires, reverse=True)
    usable = [kept for kept in by_end if now < kept.expires and kept.left > 0]
    others = [kept for kept in by_end if not (now < kept.expires and kept.left > 0)]
    return [*usable, *others][:most]


def parse_life(text: str, what: str = "expires") -> int:
    """Seconds in `30m`, `24h` or `7d`. Raises UserError, which names the option."""
    match = re.fullmatch(r"(\d{1,9})([smhd])", text, re.ASCII)
    if match is None:
        raise UserError(f"{what}: {text[:40]!r} is not a number with s, m, h or d (for example 24h)")
    life_s = int(match[1]) * _UNITS[match[2]]
    if not LIFE_MIN_S <= life_s <= LIFE_MAX_S:
        raise UserError(f"{what}: {text} is not from 1m to 365d")
    return life_s
