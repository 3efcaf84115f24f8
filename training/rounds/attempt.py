"""How does one attempt of a round travel? A collective's pieces in a window to each peer, repeated until taken.

A peer has at most WINDOW pieces that it has not confirmed, so that queues stay short whatever the model's size. What a
broken connection lost is sent again once messages flow; the bytes are kept until then, and a piece that came twice is
confirmed twice and used once. Pieces that are ready together go and are confirmed together: messages, not bytes, cost
most of a round over shared memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from peerd.training.codecs import CODECS
from peerd.training.codecs.codec import field, finite_float32, not_finite, require_length
from peerd.training.codecs.compress import Compressor, unpack
from peerd.training.codecs.vector import BUFFER_CODEC, Layout
from peerd.training.effects import Effect, Send, Vector
from peerd.training.kernels.passes import add_within, is_finite
from peerd.training.mode_settings import GRADIENTS, ModeSettings
from peerd.training.rounds.collective import Collective, Piece
from peerd.training.rounds.halves import halved, mean_of
from peerd.training.rounds.topology import parse_topology
from peerd.transport.errors import PeerError
from peerd.transport.ids import NodeId
from peerd.transport.messages import Chunk, PiecesTaken, RoundBegin, RoundPieces

WINDOW = 8
PIECES_AT_ONCE = 4  # pieces in a message; of trees half as many, and half the window: their levels wait for each other
REPEAT_MIN_S = 60.0  # breaks are told by Connected; this is for what was dropped without one
REPEAT_SHARE = 4  # times the slowest confirmation so far
ROUND_WEIGHT = 0.2  # of the last round's duration in the running mean

EXACT_CODEC = "float32"
FLOAT32_MAX = float(np.finfo(np.float32).max)
LAST_CODEC = "int8"  # of the last round of a run whose codec loses: what this loses no later round makes good


def ends_whole(settings: ModeSettings) -> bool:
    """Whether the last round of a run is of whole models (or of a source's, where gradients were exchanged)."""
    return settings.exchange == GRADIENTS or settings.codec == EXACT_CODEC


class CodecPacking:
    """Pieces through a codec, float buffers as they are; what it loses is kept, to be contributed later."""

    exact = False

    def __init__(self, codec_name: str, layout: Layout) -> None:
        self.cut = layout.parameters
        self.lost = np.zeros(layout.total, np.float32)
        self._codecs = CODECS[codec_name], CODECS[BUFFER_CODEC]
        self._compressors = Compressor(), Compressor()

    def pack(self, start: int, values: Vector) -> Chunk:
        """See `Packing.pack`. Raises NotFinite."""
        is_buffer = start >= self.cut
        codec = self._codecs[is_buffer]
        body = codec.encode(values)
        lost = self.lost[start : start + len(values)]
        codec.decode(body, lost)
        np.subtract(values, lost, out=lost)
        return self._compressors[is_buffer].pack(body)

    def unpack(self, start: int, payload: Chunk, out: Vector, onto: Vector | None = None) -> None:
        """See `Packing.unpack`."""
        codec = self._codecs[start >= self.cut]
        values = np.empty(len(out), np.float32)
        codec.decode(unpack(payload, codec.body_limit(len(out))), values)
        if onto is None:
            np.copyto(out, values)
        else:
            np.add(onto, values, out=out)


class ExactPacking:
    """Pieces as the float32 values that they are.

    Byte planes and zstd would save 5 to 8 % of the bytes for 2.4 ms of a core a MB (benchmarks/codecs.py): more than
    a line of 3 Gbit/s takes for it.
    """

    exact = True
    cut = 0
    lost = None

    def pack(self, start: int, values: Vector) -> Chunk:
        """See `Packing.pack`; not a copy where that can be. Raises NotFinite.

        Values change while their piece is on its way only by the sum, of which the piece is a part: it came before.
        """
        exact = finite_float32(values)
        if exact.dtype != values.dtype:
            values[:] = exact
        return exact.astype("<f4", copy=False).view(np.uint8).data

    def unpack(self, start: int, payload: Chunk, out: Vector, onto: Vector | None = None) -> None:
        """See `Packing.unpack`. Raises NotFinite: a sum is not finite."""
        require_length(payload, 4 * len(out), EXACT_CODEC)
        values = field(payload, "<f4", 0, len(out))
        if not add_within(values, onto, FLOAT32_MAX, out):
            if not is_finite(values):
                raise PeerError(f"{EXACT_CODEC}: a value is not finite")
            raise not_finite()


class Pace:
    """What confirmations say of the links: what deadlines and the choice of a topology follow."""

    def __init__(self) -> None:
        self.slowest_s = 0.0
        self.latency_s = 1e-3  # a local network's, until the first measurement
        self.bytes_per_s = 125e6
        self.usual_round_s: float | None = None  # from a contribution to its commit
        self.usual_period_s = 0.0  # from a commit to the next
        self._measured = False

    def observe(self, size: int, seconds: float) -> None:
        """`size` bytes were confirmed after so long."""
        self.slowest_s = max(self.slowest_s, seconds)
        flown_s = max(1e-9, seconds - 2 * self.latency_s)
        rate = size / flown_s
        self.bytes_per_s = rate if not self._measured else max(0.9 * self.bytes_per_s, rate)
        self._measured = True

    def answered(self, seconds: float) -> None:
        """A short message was answered after so long."""
        self.latency_s = max(1e-6, min(self.latency_s, seconds / 2) if self._measured else seconds / 2)

    def round_took(self, seconds: float) -> None:
        """A round was committed so long after our contribution; a rare long one does not make us patient for ever."""
        usual_s = self.usual_round_s
        self.usual_round_s = seconds if usual_s is None else usual_s + ROUND_WEIGHT * (seconds - usual_s)

    def committed_after(self, seconds: float) -> None:
        """So long after the commit before; weighed in the same way."""
        self.usual_period_s += ROUND_WEIGHT * (seconds - self.usual_period_s) if self.usual_period_s else seconds

    @property
    def repeat_s(self) -> float:
        """After how long an unconfirmed piece is sent again."""
        return max(REPEAT_MIN_S, REPEAT_SHARE * self.slowest_s)


class Attempt:
    """One member's part in one attempt."""

    def __init__(
        self, begin: RoundBegin, me: NodeId, vector: Vector, layout: Layout, pace: Pace, room: Vector | None = None
    ) -> None:
        """`vector`, shape (layout.total,), is lent until the attempt is over; the sum comes to be in `room`, or in its
        place. Codec and topology of `begin` are known ones: see `Rounds`."""
        self.begin = begin
        self.taken = 0  # pieces so far
        self._pace = pace
        self._layout = layout
        self._packing = ExactPacking() if begin.codec == EXACT_CODEC else CodecPacking(begin.codec, layout)
        if self._in_halves:
            vector, room = np.concatenate([vector[: layout.parameters], halved(vector[layout.parameters :])]), None
        topology = parse_topology(begin.topology)
        self._at_once = PIECES_AT_ONCE if topology.name == "ring" else PIECES_AT_ONCE // 2
        self._collective = Collective(
            topology, begin.roster.index(me), len(begin.roster), vector, self._packing,
            layout.parameters if begin.weights else self._packing.cut, room,
        )  # fmt: skip
        self._ranks = {peer: rank for rank, peer in enumerate(begin.roster)}
        self._waiting: dict[NodeId, deque[Piece]] = {}
        self._sent: dict[NodeId, dict[int, tuple[Piece, float]]] = {}  # by tag
        self._confirmed: dict[NodeId, deque[int]] = {}  # the last, as many as the peer's window has

    @property
    def done(self) -> bool:
        """Whether the sum is here."""
        return self._collective.done

    def mean(self) -> Vector:
        """The mean of all contributions, shape (layout.total,), the same bits for all members; ask once.

        Of gradients, and of a model that all take over, it is their sum: each member knows what to divide it by. A
        float buffer that all contribute as the same bits has these bits in the mean of whole models. Where members have
        shares, their parameters come multiplied by these.
        """
        assert self.done
        count, sums = len(self.begin.roster), self._collective.vector
        parameters, total = self._layout.parameters, self._layout.total
        parts = sum(self.begin.shares) or count
        if self._only_sums:
            return sums
        if self._in_halves:
            sums[parameters:total] = mean_of(sums[parameters:], count)
        else:
            sums[parameters:] /= count
        sums[:parameters] /= parts
        return sums[:total]

    @property
    def _only_sums(self) -> bool:
        return bool(self.begin.weights or self.begin.source)

    @property
    def _in_halves(self) -> bool:
        """A lossy codec carries differences from what all hold: those of a constant are zeros."""
        return self._packing.exact and self._layout.total > self._layout.parameters and not self._only_sums

    @property
    def lost(self) -> Vector | None:
        """What this member's own encoding dropped; None: nothing."""
        return self._packing.lost

    def come(self, there: tuple[int, int], now: float) -> list[Effect]:
        """These of our own values are there, from the first to before the last: see `Collective`. Raises NotFinite."""
        self._queue(self._collective.come(*there))
        return self._post(now)

    def on_pieces(self, sender: NodeId, message: RoundPieces, now: float) -> list[Effect]:
        """Take pieces of this attempt in. Raises PeerError and NotFinite."""
        rank = self._ranks.get(sender)
        if rank is None or len(message.chunks) != len(message.seqs):
            raise PeerError(
                f"{len(message.seqs)} pieces in {len(message.chunks)} chunks from one who is in the roster: "
                f"{rank is not None}"
            )
        for seq, chunk in zip(message.seqs, message.chunks, strict=True):
            self.taken += 1
            self._queue(self._collective.receive(rank, seq, chunk))
        self._confirmed.setdefault(sender, deque(maxlen=WINDOW)).extend(message.seqs)
        return [*self._post(now), self._taken(sender, message.seqs)]  # the farthest are served first

    def on_taken(self, sender: NodeId, message: PiecesTaken, now: float) -> list[Effect]:
        """Pieces have arrived: the window has room for others."""
        sent = self._sent.get(sender, {})
        found = [sent.pop(seq) for seq in message.seqs if seq in sent]
        if not found:
            return []
        last_at = found[-1][1]  # after a break one confirmation may be of several messages
        self._pace.observe(sum(len(piece.payload) for piece, at in found if at == last_at), now - last_at)
        return self._fill(sender, now)

    def repeat(self, peer: NodeId, now: float) -> list[Effect]:
        """Say again what the peer may not have: pieces it has not confirmed, and confirmations it may wait for."""
        sent = self._sent.get(peer, {})
        self._sent[peer] = {seq: (piece, now) for seq, (piece, _) in sent.items()}
        pieces = [piece for piece, _ in sent.values()]
        effects: list[Effect] = [
            self._message(peer, pieces[at : at + self._at_once]) for at in range(0, len(pieces), self._at_once)
        ]
        confirmed = self._confirmed.get(peer)
        return [*effects, self._taken(peer, confirmed)] if confirmed else effects

    def repeat_overdue(self, now: float) -> list[Effect]:
        """Send again what nobody has confirmed for long."""
        overdue = [
            peer for peer, sent in self._sent.items() if any(now >= at + self._pace.repeat_s for _, at in sent.values())
        ]
        return [effect for peer in overdue for effect in self.repeat(peer, now)]

    def _taken(self, peer: NodeId, seqs: Iterable[int]) -> Send:
        return Send(peer, PiecesTaken(self.begin.round, self.begin.attempt, tuple(seqs)))

    def _queue(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._waiting.setdefault(self.begin.roster[piece.to], deque()).append(piece)

    def _post(self, now: float) -> list[Effect]:
        return [effect for peer in self._waiting for effect in self._fill(peer, now)]

    def _fill(self, peer: NodeId, now: float) -> list[Effect]:
        waiting, sent = self._waiting.get(peer, deque()), self._sent.setdefault(peer, {})
        effects: list[Effect] = []
        window = WINDOW // PIECES_AT_ONCE * self._at_once
        while waiting and len(sent) < window:
            pieces = [waiting.popleft() for _ in range(min(self._at_once, window - len(sent), len(waiting)))]
            sent |= {piece.tag: (piece, now) for piece in pieces}
            effects.append(self._message(peer, pieces))
        return effects

    def _message(self, peer: NodeId, pieces: list[Piece]) -> Send:
        tags, payloads = tuple(piece.tag for piece in pieces), tuple(piece.payload for piece in pieces)
        return Send(peer, RoundPieces(self.begin.round, self.begin.attempt, tags, payloads))
