"""What every codec promises, and the one check that all of them share.

A codec turns one piece of a model difference into bytes and back. It may drop what it likes: under paired-reference
gossip the dropped part stays in `x - r` and is sent later (error feedback, CHOCO-SGD, Koloskova et al. 2019), so a
codec needs no memory of its own and is a pure function.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from peerd.training.effects import Vector
from peerd.training.kernels.passes import is_finite
from peerd.transport.errors import PeerError

Float32s = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class NotFinite(ValueError):
    """The vector holds a NaN or an infinity: it must not leave this node."""


class Encoded(NamedTuple):
    """A body, and what of the values it was made from it lets through."""

    body: memoryview
    lost: float  # ||v - C(v)||^2
    energy: float  # ||v||^2


class Codec(Protocol):
    """One way to write a piece of a vector. The contract, checked by tests/contracts/test_codec_contract.py:

    - `encode` is deterministic and never lengthens what is left: ||v - C(v)|| <= ||v||, strictly less when some |v|
      is at least 1e-30 (below that, float formats run out of digits).
    - The body never exceeds `body_limit(count)`.
    - `decode` uses only operations that IEEE 754 defines to the bit, so both ends of a link compute the same vector.
    - What `decode` writes is finite, whatever the body.
    """

    @property
    def name(self) -> str:
        """The key in `CODECS`, as it travels in a message."""

    def encode(self, values: Vector) -> bytes | memoryview:
        """The body for `values`, shape (count,), float32 (float64 is rounded to float32 first).

        Raises:
            NotFinite: a value is, or becomes in float32, a NaN or an infinity.
        """

    def decode(self, body: bytes | bytearray | memoryview, out: Vector) -> None:
        """Overwrite all of `out`, shape (count,), float32 or float64.

        Raises:
            PeerError: the body has not exactly the form that `encode` gives `count` values; `out` is then undefined.
        """

    def body_limit(self, count: int) -> int:
        """Bytes in the largest legal body for `count` values."""


@runtime_checkable
class OnePassCodec(Codec, Protocol):
    """A codec that has a kernel (training/kernels/): difference, body and loss in one pass through memory."""

    def encode_in_one_pass(self, values: Vector, known: Vector | None, decoded: Vector | None) -> Encoded | None:
        """`encode` of values - known, or of values; `decoded` gets what `decode` makes of it.

        None where the kernel cannot take these arrays, or is not there. All have shape (count,). Raises NotFinite.
        """


def finite_float32(values: Vector) -> Float32s:
    """`values` as contiguous float32, checked; no copy where they are that already.

    Raises:
        NotFinite: a value is, or becomes in float32, a NaN or an infinity.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.ascontiguousarray(values, dtype=np.float32)
    if not is_finite(exact):
        raise not_finite()
    return exact


def fits(values: Vector) -> bool:
    """Whether it is finite as it travels: a float64 model may be beyond float32."""
    try:
        finite_float32(values)
    except NotFinite:
        return False
    return True


def not_finite() -> NotFinite:
    """What every codec raises of such a vector."""
    return NotFinite("the vector holds a NaN or an infinity")


def field(body: bytes | bytearray | memoryview, dtype: str, start: int, count: int) -> npt.NDArray[Any]:
    """`count` items of `dtype` at byte `start` of `body`, read where they lie. The caller has checked the length."""
    return np.frombuffer(body, dtype=dtype, offset=start, count=count) if count else np.empty(0, dtype)


def require_length(body: bytes | bytearray | memoryview, expected: int, codec: str) -> None:
    """Raise PeerError unless `body` has exactly `expected` bytes."""
    if len(body) != expected:
        raise PeerError(f"{codec}: a body of {len(body)} bytes where {expected} are due")
