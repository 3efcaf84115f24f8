"""Is what several threads compute, a piece each, the same bits as what one does? And what of a piece that fails?"""

from __future__ import annotations

import contextvars
import gc
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.codecs import CODECS, vector
from peerd.training.codecs.difference import digest, digest_of_chunks
from peerd.training.codecs.vector import Layout
from peerd.training.kernels import passes
from peerd.training.kernels.cores import THREADS_MAX, each, spread, to_spare
from peerd.training.pairs.block_floats import BlockFloats
from peerd.training.pairs.start import start_of
from peerd.transport.errors import PeerError

PIECE = 512


def nothing() -> None:
    """What a thread begins with."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small vector has several."""
    monkeypatch.setattr("peerd.training.kernels.passes.PART", PIECE)
    monkeypatch.setattr("peerd.training.codecs.vector.PIECE_VALUES", PIECE)


def alike(compute: Callable[[], Any]) -> Any:
    """What it computes, by three threads as by one."""
    alone = compute()
    with spread(3, nothing):
        together = compute()
    assert _bits(alone) == _bits(together)
    return alone


def _bits(found: Any) -> Any:
    if isinstance(found, np.ndarray):
        return found.tobytes()
    if isinstance(found, memoryview):
        return bytes(found)
    return [_bits(one) for one in found] if isinstance(found, tuple | list) else found


@given(st.integers(0, 1 << 32), st.integers(0, 5 * PIECE), st.integers(0, 3 * PIECE), st.sampled_from(sorted(CODECS)))
def test_chunks_and_what_they_hold_are_the_same_bits(seed: int, parameters: int, buffers: int, codec: str) -> None:
    rng = np.random.default_rng(seed)
    layout = Layout(parameters, parameters + buffers)
    values = rng.standard_normal(layout.total).astype(np.float32)
    known = BlockFloats(layout) if seed % 2 else np.zeros_like(values)
    known[0 : layout.total] = (values + 0.1 * rng.standard_normal(layout.total)).astype(np.float32)

    def encoded() -> tuple[Any, Any, float, float]:
        arrives = np.empty_like(values)
        chunks, loss = vector.encode(codec, layout, values, known=known, decoded=arrives)
        return chunks, arrives, loss.lost, loss.energy

    chunks, arrives, _, _ = alike(encoded)

    def decoded() -> Any:
        out = np.empty_like(values)
        vector.decode(codec, layout, chunks, out, known=known)
        return out

    assert alike(decoded) == pytest.approx(known[0 : layout.total] + arrives, abs=1e-6)
    pieces = alike(lambda: vector.each_decoded(codec, layout, chunks, values.dtype, lambda where, piece: piece.copy()))
    assert [where.stop - where.start for where in vector.pieces(layout)] == [len(piece) for piece in pieces]
    assert len(alike(lambda: digest(known, layout))) == 16
    assert alike(lambda: start_of(values, layout)[0 : layout.total]).shape == values.shape
    assert len(alike(lambda: digest_of_chunks(chunks))) == 32


@given(st.integers(0, 1 << 32), st.lists(st.integers(0, 3 * PIECE), min_size=1, max_size=6))
def test_passes_over_tensors_that_end_anywhere_are_the_same_bits(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    stops = np.cumsum(np.array(sizes, np.int64))
    values, known = rng.standard_normal((2, int(stops[-1])), np.float32)
    factors = rng.uniform(0, 2, len(sizes))
    squares = alike(lambda: passes.squares_by(values, known, stops))
    tensors = [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    assert squares == pytest.approx([float(((values[one] - known[one]) ** 2.0).sum()) for one in tensors], rel=1e-4)

    def scaled() -> Any:
        out = values.copy()
        passes.scale_by(out, factors, stops)
        passes.correct(out, known)
        return out

    expected = values * np.repeat(factors, sizes).astype(np.float32) + known
    assert alike(scaled) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert alike(lambda: passes.is_finite(values))
    if len(values):
        values[rng.integers(len(values))] = np.inf
        assert not alike(lambda: passes.is_finite(values))


def test_a_chunk_that_is_none_is_told_as_by_one_thread() -> None:
    layout = Layout(4 * PIECE, 4 * PIECE)
    chunks = list(vector.encode("sign", layout, np.ones(layout.total, np.float32))[0])
    chunks[1], chunks[3] = b"\x07what is this", b""
    said = []
    for threads in (1, 3):
        with spread(threads, nothing), pytest.raises(PeerError) as error:
            vector.decode("sign", layout, tuple(chunks), np.empty(layout.total, np.float32))
        said.append(str(error.value))
    assert said[0] == "a chunk begins with 7, which is neither raw nor zstd"
    assert said[1] in (said[0], "a chunk of 0 bytes where 1 to 73 are due")


def test_nothing_is_under_way_once_an_error_is_told() -> None:
    busy: list[int] = []

    def work(piece: int) -> None:
        if piece == 0:
            raise PeerError("the first")
        busy.append(piece)
        time.sleep(0.02)
        busy.remove(piece)

    with spread(4, nothing):
        with pytest.raises(PeerError, match="the first"):
            each(work, range(40))
        assert busy == []


def test_what_an_error_knows_is_gone_with_it() -> None:
    class Message:
        pass

    def work(message: Message) -> None:
        raise PeerError("no model")

    messages = [Message() for _ in range(5)]
    known = [weakref.ref(message) for message in messages]
    gc.disable()
    try:
        with spread(3, nothing):
            with pytest.raises(PeerError) as error:
                each(work, messages)
            del error, messages
        assert [one() for one in known] == [None] * 5
    finally:
        gc.enable()


def test_pieces_are_done_where_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, started = threading.Thread.start, list[threading.Thread]()

    def begins_once(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", begins_once)
    with spread(4, nothing):
        assert each(lambda piece: -piece, range(9)) == [-piece for piece in range(9)]
        assert each(lambda _: threading.get_ident(), range(3)) == 3 * [threading.get_ident()]


def test_pieces_are_done_where_threads_cannot_begin() -> None:
    def fails() -> None:
        raise PermissionError("not so nice")

    for _ in range(20):
        with spread(4, fails):
            assert each(lambda piece: piece, range(9)) == list(range(9))


def test_nobody_waits_for_the_pieces_of_others() -> None:
    """Of one who has all threads; a second one does its own, and is done first."""
    ended: list[str] = []
    all_of_them, busy, go_on = threading.Barrier(3, timeout=60), threading.Event(), threading.Event()

    def slow(_: int) -> None:
        all_of_them.wait()
        busy.set()
        go_on.wait(60)

    def others() -> None:
        each(slow, range(3))
        ended.append("slow")

    with spread(3, nothing):
        other = threading.Thread(target=contextvars.copy_context().run, args=(others,))
        other.start()
        assert busy.wait(60)
        assert each(lambda piece: piece, range(40)) == list(range(40))
        ended.append("quick")
        go_on.set()
        other.join(60)
    assert ended == ["quick", "slow"]


def test_what_ends_a_program_ends_no_piece_half_done() -> None:
    busy: list[int] = []

    def work(piece: int) -> None:
        if piece == 0:
            raise KeyboardInterrupt
        busy.append(piece)
        time.sleep(0.02)
        busy.remove(piece)

    with spread(3, nothing):
        with pytest.raises(KeyboardInterrupt):
            each(work, range(40))
        assert busy == []


def test_pieces_of_a_piece() -> None:
    def of_pieces(piece: int) -> list[int]:
        return each(lambda inner: piece * inner, range(3))

    with spread(3, nothing):
        assert each(of_pieces, range(9)) == [[0, piece, 2 * piece] for piece in range(9)]


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="its errstate is a thread's own")
def test_what_numpy_ignores_it_ignores_in_pieces() -> None:
    huge = np.full(1, 1e30, np.float32)
    with spread(3, nothing), np.errstate(over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert each(lambda piece: float((huge * huge)[0]), range(9)) == [math.inf] * 9


def test_threads_are_those_of_who_asked_for_them() -> None:
    begun: list[int] = []
    all_of_them = threading.Barrier(3, timeout=60)

    def work(_: int) -> int:
        return threading.get_ident()

    def work_of_three(_: int) -> int:
        all_of_them.wait()
        return threading.get_ident()

    with spread(3, lambda: begun.append(threading.get_ident())):
        by = set(each(work_of_three, range(3)))
    assert by == {threading.get_ident(), *begun}
    assert len(by) == 3
    assert each(work, range(3)) == 3 * [threading.get_ident()]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (12, 6), (64, THREADS_MAX)])
def test_half_of_the_cores_are_to_spare(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert to_spare() == threads
