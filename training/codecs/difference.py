"""How does a vector travel to who knows another one? As its encoded difference, and how long is one?"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from peerd.training.codecs import vector
from peerd.training.codecs.vector import Gain, Layout, NotFinite
from peerd.training.effects import Vector
from peerd.training.scratch import Scratch
from peerd.transport.errors import PeerError
from peerd.transport.messages import CHUNK_VALUES, Chunks

VALUE_MAX = 1e30
"""No weight is larger; a float32 difference of two such values is still finite."""


def encode_difference(
    codec: str, layout: Layout, values: Vector, known: Vector, gain: Gain, scratch: Scratch
) -> tuple[Chunks, Vector]:
    """The chunks for values - known, and what they decode to (scratch); the loss goes into `gain`. Raises NotFinite."""
    difference, decoded = scratch.take(known), scratch.take(known)
    np.subtract(values, known, out=difference)
    try:
        chunks, contraction = vector.encode(codec, layout, difference, decoded=decoded)
    except NotFinite:
        scratch.give(decoded)
        raise
    finally:
        scratch.give(difference)
    gain.observe(contraction)
    return chunks, decoded


def decode_onto(
    codec: str, layout: Layout, chunks: Chunks, known: Vector, scratch: Scratch, value_max: float = VALUE_MAX
) -> Vector:
    """known + what `chunks` hold, in scratch. Raises PeerError, also for a sum that no model reaches."""
    incoming = scratch.take(known)
    try:
        vector.decode(codec, layout, chunks, incoming)
        with np.errstate(over="ignore"):
            for part in parts(len(incoming)):
                incoming[part] += known[part]
                if not np.abs(incoming[part]).max() <= value_max:  # at VALUE_MAX its difference could overflow
                    raise PeerError(f"a value beyond {value_max:g}")
    except PeerError:
        scratch.give(incoming)
        raise
    return incoming


def parts(count: int) -> Iterator[slice]:
    """Slices of at most CHUNK_VALUES values that cover [0, count)."""
    return (slice(start, min(start + CHUNK_VALUES, count)) for start in range(0, count, CHUNK_VALUES))


def norm_of_difference(a: Vector, b: Vector | None = None) -> float:
    """||a - b||, or ||a||, in pieces that stay in the cache."""
    return math.sqrt(sum(vector.squared_norm(a[part] if b is None else a[part] - b[part]) for part in parts(len(a))))


def norm_of_sum(a: Vector, b: Vector | None) -> float:
    """||a + b||, or ||a||, as `norm_of_difference`."""
    return math.sqrt(sum(vector.squared_norm(a[part] if b is None else a[part] + b[part]) for part in parts(len(a))))
