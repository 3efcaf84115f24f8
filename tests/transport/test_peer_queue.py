"""What waits for a peer is not queued twice, keeps its order, and is bounded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import given
from hypothesis import strategies as st

from peerd.transport.messages import (
    Applied,
    Delta,
    LeaderPassed,
    LinkClosed,
    Message,
    ModelRequest,
    ModelSnapshot,
    PairAnswer,
    Pushed,
    RoundPhase,
    RoundPieces,
    RoundReport,
    Weights,
)  # fmt: skip
from peerd.transport.peer_queue import QUEUE_MAX, PeerQueue

SUPERSEDING = RoundReport | PairAnswer | Pushed | LeaderPassed


def report(number: int) -> RoundReport:
    return RoundReport(1, RoundPhase.READY, number, 0, 0, 0, False, False, False)


def half(seq: int, chunk: bytes) -> Delta:
    return Delta(1, seq, "sign", 0.5, True, False, b"", 0.0, 0.0, (chunk,))


def weights(clock: int, worker: str, final: bool, chunk: bytes) -> Weights:
    return Weights(0, 1, "s", clock, (Applied(worker, 1, 1),), final, (), (chunk,))


def pieces(attempt: int, seq: int, chunk: bytes) -> RoundPieces:
    return RoundPieces(1, attempt, (seq,), (chunk,))


messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(pieces, st.integers(0, 2), st.integers(0, 2), st.sampled_from([b"a", b"b"])),
    st.builds(LeaderPassed, st.sampled_from("ab"), st.integers(0, 3), st.booleans()),
    st.integers(0, 3).map(report),
    st.builds(half, st.integers(0, 3), st.sampled_from([b"a", b"b"])),
    st.integers(0, 3).map(lambda link: LinkClosed(link, 1)),
    st.builds(PairAnswer, st.integers(0, 3), st.booleans()),
    st.builds(Pushed, st.integers(0, 1), st.integers(0, 3), st.floats(0, 1), st.booleans()),
    st.just(ModelRequest()),
    st.builds(ModelSnapshot, st.integers(0, 3), st.just("raw"), st.just(())),
    st.builds(weights, st.integers(0, 1), st.sampled_from("ab"), st.booleans(), st.sampled_from([b"a", b"b"])),
)
puts = st.tuples(st.just("put"), messages, st.integers(0, 1))
events = st.lists(st.one_of(puts, st.tuples(st.just("take")), st.tuples(st.just("left")), st.tuples(st.just("clear"))))


@given(events)
def test_it_is_what_a_list_with_the_same_rules_is(script: list[tuple[Any, ...]]) -> None:
    queue, waiting, leaving = PeerQueue[tuple[int, Message]](), deque[tuple[int, Message]](), None
    for what, *told in script:
        if what == "put":
            message, scope = told
            waiting = deque((other, one) for other, one in waiting if other != scope or not is_past(one, message))
            same = [at for at, (other, one) in enumerate(waiting) if other == scope and alike(one, message)]
            is_leaving = leaving is not None and leaving[0] == scope and alike(leaving[1], message)
            news = queue.put(message, (scope, message), scope)
            if isinstance(message, SUPERSEDING) and same:
                waiting[same[0]] = scope, message
                assert news
            elif same or (is_leaving and not isinstance(message, SUPERSEDING)):
                assert not news
            else:
                waiting.append((scope, message))
                assert news
        elif what == "take" and waiting and leaving is None:
            assert queue.has_waiting
            leaving = waiting.popleft()
            assert queue.take() is not None
        elif what == "left" and leaving is not None:
            queue.left()
            leaving = None
        elif what == "clear":
            queue.clear()
            waiting, leaving = deque(each for each in waiting if about_a_model(each[1])), None
        assert len(queue) == len(waiting) + (leaving is not None)
    while queue.has_waiting:
        assert queue.take() == waiting.popleft()


def alike(one: Message, other: Message) -> bool:
    """As its reader would say: the same news, whatever its bytes."""
    if isinstance(one, Delta) and isinstance(other, Delta):
        return (one.link, one.seq) == (other.link, other.seq)
    if isinstance(one, Weights) and isinstance(other, Weights):
        return (one.clock, one.answers, one.final) == (other.clock, other.answers, other.final)
    if isinstance(one, PairAnswer) and isinstance(other, PairAnswer):
        return one == other or not (one.accepts or other.accepts)
    if isinstance(one, RoundPieces) and isinstance(other, RoundPieces):
        return (one.attempt, one.seqs) == (other.attempt, other.seqs)
    if isinstance(one, LeaderPassed) and isinstance(other, LeaderPassed):
        return one.leader == other.leader
    if isinstance(one, Pushed) and isinstance(other, Pushed):
        return one.link == other.link
    return type(one) is type(other) and (isinstance(one, RoundReport | ModelSnapshot) or one == other)


def is_past(one: Message, message: Message) -> bool:
    """Nobody needs the pieces of an attempt once another one has begun."""
    return isinstance(one, RoundPieces) and isinstance(message, RoundPieces) and one.attempt < message.attempt


def about_a_model(message: Message) -> bool:
    """Between a newcomer and its donor; of all else a mode says anew what was lost."""
    return isinstance(message, ModelRequest | ModelSnapshot)


def test_a_full_queue_takes_no_more_until_something_has_left() -> None:
    queue = PeerQueue[int]()
    assert all(queue.put(LinkClosed(link, 1), link) for link in range(QUEUE_MAX))
    assert not queue.put(LinkClosed(QUEUE_MAX, 1), QUEUE_MAX)
    assert queue.take() == 0
    assert not queue.put(LinkClosed(QUEUE_MAX, 1), QUEUE_MAX)
    queue.left()
    assert queue.put(LinkClosed(QUEUE_MAX, 1), QUEUE_MAX)


def test_a_peer_that_asks_and_does_not_listen_has_so_much_bulk_wait_for_it() -> None:
    """However many links it opens; what has no chunks goes on, and so does one message, however large."""
    queue = PeerQueue[int]()
    assert queue.put(half(0, bytes(50)), 0, bulk_max=40.0)
    assert not queue.put(half(1, bytes(1)), 1, bulk_max=40.0)
    assert queue.put(LinkClosed(1, 1), 2, bulk_max=40.0)
    queue.take()
    assert not queue.put(half(1, bytes(1)), 1, bulk_max=40.0), "it has not left yet"
    queue.left()
    put = [queue.put(half(seq, bytes(10)), seq, bulk_max=40.0) for seq in range(1, 9)]
    assert put == 4 * [True] + 4 * [False]
    queue.clear()
    assert queue.put(half(9, bytes(40)), 9, bulk_max=40.0)


@dataclass(frozen=True, slots=True)
class Whole(Message):
    """As a mode of a user's own may have one."""

    supersedes: ClassVar[bool] = True

    chunks: tuple[bytes, ...]


def test_what_takes_the_place_of_another_counts_as_long_as_it_is() -> None:
    queue = PeerQueue[int]()
    for size in (40, 10):
        assert queue.put(Whole((bytes(size),)), size, bulk_max=40.0)
    assert queue.put(half(1, bytes(30)), 1, bulk_max=40.0)
    assert not queue.put(half(2, bytes(1)), 2, bulk_max=40.0)
    assert [queue.take(), len(queue)] == [10, 2]
    queue.left()
    assert queue.put(half(2, bytes(10)), 2, bulk_max=40.0)
