"""Frames: the same messages however the bytes are split, and nothing set aside for a lie."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable
from contextlib import suppress

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import messages

from peerd.transport import framing, wire
from peerd.transport.errors import PeerError
from peerd.transport.framing import FrameReader, frames
from peerd.transport.messages import Chunk, LinkClosed, Member, MemberTable, Message, ModelSnapshot, Ping, State

BULK = ModelSnapshot(3, "float32", (b"one", b"", b"three"))
PING = Ping(7, "me", "you", ())


def stream_of(*sent: Message) -> bytes:
    return b"".join(bytes(piece) for message in sent for piece in frames(message))


def read(reader: FrameReader, pieces: Iterable[Chunk]) -> list[Message]:
    """Feed a reader as a socket would, and return the messages that came out."""
    found = []
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            buffer = reader.buffer()
            count = min(len(buffer), len(rest))
            assert count, "a reader that wants more bytes has room for them"
            buffer[:count] = rest[:count]
            reader.received(count)
            rest = rest[count:]
            while (message := reader.next_message()) is not None:
                found.append(message)
    return found


@given(st.lists(messages, max_size=5))
def test_messages_come_out_as_they_went_in(sent: list[Message]) -> None:
    reader = FrameReader(1 << 20)
    assert read(reader, [stream_of(*sent)]) == sent
    assert not reader.midway


@given(st.lists(messages, min_size=1, max_size=3), st.data())
def test_any_split_gives_the_same_messages(sent: list[Message], data: st.DataObject) -> None:
    stream = stream_of(*sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(FrameReader(1 << 20), pieces) == sent


def test_a_split_at_every_byte_gives_the_same_messages() -> None:
    sent = [PING, BULK, LinkClosed(1), BULK, PING]
    stream = stream_of(*sent)
    for cut in range(len(stream)):
        assert read(FrameReader(), [stream[:cut], stream[cut:]]) == sent
    assert read(FrameReader(), [bytes([byte]) for byte in stream]) == sent


def test_small_messages_come_in_between_chunks() -> None:
    head, *chunks = frames(BULK)
    ping = stream_of(PING)
    pieces = [head, ping, chunks[0], chunks[1], chunks[2], ping, chunks[3], chunks[4], chunks[5]]
    assert read(FrameReader(), [b"".join(pieces)]) == [PING, PING, BULK]


def test_chunks_larger_than_the_staging_area() -> None:
    values = np.arange(50_000, dtype=np.float32)
    (found,) = read(FrameReader(1 << 20), [stream_of(ModelSnapshot(1, "float32", (values.data, values.data)))])
    assert isinstance(found, ModelSnapshot)
    assert [np.frombuffer(chunk, np.float32).tolist() for chunk in found.chunks] == [values.tolist()] * 2


def test_headers_as_large_as_allowed() -> None:
    row = Member("i" * 64, "name", "10.0.0.1", 7946, 1, 2, State.ALIVE, "", bytes(500))
    table = MemberTable("me", (row,) * 110)
    assert wire.HEADER_MAX - 700 < len(wire.encode(table)[0]) <= wire.HEADER_MAX
    assert read(FrameReader(), [stream_of(table, PING, table)]) == [table, PING, table]


def test_a_head_of_more_chunks_than_the_staging_area_holds() -> None:
    many = ModelSnapshot(1, "float32", tuple(bytes(200) for _ in range(40_000)))
    head = next(frames(many))
    assert len(head) > wire.HEADER_MAX + 10_000
    assert read(FrameReader(1 << 37), [stream_of(PING, many, PING, many)]) == [PING, many, PING, many]
    with pytest.raises(PeerError, match="header of"):
        read(FrameReader(1 << 32), [bytes(head)])  # no model of so many bytes has as many chunks
    nothing = framing.head_frame(ModelSnapshot.KIND, msgpack.packb([[[0] * 1024] * 63, 1, "c"]))
    with pytest.raises(PeerError, match="64512 chunks in one message, more than 1024"):
        read(FrameReader(), [nothing])


@given(st.integers(0, len(stream_of(BULK, PING)) * 8 - 1))
def test_a_flipped_bit_never_gets_through(bit: int) -> None:
    stream = bytearray(stream_of(BULK, PING))
    stream[bit // 8] ^= 1 << bit % 8
    reader, found = FrameReader(), []
    try:
        for byte in stream:
            found += read(reader, [bytes([byte])])
    except PeerError:
        pass
    else:
        assert reader.midway, "a wrong length may have it wait for more, but not take this for whole"
    assert found in ([], [BULK])


FOLDED_AND_MORE = 2 * framing.FOLD_BYTES + 10_000


@given(st.integers(0, FOLDED_AND_MORE * 8 - 1))
def test_the_folded_checksum_sees_every_bit(bit: int) -> None:
    payload = bytearray(FOLDED_AND_MORE)
    before = framing.payload_checksum(payload)
    payload[bit // 8] ^= 1 << bit % 8
    assert framing.payload_checksum(payload) != before


def test_the_folded_checksum_sees_blocks_that_moved() -> None:
    blocks = np.random.default_rng(1).integers(0, 256, (3, framing.FOLD_BYTES), dtype=np.uint8)
    assert framing.payload_checksum(blocks.ravel().data) != framing.payload_checksum(blocks[[1, 0, 2]].ravel().data)


def test_small_payloads_have_a_plain_crc32() -> None:
    assert framing.payload_checksum(b"peerd") == zlib.crc32(b"peerd")


# ---------------------------------------------------------------------------------------------- broken rules


def fixed(
    magic: bytes = b"PEER",
    version: int = wire.VERSION,
    kind: int = Ping.KIND,
    flags: int = 0,
    header: int = 0,
    payload: int = 0,
) -> bytes:
    start = struct.pack("<4sBBHIIQ4x", magic, version, kind, flags, header, payload, 0)[:28]
    return start + zlib.crc32(start).to_bytes(4, "little")


HEAD = bytes(next(frames(BULK)))

BROKEN = {
    "another protocol": (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", "not peerd's"),
    "another version": (fixed(version=9), "version 9"),
    "flags": (fixed(flags=1), "flags"),
    "no such kind": (fixed(kind=250), "kind 250"),
    "a long header": (fixed(header=wire.HEADER_MAX + 1), "header of"),
    "the longest header": (fixed(header=2**32 - 1), "header of"),
    "a payload in a message": (fixed(payload=1), "payload of 1"),
    "a chunk of nothing": (fixed(kind=framing.CHUNK, payload=1), "no message"),
    "another length than announced": (HEAD + fixed(kind=framing.CHUNK, payload=4), "3 were announced"),
    "a chunk with a header": (HEAD + fixed(kind=framing.CHUNK, payload=3, header=1), "announced"),
    "two bulk messages at once": (HEAD + HEAD, "second bulk"),
    "over the payload limit": (bytes(next(frames(ModelSnapshot(1, "c", (bytes(65537),))))), "limit"),
    "a header that is none": (framing.head_frame(Ping.KIND, b"\xc1"), "msgpack"),
}


@pytest.mark.parametrize(("stream", "text"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_rules(stream: bytes, text: str) -> None:
    with pytest.raises(PeerError, match=text):
        read(FrameReader(), [stream])


def test_messages_before_the_broken_rule_come_out() -> None:
    reader, found = FrameReader(), []
    stream = stream_of(PING) + b"x" * 40
    reader.buffer()[: len(stream)] = stream
    reader.received(len(stream))
    found.append(reader.next_message())
    with pytest.raises(PeerError):
        reader.next_message()
    assert found == [PING]


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_a_peer_error(stream: bytes) -> None:
    for start in (b"", fixed(header=50), HEAD):
        with suppress(PeerError):
            read(FrameReader(), [start + stream])


BOMBS = r"""
import struct
from peerd.transport.errors import PeerError
from peerd.transport.messages import MESSAGES, Finished, ModelRequest, ModelSnapshot, Ping, SpeedRequest
from peerd.transport import framing, wire
import msgpack

def peak_kib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

size = wire.HEADER_MAX
headers = [
    b"\x91" * size, b"\x90" * size, b"\x9f" * size, b"\xdc\x03\xff" * (size // 3), b"\xdc\x04\x00" * (size // 3),
    b"\x81\xa1a" * (size // 3), b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xdc\x04\x00" + b"\xdc\x04\x00" * 1023,
    b"\x94\x01\xa0\xa0\xdc\x04\x00" + b"\x99" * 60000, b"\xdc\x04\x00" + (b"\xdc\x00\x3f" + b"\x90" * 63) * 900,
    msgpack.packb([[wire.CHUNK_MAX] * 1024, 1, "c"]), msgpack.packb([[2**63] * 1024, 1, "c"]),
]
streams = [framing.head_frame(kind, header[:size]) for header in headers for kind in MESSAGES]
streams += [
    struct.pack("<4sBBHIIQ8x", b"PEER", 1, kind, 0, header, payload, 0)
    for kind in (Ping.KIND, ModelSnapshot.KIND, framing.CHUNK)
    for header, payload in ((2**32 - 1, 0), (0, 2**32 - 1), (2**32 - 1, 2**32 - 1))
]

def feed(stream):
    reader = framing.FrameReader()
    buffer = reader.buffer()
    buffer[: len(stream)] = stream
    reader.received(len(stream))
    try:
        message = reader.next_message()
    except PeerError:
        return
    # no fields: anything is what a newer version appended
    assert message in (None, ModelRequest(), SpeedRequest(), Finished())

before = peak_kib()
for stream in streams:
    feed(stream)
print(peak_kib() - before)
"""


def test_bombs_cost_little_memory() -> None:
    ran = subprocess.run([sys.executable, "-c", BOMBS], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) <= 16 << 10  # KiB


# ------------------------------------------------------------------------------------------ chunks beside the stream

LARGE = bytes(range(256)) * 256  # 64 KiB
MIXED = ModelSnapshot(3, "float32", (LARGE, b"small", LARGE[::-1]))


def stream_beside(message: Message, chunks_beside: bool = True) -> list[bytes]:
    """The frames of a message whose large chunks travel beside; the chunks are the test's to deliver."""
    header, chunks = wire.encode(message)
    found = [framing.head_frame(message.KIND, header, out_of_band=True)]
    for chunk in chunks:
        out_of_band = len(chunk) >= framing.OUT_OF_BAND_MIN and chunks_beside
        found.append(framing.chunk_frame(chunk, out_of_band))
        if not out_of_band:
            found.append(bytes(chunk))
    return found


def reader_beside() -> FrameReader:
    reader = FrameReader(1 << 20)
    reader.out_of_band = True
    return reader


def test_large_chunks_come_beside_and_small_ones_in_the_stream() -> None:
    reader = reader_beside()
    assert read(reader, [b"".join(stream_beside(MIXED)) + stream_of(PING)]) == []
    assert reader.take_announced() == [len(LARGE)] * 2
    assert reader.take_announced() == []
    assert reader.out_of_band_due == len(LARGE)
    reader.received_out_of_band(memoryview(LARGE))
    assert reader.next_message() is None
    assert reader.out_of_band_due == len(LARGE)
    reader.received_out_of_band(memoryview(LARGE[::-1]))
    assert reader.next_message() == MIXED
    assert reader.out_of_band_due == 0
    assert reader.next_message() == PING
    assert not reader.midway


def test_a_chunk_beside_is_checked_as_any_other() -> None:
    reader = reader_beside()
    read(reader, [b"".join(stream_beside(MIXED))])
    reader.received_out_of_band(memoryview(LARGE[::-1]))
    with pytest.raises(PeerError, match="wrong checksum"):
        reader.next_message()


def test_nothing_comes_beside_a_stream_that_was_not_upgraded() -> None:
    with pytest.raises(PeerError, match="unknown flags 0x1"):
        read(FrameReader(1 << 20), stream_beside(MIXED))


@pytest.mark.parametrize(
    ("frames_sent", "said"),
    [
        (stream_beside(MIXED, chunks_beside=False), "on the wrong way"),
        ([stream_beside(MIXED)[0], framing.chunk_frame(LARGE[:5], out_of_band=True)], "were announced"),
        (
            [bytes(next(frames(ModelSnapshot(1, "c", (LARGE,))))), framing.chunk_frame(LARGE, out_of_band=True)],
            "on the wrong way",
        ),
        ([framing.head_frame(PING.KIND, wire.encode(PING)[0], out_of_band=True)], "no chunks"),
        ([framing.chunk_frame(LARGE, out_of_band=True)], "a chunk of no message"),
    ],
)
def test_chunks_go_the_way_that_was_said(frames_sent: list[bytes], said: str) -> None:
    with pytest.raises(PeerError, match=said):
        read(reader_beside(), frames_sent)
