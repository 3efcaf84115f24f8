"""Bytes of equal rank side by side: all lowest bytes, then the next, up to the sign and exponent.

zstd codes bytes by how often each occurs, and only sign and exponent bytes are predictable. Mixed with mantissa bytes
they hide: on Gaussian bfloat16, zstd gives 0.78 of the size at 0.87 GB/s interleaved, 0.67 at 1.15 GB/s in planes; on
float32 0.92 at 0.83 GB/s, and 0.83 at 1.84.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peerd.training.codecs.codec import Bytes


def split(words: npt.NDArray[np.uint32], planes: Bytes) -> None:
    """Write the lowest bytes of `words` (count,) into `planes` (width, count), lowest first."""
    np.copyto(planes[0], words, casting="unsafe")
    shifted = np.empty_like(words)
    for rank in range(1, len(planes)):
        # Shifting and narrowing whole vectors beats copying every fourth byte 1.5 times: numpy vectorises it.
        np.right_shift(words, 8 * rank, out=shifted)
        np.copyto(planes[rank], shifted, casting="unsafe")


def join(planes: Bytes, words: npt.NDArray[np.uint32]) -> None:
    """The inverse of `split`: `words` (count,) get the bytes of `planes` (width, count) and zeros above them."""
    np.copyto(words, planes[-1])
    for plane in planes[-2::-1]:
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)
