"""One membership core at a time: the lattice of records, who may speak for whom, and what goes out when."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.membership.core import LAN, WAN, Membership
from peerd.membership.dissemination import DATAGRAM_BYTES, News, record_bytes
from peerd.membership.effects import MemberChanged, MembershipEffect, PushPull, SendDatagram
from peerd.membership.lot import Lot
from peerd.membership.probing import UNPINGED_ROUNDS
from peerd.membership.roster import INCARNATION_JUMP, META_BYTES, TABLE_MEMBERS, Roster, order
from peerd.membership.suspicion import LAST_WORDS_MAX, Suspicions
from peerd.training.effects import Log
from peerd.transport.messages import Ack, Member, MemberTable, Message, Nack, Ping, PingRequest, State

HERE = ("10.0.0.1", 7000)
PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)


def member(id: str, state: State = State.ALIVE, incarnation: int = 0, epoch: int = 1, accuser: str = "") -> Member:
    number = int(id[1:]) if id[1:].isdigit() else 0
    return Member(id, f"node-{id}", "10.0.0.1", 7000 + number, epoch, incarnation, state, accuser, b"")


def core(*others: Member, seeds: Sequence[tuple[str, int]] = (), now: float = 0.0) -> Membership:
    """A started core `n0` that has just met `others`; what it wanted to send so far is gone."""
    membership = Membership(member("n0"), seeds, random.Random(7), now)
    membership.on_timer(now)
    if others:
        membership.on_table(MemberTable("n1", others), now)
    return membership


def alive(membership: Membership) -> set[str]:
    """The others believed to live."""
    return {id for id, known in membership.members.items() if known.state < State.FAILED and id != membership.me.id}


def hear(membership: Membership, *news: Member, now: float = 0.0) -> list[MembershipEffect]:
    return membership.on_datagram(Ack(0, "n1", news), HERE, now)


def run_until(membership: Membership, end: float) -> list[MembershipEffect]:
    """Wake the core exactly when it asks to be."""
    effects: list[MembershipEffect] = []
    while membership.deadline <= end:
        effects += membership.on_timer(membership.deadline)
    return effects


def messages(effects: list[MembershipEffect], kind: type[Message]) -> list[tuple[tuple[str, int], Message]]:
    return [(e.address, e.message) for e in effects if isinstance(e, SendDatagram) and isinstance(e.message, kind)]


def changed(effects: list[MembershipEffect]) -> list[str]:
    return [effect.id for effect in effects if isinstance(effect, MemberChanged)]


records = st.builds(
    member,
    id=st.sampled_from(["n0", "n1", "n2"]),
    state=st.sampled_from(State),
    incarnation=st.integers(0, 3),
    epoch=st.integers(0, 2),
    accuser=st.sampled_from(["", "n1", "n2", "n3"]),
).flatmap(lambda record: st.sampled_from([record, replace(record, meta=b"x"), replace(record, port=9)]))


# The lattice ------------------------------------------------------------------------------------------------------


@PROPERTY
@given(updates=st.lists(records, max_size=12), data=st.data())
def test_any_order_with_any_duplicates_gives_the_same_table(updates: list[Member], data: st.DataObject) -> None:
    others = [record for record in updates if record.id != "n0"]
    shuffled = data.draw(
        st.permutations(others + data.draw(st.lists(st.sampled_from(others), max_size=6) if others else st.just([])))
    )
    first, second = core(), core()
    for record in others:
        hear(first, record)
    hear(second, *shuffled)
    assert dict(first.members) == dict(second.members)


@PROPERTY
@given(updates=st.lists(st.tuples(st.booleans(), records), max_size=12))
def test_a_key_never_decreases_and_only_we_raise_our_incarnation(updates: list[tuple[bool, Member]]) -> None:
    membership = core()
    keys: dict[str, tuple[Any, ...]] = {}
    heard = {"n0": (1, 0)}
    for as_table, record in updates:
        mine = membership.me
        if as_table:
            membership.on_table(MemberTable("n1", (record,)), 0.0)
        else:
            hear(membership, record)
        heard[record.id] = max(heard.get(record.id, (0, 0)), (record.epoch, record.incarnation))
        for id, known in membership.members.items():
            key = order(known)
            assert key >= keys.get(id, key)
            keys[id] = key
            assert id == "n0" or order(known)[:2] <= heard[id]
        assert membership.me.state == State.ALIVE
        assert membership.me.epoch == 1
        assert membership.me.incarnation in (mine.incarnation, record.incarnation + 1)
        assert membership.members["n0"] == membership.me


@PROPERTY
@given(updates=st.lists(records, max_size=12))
def test_a_change_of_the_view_is_said_and_nothing_else(updates: list[Member]) -> None:
    membership = core()
    for record in updates:
        before = dict(membership.members)
        effects = hear(membership, record)
        seen = [
            id
            for id, known in membership.members.items()
            if id != "n0"
            and (
                id not in before
                or replace(before[id], incarnation=0, accuser="") != replace(known, incarnation=0, accuser="")
            )
        ]
        assert changed(effects) == seen


def test_higher_epoch_wins_over_any_state_of_the_former_life() -> None:
    for state in State:
        membership = core(member("n1", state, incarnation=9))
        hear(membership, member("n1", epoch=2))
        assert membership.members["n1"].state == State.ALIVE
        assert alive(membership) == {"n1"}
        hear(membership, member("n1", State.LEFT, incarnation=99))
        assert membership.members["n1"].epoch == 2


def test_a_death_in_a_table_is_heard_as_a_suspicion_by_who_holds_the_member_alive() -> None:
    membership = core(member("n1"), member("n2"), member("n3"))
    effects = membership.on_table(MemberTable("n1", (member("n2", State.FAILED, accuser="n9"),)), 0.1)
    assert membership.members["n2"] == member("n2", State.SUSPECT, accuser="n9")
    assert changed(effects) == ["n2"]
    membership.on_table(MemberTable("n1", (member("n4", State.FAILED),)), 0.1)
    assert membership.members["n4"].state == State.FAILED, "one never heard of is simply dead"


# Speaking for oneself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.SUSPECT, State.FAILED, State.LEFT])
def test_what_is_said_against_us_is_refuted(state: State) -> None:
    membership = core(member("n1"))
    hear(membership, member("n0", state, incarnation=4, accuser="n1"))
    assert membership.me == member("n0", incarnation=5)
    assert membership.counts["refutations"] == 1
    assert membership.awareness == 1
    [(_, ack)] = messages(membership.on_datagram(Ping(1, "n1", "n0", ()), HERE, 0.0), Ack)
    assert isinstance(ack, Ack)
    assert membership.me in ack.news, "the refutation rides on the very next answer"


def test_old_gossip_about_us_is_ignored() -> None:
    membership = core()
    hear(membership, member("n0", State.FAILED, epoch=0, incarnation=50))
    assert membership.me == member("n0")


def test_another_life_of_ours_is_reported_once_and_counted() -> None:
    membership = core()
    effects = hear(membership, member("n0", epoch=2)) + hear(membership, member("n0", epoch=2))
    assert sum(isinstance(effect, Log) for effect in effects) == 1
    assert membership.counts["identity_conflict"] == 2
    assert membership.me == member("n0")


def test_of_two_lives_with_one_epoch_the_lower_address_yields() -> None:
    low, high = core(), core()
    hear(low, replace(member("n0"), port=7001))
    hear(high, replace(member("n0"), port=6999))
    assert (low.counts["identity_conflict"], high.counts["identity_conflict"]) == (1, 0)


def test_meta_travels_with_a_higher_incarnation() -> None:
    membership = core(member("n1"))
    effects = membership.set_meta(b"gpu", 0.0)
    assert membership.me == replace(member("n0", incarnation=1), meta=b"gpu")
    assert changed(effects) == ["n0"]
    other = core(member("n0x"))
    effects = hear(other, replace(member("n0x", incarnation=1), meta=b"gpu"))
    assert changed(effects) == ["n0x"]


@pytest.mark.parametrize("port", [6000, 8000])
def test_where_we_are_reached_is_told_anew_and_what_was_true_before_is_no_other_node_of_ours(port: int) -> None:
    membership, before = core(member("n1")), member("n0")
    effects = membership.move(("10.9.9.9", port), 0.0)
    assert membership.me == replace(before, host="10.9.9.9", port=port, incarnation=1)
    assert changed(effects) == ["n0"]
    hear(membership, before)
    assert membership.counts["identity_conflict"] == 0
    hear(membership, replace(before, state=State.SUSPECT, accuser="n1", incarnation=1))
    assert (membership.me.host, membership.me.incarnation) == ("10.9.9.9", 2)
    assert not membership.move(("10.9.9.9", port), 1.0)
    other, theirs = core(member("n2")), member("n2")
    assert changed(hear(other, replace(theirs, host="10.9.9.9", port=port, incarnation=1))) == ["n2"]
    hear(other, theirs)
    assert other.members["n2"].host == "10.9.9.9"


def test_leaving_is_told_and_not_refuted() -> None:
    membership = core(member("n1"), member("n2"))
    membership.leave(1.0)
    assert membership.me.state == State.LEFT
    hear(membership, member("n0", State.LEFT), member("n0", State.SUSPECT, accuser="n1"), now=1.0)
    assert membership.me == member("n0", State.LEFT)
    hear(membership, member("n0", State.SUSPECT, incarnation=3, accuser="n1"), now=1.0)
    assert membership.me == member("n0", State.LEFT, incarnation=4)
    spread = [membership.left_spread]
    effects = run_until(membership, 10.0)
    assert [*spread, membership.left_spread] == [False, True]
    assert membership.deadline == math.inf
    assert not messages(effects, Ping)
    assert len(messages(effects, Ack)) >= LAN.retransmissions(3)


def test_with_nobody_to_tell_leaving_is_done_at_once() -> None:
    membership = core()
    membership.leave(0.0)
    assert membership.left_spread


# Limits -----------------------------------------------------------------------------------------------------------


def test_lies_beyond_the_limits_are_counted_and_ignored() -> None:
    membership = core(member("n1"))
    before = dict(membership.members)
    hear(
        membership,
        member("n1", incarnation=INCARNATION_JUMP + 1),
        member("n0", State.SUSPECT, incarnation=INCARNATION_JUMP + 1),
        member("n2", incarnation=INCARNATION_JUMP + 1),
        replace(member("n3"), meta=b"x" * (META_BYTES + 1)),
        replace(member("n4"), port=1 << 16),
        replace(member("n5"), name="n" * 1000),
        replace(member("n6"), id=""),
    )
    assert dict(membership.members) == before
    assert membership.counts["incarnation_jump"] == 3
    assert membership.counts["meta_too_long"] == 1
    assert membership.counts["malformed"] == 3
    hear(membership, member("n1", incarnation=INCARNATION_JUMP))
    assert membership.members["n1"].incarnation == INCARNATION_JUMP


def test_a_full_table_forgets_the_longest_gone_and_only_them() -> None:
    membership = core()
    for first in range(1, TABLE_MEMBERS, 64):
        hear(membership, *[member(f"n{number}") for number in range(first, min(first + 64, TABLE_MEMBERS))])
    assert len(membership.members) == TABLE_MEMBERS
    hear(membership, member("n9000"))
    assert "n9000" not in membership.members
    assert membership.counts["table_full"] == 1
    hear(membership, member("n11", State.LEFT), member("n10", State.FAILED))
    hear(membership, member("n9000"), member("n9001"), member("n9002"))
    assert "n9001" in membership.members
    assert not {"n10", "n11", "n9002"} & membership.members.keys()
    oversized = MemberTable("n1", tuple(member(f"m{number}") for number in range(TABLE_MEMBERS + 1)))
    assert membership.on_table(oversized, 0.0) == []
    assert membership.counts["oversized_tables"] == 1


def test_messages_that_are_no_datagrams_are_counted() -> None:
    membership = core()
    membership.on_datagram(membership.table(), HERE, 0.0)
    assert membership.counts["unexpected_datagrams"] == 1


@PROPERTY
@given(
    sizes=st.lists(st.tuples(st.integers(0, META_BYTES), st.integers(1, 64)), min_size=1, max_size=40), data=st.data()
)
def test_datagrams_fit_and_each_news_is_told_its_number_of_times(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    news, limit = News(), data.draw(st.integers(1, 8))
    told: dict[str, int] = {}
    for number, (meta, name) in enumerate(sizes):
        news.add(replace(member(f"n{number}"), meta=bytes(meta), name="ü" * name))
    for _ in range(len(sizes) * limit):
        taken = news.take(1200, limit)
        assert sum(map(record_bytes, taken)) <= 1200
        for record in taken:
            told[record.id] = told.get(record.id, 0) + 1
        assert max(told.values()) - min(told.get(f"n{i}", 0) for i in range(len(sizes))) <= limit
    assert told == {f"n{number}": limit for number in range(len(sizes))}
    assert not news


def test_the_least_told_news_goes_first_and_newer_news_replaces_older() -> None:
    news = News()
    news.add(member("n1"))
    assert news.take(10_000, 4) == (member("n1"),)
    news.add(member("n2"))
    assert news.take(10_000, 4) == (member("n2"), member("n1"))
    news.add(member("n1", State.SUSPECT, accuser="n5"))
    news.add(member("n1", State.SUSPECT, accuser="n6"))
    assert len(news) == 3, "accusers stand side by side"
    news.add(member("n1", incarnation=1))
    assert len(news) == 2


def test_record_bytes_is_no_less_than_msgpack_needs() -> None:
    msgpack = pytest.importorskip("msgpack")
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(rng.choice("aé日\U0001f600") for _ in range(rng.randrange(1, 40)))
        record = Member(
            text, text[::2], text[:9], rng.randrange(65536), rng.getrandbits(63), rng.getrandbits(63),
            State.LEFT, text[::3], rng.randbytes(rng.randrange(META_BYTES)),
        )  # fmt: skip
        fields = [getattr(record, name) for name in Member.__slots__]
        assert len(msgpack.packb([int(f) if isinstance(f, State) else f for f in fields])) <= record_bytes(record)


@PROPERTY
@given(number=st.integers(1, 60), meta=st.integers(0, META_BYTES))
def test_no_datagram_exceeds_its_limit(number: int, meta: int) -> None:
    msgpack = pytest.importorskip("msgpack")
    others = [replace(member(f"n{i}"), id=f"{i:064}", meta=bytes(meta)) for i in range(1, number + 1)]
    membership = core(*others)
    for effect in run_until(membership, 3.0):
        if isinstance(effect, SendDatagram):
            names: Iterable[str] = type(effect.message).__slots__
            body = [getattr(effect.message, name) for name in names if name != "news"]
            news = [
                [getattr(record, name) for name in Member.__slots__] for record in getattr(effect.message, "news", ())
            ]
            assert 32 + len(msgpack.packb([body, news])) <= DATAGRAM_BYTES


# Probing ----------------------------------------------------------------------------------------------------------


def test_a_round_probes_every_member_once() -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 9)])
    now, probed = 0.0, []
    for _ in range(16):
        while not (pings := messages(membership.on_timer(now := membership.deadline), Ping)):
            pass
        [(where, ping)] = pings
        assert isinstance(ping, Ping)
        probed.append(ping.target)
        membership.on_datagram(Ack(ping.seq, ping.target, ()), where, now + 0.001)
    assert sorted(probed[:8]) == sorted(probed[8:]) == [f"n{number}" for number in range(1, 9)]
    assert membership.counts["acks"] == 16
    assert not membership.counts["suspicions"]


def first_ping(membership: Membership, end: float = 2.0) -> tuple[float, Ping]:
    while membership.deadline <= end:
        now = membership.deadline
        for _, ping in messages(membership.on_timer(now), Ping):
            assert isinstance(ping, Ping)
            return now, ping
    raise AssertionError("no ping")


def test_silence_leads_to_indirect_probes_and_a_suspicion() -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 7)])
    now, ping = first_ping(membership)
    requests = messages(run_until(membership, now + 0.51), PingRequest)
    assert len(requests) == 3
    for _, request in requests:
        assert isinstance(request, PingRequest)
        assert (request.seq, request.target) == (ping.seq, ping.target)
        assert (request.host, request.port) == ("10.0.0.1", 7000 + int(request.target[1:]))
    run_until(membership, now + 1.01)
    assert membership.members[ping.target] == member(ping.target, State.SUSPECT, accuser="n0")
    assert membership.awareness == 1, "no Nack came: perhaps it is us"


def test_all_nacks_mean_that_we_are_well() -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 7)])
    now, ping = first_ping(membership)
    for where, _ in messages(run_until(membership, now + 0.51), PingRequest):
        membership.on_datagram(Nack(ping.seq, f"n{where[1] - 7000}"), where, now + 0.95)
    run_until(membership, now + 1.01)
    assert membership.members[ping.target].state == State.SUSPECT
    assert membership.awareness == 0


def test_an_answer_through_another_saves_the_target() -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 7)])
    now, ping = first_ping(membership)
    [(where, _), *_] = messages(run_until(membership, now + 0.51), PingRequest)
    membership.on_datagram(Ack(ping.seq, f"n{where[1] - 7000}", ()), where, now + 0.9)
    run_until(membership, now + 1.01)
    assert membership.members[ping.target].state == State.ALIVE


def test_an_answer_by_somebody_not_asked_is_no_answer() -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 7)])
    now, ping = first_ping(membership)
    stranger = next(id for id in alive(membership) if id != ping.target)
    membership.on_datagram(Ack(ping.seq, stranger, ()), HERE, now + 0.1)
    membership.on_datagram(Ack(ping.seq + 1, ping.target, ()), HERE, now + 0.1)
    run_until(membership, now + 1.01)
    assert membership.members[ping.target].state == State.SUSPECT


def test_probing_for_another_passes_the_answer_on_and_says_nack_when_late() -> None:
    membership, asker = core(member("n1"), member("n2")), ("10.0.0.1", 7001)
    effects = membership.on_datagram(PingRequest(77, "n1", "n2", "10.0.0.1", 7002, ()), asker, 0.0)
    [(where, ping)] = messages(effects, Ping)
    assert isinstance(ping, Ping)
    assert (where, ping.target) == (("10.0.0.1", 7002), "n2")
    assert (asker, Nack(77, "n0")) in messages(run_until(membership, 0.45), Nack)
    [(back, ack)] = messages(membership.on_datagram(Ack(ping.seq, "n2", ()), where, 0.46), Ack)
    assert isinstance(ack, Ack)
    assert (back, ack.seq, ack.sender) == (asker, 77, "n0")
    assert not membership.on_datagram(Ack(ping.seq, "n2", ()), where, 0.47), "once"


def test_who_is_answered_for_long_and_asked_by_nobody_is_not_reached() -> None:
    membership, slowest = core(member("n1")), UNPINGED_ROUNDS * (LAN.awareness_max + 1)
    now = 0.0

    def answered(times: int) -> None:
        nonlocal now
        for _ in range(times):
            now, ping = first_ping(membership, end=1000.0)
            membership.on_datagram(Ack(ping.seq, "n1", ()), HERE, now)

    def accused() -> None:
        hear(membership, replace(membership.me, state=State.SUSPECT, accuser="n1"), now=now)

    def is_reached() -> bool:
        return not membership.is_asked_by_nobody

    for asked in ("n0", "n0", "n7"):  # the last is somebody who lived here before
        accused()
        answered(slowest)
        assert is_reached(), "the other may be as slow as this"
        membership.on_datagram(Ping(1, "n1", asked, ()), HERE, now)
    answered(1)
    assert not is_reached()
    membership.on_datagram(Ping(1, "n1", "n0", ()), HERE, now)
    assert is_reached()
    answered(3 * slowest)
    assert is_reached(), "one that stands still again and again asks nobody, nor accuses anybody"
    accused()
    assert not is_reached()


def test_a_ping_for_who_lived_here_before_is_not_answered() -> None:
    membership = core(member("n1"))
    assert not membership.on_datagram(Ping(1, "n1", "somebody", ()), HERE, 0.0)
    assert membership.counts["misdirected_pings"] == 1


def test_a_suspect_hears_of_it_first() -> None:
    suspect = member("n1", State.SUSPECT, accuser="n5")
    membership = core(suspect)
    _, ping = first_ping(membership)
    assert ping.news[0] == suspect
    [(_, ack)] = messages(membership.on_datagram(Ping(1, "n1", "n0", ()), HERE, 1.0), Ack)
    assert isinstance(ack, Ack)
    assert ack.news[0] == suspect


def test_the_timeout_follows_the_measured_round_trip() -> None:
    membership = core(member("n1"), member("n2"), member("n3"))
    for _ in range(12):
        now, ping = first_ping(membership, end=1000.0)
        effects = run_until(membership, now + 0.8)
        membership.on_datagram(Ack(ping.seq, ping.target, ()), HERE, now + 0.8)
    assert not messages(effects, PingRequest), "0.8 s is usual by now: nobody need be asked"
    membership.counts.clear()
    run_until(membership, membership.deadline + 30)
    assert membership.counts["suspicions"] > 0, "but silence is still noticed"


# Suspicion and stalls ---------------------------------------------------------------------------------------------


@PROPERTY
@given(times=st.lists(st.floats(0, 12), max_size=6), population=st.integers(2, 2000))
def test_more_accusers_never_lengthen_a_suspicion_and_bounds_hold(times: list[float], population: int) -> None:
    suspicions = Suspicions(LAN)
    suspicions.begin("n1", "a", population, 0.0)
    least_s = LAN.suspicion_min_s(population)
    deadline = suspicions.deadline
    assert deadline == pytest.approx(least_s * (LAN.suspicion_max_mult if population > 2 else 1))
    for number, now in enumerate(sorted(times)):
        suspicions.confirm("n1", f"b{number}")
        assert not suspicions.confirm("n1", "a"), "the same accuser twice is one accuser"
        assert least_s <= suspicions.deadline <= deadline
        deadline = suspicions.deadline
        if number == 1:
            suspicions.postpone(now)
            assert suspicions.deadline >= now + least_s
            deadline = suspicions.deadline
    assert suspicions.expired(math.nextafter(deadline, 0)) == []
    assert suspicions.expired(deadline) == ["n1"]
    assert suspicions.deadline == math.inf


def test_three_further_accusers_make_it_short() -> None:
    suspicions = Suspicions(LAN)
    suspicions.begin("n1", "a", 100, 0.0)
    assert [suspicions.confirm("n1", accuser) for accuser in "abcde"] == [False, True, True, True, False]
    assert suspicions.deadline == pytest.approx(5.0)


@PROPERTY
@given(
    accusers=st.integers(0, 6), population=st.integers(2, 2000), vacant_at=st.integers(0, 6), vacant_first=st.booleans()
)
def test_where_nobody_listens_a_suspicion_is_short_from_whenever_that_is_known(
    accusers: int, population: int, vacant_at: int, vacant_first: bool
) -> None:
    suspicions = Suspicions(LAN)
    suspicions.begin("n1", "a", population, 0.0, vacant=vacant_first)
    short_s = LAN.suspicion_vacant_share * LAN.suspicion_min_s(population)
    known = vacant_first
    suspicions.shorten("who is not suspected")
    for number in range(accusers):
        if number == vacant_at:
            suspicions.shorten("n1")
            suspicions.shorten("n1")
            known = True
        assert (suspicions.deadline == pytest.approx(short_s)) == known
        suspicions.confirm("n1", f"b{number}")


def serve(membership: Membership, end: float, answers: Callable[[str], bool], through_others: bool = False) -> None:
    """Wake the core; those answer its probes, and those asked to probe for it, of whom this is said."""
    while membership.deadline <= end:
        now = membership.deadline
        effects = membership.on_timer(now)
        for where, ping in messages(effects, Ping):
            assert isinstance(ping, Ping)
            if answers(ping.target):
                membership.on_datagram(Ack(ping.seq, ping.target, ()), where, now)
        for where, request in messages(effects, PingRequest):
            assert isinstance(request, PingRequest)
            if through_others:
                membership.on_datagram(Ack(request.seq, f"n{where[1] - 7000}", ()), where, now)


@pytest.mark.parametrize("knows_first", [False, True])
def test_who_died_where_nobody_listens_is_known_to_have_in_half_the_time(knows_first: bool) -> None:
    """However many members there are: it need not wait for its turn."""
    membership = core(*[member(f"n{number}") for number in range(1, 200)])

    def answers(id: str) -> bool:
        return id != "n77"

    serve(membership, 2.0, answers)
    died_at = 2.0
    if knows_first:
        hear(membership, member("n77", State.SUSPECT, accuser="n5"), now=died_at)
    membership.vacant("n77", died_at)
    serve(membership, died_at + 2 * LAN.probe_interval_s + 0.01, answers)
    assert state(membership, "n77") == State.SUSPECT
    membership.vacant("n77", died_at + 1.5)
    serve(membership, died_at + 4.2, answers)
    assert membership.counts["last_words"] == 1
    membership.on_unreachable(("10.0.0.1", 7077), died_at + 4.2)
    assert state(membership, "n77") == State.FAILED
    assert (membership.counts["failures"], membership.counts["suspicions"]) == (1, not knows_first)


@pytest.mark.parametrize("through_others", [False, True])
def test_who_is_heard_though_nobody_seems_to_listen_is_not_suspected(through_others: bool) -> None:
    """As where a firewall between the two says so: the others hear it, or this node by datagrams."""
    membership = core(*[member(f"n{number}") for number in range(1, 9)])

    def answers(id: str) -> bool:
        return id != "n3" or not through_others

    serve(membership, 2.0, lambda _: True)
    probes = membership.counts["probes"]
    for tenths in range(100):
        serve(membership, 2.0 + tenths / 10, answers, through_others)
        membership.vacant("n3", 2.0 + tenths / 10)
    assert state(membership, "n3") == State.ALIVE
    assert not membership.counts["suspicions"]
    assert membership.counts["probes"] - probes <= 22, "each sign of it hastens one probe an interval at most"


def test_one_that_dies_just_after_it_was_probed_is_probed_again() -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 9)])
    now, ping = first_ping(membership)
    membership.on_datagram(Ack(ping.seq, ping.target, ()), HERE, now + 0.001)
    membership.vacant(ping.target, now + 0.1)
    [(_, again)] = messages(run_until(membership, now + 0.2), Ping)
    assert isinstance(again, Ping)
    assert again.target == ping.target


@given(st.permutations("abcde"), st.lists(st.sampled_from("abcde"), min_size=1), st.integers(0, 99))
def test_whoever_is_in_a_lot_may_be_drawn_and_nobody_else(ids: list[str], changes: list[str], seed: int) -> None:
    """All come; whoever changes goes if it is there, and comes if it is not."""
    lot, held, rng = Lot(), set[str](), random.Random(seed)
    for id in [*ids, *changes]:
        (lot.discard if id in held else lot.add)(id)
        held ^= {id}
        for known in held:
            lot.add(known)
        lot.discard("x")
        assert lot.keys() == held
        assert {lot.draw(rng) for _ in range(200 if held else 0)} == held


def test_what_was_seen_before_a_suspicion_shortens_it() -> None:
    asked_after_s = []
    for vacant in (True, False):
        membership = core(*[member(f"n{number}") for number in range(1, 9)])
        if vacant:
            membership.vacant("n1", 0.0)
        hear(membership, member("n1", State.SUSPECT, accuser="n2"), now=0.1)
        while not membership.counts["last_words"]:
            serve(membership, membership.deadline, lambda id: id != "n1")
        asked_after_s.append(membership.deadline)
    assert asked_after_s[0] < 0.75 * asked_after_s[1]


@pytest.mark.parametrize("again", [member("n1", epoch=2), member("n1", incarnation=1)], ids=["restarts", "refutes"])
def test_what_was_seen_of_a_former_life_shortens_no_later_suspicion(again: Member) -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 9)])
    hear(membership, member("n1", State.SUSPECT, accuser="n2"), now=0.0)
    membership.vacant("n1", 0.0)
    hear(membership, again, now=1.0)
    hear(membership, replace(again, state=State.SUSPECT, accuser="n2"), now=1.5)
    serve(membership, 1.5 + LAN.suspicion_min_s(9) - 0.1, lambda id: id != "n1")
    assert state(membership, "n1") == State.SUSPECT


def test_members_where_again_and_again_nobody_listens_do_not_hide_a_death() -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 9)])
    serve(membership, 2.0, lambda _: True)
    for tenths in range(200):
        serve(membership, 2.0 + tenths / 10, lambda id: id != "n8")
        for id in ("n1", "n2", "n3", "n4"):
            membership.vacant(id, 2.0 + tenths / 10)
    assert state(membership, "n8") >= State.SUSPECT, "probed within two rounds of eight"


def test_who_is_gone_or_unknown_is_not_probed_for_that() -> None:
    membership = core(member("n1"), member("n2", State.LEFT))
    membership.vacant("n2", 0.0)
    membership.vacant("nobody", 0.0)
    membership.vacant("n1", 0.0)
    hear(membership, member("n1", State.LEFT))
    assert not messages(run_until(membership, 5.0), Ping)


def test_a_second_suspicion_begins_anew() -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 9)])
    hear(membership, member("n1", State.SUSPECT, accuser="n2"), now=0.0)
    hear(membership, member("n1", State.SUSPECT, incarnation=1, accuser="n3"), now=4.0)
    effects = [effect for effect in run_until(membership, 9.0) if effect == MemberChanged("n1")]
    assert not effects
    assert membership.members["n1"].state == State.SUSPECT


def state(membership: Membership, id: str) -> State:
    return membership.members[id].state


def test_nobody_is_buried_unheard() -> None:
    membership, where = suspecting()
    effects = run_until(membership, 5.01)
    assert PushPull(where) in effects
    assert membership.counts["last_words"] == 1
    assert state(membership, "n1") == State.SUSPECT
    run_until(membership, 6.01)
    assert state(membership, "n1") == State.FAILED, "it said nothing for two probe timeouts"


def test_a_suspect_whose_table_comes_lives_and_has_time_to_refute() -> None:
    membership, _ = suspecting()
    run_until(membership, 5.01)
    membership.on_table(MemberTable("n1", ()), 5.1)
    run_until(membership, 10.0)
    assert state(membership, "n1") == State.SUSPECT
    membership.on_table(MemberTable("n1", (member("n1", incarnation=1),)), 10.01)
    run_until(membership, 10.5)
    assert state(membership, "n1") == State.ALIVE


def test_a_suspect_where_nobody_listens_is_buried_at_once() -> None:
    membership, where = suspecting()
    run_until(membership, 5.01)
    membership.on_unreachable(where, 5.02)
    assert membership.members["n1"].state == State.FAILED


@pytest.mark.parametrize("timer_first", [True, False])
def test_a_dial_that_ran_out_while_this_node_stood_still_buries_nobody(timer_first: bool) -> None:
    membership, where = suspecting()
    run_until(membership, 5.01)
    assert membership.counts["last_words"] == 1
    if timer_first:
        membership.on_timer(25.0)
    membership.on_unreachable(where, 25.0)
    assert state(membership, "n1") == State.SUSPECT, "it may have answered"
    effects = run_until(membership, 25.0 + LAN.suspicion_min_s(9) + 0.5)
    assert PushPull(where) in effects, "it is asked once more"
    assert state(membership, "n1") == State.SUSPECT


def test_of_many_suspects_a_few_are_asked_and_the_others_are_buried() -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 20)])
    accusers = ("n16", "n17", "n18", "n19")
    hear(membership, *[member(f"n{i}", State.SUSPECT, accuser=a) for i in range(1, 11) for a in accusers])
    run_until(membership, 5.01)
    states = [membership.members[f"n{number}"].state for number in range(1, 11)]
    assert membership.counts["last_words"] == states.count(State.SUSPECT) == LAST_WORDS_MAX
    assert states.count(State.FAILED) == 10 - LAST_WORDS_MAX


def suspecting() -> tuple[Membership, tuple[str, int]]:
    """A node that has held n1 suspect since 0 s, with as many accusers as there may be."""
    membership = core(*[member(f"n{number}") for number in range(1, 9)])
    hear(membership, *[member("n1", State.SUSPECT, accuser=accuser) for accuser in ("n2", "n3", "n4", "n5")])
    return membership, (membership.members["n1"].host, membership.members["n1"].port)


def test_who_stood_still_accuses_nobody_and_gives_suspects_their_time_again() -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 9)])
    now, ping = first_ping(membership)
    suspect = "n2" if ping.target != "n2" else "n3"
    hear(membership, *[member(suspect, State.SUSPECT, accuser=f"n{i}") for i in (4, 5, 6, 7)], now=now)
    woken = now + 60
    membership.on_timer(woken)
    assert membership.counts["stalls"] == 1
    run_until(membership, woken + 0.01)
    assert not membership.counts["suspicions"]
    assert membership.members[ping.target].state == State.ALIVE
    assert membership.members[suspect].state == State.SUSPECT
    run_until(membership, woken + 4.9)
    assert membership.members[suspect].state == State.SUSPECT
    run_until(membership, woken + 6.1)  # and 1 s for its last word
    assert membership.members[suspect].state == State.FAILED
    assert membership.counts["stalls"] == 1


def test_a_stall_is_noticed_whatever_comes_first() -> None:
    membership = core(member("n1"), member("n2"))
    now, _ = first_ping(membership)
    hear(membership, now=now + 30)
    membership.on_timer(now + 30)
    assert membership.counts["stalls"] == 1
    assert not membership.counts["suspicions"]


def test_being_a_little_late_is_no_stall() -> None:
    membership = core(member("n1"), member("n2"))
    for _ in range(200):
        membership.on_timer(membership.deadline + 0.2)
    assert membership.counts["stalls"] == 0


# Holding together -------------------------------------------------------------------------------------------------


def dials(effects: list[MembershipEffect]) -> list[tuple[str, int]]:
    return [effect.address for effect in effects if isinstance(effect, PushPull)]


def test_every_seed_is_dialled_first_and_then_ever_more_rarely() -> None:
    seeds = [("a", 1), ("b", 2), HERE, ("a", 1)]
    membership = Membership(member("n0"), seeds, random.Random(1), 100.0)
    times = []
    while membership.deadline < 400:
        now = membership.deadline
        if found := dials(membership.on_timer(now)):
            assert found == [("a", 1), ("b", 2)]
            times.append(now - 100)
            membership.on_unreachable(("a", 1), now)
    assert times[:7] == [0, 1, 3, 7, 15, 31, 61]
    assert times[-1] > 270
    assert membership.counts["unreachable"] == len(times)


def test_a_dropped_seed_is_dialled_no_more() -> None:
    membership = Membership(member("n0"), [("a", 1), ("b", 2)], random.Random(1), 0.0)
    membership.drop_seed(("a", 1))
    membership.drop_seed(("c", 3))
    assert set(dials(run_until(membership, 100.0))) == {("b", 2)}


def test_an_unreachable_seed_is_logged_once() -> None:
    membership = core(seeds=[("a", 1)])
    logs = [membership.on_unreachable(("a", 1), 0.0) for _ in range(3)]
    assert [len(effects) for effects in logs] == [1, 0, 0]


def test_the_failed_are_retried_for_ever_and_the_left_never() -> None:
    membership = core(member("n1"), member("n2", State.FAILED), member("n3", State.LEFT))
    found = []
    for _ in range(200_000):
        now = membership.deadline
        effects = membership.on_timer(now)
        found += [where for where in dials(effects) if now > 3600]
        for where, ping in messages(effects, Ping):
            assert isinstance(ping, Ping)
            assert ping.target == "n1"
            membership.on_datagram(Ack(ping.seq, "n1", ()), where, now)
        if now > 7200:
            break
    assert found.count(("10.0.0.1", 7002)) >= 115
    assert ("10.0.0.1", 7003) not in found


def test_presets() -> None:
    assert LAN.suspicion_min_s(3) == LAN.suspicion_min_s(999) == 5.0
    assert LAN.suspicion_min_s(10**6) == pytest.approx(10.0, rel=1e-3)
    assert (LAN.retransmissions(9), LAN.retransmissions(64), LAN.retransmissions(999)) == (8, 8, 12)
    assert (LAN.stretch(1), LAN.stretch(32), LAN.stretch(33), LAN.stretch(1000)) == (1, 1, 2, 6)
    assert WAN.suspicion_min_s(10) == 30.0
    assert (LAN.silence_s(2), WAN.silence_s(2)) == (11.0, 65.0)


@PROPERTY
@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from(State)), max_size=60), st.integers(0, 2**32))
def test_picks_are_live_and_distinct(changes: list[tuple[int, State]], chance: int) -> None:
    roster, rng = Roster(member("n0")), random.Random(chance)
    for step, (number, state) in enumerate(changes):
        roster.put(member(f"n{number}", state, incarnation=step))
        assert sorted(roster.live) == sorted(i for i, m in roster.rows.items() if m.state < State.FAILED and i != "n0")
        picked = roster.pick(3, rng, without="n1")
        assert len({one.id for one in picked}) == len(picked) <= 3
        assert {one.id for one in picked} <= set(roster.live) - {"n1"}
        assert all(one.state == State.ALIVE for one in roster.pick(2, rng, alive_only=True))
        failed = {i for i, m in roster.rows.items() if m.state == State.FAILED}
        assert {one.id for one in roster.failed(9, rng)} == failed
        assert len(roster.failed(2, rng)) == min(2, len(failed))


def test_after_a_stall_every_suspect_is_still_asked_for_its_last_word() -> None:
    suspicions = Suspicions(LAN)
    for id in ("a", "b"):
        suspicions.begin(id, "x", 100, 0.0)
    suspicions.confirm("a", "y")
    assert suspicions.last_words(suspicions.deadline) == ["a"]
    suspicions.postpone(20.0)
    now = suspicions.deadline
    assert suspicions.last_words(now) == ["a", "b"], "the question before may have been answered meanwhile"
    assert not suspicions.expired(now)
