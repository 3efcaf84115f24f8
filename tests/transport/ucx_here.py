"""Is there a UCX to test with, and how does a connection come to use it?"""

from __future__ import annotations

import pytest
import trio

from peerd.transport.connection import Connection
from peerd.transport.rdma import ucx


def why_not() -> str:
    try:
        ucx.load()
    except ucx.UcxError as error:
        return str(error)
    return ""


needs_ucx = pytest.mark.skipif(bool(why_not()), reason=f"no UCX here: {why_not()}")


async def upgrade(near: Connection, far: Connection) -> None:
    """Move the bulk of a connection to what its two ends have, if they have something."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(far.receive)
        assert await near.upgrade() == ""
        while far.carrier != near.carrier:
            await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
