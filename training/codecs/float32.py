"""The exact codec: every bit of every float32, for snapshots and for the last exchange of a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from peerd.training.codecs import planes
from peerd.training.codecs.codec import field, finite_float32, require_length
from peerd.training.effects import Vector
from peerd.training.kernels.passes import BATCH, is_finite, parts
from peerd.transport.errors import PeerError


@dataclass(frozen=True)
class Float32:
    """Four byte planes, 4 bytes a value; exact."""

    name: str = "float32"

    def encode(self, values: Vector) -> memoryview:
        """See `Codec.encode`."""
        exact = finite_float32(values)
        body = np.empty((4, exact.size), np.uint8)
        for batch in parts(exact.size, BATCH):
            planes.split(exact[batch].view(np.uint32), body[:, batch])
        return body.reshape(-1).data

    def decode(self, body: bytes | bytearray | memoryview, out: Vector) -> None:
        """See `Codec.decode`."""
        require_length(body, self.body_limit(out.size), self.name)
        own = out if out.dtype == np.float32 and out.flags.c_contiguous else np.empty(out.size, np.float32)
        planes.join(field(body, "u1", 0, len(body)).reshape(4, out.size), own.view(np.uint32))
        if not is_finite(own):
            raise PeerError("float32: a value is not finite")
        if own is not out:
            out[:] = own

    def body_limit(self, count: int) -> int:
        """See `Codec.body_limit`; every body has this length."""
        return 4 * count
