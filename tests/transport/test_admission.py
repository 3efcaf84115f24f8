"""The listener's caps, in plain numbers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from peerd.transport.admission import (
    ACCEPTED_MAX,
    ACCEPTS_PER_S,
    BURST,
    GREETED_MAX,
    GREETED_PER_PEER_MAX,
    GUESTS_MAX,
    MAKES_WAY_AFTER_S,
    PENDING_MAX,
    PROVED_S,
    Admission,
    Greeted,
)


def entered(admission: Admission, host: str, now: float = 0.0) -> int:
    number = admission.enter(host, now)
    assert number is not None
    return number


def test_a_burst_then_a_steady_rate() -> None:
    admission = Admission(now=100.0)
    for _ in range(int(BURST)):
        assert admission.delay_s(100.0) == 0.0
        number = entered(admission, "127.0.0.1", 100.0)
        admission.admit(number)
        admission.leave(number)
    assert admission.delay_s(100.0) == 1 / ACCEPTS_PER_S
    assert admission.delay_s(100.0 + 1 / ACCEPTS_PER_S) < 1e-9
    assert admission.delay_s(1000.0) == 0.0


def test_one_host_has_four_in_their_handshake() -> None:
    admission = Admission(now=0.0)
    first, *others = [admission.enter("10.0.0.1", 0.0) for _ in range(5)]
    assert [number is not None for number in others] == [True] * 3 + [False]
    entered(admission, "10.0.0.2")
    assert first is not None
    admission.admit(first)
    admission.admit(first)  # counts once
    entered(admission, "10.0.0.1")
    assert admission.enter("10.0.0.1", 0.0) is None
    assert admission.refused == 2


def test_a_host_that_is_closed_at_once_takes_nobodys_turn() -> None:
    """It costs no handshake: 200 a second from one host would have all others wait behind them."""
    admission, now = Admission(now=0.0), 0.0
    for _ in range(5 * int(ACCEPTS_PER_S + BURST)):
        now += 0.005
        assert admission.delay_s(now) == 0.0
        admission.enter("10.0.0.1", now)
    for host in range(int(BURST) // 2):
        assert admission.delay_s(now) == 0.0
        admission.leave(entered(admission, f"10.0.1.{host}", now))


def test_where_others_wait_a_host_has_one_and_makes_way_for_one_that_has_none() -> None:
    """How long it has been slow does not count then: nine hosts could hold up all others."""
    admission = Admission(now=0.0)
    hosts = [f"10.0.0.{n}" for n in range(9)]
    numbers = {entered(admission, hosts[n % 9], 1e-3 * n): hosts[n % 9] for n in range(PENDING_MAX)}
    assert admission.full
    assert all(admission.refuses(host) for host in hosts)
    assert not admission.refuses("10.0.1.1")
    assert admission.makes_way(0.1, hosts[0]) is None
    leaves = admission.makes_way(0.1, "10.0.1.1")
    assert leaves is not None
    assert list(numbers.values()).count(numbers[leaves]) == 4, "of those that have the most"
    assert leaves < 9, "the oldest"


def test_nobody_who_has_just_come_makes_way_where_each_host_has_one() -> None:
    admission = Admission(now=0.0)
    for n in range(PENDING_MAX):
        entered(admission, f"10.0.0.{n}", 0.0)
    assert admission.makes_way(0.9 * MAKES_WAY_AFTER_S, "10.0.1.1") is None
    assert admission.makes_way(MAKES_WAY_AFTER_S, "10.0.1.1") is not None


def test_loopback_is_exempt_up_to_the_total() -> None:
    admission = Admission(now=0.0)
    for host in ("127.0.0.1", "::1") * (PENDING_MAX // 2):
        assert not admission.full
        last = entered(admission, host)
    assert admission.full
    admission.admit(last)
    assert not admission.full


def test_the_guests_of_a_relay_and_those_who_have_greeted_keep_nobody_out() -> None:
    admission = Admission(now=0.0)
    for _ in range(GUESTS_MAX + GREETED_MAX):
        admission.admit(entered(admission, "10.0.0.1"))
    for _ in range(PENDING_MAX):
        assert not admission.full
        entered(admission, "127.0.0.1")


def test_the_admitted_are_counted_until_they_leave() -> None:
    admission = Admission(now=0.0)
    for _ in range(ACCEPTED_MAX + GUESTS_MAX):
        number = entered(admission, "10.0.0.1")
        admission.admit(number)
    assert admission.pending == 0
    assert admission.full
    admission.leave(number)
    assert not admission.full


def test_the_oldest_of_the_host_with_most_makes_way_and_nobody_who_has_just_come() -> None:
    admission = Admission(now=0.0)
    assert admission.makes_way(9.0) is None
    assert admission.makes_way_at == math.inf
    alone = entered(admission, "10.0.0.9", 0.0)
    many = [entered(admission, "127.0.0.1", 0.1 * n) for n in range(1, PENDING_MAX)]
    assert admission.full
    assert admission.makes_way_at == MAKES_WAY_AFTER_S
    assert admission.makes_way(0.9 * MAKES_WAY_AFTER_S) is None
    assert admission.makes_way(MAKES_WAY_AFTER_S) == alone, "nobody else is old enough"
    assert admission.makes_way(9.0) == many[0]
    admission.leave(many[0])
    assert admission.makes_way(9.0) == many[1]


@given(st.lists(st.tuples(st.sampled_from(["127.0.0.1", "10.0.0.1", "10.0.0.2"]), st.floats(0, 2)), max_size=80))
def test_with_room_made_whoever_comes_waits_no_longer_than_a_second(comings: list[tuple[str, float]]) -> None:
    """Strangers who say nothing hold nobody up, however many they are."""
    admission, now = Admission(now=0.0), 0.0
    for host, pause in comings:
        now += pause
        while admission.full:
            assert admission.makes_way_at <= now + MAKES_WAY_AFTER_S
            now = max(now, admission.makes_way_at)
            leaves = admission.makes_way(now)
            assert leaves is not None
            admission.leave(leaves)
        admission.enter(host, now)
        assert admission.pending <= PENDING_MAX


def test_silent_connections_make_way_and_those_of_use_stay() -> None:
    greeted: Greeted[int] = Greeted()
    for connection in range(GREETED_MAX):
        assert greeted.enter(connection, f"peer {connection}", 0.0 + connection) == []
    greeted.useful(0, 500.0)
    assert greeted.enter(GREETED_MAX, "newcomer", 501.0) == [1], "the idlest of those that proved nothing"
    assert greeted.proved(0, 501.0)
    assert not greeted.proved(0, 501.0 + PROVED_S)


def test_where_all_are_of_use_the_newcomer_goes() -> None:
    greeted: Greeted[int] = Greeted()
    for connection in range(GREETED_MAX):
        greeted.enter(connection, f"peer {connection}", 0.0)
        greeted.useful(connection, 1.0)
    assert greeted.enter(-1, "newcomer", 2.0) == [-1]
    greeted.leave(5)
    assert greeted.enter(-1, "newcomer", 2.0) == []


def test_a_peer_sends_on_one_connection_and_has_few() -> None:
    greeted: Greeted[str] = Greeted()
    for connection in ("old", "table", "other"):
        assert greeted.enter(connection, "other" if connection == "other" else "peer", 0.0) == []
    assert greeted.sends("old") == greeted.sends("old") == greeted.sends("other") == []
    greeted.enter("new", "peer", 1.0)
    assert greeted.sends("new") == ["old"], "it broke, and was made anew"
    assert greeted.of("peer") == ["table", "new"]
    closed = [greeted.enter(str(number), "peer", 2.0) for number in range(9)]
    assert sum(map(len, closed)) == 11 - GREETED_PER_PEER_MAX
    assert len(greeted.of("peer")) == GREETED_PER_PEER_MAX


@given(st.lists(st.tuples(st.sampled_from(["enter", "sends", "useful", "leave"]), st.integers(0, 300)), max_size=400))
def test_there_are_never_more_than_may_be(steps: list[tuple[str, int]]) -> None:
    greeted: Greeted[int] = Greeted()
    here: set[int] = set()
    for now, (what, connection) in enumerate(steps):
        if what == "enter" and connection not in here:
            here = (here | {connection}) - set(greeted.enter(connection, connection % 200, float(now)))
        elif what == "sends":
            here -= set(greeted.sends(connection))
        elif what == "useful":
            greeted.useful(connection, float(now))
        elif what == "leave":
            greeted.leave(connection)
            here.discard(connection)
        assert len(here) <= GREETED_MAX
        assert here == {each for peer in range(200) for each in greeted.of(peer)}
