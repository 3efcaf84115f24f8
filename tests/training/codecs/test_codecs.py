"""What is particular to each codec."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from peerd.training.codecs import CODECS, planes
from peerd.training.codecs.bfloat16 import from_bits, to_bits
from peerd.training.codecs.blocks import BLOCK
from peerd.training.codecs.gaps import from_gaps, gaps_limit, to_gaps
from peerd.training.codecs.nibbles import pack_nibbles, unpack_nibbles
from peerd.training.codecs.sign_largest import ratios, shares
from peerd.training.codecs.top_k import TopK, largest, of_rank, quantise
from peerd.training.codecs.top_k_2bit import TOGETHER, two_magnitudes
from peerd.training.effects import Vector
from peerd.transport.errors import PeerError

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = arrays(np.float32, st.integers(1, 600), elements=finite)


def sent(name: str, values: Vector) -> Vector:
    out = np.empty_like(values)
    CODECS[name].decode(CODECS[name].encode(values), out)
    return out


@given(values=vectors)
@settings(deadline=None)
def test_float32_keeps_every_bit(values: Vector) -> None:
    assert np.array_equal(sent("float32", values).view(np.uint32), values.view(np.uint32))


@given(words=arrays(np.uint32, st.integers(0, 50)))
def test_planes_come_together_again(words: np.ndarray) -> None:
    body = np.empty((4, words.size), np.uint8)
    planes.split(words, body)
    again = np.empty_like(words)
    planes.join(body, again)
    assert np.array_equal(words, again)


@given(bits=arrays(np.uint16, st.integers(1, 50), elements=st.integers(0, 2**16 - 1)))
def test_bfloat16_is_kept_and_the_nearest(bits: np.ndarray) -> None:
    bits = np.where(bits & 0x7F80 == 0x7F80, bits & 0x7F, bits).astype(np.uint16)
    values = from_bits(bits)
    assert np.array_equal(to_bits(values), bits)
    inner = bits[bits & 0x7FFF < 0x7F7F]
    low, high = from_bits(inner).astype(np.float64), from_bits(inner + np.uint16(1)).astype(np.float64)
    for share in (0.25, 0.75):
        between = (low + share * (high - low)).astype(np.float32)
        assert np.array_equal(to_bits(between) - inner, np.full(inner.size, share > 0.5, np.uint32))


def test_bfloat16_does_not_round_to_infinity() -> None:
    top = np.array([1, -1], np.float32) * np.finfo(np.float32).max
    assert np.isfinite(sent("bfloat16", top)).all()


@given(values=vectors)
@settings(deadline=None)
def test_int8_is_within_half_a_step(values: Vector) -> None:
    error = np.abs(sent("int8", values).astype(np.float64) - values)
    for start in range(0, values.size, BLOCK):
        block = slice(start, start + BLOCK)
        step = float(np.abs(values[block]).max()) / 127
        assert error[block].max() <= 0.501 * step + 64e-45  # a denormal step is rounded to a multiple of 1.4e-45


def test_sign_loses_what_the_formula_says() -> None:
    values = np.random.default_rng(1).standard_normal(64 * BLOCK).astype(np.float32)
    lost = ((values - sent("sign", values)).astype(np.float64) ** 2).sum()
    means = np.abs(values.reshape(-1, BLOCK)).mean(axis=1, dtype=np.float64)
    expected = (values.astype(np.float64) ** 2).sum() - BLOCK * (means**2).sum()
    assert expected <= lost <= expected * (1 + 1e-4)


@given(values=vectors)
@example(values=np.full(2, 1.857e-42, np.float32))
@settings(deadline=None)
def test_sign_largest_gives_the_largest_and_the_mean_of_the_others(values: Vector) -> None:
    arrived = sent("sign_largest", values)
    for start in range(0, values.size, BLOCK):
        block, came = values[start : start + BLOCK].astype(np.float64), arrived[start : start + BLOCK]
        where = int(np.abs(block).argmax())
        assert came[where] == sent("sign", values[start + where : start + where + 1])[0]
        others = np.delete(np.abs(block), where)
        mean = others.mean() if others.size else 0.0
        rounded = 2.0**-134  # a denormal largest is rounded to a multiple of 2**-133
        smallest = abs(float(came[where])) * 2.0**-31 + rounded
        assert np.abs(np.abs(np.delete(came, where)) - mean).max(initial=0.0) <= mean / 15 + smallest + 1e-44
        assert (np.signbit(came) == np.signbit(block)).all()


@given(means=arrays(np.float64, 9, elements=st.floats(0, 1)))
def test_a_ratio_is_the_nearest_that_there_is(means: npt.NDArray[np.float64]) -> None:
    one = np.ones(9, np.float32)
    given_back = shares(ratios(means, one))
    every = shares(np.arange(256, dtype=np.uint8))
    assert (np.diff(every) < 0).all()
    nearest = np.abs(every[None, :] - means[:, None]).min(axis=1)
    assert np.abs(given_back - means) == pytest.approx(nearest, rel=1e-3, abs=2**-31)


def test_what_sign_leaves_behind_round_after_round_sign_largest_sends() -> None:
    """Of changes that are larger in some places than around them, in the same ones each time, as those of SGD are."""
    rng = np.random.default_rng(3)
    left = {"sign": np.zeros(64 * BLOCK), "sign_largest": np.zeros(64 * BLOCK)}
    scale = np.where(rng.random(64 * BLOCK) < 0.01, 30, 1)
    for _ in range(100):
        change = scale * rng.standard_normal(64 * BLOCK)
        for name, waits in left.items():
            waits += change
            waits -= sent(name, waits)
    step = np.linalg.norm(change)
    assert np.linalg.norm(left["sign"]) > 4 * step
    assert np.linalg.norm(left["sign_largest"]) < step


@pytest.mark.parametrize("percent", [1, 3])
@given(values=vectors)
@settings(deadline=None)
def test_top_k_names_the_largest_and_keeps_their_signs(percent: int, values: Vector) -> None:
    codec = TopK("top_k", percent)
    most = codec.most(values.size)
    chosen = largest(values, None, most).where
    assert np.array_equal(chosen, np.unique(chosen))
    assert chosen.size == min(most, np.count_nonzero(values))
    if chosen.size:
        rest = np.delete(np.abs(values), chosen)
        assert np.abs(values[chosen]).min() >= rest.max(initial=0.0)


@pytest.mark.parametrize("kind", ["gaussian", "equal", "columns", "few"])
def test_top_k_of_a_large_vector_is_exact_and_bounded(kind: str) -> None:
    count = 300_000  # above the sample's size, so that the threshold is an estimate
    values = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    match kind:
        case "equal":
            values[:] = 2.0
        case "columns":
            values[np.arange(count) % 512 != 0] = 0
        case "few":
            values[np.arange(count) % 30_011 != 0] = 0
    found = largest(values, None, 3000)
    chosen = found.where
    assert np.array_equal(found.values, values[chosen])
    assert found.others == pytest.approx(float(np.square(np.delete(values, chosen), dtype=np.float64).sum()), rel=1e-6)
    assert chosen.size == min(3000, np.count_nonzero(values))
    reference = np.sort(np.abs(values))[-chosen.size :].astype(np.float64).sum()
    assert np.abs(values[chosen]).astype(np.float64).sum() == pytest.approx(reference, rel=1e-6)


@given(
    magnitude=arrays(np.float32, st.integers(1, 300), elements=st.floats(0, width=32, allow_nan=False)),
    where=st.floats(0, 1, exclude_max=True),
)
def test_a_magnitude_of_a_rank_is_that_of_a_sorted_vector(magnitude: Vector, where: float) -> None:
    rank = int(where * magnitude.size)
    assert of_rank(magnitude, rank) == np.sort(magnitude)[rank]


@given(magnitude=arrays(np.float32, st.integers(1, 300), elements=st.floats(2.0**-100, 2.0**126, width=32)))
def test_ranges_are_ordered_and_their_means_lie_within(magnitude: Vector) -> None:
    levels, table = quantise(magnitude)
    means = from_bits(table.view("<u2"))
    assert levels.max() < means.size
    for level in np.unique(levels):
        members = magnitude[levels == level]
        assert members.min() * 0.996 <= means[level] <= members.max() * 1.004
    order = np.argsort(magnitude)
    assert (np.diff(levels[order].astype(int)) >= 0).all()


@given(
    length=st.sampled_from([1, 49, 50, 51, 3200, 3201, 9000, 70_000]), seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["gaussian", "heavy", "few kinds", "few", "many scales", "one"]),
)  # fmt: skip
@settings(deadline=None)
def test_two_bits_keep_a_400th_of_any_energy(length: int, seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    match kind:
        case "gaussian":
            drawn = rng.standard_normal(length)
        case "heavy":
            drawn = rng.standard_t(1.5, length) * 10.0 ** rng.integers(-20, 20)
        case "few kinds":
            drawn = rng.integers(-2, 3, length).astype(np.float64)  # many equals
        case "few":
            drawn = rng.standard_normal(length) * (rng.random(length) < 0.01)  # fewer than there is room for
        case "many scales":
            drawn = 10.0 ** -rng.uniform(0, 25, length)
        case _:
            drawn = np.eye(1, length, length // 2)[0]
    values = drawn.astype(np.float32)
    exact = values.astype(np.float64)
    left = exact - sent("top_k_2bit", values)
    assert left @ left <= (exact @ exact) * (1 - (1 - 2e-3) / 400)  # a magnitude's rounding


@given(magnitude=arrays(np.float32, st.integers(1, 200), elements=st.floats(2.0**-60, 2.0**60, width=32)))
def test_no_other_cut_in_two_keeps_more(magnitude: Vector) -> None:
    table, high = two_magnitudes(magnitude)
    means = from_bits(table.view("<u2")).astype(np.float64).reshape(-1, 2)
    for row, (low_mean, high_mean) in enumerate(means):
        here = slice(row * TOGETHER, (row + 1) * TOGETHER)
        exact = magnitude[here].astype(np.float64)
        left = exact - np.where(high[here], high_mean, low_mean)
        ordered = np.sort(exact)
        cuts = [(ordered[:cut], ordered[cut:]) for cut in range(ordered.size)]
        best = max(sum(len(part) * part.mean() ** 2 for part in both if part.size) for both in cuts)
        assert left @ left <= exact @ exact * (1 + 1e-4) - best
        assert low_mean <= high_mean


@given(chosen=st.sets(st.integers(0, 5000), max_size=80))
def test_gaps_come_back(chosen: set[int]) -> None:
    indices = np.array(sorted(chosen), np.intp)
    gaps = to_gaps(indices)
    assert gaps.size <= gaps_limit(indices.size, 5001)
    assert np.array_equal(from_gaps(gaps, indices.size, 5001, "top_k"), indices)


@given(gaps=st.binary(max_size=40), count=st.integers(1, 3000))
def test_any_gaps_are_increasing_indices_or_a_peer_error(gaps: bytes, count: int) -> None:
    wire = np.frombuffer(gaps, np.uint8)
    k = int(np.count_nonzero(wire != 255))
    try:
        indices = from_gaps(wire, k, count, "top_k")
    except PeerError:
        return
    assert indices.size == k
    assert (np.diff(indices) > 0).all()
    assert ((indices >= 0) & (indices < count)).all()
    assert np.array_equal(to_gaps(indices), wire)  # one spelling


@given(nibbles=st.lists(st.integers(0, 15), min_size=1))
def test_nibbles_come_back(nibbles: list[int]) -> None:
    packed = pack_nibbles(np.array(nibbles, np.uint8))
    assert unpack_nibbles(packed, len(nibbles), "top_k").tolist() == nibbles
    if len(nibbles) % 2:
        with pytest.raises(PeerError):
            unpack_nibbles(packed | np.uint8(0x80), len(nibbles), "top_k")


@pytest.mark.parametrize(
    ("name", "spoil", "why"),
    [
        ("int8", lambda body: body.__setitem__(slice(0, 4), b"\x00\x00\x80\x7f"), "scale"),
        ("int8", lambda body: body.__setitem__(slice(0, 4), b"\x00\x00\x80\xbf"), "scale"),
        ("int8", lambda body: body.__setitem__(4, 0x80), "-128"),
        ("int4", lambda body: body.__setitem__(slice(0, 2), b"\x80\x7f"), "scale"),
        ("int4", lambda body: body.__setitem__(slice(0, 2), b"\x13\x7e"), "scale"),
        ("int4", lambda body: body.__setitem__(1, 0x80), "scale"),
        ("int4", lambda body: body.__setitem__(2, 0x78), "-8"),
        ("int4", lambda body: body.__setitem__(-1, body[-1] | 0x10), "nibble"),
        ("sign", lambda body: body.__setitem__(slice(0, 2), b"\x80\x7f"), "scale"),
        ("sign", lambda body: body.__setitem__(1, 0x80), "scale"),
        ("sign", lambda body: body.__setitem__(-1, body[-1] | 1), "beyond"),
        ("sign_largest", lambda body: body.__setitem__(slice(0, 2), b"\x80\x7f"), "scale"),
        ("sign_largest", lambda body: body.__setitem__(1, 0x80), "scale"),
        ("sign_largest", lambda body: body.__setitem__(2, 77), "sign_largest: the largest value is beyond the last"),
        ("sign_largest", lambda body: body.__setitem__(-1, body[-1] | 1), "a bit is set beyond"),
        ("top_k", lambda body: body.__setitem__(0, 2), "named"),
        ("top_k", lambda body: body.__setitem__(slice(0, 4), b"\xff\xff\xff\xff"), "named"),
        ("top_k", lambda body: body.__setitem__(slice(0, 4), bytes(4)), "named"),
        ("top_k", lambda body: body.__setitem__(5, 0x80), "scale"),
        ("top_k", lambda body: body.__setitem__(-1, 255), "top_k: the gaps do not name 1 values"),
        ("top_k", lambda body: body.__setitem__(-1, 77), "top_k: index 77 of 77"),
        ("top_k", lambda body: body.__setitem__(20, 0x10), "nibble"),
        ("top_k_2bit", lambda body: body.__setitem__(0, 3), "named"),
        ("top_k_2bit", lambda body: body.__setitem__(slice(0, 4), bytes(4)), "named"),
        ("top_k_2bit", lambda body: body.__setitem__(slice(0, 4), b"\xff\xff\xff\xff"), "named"),
        ("top_k_2bit", lambda body: body.__setitem__(5, 0x80), "scale"),
        ("top_k_2bit", lambda body: body.__setitem__(8, body[8] | 1), "beyond"),
        ("top_k_2bit", lambda body: body.__setitem__(9, body[9] | 1), "beyond"),
        ("top_k_2bit", lambda body: body.__setitem__(-1, 255), "top_k_2bit: the gaps do not name 2 values"),
        ("top_k_2bit", lambda body: body.__setitem__(-1, 77), "top_k_2bit: index 153 of 77"),
        ("bfloat16", lambda body: body.__setitem__(slice(0, None), b"\xff" * len(body)), "finite"),
        ("float32", lambda body: body.__setitem__(slice(0, None), b"\xff" * len(body)), "finite"),
    ],
)
def test_a_spoilt_body_is_refused_for_the_right_reason(name: str, spoil: object, why: str) -> None:
    body = bytearray(CODECS[name].encode(np.linspace(1, 2, 77, dtype=np.float32)))
    assert callable(spoil)
    spoil(body)
    with pytest.raises(PeerError, match=why):
        CODECS[name].decode(body, np.empty(77, np.float32))
