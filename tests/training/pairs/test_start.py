"""What a link starts from: the same bits on both ends, whether it travels or not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peerd.training import room
from peerd.training.codecs import bfloat16, vector
from peerd.training.codecs.bfloat16 import Bfloat16
from peerd.training.codecs.codec import NotFinite
from peerd.training.codecs.difference import digest
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Sliced, Vector
from peerd.training.kernels.passes import BATCH
from peerd.training.pairs.start import SNAPSHOT_CODEC, arrived, snapshot, start_of

PIECE = 512
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector, "PIECE_VALUES", PIECE)


@pytest.fixture(params=["large", "small"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "large":
        monkeypatch.setattr(room, "LARGE", 0)
    return str(request.param)


@st.composite
def models(draw: st.DrawFn) -> tuple[Vector, Layout]:
    """Values of all scales, some of them odd, of parameters and buffers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    total = draw(st.sampled_from([1, 255, PIECE, PIECE + 1, 3 * PIECE]) | st.integers(1, 2000))
    values = rng.standard_normal(total) * draw(st.sampled_from([1e-44, 1e-38, 1e-10, 1.0, 1e30]))
    if draw(st.booleans()):
        drawn = rng.integers(0, 2**32, total, dtype=np.uint32).view(np.float32)
        values = np.where(np.isfinite(drawn), drawn, np.float32(0)).astype(np.float64)
    for at, odd in draw(st.lists(st.tuples(st.integers(0, total - 1), FLOATS), max_size=5)):
        values[at] = odd
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return values.astype(dtype), Layout(total - draw(st.integers(0, min(total, 700))), total)


def bits(start: Sliced) -> bytes:
    return start[0 : start.shape[0]].tobytes()


@given(models())
@pytest.mark.usefixtures("size")
def test_a_start_that_does_not_travel_is_the_one_that_does(model: tuple[Vector, Layout]) -> None:
    values, layout = model
    start = start_of(values, layout)
    for sent in (snapshot(values, layout), snapshot(start, layout)):
        there = arrived(SNAPSHOT_CODEC, layout, sent, values.dtype)
        assert type(there) is type(start)
        assert bits(there) == bits(start)
        assert digest(there, layout) == digest(start, layout)
    assert bits(start_of(start[0 : layout.total], layout)) == bits(start), "said again it is the same"


@given(models(), st.integers(0, 1 << 30))
@pytest.mark.usefixtures("size")
def test_another_start_has_another_digest(model: tuple[Vector, Layout], which: int) -> None:
    values, layout = model
    at = which % layout.total
    other = values.copy()
    other[at] = 1.0 if abs(values[at]) < 0.5 else 0.0
    start, changed = start_of(values, layout), start_of(other, layout)
    assert (digest(start, layout) == digest(changed, layout)) == (bits(start) == bits(changed))


@given(models(), st.integers(0, 1 << 30), st.sampled_from([np.nan, np.inf, -np.inf]))
@pytest.mark.usefixtures("size")
def test_a_model_that_is_not_finite_starts_nothing(model: tuple[Vector, Layout], which: int, odd: float) -> None:
    values, layout = model
    values[which % layout.total] = odd
    with pytest.raises(NotFinite):
        start_of(values, layout)


@given(st.lists(FLOATS, max_size=40))
@example([3.4028235e38, -3.4028235e38, 1.00390625, 1.005859375, -1.00390625, 1e-45, -0.0])
def test_what_is_rounded_is_what_the_codec_brings(found: list[float]) -> None:
    values = np.array(found, np.float32)
    out = np.empty_like(values)
    Bfloat16().decode(Bfloat16().encode(values), out)
    assert bfloat16.rounded(values).tobytes() == out.tobytes()


def test_batches_are_rounded_alike() -> None:
    values = np.random.default_rng(0).standard_normal(2 * BATCH + 3).astype(np.float32)
    out = np.empty_like(values)
    Bfloat16().decode(Bfloat16().encode(values), out)
    assert bfloat16.rounded(values).tobytes() == out.tobytes()
