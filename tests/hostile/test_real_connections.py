"""What holds a port's connections: silence, half messages, bytes that are none, bombs."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

import msgpack
import pytest
import zstandard
from stranger import Insider, Line, Stranger, frame, stream_bytes
from victims import Victims

from peerd.training.codecs.compress import ZSTD
from peerd.transport import framing, wire
from peerd.transport.errors import PeerError
from peerd.transport.messages import Delta, Hello, LinkOpen, ModelRequest, ModelSnapshot, SpeedRequest

pytestmark = pytest.mark.soak
VICTIMS = {"pad": 500_000}  # values: half a message of a model is worth something then


def test_bytes_that_are_no_messages(them: Victims) -> None:
    swollen = bytes([ZSTD]) + zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    garbage = [
        b"\0",
        os.urandom(5000),
        b"GET /status HTTP/1.1\r\nHost: node\r\n\r\n",
        frame(Hello.KIND, header_length=0xFFFFFFFF),
        frame(Hello.KIND, header_length=65536),
        frame(Hello.KIND, b"\xdf\xff\xff\xff\xff"),  # a map of 4 billion
        frame(Hello.KIND, b"\x91" * 60000),  # arrays in arrays
        frame(Hello.KIND, b"\xdd\xff\xff\xff\xff" * 10000),  # arrays of 4 billion
        frame(255, payload_length=0xFFFFFFFF),
        frame(ModelSnapshot.KIND, msgpack.packb([[1 << 62], 0, "float32"])),
        frame(ModelSnapshot.KIND, msgpack.packb([[wire.CHUNK_MAX] * 1024, 0, "float32"])),
        stream_bytes(Delta(7, 1, "sign", 0.1, True, False, b"", 0.0, 0.0, (swollen,))),
        stream_bytes(ModelSnapshot(1, "bfloat16", (swollen,))),
    ]
    with them.unharmed(), Stranger() as stranger:
        for address in them.addresses:
            for thrown in garbage:
                with suppress(OSError):
                    stranger.call(address).raw(thrown)
                with suppress(OSError, PeerError):
                    line = stranger.greet(address)
                    line.say(LinkOpen(7))
                    line.raw(thrown)
                with suppress(OSError):
                    stranger.udp.sendto(thrown[:60000], address)


def test_messages_that_never_end(them: Victims) -> None:
    """Each as large as the model, but for its last byte."""
    a, _ = them.addresses
    size = min(wire.CHUNK_MAX, 4 * them.layout().total)
    with them.unharmed(), Insider(them.rows()[1]) as insider:
        insider.join(a)
        for _ in range(100):
            with suppress(OSError, PeerError):
                line = insider.greet(a)
                line.raw(frame(ModelSnapshot.KIND, msgpack.packb([[size], 1, "float32"])))
                line.raw(bytes(framing.chunk_frame(bytes(size))) + bytes(size - 1))
        insider.leave(a)


def newcomer_gets_in(address: tuple[str, int], within_s: float) -> bool:
    """Whether somebody honest is greeted, who asks again when it is cut off."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with Stranger(name="newcomer") as newcomer, suppress(OSError, PeerError):
            newcomer.greet(address)
            return True
        time.sleep(0.2)
    return False


@pytest.mark.parametrize("ids", ["one id", "many ids"])
def test_silent_links_keep_nobody_out(ids: str, them: Victims) -> None:
    a, _ = them.addresses
    with them.unharmed(), Stranger() as stranger:
        for _ in range(140):
            if ids == "many ids":
                stranger.id = os.urandom(16).hex()
            with suppress(OSError, PeerError):
                line = stranger.call(a)
                line.sock.settimeout(2.0)
                line.say(stranger.hello())
                line.hear()
        assert newcomer_gets_in(a, 40.0), "the port is full"


def test_a_slow_hand_across_frames(them: Victims) -> None:
    """Each frame in its time, the message never: one that nobody would wait for as a whole."""
    a, _ = them.addresses
    with them.unharmed(), Stranger() as stranger:
        line = stranger.greet(a)
        line.raw(frame(ModelSnapshot.KIND, msgpack.packb([[1] * 60, 1, "float32"])))
        began = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - began < 25.0:
                line.raw(bytes(framing.chunk_frame(b"x")) + b"x")
                time.sleep(1.0)
            raise AssertionError("it may take for ever")


def test_requests_without_end(them: Victims) -> None:
    """For the whole model, and for samples of the line, of which the answers are never read."""
    a, _ = them.addresses

    def ask(line: Line, request: bytes) -> None:
        line.sock.settimeout(1.0)
        line.raw(request * 2000)

    with them.unharmed(), Insider(them.rows()[1]) as insider:
        insider.join(a)
        for request in (SpeedRequest(), ModelRequest()):
            for _ in range(8):
                with suppress(OSError, PeerError):
                    line = insider.call(a) if isinstance(request, SpeedRequest) else insider.greet(a)
                    line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    ask(line, stream_bytes(request))
        insider.leave(a)
