"""A datagram on its way between a relay and its guest: the guest's key, the address of the other end, what is said.

A core. As in TURN (RFC 8656) a relay sends to nobody who has not sent to it: else guests would have it talk to anyone.
"""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict

from peerd.transport.ids import Address

KEY_BYTES = 16
ENCLOSED_MAX = 2048  # a datagram of peerd's with its seal and tag is below 1,450 bytes
HEARD_MAX, HEARD_S = 1024, 120.0  # other ends that may be answered, and for how long after their last word
BUCKET_S = 1.0

_ADDRESS_BYTES = {4: 4, 6: 16}


def enclose(key: bytes, other: Address, datagram: bytes) -> bytes:
    """For the other end of the tunnel. Raises ValueError where `other` is no IP address."""
    host = ipaddress.ip_address(other[0])
    return b"".join((key, bytes([host.version]), host.packed, other[1].to_bytes(2, "big"), datagram))


def disclose(key: bytes, enclosed: bytes) -> tuple[Address, bytes]:
    """The other end and what it says, or is to hear. Raises ValueError for what was not enclosed with this key."""
    size = _ADDRESS_BYTES.get(enclosed[KEY_BYTES] if len(enclosed) > KEY_BYTES else 0)
    if size is None or not enclosed.startswith(key):
        raise ValueError("not of this tunnel")
    at = KEY_BYTES + 1
    host, port, said = enclosed[at : at + size], enclosed[at + size : at + size + 2], enclosed[at + size + 2 :]
    if len(port) < 2:
        raise ValueError("cut short")
    return (str(ipaddress.ip_address(host)), int.from_bytes(port, "big")), said


class Heard:
    """The other ends that have sent to one port lately."""

    def __init__(self) -> None:
        self._at: OrderedDict[Address, float] = OrderedDict()

    def note(self, other: Address, now: float) -> None:
        """It has sent something."""
        self._at[other] = now
        self._at.move_to_end(other)
        if len(self._at) > HEARD_MAX:
            self._at.popitem(last=False)

    def may_answer(self, other: Address, now: float) -> bool:
        """Whether it has sent something lately."""
        return now - self._at.get(other, -HEARD_S) < HEARD_S


class Bucket:
    """So many bytes a second, and those of BUCKET_S at once; what is more is lost (a token bucket)."""

    def __init__(self, rate: float) -> None:
        """`rate` in bytes a second."""
        self._rate = rate
        self._full_at = -math.inf

    def has(self, count: int, now: float) -> bool:
        """Whether these may go; then they are taken."""
        full_at = max(self._full_at, now) + count / self._rate
        if full_at > now + BUCKET_S:
            return False
        self._full_at = full_at
        return True
