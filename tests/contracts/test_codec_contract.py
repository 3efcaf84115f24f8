"""Every codec in the dict keeps the contract in training/codecs/codec.py."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from peerd.training.codecs import CODECS, Codec, NotFinite
from peerd.training.effects import Vector
from peerd.training.kernels import library
from peerd.transport.errors import PeerError
from peerd.transport.messages import CHUNK_VALUES

TINY = 1e-30  # below it the contract allows that nothing gets through
LENGTHS = (0, 1, 2, 7, 255, 256, 257, 70_000, 140_001)  # the last is more than a batch of the encoders
LARGEST = np.finfo(np.float32).max

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = arrays(np.float32, st.integers(0, 600), elements=finite | st.sampled_from([0.0, 1.0, -1.0, 1e-45, 1e38]))
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module", params=["compiled", "numpy"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """By the kernels, and as where there was no compiler."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(library, "LIBRARY", None)
        elif library.LIBRARY is None:
            pytest.skip("peerd was installed without a compiler")
        yield


every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def gaussian(count: int, seed: int = 1) -> Vector:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


@functools.cache
def special_vectors() -> dict[str, Vector]:
    """Shapes of data that have broken codecs: of 70 000 values, unless the name says otherwise."""
    count = 70_000
    steps = np.arange(count)
    one = np.zeros(count, np.float32)
    one[12_345] = -3.0
    return {
        "zeros": np.zeros(count, np.float32),
        "minus zeros": np.full(count, -0.0, np.float32),
        "one value": one,
        "all equal": np.full(count, 0.25, np.float32),
        "alternating": np.where(steps % 2, 1, -1).astype(np.float32),
        "every second": np.where(steps % 2, 1, 0).astype(np.float32),
        "denormals": (steps * 1e-45).astype(np.float32),
        "small": gaussian(count) * np.float32(1e-29),
        "huge": np.where(steps % 3, 1e38, -2e38).astype(np.float32),
        "largest": np.full(count, LARGEST, np.float32),
        "largest and denormals": np.where(steps % 2, LARGEST, 1e-45).astype(np.float32),
        "increasing": steps.astype(np.float32),
        "heavy-tailed": np.random.default_rng(2).standard_t(1.5, count).astype(np.float32),
        "strided view": gaussian(2 * count)[::2],
        **{f"{length} values": gaussian(length) for length in LENGTHS},
    }


def sent(codec: Codec, values: Vector) -> Vector:
    """C(values), decoded over rubbish."""
    body = codec.encode(values)
    assert len(body) <= codec.body_limit(values.size)
    out = np.full(values.size, np.nan, np.float32)
    codec.decode(body, out)
    assert np.isfinite(out).all()
    return out


def check_contraction(codec: Codec, values: Vector) -> None:
    """0 <= ||v - C(v)|| <= ||v||, strictly where something could be said; and what is left makes up the rest."""
    scale = float(np.abs(values).max(initial=0.0)) or 1.0
    exact = values.astype(np.float64) / scale
    arrived = sent(codec, values).astype(np.float64) / scale
    left = exact - arrived
    error, norm = float(left @ left), float(exact @ exact)
    assert error <= norm
    if values.size and np.abs(values).max() >= TINY:
        assert error < norm
    np.testing.assert_allclose(left + arrived, exact, rtol=0, atol=1e-15)  # of the largest value, which is 1 here


@every_codec
def test_name_is_the_key(codec: Codec) -> None:
    assert CODECS[codec.name] is codec
    assert len(codec.name) < 32


@every_codec
@pytest.mark.parametrize("kind", special_vectors())
def test_contraction_of_special_vectors(codec: Codec, kind: str) -> None:
    check_contraction(codec, special_vectors()[kind])


@pytest.mark.cases(6)
@every_codec
@given(values=vectors)
@settings(deadline=None, max_examples=40)
def test_contraction_of_any_vector(codec: Codec, values: Vector) -> None:
    check_contraction(codec, values)


@every_codec
def test_encode_is_deterministic_and_leaves_its_input_alone(codec: Codec) -> None:
    values = gaussian(70_001)
    before = values.copy()
    first = bytes(codec.encode(values))
    assert bytes(codec.encode(values)) == first
    assert bytes(codec.encode(values.copy())) == first
    assert np.array_equal(values, before)


@every_codec
@pytest.mark.parametrize("count", [1, 255, 256, 70_001])
def test_decode_is_identical_wherever_the_bytes_lie(codec: Codec, count: int) -> None:
    """Chunks carry a flag byte, so bodies are read from odd addresses, and outputs are slices of larger vectors."""
    body = codec.encode(gaussian(count))
    plain = np.full(count, np.nan, np.float32)
    codec.decode(body, plain)
    slid = np.full(count + 1, np.nan, np.float32)
    codec.decode(memoryview(bytearray(b"?" + bytes(body)))[1:], slid[1:])
    wide = np.full(count, np.nan, np.float64)
    codec.decode(bytes(body), wide)
    strided = np.full(2 * count, np.nan, np.float32)
    codec.decode(body, strided[::2])
    for other in (slid[1:], wide, strided[::2]):
        assert np.array_equal(plain, other)


@every_codec
def test_float64_is_rounded_to_float32_first(codec: Codec) -> None:
    values = np.random.default_rng(3).standard_normal(1000)
    assert bytes(codec.encode(values)) == bytes(codec.encode(values.astype(np.float32)))


@every_codec
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 256, 1000])
def test_a_value_that_is_not_finite_is_refused(codec: Codec, bad: float, count: int) -> None:
    for place in {0, count // 2, count - 1}:
        values = gaussian(count)
        values[place] = bad
        with pytest.raises(NotFinite):
            codec.encode(values)
    with pytest.raises(ValueError):
        codec.encode(np.full(count, 1e300))  # finite, but not in float32


@every_codec
@given(seed=seeds, heavy=st.booleans())
@settings(deadline=None, max_examples=6)
def test_error_feedback_sends_the_whole_in_the_end(codec: Codec, seed: int, heavy: bool) -> None:
    random = np.random.default_rng(seed)
    total = (random.standard_t(3, 500) if heavy else random.standard_normal(500)).astype(np.float32)
    reference = np.zeros_like(total)
    left = [float(np.linalg.norm(total))]
    for _ in range(100):
        reference += sent(codec, total - reference)
        left.append(float(np.linalg.norm(total - reference)))
    # A sum in float32 cannot come nearer than its own rounding.
    assert all(later <= earlier * (1 + 1e-6) + 1e-6 * left[0] for earlier, later in itertools.pairwise(left))
    # Whatever the values, sign keeps 1/256 of the energy of each block, top-k 1 % nearly 1/100: 100 rounds leave 0.82.
    assert left[-1] < (0.85 if heavy else 0.2) * left[0]


@pytest.mark.cases(6)
@every_codec
@given(data=st.data(), count=st.sampled_from([0, 1, 9, 256, 257, 700]))
@settings(deadline=None, max_examples=60)
def test_any_bytes_give_a_finite_vector_or_a_peer_error(codec: Codec, data: st.DataObject, count: int) -> None:
    body = bytearray(codec.encode(gaussian(count, seed=count)))
    match data.draw(st.sampled_from(["rubbish", "changed", "cut", "longer"])):
        case "rubbish":
            size = data.draw(st.integers(0, codec.body_limit(count) + 8))
            body = bytearray(data.draw(st.binary(min_size=size, max_size=size)))
        case "changed":
            for _ in range(data.draw(st.integers(1, 8)) if body else 0):
                body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.sampled_from([0, 127, 128, 255]))
        case "cut":
            del body[data.draw(st.integers(0, len(body))) :]
        case _:
            body += data.draw(st.binary(min_size=1, max_size=8))
    out = np.full(count, np.nan, np.float32)
    try:
        codec.decode(body, out)
    except PeerError:
        return
    assert np.isfinite(out).all()


@every_codec
def test_a_longer_body_is_refused(codec: Codec) -> None:
    for count in (0, 1, 256, 1000):
        body = bytes(codec.encode(gaussian(count)))
        with pytest.raises(PeerError):
            codec.decode(body + bytes(codec.body_limit(count) + 1 - len(body)), np.empty(count, np.float32))


@every_codec
def test_limits_grow_with_the_count_and_fit_a_chunk(codec: Codec) -> None:
    limits = [codec.body_limit(count) for count in range(2000)]
    assert limits == sorted(limits)
    assert codec.body_limit(CHUNK_VALUES) <= 4 * CHUNK_VALUES


@pytest.mark.cases(6)
@every_codec
def test_a_whole_chunk(codec: Codec) -> None:
    check_contraction(codec, gaussian(CHUNK_VALUES))
