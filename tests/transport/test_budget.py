"""A node sends no more than its budget, loses nobody by it, and each connection has its turn."""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio
from hypothesis import given, note
from hypothesis import strategies as st

from peerd.transport.connection import ConnectionLost
from peerd.transport.memory_stream import PIPE_BYTES, MemoryPipe, MemoryStream
from peerd.transport.messages import Delta, Message, Ping, SpeedSample
from peerd.transport.patience import PATIENCE_S, SLOWEST_RATE
from peerd.transport.sending.budget import BURST_S, PIECE_MAX, PIECE_MIN, Budget, BulkTurn, parse_rate
from peerd.transport.sending.send_queue import SendQueue
from peerd.transport.stream import StreamConnection

MBIT = 125_000.0  # bytes a second
MBIT_SECOND = 125_000


@given(
    st.floats(MBIT, 1e9),
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, PIECE_MAX)), min_size=1, max_size=60),
)
def test_no_window_has_more_than_the_rate_and_a_burst(rate: float, asked: list[tuple[float, int]]) -> None:
    budget, now, gone = Budget(rate), 1000.0, []
    for pause, count in asked:
        now += pause * count / rate
        gone.append((now + budget.take(count, now), count))
    note(repr(gone))
    assert [at for at, _ in gone] == sorted(at for at, _ in gone), "first come, first served"
    for first in range(len(gone)):
        for last in range(first, len(gone)):
            seconds = gone[last][0] - gone[first][0]
            size = sum(count for _, count in gone[first : last + 1])
            assert size - gone[last][1] <= rate * (seconds + BURST_S) * (1 + 1e-6)


@given(st.floats(MBIT, 1e9), st.integers(2, 40))
def test_who_always_asks_gets_all_of_it(rate: float, pieces: int) -> None:
    budget, now = Budget(rate), 5.0
    assert PIECE_MIN <= budget.piece <= PIECE_MAX
    for _ in range(pieces):
        now += budget.take(budget.piece, now)
    assert now - 5.0 <= (pieces - 1) * budget.piece / rate * (1 + 1e-6)


@given(st.floats(MBIT, 20 * MBIT), st.randoms(use_true_random=False), st.integers(2, 9))
def test_turns_are_few_enough_and_come_to_all(rate: float, rng: random.Random, many: int) -> None:
    budget = Budget(rate)
    woken: list[int] = []
    turns = [BulkTurn(budget, partial(woken.append, place)) for place in range(many)]
    asked: list[BulkTurn] = []
    for _ in range(40):
        turn = rng.choice(turns)
        if turn.held or (turn in asked and rng.random() < 0.2):  # it has sent all, or its connection is lost
            turn.give()
            asked = [one for one in asked if one is not turn]
        elif turn not in asked:
            asked.append(turn)
            assert turn.take() == turn.held
        held = [one for one in asked if one.held]
        assert held == asked[: budget.turns_max], "in the order in which they asked"
        assert sum(one.held for one in turns) == len(held)
    assert budget.turns_max == 1 or rate / budget.turns_max >= 2 * SLOWEST_RATE
    assert len(woken) <= 40


@pytest.mark.parametrize(
    ("text", "bytes_s"),
    [("2Mbit", 250_000), ("1500kbit/s", 187_500), (" 0.01 Gbit", 1_250_000), ("1Mbit", 125_000), ("1000Gbit", 125e9)],
)
def test_a_rate(text: str, bytes_s: float) -> None:
    assert parse_rate(text) == pytest.approx(bytes_s)


@pytest.mark.parametrize(
    "text", ["2", "2MB", "2mbit", "-2Mbit", "1e3Mbit", "999kbit", "1001Gbit", "nanMbit", "2Mbit 3", ""]
)
def test_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no rate|is outside"):
        parse_rate(text)


def bulk(size: int) -> Delta:
    chunk = random.Random(size).randbytes(size)
    return Delta(7, 1, "float32", 0.5, False, False, b"", 0.0, 0.0, (chunk,))


class Ends:
    """Connections of one node with a budget, each with what its peer has received, and when."""

    def __init__(self, nursery: trio.Nursery, budget: Budget, many: int) -> None:
        self.came: list[list[tuple[float, Message]]] = [[] for _ in range(many)]
        self.lost: list[ConnectionLost] = []
        self.senders = []
        for place in range(many):
            pipe = MemoryPipe(frozenset(("a", f"b{place}")))
            sender = StreamConnection(MemoryStream(pipe, 0, "far"), "far", budget=budget)
            self.senders.append(sender)
            nursery.start_soon(sender.run_sender)
            nursery.start_soon(self._receive, place, StreamConnection(MemoryStream(pipe, 1, "near"), "near"))

    async def _receive(self, place: int, connection: StreamConnection) -> None:
        connection.payload_limit = 1 << 30
        try:
            while True:
                message = await connection.receive()
                self.came[place].append((trio.current_time(), message))
        except ConnectionLost as lost:
            self.lost.append(lost)


@pytest.mark.trio(clock="autojump")
async def test_slow_as_it_is_nobody_is_given_up() -> None:
    """Six links at 1 Mbit/s: side by side each would be slower than a receiver waits for."""
    async with trio.open_nursery() as nursery:
        size, many = 3 << 20, 6
        ends, began = Ends(nursery, Budget(MBIT), many), trio.current_time()
        for sender in ends.senders:
            await sender.send(bulk(size))
        for sender in ends.senders:
            await sender.flushed()
        took_s = trio.current_time() - began
        assert 0.98 <= took_s * MBIT / (size * many) <= 1.05
        assert took_s > PATIENCE_S + size / SLOWEST_RATE, "longer than each waits for a message"
        await trio.sleep(1)
        assert not ends.lost
        assert [len(came) for came in ends.came] == [1] * many
        for sender in ends.senders:
            await sender.aclose()


@pytest.mark.trio(clock="autojump")
async def test_turns_go_round_and_small_messages_do_not_wait_for_them() -> None:
    async with trio.open_nursery() as nursery:
        ends, began = Ends(nursery, Budget(MBIT), 3), trio.current_time()
        one, other, third = ends.senders
        for _ in range(3):
            nursery.start_soon(one.send, bulk(MBIT_SECOND))
            nursery.start_soon(other.send, bulk(MBIT_SECOND))
        await trio.sleep(0.2)
        await third.send(Ping(1, "a", "b", ()))
        await trio.sleep(0.3)
        assert [type(message) for _, message in ends.came[2]] == [Ping]
        await trio.sleep(10)
        seconds = [[round(at - began) for at, _ in came] for came in ends.came[:2]]
        assert sorted(seconds) == [[1, 3, 5], [2, 4, 6]]
        for sender in ends.senders:
            await sender.aclose()


@pytest.mark.trio(clock="autojump")
async def test_who_takes_in_nothing_holds_up_nobody() -> None:
    async with trio.open_nursery() as nursery:
        budget = Budget(MBIT)
        ends = Ends(nursery, budget, 1)
        pipe = MemoryPipe(frozenset(("a", "stopped")))
        stopped = StreamConnection(MemoryStream(pipe, 0, "far"), "far", budget=budget)
        nursery.start_soon(stopped.run_sender)
        await stopped.send(bulk(3 << 20))
        await trio.sleep(0.1)
        began = trio.current_time()
        await ends.senders[0].send(bulk(MBIT_SECOND))
        await ends.senders[0].flushed()
        took_s = trio.current_time() - began
        assert took_s <= PIPE_BYTES / MBIT + 1 + 1.5, "its buffers fill, it stands, then comes our second"
        nursery.cancel_scope.cancel()


@pytest.mark.trio(clock="autojump")
@pytest.mark.parametrize("beside", [False, True])
async def test_what_is_measured_and_what_travels_beside_take_no_turn(beside: bool) -> None:
    budget = Budget(MBIT)
    other = BulkTurn(budget, lambda: None)
    assert other.take()
    queue = SendQueue(budget)
    queue.out_of_band = beside
    await queue.put(bulk(1 << 20) if beside else SpeedSample((bytes(1 << 20),)))
    with trio.fail_after(1):
        assert await queue.take()
    queue.close(ConnectionLost("over"))
    other.give()
    assert other.take(), "nothing was held that was not taken"


@pytest.mark.trio(clock="autojump")
async def test_a_connection_that_is_lost_with_its_turn_leaves_it() -> None:
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery, Budget(MBIT), 3)
        for sender in ends.senders:
            await sender.send(bulk(MBIT_SECOND))
        await trio.sleep(0.5)
        ends.senders[0].drop(ConnectionLost("has it"))
        ends.senders[2].drop(ConnectionLost("waits for it"))
        await trio.sleep(1.5)
        assert [len(came) for came in ends.came] == [0, 1, 0]
        await ends.senders[1].send(bulk(MBIT_SECOND))
        await trio.sleep(1.5)
        assert len(ends.came[1]) == 2
        await ends.senders[1].aclose()
