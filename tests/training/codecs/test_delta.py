"""Whole vectors to chunks and back, and a gain that follows what is lost on the way."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.training.codecs import CODECS, vector
from peerd.training.codecs.difference import norm_of_difference, norm_of_sum
from peerd.training.codecs.vector import GAIN_FIRST, GAIN_MIN, Contraction, Gain, Layout, NotFinite, decode, encode
from peerd.training.effects import Vector
from peerd.transport.errors import PeerError
from peerd.transport.messages import Chunks

every_codec = pytest.mark.parametrize("codec", CODECS)
layouts = st.tuples(st.integers(0, 2000), st.integers(0, 700)).map(lambda sizes: Layout(sizes[0], sum(sizes)))
NETWORK = Layout(1500, 1800)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 512 values, so that a small vector has several."""
    monkeypatch.setattr(vector, "PIECE_VALUES", 512)


def gaussian(layout: Layout, seed: int = 1) -> Vector:
    return np.random.default_rng(seed).standard_normal(layout.total).astype(np.float32)


def size(chunks: Chunks) -> int:
    return sum(len(chunk) for chunk in chunks)


@every_codec
@pytest.mark.usefixtures("small_pieces")
def test_any_layout_comes_back(codec: str) -> None:
    @given(layout=layouts, seed=st.integers(0, 99))
    @settings(deadline=None, max_examples=25)
    def check(layout: Layout, seed: int) -> None:
        values = gaussian(layout, seed)
        known = np.full(layout.total, np.nan, np.float32)
        chunks, contraction = encode(codec, layout, values, decoded=known)
        assert (chunks, contraction) == encode(codec, layout, values)
        assert len(chunks) == -(-layout.parameters // 512) + -(-(layout.total - layout.parameters) // 512)
        assert size(chunks) <= vector.payload_limit(layout)
        out = np.full(layout.total, np.nan, np.float32)
        decode(codec, layout, chunks, out)
        assert np.array_equal(out, known)
        np.testing.assert_array_equal(out[layout.parameters :], values[layout.parameters :])
        left = (values - out)[: layout.parameters].astype(np.float64)
        assert contraction.lost == pytest.approx(left @ left, rel=1e-4, abs=1e-9)
        whole = values[: layout.parameters].astype(np.float64)
        assert contraction.energy == pytest.approx(whole @ whole, rel=1e-4)

    check()


@pytest.mark.usefixtures("small_pieces")
def test_float32_is_exact_and_float64_is_rounded() -> None:
    values = np.random.default_rng(1).standard_normal(NETWORK.total)
    layout = Layout(NETWORK.total, NETWORK.total)
    chunks, contraction = encode("float32", layout, values)
    out = np.empty(layout.total)
    decode("float32", layout, chunks, out)
    assert np.array_equal(out, values.astype(np.float32))
    assert contraction.delta == pytest.approx(1.0)


@every_codec
@pytest.mark.usefixtures("small_pieces")
def test_changed_chunks_give_a_finite_vector_or_a_peer_error(codec: str) -> None:
    chunks, _ = encode(codec, NETWORK, gaussian(NETWORK))

    @given(data=st.data())
    @settings(deadline=None, max_examples=50)
    def check(data: st.DataObject) -> None:
        changed = [bytearray(chunk) for chunk in chunks]
        for _ in range(data.draw(st.integers(1, 3))):
            chunk = data.draw(st.sampled_from(changed))
            if chunk and data.draw(st.booleans()):
                chunk[data.draw(st.integers(0, len(chunk) - 1))] = data.draw(st.integers(0, 255))
            else:
                del chunk[data.draw(st.integers(0, len(chunk))) :]
        out = np.full(NETWORK.total, np.nan, np.float32)
        try:
            decode(codec, NETWORK, tuple(changed), out)
        except PeerError:
            return
        assert np.isfinite(out).all()

    check()


def test_wrong_messages_are_refused() -> None:
    chunks, _ = encode("int8", NETWORK, gaussian(NETWORK))
    out = np.empty(NETWORK.total, np.float32)
    for codec, sent in (
        ("gzip", chunks),
        ("x" * 10_000, chunks),
        ("int8", ()),
        ("int8", chunks[:1]),
        ("int8", (*chunks, chunks[0])),
        ("int8", chunks[::-1]),
        ("float32", chunks),
    ):
        with pytest.raises(PeerError) as caught:
            decode(codec, NETWORK, sent, out)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("place", [0, 1499, 1500, 1799])
@every_codec
def test_nothing_that_is_not_finite_leaves(codec: str, place: int) -> None:
    values = gaussian(NETWORK)
    values[place] = np.nan
    with pytest.raises(NotFinite):
        encode(codec, NETWORK, values)


@every_codec
def test_full_pieces_fit_their_chunks(codec: str) -> None:
    layout = Layout(vector.PIECE_VALUES + 3, vector.PIECE_VALUES + 3)
    values = np.random.default_rng(1).integers(0, 2**32, layout.total, np.uint32).view(np.float32)
    values[~np.isfinite(values)] = 0  # random bits: zstd cannot help
    chunks, _ = encode(codec, layout, values)
    assert len(chunks) == 2
    assert max(len(chunk) for chunk in chunks) <= 4 << 20
    assert size(chunks) <= vector.payload_limit(layout)


def test_a_zero_difference_contracts_wholly_and_costs_little() -> None:
    layout = Layout(100_000, 100_000)
    for codec in CODECS:
        chunks, contraction = encode(codec, layout, np.zeros(layout.total, np.float32))
        assert contraction == Contraction(0.0, 0.0)
        assert contraction.delta == 1.0
        assert size(chunks) < 14_000


@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e15, 1e37])
def test_contraction_does_not_depend_on_scale(scale: float) -> None:
    layout = Layout(10_000, 10_000)
    values = gaussian(layout)
    plain = encode("sign", layout, values)[1].delta
    assert encode("sign", layout, values * np.float32(scale))[1].delta == pytest.approx(plain, rel=0.01)


def test_the_daemon_need_not_load_torch() -> None:
    script = "import sys, peerd.training.codecs.vector, peerd.training.trigger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


# ---- the gain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "gain"),
    [
        ("float32", 0.5),
        ("int8", 0.5),
        ("int4", 0.5),
        ("sign", 0.5),
        ("top_k_3", 0.156),
        ("top_k", 0.068),
        ("top_k_2bit", 0.115),
    ],
)
def test_calibration_on_gaussian_values(codec: str, gain: float) -> None:
    layout = Layout(100_000, 100_000)
    meter = Gain()
    assert meter.value == GAIN_FIRST
    meter.observe(encode(codec, layout, gaussian(layout))[1])
    assert meter.value == pytest.approx(gain, rel=0.03)


@given(deltas=st.lists(st.floats(0, 1), max_size=30))
def test_the_gain_stays_in_bounds_and_within_what_was_measured(deltas: list[float]) -> None:
    meter = Gain()
    for number in deltas:
        before = meter.value
        meter.observe(Contraction(lost=1 - number, energy=1.0))
        assert GAIN_MIN <= meter.value <= 0.5
        allowed = min(0.5, max(GAIN_MIN, 0.8 * number))
        if number is not deltas[0]:
            assert min(before, allowed) - 1e-9 <= meter.value <= max(before, allowed) + 1e-9
    value = meter.value
    meter.observe(Contraction(0.0, 0.0))
    assert meter.value == value


def test_the_gain_falls_faster_than_it_rises() -> None:
    meter = Gain()
    meter.observe(Contraction(0.5, 1.0))
    start = meter.value
    meter.observe(Contraction(1.0, 1.0))
    fallen = meter.value
    meter.observe(Contraction(0.5, 1.0))
    assert start - fallen > meter.value - fallen > 0


class Swarm:
    """16 nodes with fixed vectors, on a ring with 16 chords, exchanging compressed differences over every link."""

    def __init__(self, codec: str, start: Vector, constant_gain: float | None = None) -> None:
        self.codec, self.constant_gain = codec, constant_gain
        self.models = start.astype(np.float64)
        nodes = len(start)
        self.layout = Layout(start.shape[1], start.shape[1])
        self.gains = [Gain() for _ in range(nodes)]
        self.links = {
            (node, (node + hop) % nodes): np.stack([start[node]] * 2).astype(np.float32)
            for node in range(nodes)
            for hop in (1, 5)
        }

    def exchange(self, left: int, right: int) -> None:
        references = self.links[left, right]
        for side, node in enumerate((left, right)):
            arrived = np.empty(self.layout.total, np.float32)
            difference = self.models[node].astype(np.float32) - references[side]
            self.gains[node].observe(encode(self.codec, self.layout, difference, decoded=arrived)[1])
            references[side] += arrived
        gain = self.constant_gain or min(self.gains[left].value, self.gains[right].value)
        correction = gain * (references[1] - references[0]).astype(np.float64)
        self.models[left] += correction
        self.models[right] -= correction

    def spread(self) -> float:
        return float(np.linalg.norm(self.models - self.models.mean(axis=0)))

    def rounds(self, number: int) -> list[float]:
        """The spread before, and after each of `number` rounds over all links, in shares of the first."""
        random = np.random.default_rng(3)
        spreads = [self.spread()]
        for _ in range(number):
            for link in random.permutation(list(self.links)):
                self.exchange(*link)
            spreads.append(self.spread())
        return [spread / spreads[0] for spread in spreads]


def starts(kind: str) -> Vector:
    random = np.random.default_rng(2)
    return random.standard_t(3, (16, 600)) if kind == "student t" else random.standard_normal((16, 600))


@pytest.mark.cases(6)
@every_codec
@pytest.mark.parametrize("kind", ["gaussian", "student t"])
def test_consensus_with_every_codec(codec: str, kind: str) -> None:
    """The mean is conserved, the spread falls, and it never grows past where it began."""
    swarm = Swarm(codec, starts(kind))
    mean = swarm.models.mean(axis=0)
    spreads = swarm.rounds(30)
    assert max(spreads) <= 1.001
    assert spreads[-1] < 0.7
    assert spreads[-1] < spreads[20] < spreads[10] < spreads[5]
    np.testing.assert_allclose(swarm.models.mean(axis=0), mean, atol=1e-12)


def test_a_constant_gain_of_one_half_diverges_with_top_k() -> None:
    """Which is why the gain is measured; and it shows that the test above can fail."""
    assert Swarm("top_k_3", starts("gaussian"), constant_gain=0.5).rounds(25)[-1] > 2


@every_codec
@pytest.mark.usefixtures("small_pieces")
def test_float_buffers_come_as_the_bits_that_they_are(codec: str) -> None:
    """A table of frequencies or a noise schedule that nobody trains must not be rounded on its way."""

    @given(layout=layouts, seed=st.integers(0, 99))
    @settings(deadline=None, max_examples=25)
    def check(layout: Layout, seed: int) -> None:
        values = gaussian(layout, seed)
        out = np.empty(layout.total, np.float32)
        decode(codec, layout, encode(codec, layout, values)[0], out)
        assert out[layout.parameters :].tobytes() == values[layout.parameters :].tobytes()

    check()


@given(st.integers(0, 9), st.integers(0, 300), st.booleans())
def test_the_norm_of_a_sum_is_that_in_pieces_too(seed: int, count: int, has_two: bool) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, count), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peerd.training.kernels.passes.PART", 64)  # so that a small vector has several
        found, expected = norm_of_sum(a, b if has_two else None), a + b if has_two else a
        assert found == pytest.approx(float(np.linalg.norm(expected)), rel=1e-5)
        assert norm_of_sum(a, -b) == pytest.approx(norm_of_difference(a, b), rel=1e-5)
