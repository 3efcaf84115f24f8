"""A whole flat vector to chunks and back, and what the loss on the way means for the gain.

The vector is cut into pieces of at most PIECE_VALUES; each becomes one chunk (codec, then compress). Parameters use the
chosen codec. Float buffers (running means and variances, tables of frequencies) always travel as they are: one that no
step changes must stay the bits that it is on every node, a sign or a top-k of a variance is a worse variance, and they
are few. Pieces are independent of each other: kernels/cores.py does them side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from peerd.training.codecs import CODECS, ONE_PASS, Codec, NotFinite
from peerd.training.codecs.blocks import BLOCK
from peerd.training.codecs.codec import Encoded, finite_float32
from peerd.training.codecs.compress import Compressor, unpack
from peerd.training.effects import Sliced, Vector
from peerd.training.kernels.cores import each
from peerd.training.kernels.passes import add_within, squares
from peerd.transport.errors import PeerError
from peerd.transport.messages import CHUNK_VALUES, Chunk, Chunks

__all__ = [
    "PIECE_VALUES",
    "VALUE_MAX",
    "Contraction",
    "Gain",
    "Layout",
    "NotFinite",
    "decode",
    "each_decoded",
    "encode",
    "payload_limit",
    "pieces",
]

PIECE_VALUES = CHUNK_VALUES - BLOCK
"""One block short of CHUNK_VALUES, so that a float32 piece and its flag byte still fit a chunk of 4 MiB."""

Result = TypeVar("Result")

BUFFER_CODEC = "float32"
VALUE_MAX = 1e30
"""No weight is larger; a float32 difference of two such values is still finite."""
GAIN_MAX = 0.5
"""At one half a pair meets in the middle: more overshoots."""
GAIN_MIN = 0.001
"""A tenth of what top-k 1 % allows on its worst input, all values equal: a link that mixes nothing is no link."""
GAIN_FIRST = 0.05
"""Below what top-k 1 % allows on Gaussian values (0.07), so that no codec's first exchange overshoots."""
GAIN_SHARE = 0.8
"""Gain for each unit of contraction: 0.07 for top-k 1 % and 0.15 for 3 % of Gaussian values, 0.5 for sign."""
FALLING = 0.5
RISING = 0.2
"""Weights of a measurement below and above the running contraction: too low a gain costs time, too high a one the
model. Consensus on Gaussian and Student t values is as fast as without smoothing, and one odd measurement halves the
gain at most."""


@dataclass(frozen=True)
class Layout:
    """What a flat vector holds: values [0, parameters) are parameters, [parameters, total) float buffers.

    Of these the ranges (start, stop) in `variances` are running variances; see variances.py. The last `states` of them
    are the optimizer's, where gradients are exchanged by members that step alike.
    """

    parameters: int
    total: int
    variances: tuple[tuple[int, int], ...] = ()
    tensors: tuple[int, ...] = ()  # where each ends, in order; what bounds one tensor's change needs to know
    states: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.parameters <= self.total - self.states

    @property
    def gradients(self) -> Layout:
        """Of the vector that is exchanged in place of the model: parameters' gradients, then what travels as it is.

        These are the float buffers as they are at that step, and a flag for each tensor of parameters, in order: 1
        where it has a gradient, 0 where none came to it (and its part of the vector is zeros).
        """
        flags = sum(end <= self.parameters for end in self.tensors)
        return Layout(self.parameters, self.total - self.states + flags)

    def cut(self, count: int) -> list[tuple[slice, Layout]]:
        """The vector in `count` parts that follow each other, equal but for a value: where each is, and its layout."""
        cuts = [self.total * index // count for index in range(count + 1)]
        return [
            (
                slice(start, stop),
                Layout(
                    min(stop, max(start, self.parameters)) - start,
                    stop - start,
                    tuple(
                        (max(first, start) - start, min(last, stop) - start)
                        for first, last in self.variances
                        if first < stop and last > start
                    ),
                    tuple(
                        min(end, stop) - start
                        for begin, end in pairwise((0, *self.tensors))
                        if start < end and begin < stop
                    ),
                ),
            )
            for start, stop in pairwise(cuts)
        ]


class _Piece(NamedTuple):
    codec: Codec
    where: slice
    of_parameters: bool


@dataclass(frozen=True)
class Contraction:
    """How much of a difference v a codec C let through, over the parameters."""

    lost: float  # ||v - C(v)||^2
    energy: float  # ||v||^2

    @property
    def delta(self) -> float:
        """1 - lost/energy, in [0, 1]; 1 if there was nothing to send (Koloskova et al. 2019 call it delta, too)."""
        return min(1.0, max(0.0, 1.0 - self.lost / self.energy)) if self.energy > 0 else 1.0


class Gain:
    """The mixing gain that one sender's measured contraction allows: min(0.5, 0.8 * delta).

    Delta is a running mean that falls faster than it rises. A constant gain diverges once it is too high for the codec
    (CHOCO-SGD proves convergence for small ones only): 16 nodes agree with every codec at 0.8 of the contraction, and
    at 1.6 top-k 3 % diverges.
    """

    def __init__(self) -> None:
        self._delta: float | None = None

    def __repr__(self) -> str:
        return f"<Gain {self.value:.3f}>"

    def observe(self, measured: Contraction) -> None:
        """Take in the contraction of one encoded difference; a zero difference says nothing."""
        if measured.energy <= 0:
            return
        if self._delta is None:
            self._delta = measured.delta
        else:
            weight = FALLING if measured.delta < self._delta else RISING
            self._delta += weight * (measured.delta - self._delta)

    @property
    def contraction(self) -> float:
        """The running mean of delta; 0 before anything was measured."""
        return self._delta or 0.0

    @property
    def value(self) -> float:
        """The gain, in [GAIN_MIN, GAIN_MAX]; GAIN_FIRST before anything was measured."""
        if self._delta is None:
            return GAIN_FIRST
        return min(GAIN_MAX, max(GAIN_MIN, GAIN_SHARE * self._delta))


def encode(
    codec_name: str, layout: Layout, values: Sliced, *, known: Sliced | None = None, decoded: Vector | None = None
) -> tuple[Chunks, Contraction]:
    """The chunks for `values`, or for values - known, all of shape (layout.total,), and what they lose.

    `decoded`, of the same shape, is overwritten with what `decode` makes of these chunks: measuring the loss computes
    it anyway, and the sender needs it for its own copy of the reference.

    Raises:
        NotFinite: a value is a NaN or an infinity; no chunk must leave then.
    """
    assert values.shape == (layout.total,)
    chunks: list[Chunk] = []
    lost = energy = 0.0

    def one(compressor: Compressor, piece: _Piece) -> tuple[Chunk, float, float]:
        where = piece.where
        reference = None if known is None else known[where]
        arrives = None if decoded is None else decoded[where]
        encoded = _encode_piece(piece.codec, values[where], reference, arrives, measured=piece.of_parameters)
        return compressor.pack(encoded.body), encoded.lost, encoded.energy

    for side in _pieces(codec_name, layout):
        alike = partial(one, Compressor())
        first = [alike(piece) for piece in side[:1]]  # says whether it pays to compress the others
        for piece, (chunk, loss, of_piece) in zip(side, first + each(alike, side[1:]), strict=True):
            chunks.append(chunk)
            if piece.of_parameters:
                lost += loss
                energy += of_piece
    return tuple(chunks), Contraction(lost, energy)


def _encode_piece(
    codec: Codec, values: Vector, known: Vector | None, decoded: Vector | None, *, measured: bool
) -> Encoded:
    one_pass = ONE_PASS.get(codec.name)
    if one_pass is not None and (encoded := one_pass.encode_in_one_pass(values, known, decoded)) is not None:
        return encoded
    difference = values if known is None else values - known
    if decoded is None and not measured:
        return Encoded(memoryview(codec.encode(difference)), 0.0, 0.0)
    arrived = np.empty_like(difference) if decoded is None else decoded
    if one_pass is not None:  # not of these arrays, but of their difference in float32
        rounded = finite_float32(difference)
        arrives = np.empty_like(rounded)
        if (encoded := one_pass.encode_in_one_pass(rounded, None, arrives)) is not None:
            np.copyto(arrived, arrives)
            return Encoded(encoded.body, squares(difference, arrived), squares(difference))
    body = codec.encode(difference)
    codec.decode(body, arrived)
    return Encoded(memoryview(body), squares(difference, arrived), squares(difference))


def decode(
    codec_name: str,
    layout: Layout,
    chunks: Chunks,
    out: Sliced,
    *,
    known: Sliced | None = None,
    value_max: float = VALUE_MAX,
) -> None:
    """Overwrite `out`, shape (layout.total,), float32 or float64, with what `chunks` hold: finite, or an error.

    Or with known + what they hold, of which no value may be beyond `value_max`.

    Every codec promises finite values, which costs it a look at the scales where looking at `out` would be a pass.

    Raises:
        PeerError: an unknown codec, a wrong number of chunks, or a chunk that is not as `encode` makes them; `out` is
            then half written, so it must be scratch.
    """
    assert out.shape == (layout.total,)

    def one(encoded: tuple[_Piece, Chunk]) -> None:
        where = encoded[0].where
        piece = out[where]
        _decode_piece(*encoded, piece)
        if known is not None and not add_within(piece, known[where], value_max, piece):
            raise PeerError(f"a value beyond {value_max:g}")
        out[where] = piece

    each(one, _with_chunks(codec_name, layout, chunks))


def each_decoded(
    codec_name: str,
    layout: Layout,
    chunks: Chunks,
    dtype: np.dtype[np.floating[Any]],
    work: Callable[[slice, Vector], Result],
) -> list[Result]:
    """`work` of each piece of what `chunks` hold: where it is, and its values, which are nobody's afterwards.

    Raises PeerError, as `decode`.
    """

    def one(encoded: tuple[_Piece, Chunk]) -> Result:
        where = encoded[0].where
        piece: Vector = np.empty(where.stop - where.start, dtype)
        _decode_piece(*encoded, piece)
        return work(where, piece)

    return each(one, _with_chunks(codec_name, layout, chunks))


def _with_chunks(codec_name: str, layout: Layout, chunks: Chunks) -> list[tuple[_Piece, Chunk]]:
    if codec_name not in CODECS:
        raise PeerError(f"codec {codec_name[:40]!r} is none of {', '.join(CODECS)}")
    of_parameters, of_buffers = _pieces(codec_name, layout)
    due = len(of_parameters) + len(of_buffers)
    if len(chunks) != due:
        raise PeerError(f"{len(chunks)} chunks where {due} are due")
    return list(zip(of_parameters + of_buffers, chunks, strict=True))


def _decode_piece(piece: _Piece, chunk: Chunk, out: Vector) -> None:
    piece.codec.decode(unpack(chunk, piece.codec.body_limit(len(out))), out)


def payload_limit(layout: Layout, kept: int = 0) -> int:
    """Bytes in the longest payload that any codec can make of such a vector, or of a piece of it alone.

    Or of it as it is, with so many values more for each parameter: those that a server's optimizer keeps.

    A round sends each float buffer in two halves (training/rounds/attempt.py), at most all of them in one message.
    """
    halves = 4 * (layout.total - layout.parameters)
    whole = max(_room(codec, layout.parameters) for codec in CODECS.values())
    whole += _room(CODECS[BUFFER_CODEC], layout.total - layout.parameters)
    piece = max(1 + codec.body_limit(min(PIECE_VALUES, layout.total)) for codec in CODECS.values())
    count = layout.total + kept * layout.parameters
    return max(whole, piece, _room(CODECS[BUFFER_CODEC], count)) + halves


def _room(codec: Codec, count: int) -> int:
    """Bytes of so many values' longest chunks."""
    full, rest = divmod(count, PIECE_VALUES)
    return full * (1 + codec.body_limit(PIECE_VALUES)) + (1 + codec.body_limit(rest) if rest else 0)


def _pieces(codec_name: str, layout: Layout) -> tuple[list[_Piece], list[_Piece]]:
    """Those of the parameters of a vector, and those of its buffers."""
    cut = layout.parameters
    return (
        [_Piece(CODECS[codec_name], where, True) for where in _cut(0, cut)],
        [_Piece(CODECS[BUFFER_CODEC], where, False) for where in _cut(cut, layout.total)],
    )


def pieces(layout: Layout) -> list[slice]:
    """Where a vector is cut, whatever the codec."""
    return _cut(0, layout.parameters) + _cut(layout.parameters, layout.total)


def _cut(first: int, last: int) -> list[slice]:
    return [slice(start, min(start + PIECE_VALUES, last)) for start in range(first, last, PIECE_VALUES)]
