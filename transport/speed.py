"""How fast does a peer's data come in? Whoever asks in place of a greeting is sent samples, and counts.

Nobody has to be a member for it. What a stranger can have this way ends with the time that a greeting may take.
"""

from __future__ import annotations

import os
from functools import cache

import trio

from peerd.effects import PeerError
from peerd.messages import SpeedRequest, SpeedSample
from peerd.transport.link import Link

SAMPLE_BYTES = 1 << 20
UNDER_WAY = 4  # samples, so that the line never waits for a request
MEASURE_S, MEASURE_BYTES = 2.0, 256 << 20  # whichever is reached first
LOOK_S = 0.01


@cache
def sample() -> SpeedSample:
    """What a request is answered with: nothing that a tunnel could compress."""
    return SpeedSample((os.urandom(SAMPLE_BYTES),))


async def measure(link: Link) -> float:
    """Return the bytes a second that come from the peer; the link was not greeted and is of no other use.

    The first half is TCP's to find its pace. Raises LinkLost or PeerError with the link, PeerError when nothing comes.
    """
    link.payload_limit = SAMPLE_BYTES
    for _ in range(UNDER_WAY):
        await link.send(SpeedRequest())
    marks = [(trio.current_time(), link.bytes_received)]
    while marks[-1][0] < marks[0][0] + MEASURE_S and marks[-1][1] < MEASURE_BYTES:
        with trio.move_on_after(LOOK_S) as look:
            await link.receive()
        if not look.cancelled_caught:
            await link.send(SpeedRequest())
        marks.append((trio.current_time(), link.bytes_received))
    (began, before), (ended, after) = marks[len(marks) // 2], marks[-1]
    if before == after:
        raise PeerError(f"{link.remote}: it does not answer")
    return (after - before) / max(1e-9, ended - began)
