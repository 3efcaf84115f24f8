"""How a vector is cut into blocks that share a scale."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.codec import Float32s
from peerd.training.effects import Vector

BLOCK = 256
"""Values a scale covers: a float32 scale then costs 1/8 bit a value, and layers of differing size keep their own."""


def block_count(count: int) -> int:
    """Blocks that hold `count` values, the last perhaps ragged."""
    return -(-count // BLOCK)


def as_blocks(values: Float32s) -> Float32s:
    """(count,) as (blocks, BLOCK): a view, or a zero-padded copy if the last block is ragged."""
    if values.size % BLOCK:
        padded = np.zeros(block_count(values.size) * BLOCK, np.float32)
        padded[: values.size] = values
        values = padded
    return values.reshape(-1, BLOCK)


def room_for_blocks(out: Vector) -> Float32s:
    """(blocks, BLOCK) to decode into: a view of `out` (count,) where its form allows, else fresh room."""
    if out.dtype == np.float32 and out.size % BLOCK == 0 and out.flags.c_contiguous:
        return out.reshape(-1, BLOCK)
    blocks = np.empty((block_count(out.size), BLOCK), np.float32)
    blocks[-1:] = 0.0  # whatever lay there would be multiplied with the last scale
    return blocks


def deliver(blocks: Float32s, out: Vector) -> None:
    """Copy decoded blocks to `out`, unless `room_for_blocks` gave out its own memory."""
    if not np.may_share_memory(blocks, out):
        out[:] = blocks.reshape(-1)[: out.size]


def sizes(count: int) -> npt.NDArray[np.float32]:
    """(blocks,): values in each block."""
    each = np.full(block_count(count), BLOCK, np.float32)
    if count % BLOCK:
        each[-1] = count % BLOCK
    return each
