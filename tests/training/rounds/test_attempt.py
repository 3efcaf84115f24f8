"""How pieces travel: nothing is copied where that can be, nothing damaged is taken, and all arrive whatever breaks."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.training.codecs import NotFinite
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Effect, Send, Vector
from peerd.training.rounds import collective
from peerd.training.rounds.attempt import PIECES_AT_ONCE, WINDOW, Attempt, ExactPacking, Pace
from peerd.training.rounds.member import WHOLE
from peerd.transport.errors import PeerError
from peerd.transport.messages import Chunk, PiecesTaken, RoundBegin, RoundPieces


def unpacked(payload: Chunk, count: int) -> Vector:
    values = np.full(count, np.nan, np.float32)
    ExactPacking().unpack(0, payload, values)
    return values


def test_float32_values_travel_as_they_are() -> None:
    values = np.array([1.5, -0.0, 3e38, 1e-45], np.float32)
    payload = ExactPacking().pack(7, values)
    assert bytes(payload) == values.astype("<f4").tobytes()
    assert np.shares_memory(np.frombuffer(payload, np.uint8), values)
    assert unpacked(payload, 4).tobytes() == values.tobytes()


def test_wider_values_become_what_the_others_unpack() -> None:
    values = np.array([1 / 3, 1e-3])
    payload = ExactPacking().pack(0, values)
    assert (unpacked(payload, 2) == values).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_neither_leaves_nor_enters(wrong: float) -> None:
    values = np.array([1.0, wrong], np.float32)
    with pytest.raises(NotFinite):
        ExactPacking().pack(0, values)
    with pytest.raises(PeerError, match="not finite"):
        unpacked(values.tobytes(), 2)
    with pytest.raises(PeerError, match="not finite"):
        ExactPacking().unpack(0, values.tobytes(), np.empty(2, np.float32), onto=np.ones(2, np.float32))


def test_a_sum_that_is_not_finite_is_nobodys_fault() -> None:
    large = np.array([1.0, 3e38], np.float32)
    with pytest.raises(NotFinite):
        ExactPacking().unpack(0, large.tobytes(), np.empty(2, np.float32), onto=large)


def test_a_piece_of_another_length_is_refused() -> None:
    with pytest.raises(PeerError, match="12 bytes where 8 are due"):
        unpacked(bytes(12), 2)


# ---------------------------------------------------------------------------------------------- a whole attempt


class Ring:
    """Members of one attempt and what is between them; a connection may break and lose what is on its way."""

    def __init__(self, size: int, values: int, topology: str, buffers: int = 0) -> None:
        """The last `buffers` of the values are any bits, the same on all members."""
        names = tuple("abcdefg"[:size])
        begin = RoundBegin(1, 1, "float32", topology, True, False, names, (1,) * size)
        rng = np.random.default_rng(values)
        vectors = {name: rng.integers(-999, 999, values).astype(np.float32) for name in names}
        constant = rng.integers(0, 2**32, buffers, np.uint32).view(np.float32)
        self.constant = np.where(np.abs(constant) < np.finfo(np.float32).max / size, constant, np.float32(0.1))
        for vector in vectors.values():
            vector[values - buffers :] = self.constant
        with np.errstate(over="ignore"):
            self.mean = np.sum(list(vectors.values()), axis=0) / np.float32(size)
        self.mean[values - buffers :] = self.constant
        layout = Layout(values - buffers, values)
        self.members = {name: Attempt(begin, name, vectors[name], layout, Pace()) for name in names}
        self.queues: dict[tuple[str, str], deque[RoundPieces | PiecesTaken]] = {}
        self.unconfirmed: dict[tuple[str, str], set[int]] = {}
        self.messages = self.confirmations = 0
        for name, member in self.members.items():
            self.post(name, member.come(WHOLE, 0.0))

    def post(self, source: str, effects: list[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect, Send)
            message = effect.message
            assert isinstance(message, RoundPieces | PiecesTaken)
            self.queues.setdefault((source, effect.peer), deque()).append(message)
            if isinstance(message, RoundPieces):
                self.messages += 1
                assert 0 < len(message.seqs) == len(message.chunks) <= PIECES_AT_ONCE
                under_way = self.unconfirmed.setdefault((source, effect.peer), set())
                under_way |= set(message.seqs)
                assert len(under_way) <= WINDOW
            else:
                self.confirmations += 1
                assert 0 < len(message.seqs) <= WINDOW

    def deliver(self, source: str, target: str, now: float) -> None:
        message = self.queues[source, target].popleft()
        if isinstance(message, RoundPieces):
            self.post(target, self.members[target].on_pieces(source, message, now))
        else:
            self.unconfirmed[target, source] -= set(message.seqs)
            self.post(target, self.members[target].on_taken(source, message, now))

    def break_off(self, source: str, target: str, now: float) -> None:
        """What is under way is lost, and the source says again what has had no answer."""
        self.queues[source, target].clear()
        self.post(source, self.members[source].repeat(target, now))


@settings(deadline=None)
@given(
    st.sampled_from(["ring", "tree:2", "halving"]), st.integers(1, 7), st.integers(1, 90), st.integers(1, 9),
    st.randoms(use_true_random=False), st.integers(0, 20), st.integers(0, 90),
)  # fmt: skip
def test_every_member_has_the_exact_mean_whatever_breaks(
    topology: str, size: int, values: int, piece: int, rng: random.Random, breaks: int, buffers: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "PIECE_VALUES", piece)
        ring = Ring(size, values, topology, min(buffers, values))
        now = 0.0
        while waiting := sorted(link for link, queue in ring.queues.items() if queue):
            now += 1.0
            link = rng.choice(waiting)
            if breaks and rng.random() < 0.2:
                breaks -= 1
                ring.break_off(*link, now)
            else:
                ring.deliver(*link, now)
        for member in ring.members.values():
            assert member.done, "nothing is under way, and something is missing"
            assert member.mean().tobytes() == ring.mean.tobytes()
        assert not any(ring.unconfirmed.values())


def test_pieces_that_are_ready_together_go_and_are_confirmed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "PIECE_VALUES", 10)
    ring = Ring(4, 4 * 80, "ring")  # eight pieces a segment
    while waiting := sorted(link for link, queue in ring.queues.items() if queue):
        for link in waiting:
            ring.deliver(*link, 0.0)
    pieces = 4 * 8 * 6
    assert all(member.done for member in ring.members.values())
    assert ring.messages == ring.confirmations == pieces // PIECES_AT_ONCE


def test_pieces_and_chunks_that_do_not_match_are_refused() -> None:
    ring = Ring(2, 20, "ring")
    with pytest.raises(PeerError, match="2 pieces in 1 chunks"):
        ring.members["a"].on_pieces("b", RoundPieces(1, 1, (0, 1), (b"",)), 0.0)


@pytest.mark.parametrize("topology", ["ring", "tree:2", "halving"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_vector_that_is_lent_stays_as_it_is(topology: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "PIECE_VALUES", 4)
    names = tuple("abcdefg"[:size])
    begin = RoundBegin(1, 1, "float32", topology, False, False, names, (1,) * size, weights=(1.0,) * size)
    layout, rng = Layout(30, 33), np.random.default_rng(size)
    lent = {name: rng.integers(-999, 999, 33).astype(np.float32) for name in names}
    before = {name: vector.copy() for name, vector in lent.items()}
    rooms = {name: np.full(33, np.nan, np.float32) for name in names}
    for vector in lent.values():
        vector.flags.writeable = False
    members = {name: Attempt(begin, name, lent[name], layout, Pace(), rooms[name]) for name in names}
    waiting = [(name, effect) for name in names for effect in members[name].come(WHOLE, 0.0)]
    while waiting:
        source, effect = waiting.pop(0)
        assert isinstance(effect, Send)
        target, message = members[effect.peer], effect.message
        if isinstance(message, RoundPieces):
            for chunk in message.chunks:
                assert not any(np.shares_memory(np.frombuffer(chunk, np.uint8), vector) for vector in lent.values())
            waiting += [(effect.peer, each) for each in target.on_pieces(source, message, 0.0)]
        else:
            assert isinstance(message, PiecesTaken)
            waiting += [(effect.peer, each) for each in target.on_taken(source, message, 0.0)]
    for name, member in members.items():
        assert member.mean() is rooms[name]
        assert (rooms[name] == np.sum(list(before.values()), axis=0)).all()
        assert (lent[name] == before[name]).all()
