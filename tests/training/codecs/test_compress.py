"""Chunks: the flag, when zstd is used, and that no frame can make us allocate more than we agreed to."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.training.codecs.compress import MAGIC, RAW, ZSTD, Compressor, unpack
from peerd.transport.errors import PeerError

LIMIT = 1 << 20
BLOCK = 128 << 10
LAST = 1


def repeat_block(size: int, flags: int = 0) -> bytes:
    """A zstd block of four bytes that stands for `size` equal ones."""
    return (flags | 1 << 1 | size << 3).to_bytes(3, "little") + b"z"


def frame(claimed: int | None, blocks: bytes, window_log: int = 17, dictionary: int = 0) -> bytes:
    """A hand-made zstd frame that claims to hold `claimed` bytes (None: does not say)."""
    descriptor = (0 if claimed is None else 3 << 6) | (1 if dictionary else 0)
    header = bytes([descriptor, (window_log - 10) << 3])
    if dictionary:
        header += bytes([dictionary])
    if claimed is not None:
        header += claimed.to_bytes(8, "little")
    return MAGIC + header + blocks


GOOD = frame(1000, repeat_block(1000, LAST))
BOMB = repeat_block(BLOCK) * 4095 + repeat_block(BLOCK, LAST)  # 16 KiB that stand for 512 MiB
BAD = {
    "empty": b"",
    "junk": b"junk and nothing else",
    "bomb": frame(512 << 20, BOMB),
    "bomb of no stated size": frame(None, BOMB),
    "64 GiB claimed": frame(64 << 30, repeat_block(1, LAST)),
    "lying header": frame(1000, BOMB),
    "stated size too large by one": frame(1001, repeat_block(1000, LAST)),
    "stated size too small by one": frame(999, repeat_block(1000, LAST)),
    "two frames": GOOD + GOOD,
    "trailing junk": GOOD + b"junk",
    "trailing bomb": GOOD + frame(512 << 20, BOMB),
    "cut short": GOOD[:-1],
    "no blocks": GOOD[:-4],
    "skippable frame first": b"\x50\x2a\x4d\x18" + (1000).to_bytes(4, "little") + bytes(1000) + GOOD,
    "skippable frame alone": b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + bytes(4),
    "window of 16 MiB": frame(1000, repeat_block(1000, LAST), window_log=24),
    "dictionary": frame(1000, repeat_block(1000, LAST), dictionary=7),
    "whole chunk claimed, nothing there": frame(LIMIT, repeat_block(0, LAST)),
}


def test_the_hand_made_frame_is_sound() -> None:
    assert unpack(bytes([ZSTD]) + GOOD, LIMIT) == b"z" * 1000
    assert zstandard.get_frame_parameters(BAD["lying header"]).content_size == 1000


@pytest.mark.parametrize("kind", BAD)
def test_bad_frames_are_refused(kind: str) -> None:
    with pytest.raises(PeerError):
        unpack(bytes([ZSTD]) + BAD[kind], LIMIT)


def test_bad_frames_cost_no_memory() -> None:
    """In a fresh process, for the high-water mark of this one says nothing. Expected: LIMIT and 10 MiB, at most."""
    script = """
import sys; sys.path[:0] = ["tests/training/codecs"]
from test_compress import BAD, GOOD, LIMIT, ZSTD, unpack
from peerd.transport.errors import PeerError
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
unpack(bytes([ZSTD]) + GOOD, LIMIT)
chunks = [bytes([ZSTD]) + bad for bad in BAD.values()]
before = peak()
for chunk in chunks:
    try:
        unpack(chunk, LIMIT)
        raise SystemExit("accepted")
    except PeerError:
        pass
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= (LIMIT >> 10) + 10 * 1024


@given(data=st.data())
@settings(deadline=None)
def test_a_changed_frame_is_refused_or_holds_the_stated_size(data: st.DataObject) -> None:
    body = bytes(range(64)) * 40
    chunk = bytearray(bytes([ZSTD]) + zstandard.ZstdCompressor().compress(body))
    for _ in range(data.draw(st.integers(1, 4))):
        chunk[data.draw(st.integers(1, len(chunk) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PeerError):
        assert len(unpack(chunk, 4096)) <= 4096


@given(chunk=st.binary(max_size=200))
def test_any_chunk_is_a_bounded_body_or_a_peer_error(chunk: bytes) -> None:
    with contextlib.suppress(PeerError):
        assert len(unpack(chunk, 100)) <= 100


@given(bodies=st.lists(st.binary(max_size=300) | st.integers(0, 5000).map(bytes), max_size=4))
@settings(deadline=None)
def test_bodies_come_back(bodies: list[bytes]) -> None:
    squeezer = Compressor()
    for body in bodies:
        chunk = squeezer.pack(body)
        assert len(chunk) <= 1 + len(body)
        assert unpack(chunk, len(body)) == body


def test_zstd_is_used_where_it_pays_and_the_first_answer_stands() -> None:
    random = np.random.default_rng(1).bytes(10_000)
    plain = bytes(10_000)
    pays, pays_not = Compressor(), Compressor()
    assert [pays.pack(body)[0] for body in (plain, plain, random, plain)] == [ZSTD, ZSTD, RAW, ZSTD]
    assert [pays_not.pack(body)[0] for body in (random, plain, plain)] == [RAW, RAW, RAW]


def test_a_chunk_is_a_copy() -> None:
    memory = bytearray(range(100))
    chunk = Compressor().pack(memoryview(memory))
    memory[0] = 99
    assert unpack(chunk, 100)[0] == 0


def test_the_limit_holds_for_raw_chunks_and_unknown_flags() -> None:
    assert unpack(bytes([RAW]) + bytes(100), 100) == bytes(100)
    for chunk in (b"", bytes([RAW]) + bytes(101), bytes([2]) + bytes(10), bytes([255])):
        with pytest.raises(PeerError):
            unpack(chunk, 100)
