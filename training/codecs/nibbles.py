"""Four bits a value, two values to a byte."""

from __future__ import annotations

import numpy as np

from peerd.training.codecs.codec import Bytes
from peerd.transport.errors import PeerError


def pack_nibbles(nibbles: Bytes) -> Bytes:
    """Two of `nibbles` (k,) to a byte, the first below; an odd one is followed by a zero."""
    pairs = np.zeros(nibbles.size + nibbles.size % 2, np.uint8)
    pairs[: nibbles.size] = nibbles
    return pairs[::2] | (pairs[1::2] << np.uint8(4))


def unpack_nibbles(packed: Bytes, k: int, codec: str) -> Bytes:
    """The inverse of `pack_nibbles`. Raises PeerError as `require_end` does."""
    require_end(packed, k, codec)
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=1).reshape(-1)[:k]


def require_end(packed: Bytes, k: int, codec: str) -> None:
    """PeerError if a nibble beyond the `k`-th is not zero: what is equal has equal bytes."""
    if k % 2 and packed[-1] >> 4:
        raise PeerError(f"{codec}: a nibble is set beyond the last value")
