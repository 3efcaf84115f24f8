"""The compiled passes and numpy's compute the same: what both ends of a link must agree on, to the bit."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest
from exchanged import exchange
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.codecs import CODECS, ONE_PASS, NotFinite, compress, vector
from peerd.training.codecs.vector import Contraction, Gain, Layout, decode, encode
from peerd.training.effects import Vector
from peerd.training.kernels import library, passes
from peerd.training.pairs.reference import ExchangeHalf, LinkMismatch, PairedReference
from peerd.training.pairs.robust import packed, tensors_of
from peerd.training.scratch import Scratch
from peerd.transport.errors import PeerError
from peerd.transport.messages import Chunk, Delta

pytestmark = pytest.mark.skipif(library.LIBRARY is None, reason="peerd was installed without a compiler")

counts = st.sampled_from([1, 7, 8, 15, 16, 17, 255, 256, 257, 511, 1000]) | st.integers(0, 2000)
FLOAT32_MAX = float(np.finfo(np.float32).max)
scales = st.sampled_from([1e-45, 1e-38, 1e-30, 1e-10, 1.0, 1e10, 1e18, 1e25, 1e29])
seeds = st.integers(0, 2**32 - 1)


@contextmanager
def by_numpy() -> Iterator[None]:
    """As where there was no compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "LIBRARY", None)
        yield


@st.composite
def vectors(draw: st.DrawFn, count: int) -> Vector:
    """Float32 values of the draw's scale, of which some are zero or of another scale."""
    rng = np.random.default_rng(draw(seeds))
    values = rng.standard_normal(count) * draw(scales)
    odd = rng.random(count)
    values[odd < draw(st.sampled_from([0.0, 0.1, 1.0]))] = draw(st.sampled_from([0.0, -0.0, 1e-42, 3.0, -1e28]))
    return values.astype(np.float32)


def gaussian(rng: np.random.Generator, count: int) -> Vector:
    return rng.standard_normal(count).astype(np.float32)


def same_bits(a: Vector, b: Vector) -> bool:
    return a.tobytes() == b.tobytes()


@given(st.data(), counts, st.booleans())
def test_sums_of_squares(data: st.DataObject, count: int, has_two: bool) -> None:
    a = data.draw(vectors(count))
    b = data.draw(vectors(count)) if has_two else None
    exact = a.astype(np.float64) if b is None else (a - b).astype(np.float64)
    assert passes.squares(a, b) == pytest.approx(float(exact @ exact), rel=1e-5)


@given(counts.filter(bool), seeds, st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_sum_of_squares_tells_what_is_not_finite(count: int, seed: int, odd: float) -> None:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(count).astype(np.float32)
    a[rng.integers(count)] = odd
    assert not np.isfinite(passes.squares(a))
    assert not np.isfinite(passes.squares(np.zeros_like(a), a))


@given(st.data(), counts, st.sampled_from([0.0, 1.0, 1e28, 1e30, FLOAT32_MAX]), st.booleans(), st.booleans())
def test_additions_within_a_bound(
    data: st.DataObject, count: int, most: float, has_known: bool, in_place: bool
) -> None:
    values, known = data.draw(vectors(count)), data.draw(vectors(count)) if has_known else None
    if count and data.draw(st.booleans()):
        values[data.draw(st.integers(0, count - 1))] = data.draw(st.sampled_from([np.nan, np.inf, 2e30]))
    with np.errstate(over="ignore"):
        wanted = values.copy() if known is None else values + known
    compiled, plain = (values.copy() if in_place else np.empty_like(values) for _ in range(2))
    within = passes.add_within(compiled if in_place else values, known, most, compiled)
    with by_numpy():
        assert passes.add_within(plain if in_place else values, known, most, plain) == within
    assert within == bool((np.abs(wanted) <= most).all())
    assert same_bits(compiled, wanted)
    assert same_bits(plain, wanted)


@given(st.data(), counts)
def test_models_are_corrected(data: st.DataObject, count: int) -> None:
    compiled = [data.draw(vectors(count)) for _ in range(3)]
    plain = [each.copy() for each in compiled]
    found = passes.add(compiled[0], compiled[1], compiled[2])
    with by_numpy():
        expected = passes.add(plain[0], plain[1], plain[2])
    assert all(map(same_bits, compiled, plain))
    assert found == pytest.approx(expected, rel=1e-5)


@given(st.data(), counts, st.sampled_from([1.0, 3.0, 7.5]))
def test_means_take_the_place_of_gradients(data: st.DataObject, count: int, members: float) -> None:
    gradient, summed = data.draw(vectors(count)), data.draw(vectors(count))
    expected = summed / np.float32(members)
    apart = float(np.square(gradient - expected, dtype=np.float64).sum())
    plain = gradient.copy()
    found = passes.mean(gradient, summed, members)
    with by_numpy():
        assert passes.mean(plain, summed, members) == pytest.approx(found, rel=1e-5)
    assert same_bits(gradient, expected)
    assert same_bits(plain, expected)
    assert found == pytest.approx((float(np.square(expected, dtype=np.float64).sum()), apart), rel=1e-5)


@given(st.data(), counts)
def test_what_is_not_finite_is_found(data: st.DataObject, count: int) -> None:
    values = data.draw(vectors(count))
    assert passes.is_finite(values)
    if count:
        values[data.draw(st.integers(0, count - 1))] = data.draw(st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]))
        assert not passes.is_finite(values)


@given(st.data(), counts.filter(bool), st.sampled_from([0, 100, passes.SMALL]))
def test_references_move_and_each_tensor_has_its_sum_and_its_factor(
    data: st.DataObject, count: int, small: int
) -> None:
    cuts = data.draw(st.sets(st.integers(1, count), max_size=9))
    stops = np.array(sorted({*cuts, count}), np.int64)
    factors = np.array(data.draw(st.lists(st.floats(0, 1), min_size=len(stops), max_size=len(stops))))
    compiled = [data.draw(vectors(count)) for _ in range(4)]
    plain = [each.copy() for each in compiled]
    found = passes.move_references(compiled[0], compiled[1], compiled[2], compiled[3], stops)
    apart = passes.squares_by(compiled[0], compiled[3], stops)
    passes.scale_by(compiled[3], factors, stops)
    with by_numpy(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "SMALL", small)
        expected = passes.move_references(plain[0], plain[1], plain[2], plain[3], stops)
        apart_too = passes.squares_by(plain[0], plain[3], stops)
        passes.scale_by(plain[3], factors, stops)
    assert all(map(same_bits, compiled, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(apart, apart_too, rtol=1e-5)
    parts = np.split((compiled[0].astype(np.float64)), stops[:-1])
    np.testing.assert_allclose(passes.squares_by(compiled[0], None, stops), [part @ part for part in parts], rtol=1e-5)


@given(data=st.data(), count=counts, has_known=st.booleans(), rank=st.floats(0, 1))
def test_values_that_are_large_enough(data: st.DataObject, count: int, has_known: bool, rank: float) -> None:
    values = data.draw(vectors(count))
    known = data.draw(vectors(count)) if has_known else None
    apart = values if known is None else values - known
    least = max(float(np.quantile(np.abs(apart), rank, method="nearest")) if count else 0.0, 1e-45)
    enough = np.abs(apart) >= least
    found = passes.at_least(values, known, least)
    with by_numpy():
        by_hand = passes.at_least(values, known, least)
    for one in (found, by_hand):
        assert one is not None
        where, large, others = one
        assert np.array_equal(where, np.flatnonzero(enough))
        assert same_bits(large, apart[enough])
        rest = apart[~enough].astype(np.float64)
        assert others == pytest.approx(float(rest @ rest), rel=1e-5)


@pytest.mark.parametrize("codec", ONE_PASS)
@given(data=st.data(), count=counts, has_known=st.booleans())
def test_what_is_encoded(codec: str, data: st.DataObject, count: int, has_known: bool) -> None:
    """Either decoder makes the same bits of either encoder's chunks; and these differ in the last bit of a scale."""
    layout = Layout(count, count)
    values = data.draw(vectors(count))
    known = data.draw(vectors(count)) if has_known else None
    decoded = np.full(count, np.nan, np.float32)
    chunks, contraction = encode(codec, layout, values, known=known, decoded=decoded)
    with by_numpy():
        by_hand = np.full(count, np.nan, np.float32)
        other, expected = encode(codec, layout, values, known=known, decoded=by_hand)
    np.testing.assert_allclose(decoded, by_hand, rtol=2.0**-7, atol=1e-44)
    check_loss(values if known is None else values - known, decoded, contraction)
    check_loss(values if known is None else values - known, by_hand, expected)
    for each, arrives in ((chunks, decoded), (other, by_hand)):
        out, again = np.empty_like(decoded), np.empty_like(decoded)
        decode(codec, layout, each, out)
        with by_numpy():
            decode(codec, layout, each, again)
        assert same_bits(out, arrives)
        assert same_bits(again, arrives)


def check_loss(difference: Vector, decoded: Vector, contraction: Contraction) -> None:
    exact, left = difference.astype(np.float64), (difference - decoded).astype(np.float64)
    assert contraction.energy == pytest.approx(float(exact @ exact), rel=1e-5)
    assert contraction.lost == pytest.approx(float(left @ left), rel=1e-4)


@pytest.mark.parametrize("codec", ONE_PASS)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 255, 256, 300, 1000])
def test_what_is_not_finite_is_not_encoded(codec: str, odd: float, count: int) -> None:
    for place in {0, count // 2, count - 1}:
        values = np.ones(count, np.float32)
        values[place] = odd
        for known in (None, np.ones(count, np.float32)):
            with pytest.raises(NotFinite):
                encode(codec, Layout(count, count), values, known=known)


@pytest.mark.parametrize("codec", ONE_PASS)
@given(seed=seeds, count=counts.filter(bool))
def test_a_body_that_no_encoder_makes_is_refused_by_both_or_by_none(codec: str, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    body = rng.integers(0, 256, CODECS[codec].body_limit(count), np.uint8)
    body[: 4 * -(-count // 256)] &= rng.choice(np.array([0xFF, 0x3F], np.uint8))  # scales that are mostly good, too
    found = decoded_or_refused(codec, body, count)
    with by_numpy():
        assert decoded_or_refused(codec, body, count) == found


def decoded_or_refused(codec: str, body: npt.NDArray[np.uint8], count: int) -> bytes | str:
    out = np.zeros(count, np.float32)
    try:
        CODECS[codec].decode(body.data, out)
    except PeerError as error:
        return str(error)
    return out.tobytes()


@given(data=st.data(), codec=st.sampled_from(list(CODECS)), count=counts.filter(bool), rounds=st.integers(1, 4))
def test_a_node_without_a_compiler_keeps_the_same_references(
    data: st.DataObject, codec: str, count: int, rounds: int
) -> None:
    """One end of a link computes with kernels, the other with numpy: what each knows of the other stays the same."""
    layout = Layout(count, count)
    rng = np.random.default_rng(data.draw(seeds))
    start, x, y = (gaussian(rng, count) for _ in range(3))
    limits = packed(np.full(len(tensors_of(layout)), data.draw(st.sampled_from([np.inf, 0.1, 1e-3]))))
    half = ExchangeHalf(codec, Gain(), 0.5, finishing=False, limits=limits)
    a, b = (PairedReference(1, start.copy(), layout, Scratch()) for _ in range(2))
    for _ in range(rounds):
        exchanged, answer = exchange(a, b, x, y, half, by_numpy())
        ours, theirs = exchanged.correction, answer.correction
        np.testing.assert_allclose(ours, -theirs, rtol=1e-6, atol=1e-30)
        x += ours.astype(np.float32)
        y += theirs.astype(np.float32)


def test_one_end_without_a_compiler_costs_a_large_model_no_more_than_rounding() -> None:
    rng = np.random.default_rng(0)
    values = gaussian(rng, 1 << 20)
    by_kernels = passes.squares(values)
    with by_numpy():
        assert passes.squares(values) == pytest.approx(by_kernels, rel=1e-6)


def test_another_signature_is_another_version() -> None:
    """Whoever changes a signature must raise VERSION, here and in kernels.c: a compiled file of before may be left."""
    signatures = ";".join(
        f"{name}{[one.__name__ for one in taken]}" for name, (_, taken) in library._SIGNATURES.items()
    )
    assert (library.VERSION, zlib.crc32(signatures.encode())) == (7, 3139942578)


def test_a_compiled_file_of_another_version_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library._load() is not None
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    assert library._load() is None


def test_an_exchange_that_an_error_broke_off_half_way_ends_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2 * vector.PIECE_VALUES + 5
    layout, rng = Layout(count, count), np.random.default_rng(0)
    start, x, y = (gaussian(rng, count) for _ in range(3))
    half = ExchangeHalf("sign", Gain(), 0.5, finishing=False)
    a, b = (PairedReference(1, start.copy(), layout, Scratch()) for _ in range(2))
    reply = b.receive(a.begin(x, half), y, half).reply
    assert isinstance(reply, Delta)
    looks = count_calls_then_fail(after=3 + 1)  # the three pieces of theirs, the first of ours
    with monkeypatch.context() as patch:
        patch.setattr(vector, "unpack", looks)
        with pytest.raises(MemoryError):
            a.receive(reply, x, half)
    with pytest.raises(LinkMismatch):
        a.receive(reply, x, half)
    assert a.end() is None


def count_calls_then_fail(after: int) -> Callable[[Chunk, int], memoryview]:
    left = iter(range(after))

    def unpack(chunk: Chunk, limit: int) -> memoryview:
        if next(left, None) is None:
            raise MemoryError
        return compress.unpack(chunk, limit)

    return unpack
