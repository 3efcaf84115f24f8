"""From which vector does a link start, and how do both ends know that theirs is the same?

From the model of one of them, rounded to bfloat16, in the room in which a reference is kept. Where the other end's is
the same by its digest, as when all have just begun, nothing travels.
"""

from __future__ import annotations

import numpy as np

from peerd.training.codecs import vector
from peerd.training.codecs.bfloat16 import rounded
from peerd.training.codecs.codec import finite_float32
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Sliced, Vector
from peerd.training.kernels.cores import each
from peerd.training.pairs.block_floats import known_vector
from peerd.transport.messages import Chunks

SNAPSHOT_CODEC = "bfloat16"  # any vector may start a pair of references; this one costs half of float32


def start_of(values: Vector, layout: Layout) -> Sliced:
    """Of the model `values`, shape (total,): as `arrived` makes of its `snapshot`, to the bit. Raises NotFinite."""
    start = known_vector(layout, values.dtype)

    def one(where: slice) -> None:
        start[where] = (rounded if where.start < layout.parameters else finite_float32)(values[where])

    each(one, vector.pieces(layout))
    return start


def snapshot(values: Sliced, layout: Layout) -> Chunks:
    """A start, or a model from which one is made, as it travels. Raises NotFinite."""
    return vector.encode(SNAPSHOT_CODEC, layout, values)[0]


def arrived(codec: str, layout: Layout, chunks: Chunks, dtype: np.dtype[np.floating]) -> Sliced:
    """The start that a peer gives, for a model of this type. Raises PeerError."""
    start = known_vector(layout, dtype)
    vector.decode(codec, layout, chunks, start)
    return start
