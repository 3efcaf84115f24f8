"""How does a codec with a kernel encode a difference? Scales, then values, in one pass through memory."""

from __future__ import annotations

import numpy as np

from peerd.training.codecs.codec import Encoded, not_finite
from peerd.training.effects import Vector
from peerd.training.kernels import library
from peerd.training.kernels.passes import address, is_plain


def encode_by(
    kernel: str, values: Vector, known: Vector | None, decoded: Vector | None, room: tuple[int, int], *bounds: float
) -> Encoded | None:
    """See `OnePassCodec.encode_in_one_pass`; `room` is the bytes of a body's scales, and of all of it."""
    if (kernels := library.LIBRARY) is None or not is_plain(values, known, decoded):
        return None
    scales, whole = room
    body, loss = np.empty(whole, np.uint8), np.zeros(2)
    out = address(body), address(body[scales:]), address(decoded), address(loss)
    if getattr(kernels, kernel)(address(values), address(known), values.size, *out, *bounds):
        raise not_finite()
    return Encoded(body.data, float(loss[0]), float(loss[1]))
