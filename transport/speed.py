"""How fast does a peer's data come in? Whoever asks in place of a greeting is sent samples, and counts.

Nobody has to be a member for it. One connection has as many samples as a measurement takes, in the time that a greeting
may take; as with greetings, only the listener's rate limits how often a stranger comes back.
"""

from __future__ import annotations

import os
from functools import cache

import trio

from peerd.transport.connection import Connection
from peerd.transport.errors import PeerError
from peerd.transport.messages import Message, SpeedRequest, SpeedSample

SAMPLE_BYTES = 1 << 20
UNDER_WAY = 16  # samples: enough for 1 Gbit/s over 100 ms
MEASURE_S, MEASURE_BYTES = 2.0, 256 << 20  # whichever is reached first
SAMPLES_MAX = MEASURE_BYTES // SAMPLE_BYTES + UNDER_WAY
LOOK_S = 0.01  # on a slow line a sample takes long: what has come of it counts


class NoSample(PeerError):
    """The other end has said something else: why it measures nothing with us, where that is a Refuse."""

    def __init__(self, connection: Connection, message: Message) -> None:
        self.message = message
        super().__init__(f"{connection.remote}: a {type(message).__name__} is no sample")


@cache
def _sample() -> SpeedSample:
    """What a request is answered with: nothing that a tunnel could compress."""
    return SpeedSample((os.urandom(SAMPLE_BYTES),))


async def serve(connection: Connection) -> Message:
    """Answer requests, if there are some; return the first message that is none. Raises PeerError for too many."""
    for _ in range(SAMPLES_MAX):
        if not isinstance(message := await connection.receive(), SpeedRequest):
            return message
        before = connection.bytes_sent
        try:
            await connection.send(_sample())
            await connection.flushed()
        finally:
            connection.bytes_measured += connection.bytes_sent - before
    raise PeerError(f"{connection.remote}: asked for more than {SAMPLES_MAX} samples")


async def measure(connection: Connection) -> float:
    """Return the bytes a second that come from the peer; the connection was not greeted and is of no other use.

    The first half of the looks is TCP's to find its pace. Raises ConnectionLost or PeerError with it, NoSample when
    something else comes, PeerError when nothing does.
    """
    connection.payload_limit = SAMPLE_BYTES
    for _ in range(UNDER_WAY):
        await connection.send(SpeedRequest())
    looks = [(trio.current_time(), connection.bytes_received)]
    while looks[-1][0] < looks[0][0] + MEASURE_S and looks[-1][1] < MEASURE_BYTES:
        with trio.move_on_after(LOOK_S) as look:
            if not isinstance(message := await connection.receive(), SpeedSample):
                raise NoSample(connection, message)
        if not look.cancelled_caught:
            await connection.send(SpeedRequest())
        looks.append((trio.current_time(), connection.bytes_received))
    (began, before), (ended, after) = looks[len(looks) // 2], looks[-1]
    if before == after:
        raise PeerError(f"{connection.remote}: {'it stopped in the middle' if after else 'it does not answer'}")
    return (after - before) / max(1e-9, ended - began)
