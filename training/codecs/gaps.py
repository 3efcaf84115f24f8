"""Strictly increasing indices as one byte a gap.

A byte below 255 skips that many values and names the next one; 255 only skips 255. So indices cannot repeat, fall or
start below zero whatever the bytes say, each sequence has one spelling, and at 1 % density an index costs 1.08 bytes
(the entropy is 1.01; uint16 gaps take 2, a bitmap 12.5).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.codec import Bytes
from peerd.transport.errors import PeerError

Indices = npt.NDArray[np.intp]
SKIP = 255


def to_gaps(indices: Indices) -> Bytes:
    """The bytes for strictly increasing `indices` (k,), all >= 0."""
    skipped = np.diff(indices, prepend=-1) - 1
    gaps = skipped.astype(np.uint8)
    far = np.flatnonzero(skipped >= SKIP)  # few of them, and dividing all takes as long as all the rest
    if far.size:
        skips, gaps[far] = np.divmod(skipped[far], SKIP)
        gaps = np.insert(gaps, np.repeat(far, skips), SKIP)
    return gaps


def from_gaps(gaps: Bytes, k: int, count: int, codec: str) -> Indices:
    """The `k` indices below `count` that `gaps` spells; `codec` is for the errors.

    Raises:
        PeerError: it spells another number of them, ends in a skip, or reaches past `count`.
    """
    named = gaps != SKIP
    if int(np.count_nonzero(named)) != k or (gaps.size and not named[-1]):
        raise PeerError(f"{codec}: the gaps do not name {k} values")
    indices: Indices = np.cumsum(gaps, dtype=np.intp)[named] + np.arange(k, dtype=np.intp)
    if k and indices[-1] >= count:
        raise PeerError(f"{codec}: index {indices[-1]} of {count}")
    return indices


def gaps_limit(k: int, count: int) -> int:
    """Bytes that `k` indices below `count` can take."""
    return k + count // SKIP
