"""What records can a stranger not make a membership core believe, do or keep?"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.membership.core import LAN, Membership
from peerd.membership.effects import AskTwin, MembershipEffect, PushPull, SendDatagram
from peerd.membership.lives import DISOWNED_S, TWIN_AGAIN_S, TWIN_DEADLINE_S, Disowned
from peerd.membership.roster import EPOCH_JUMP, INCARNATION_JUMP, NUMBER_END, TABLE_MEMBERS, Roster
from peerd.membership.suspicion import Suspicions
from peerd.membership.table_budget import BURST_ROWS, ROWS_PER_S, SOURCES_MAX, TableBudget
from peerd.membership.table_exchange import FOLLOW_UP_S
from peerd.training.effects import Log
from peerd.transport import wire
from peerd.transport.ids import Address
from peerd.transport.messages import Ack, Member, MemberTable, Message, Nack, Ping, PingRequest, State

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
STRANGER = ("203.0.113.9", 53)


def member(id: str, state: State = State.ALIVE, incarnation: int = 0, epoch: int = 1, accuser: str = "") -> Member:
    """Each has a host of its own."""
    return Member(id, f"node-{id}", f"10.0.0.{int(id[1:]) % 200 + 1}", 7000, epoch, incarnation, state, accuser, b"")


def at(id: str) -> Address:
    return member(id).host, 7000


def core(*others: Member, me: str = "n0") -> Membership:
    membership = Membership(member(me), (), random.Random(7), 0.0)
    membership.on_timer(0.0)
    if others:
        membership.on_table(MemberTable("n1", others), 0.0)
    return membership


def hear(membership: Membership, *news: Member, now: float = 0.0) -> list[MembershipEffect]:
    return membership.on_datagram(Ack(0, "n1", news), STRANGER, now)


def run_until(membership: Membership, end: float) -> list[MembershipEffect]:
    effects: list[MembershipEffect] = []
    while membership.deadline <= end:
        effects += membership.on_timer(membership.deadline)
    return effects


# Another life of ours --------------------------------------------------------------------------------------------


def questions(effects: list[MembershipEffect]) -> list[Address]:
    return [effect.address for effect in effects if isinstance(effect, AskTwin)]


def test_a_later_life_of_ours_is_asked_to_prove_itself_and_ends_nothing() -> None:
    membership = core(member("n1"))
    twin = replace(member("n0", epoch=9), host="10.9.9.9")
    assert questions(hear(membership, twin)) == [("10.9.9.9", 7000)]
    assert membership.me == member("n0")


def test_at_our_own_address_a_later_life_alone_is_asked() -> None:
    """A relay gives one port to both lives of a copied folder."""
    ours = member("n0")
    assert questions(hear(core(member("n1")), replace(ours, epoch=9))) == [(ours.host, ours.port)]
    assert not questions(hear(core(member("n1")), replace(ours, incarnation=9)))


def test_a_flood_of_lives_asks_one_at_a_time_and_each_address_once_a_minute() -> None:
    membership = core(member("n1"))
    asked: dict[Address, list[float]] = {}
    logs = 0
    for step in range(2000):
        now = step * 0.1
        lie = replace(member("n0", epoch=2 + step), host=f"10.9.9.{step % 3}")
        effects = hear(membership, lie, now=now)
        logs += sum(isinstance(effect, Log) for effect in effects)
        for where in questions(effects):
            asked.setdefault(where, []).append(now)
    times = sorted(time for each in asked.values() for time in each)
    assert all(later - earlier >= TWIN_DEADLINE_S for earlier, later in itertools.pairwise(times))
    for each in asked.values():
        assert all(later - earlier >= TWIN_AGAIN_S for earlier, later in itertools.pairwise(each))
        assert len(each) >= 200 // TWIN_AGAIN_S, "and is asked again"
    assert len(asked) == 3
    assert logs <= len(times) + 4, "nor does it fill the log (a stall is told, too)"
    assert membership.me.epoch == 1
    assert membership.me.incarnation == 0


def test_a_copy_in_our_own_epoch_is_asked_and_refuted_meanwhile() -> None:
    membership = core(member("n1"))
    lie = replace(member("n0", State.LEFT, incarnation=3), host="10.9.9.9")
    assert questions(hear(membership, lie)) == [("10.9.9.9", 7000)]
    assert membership.me == member("n0", incarnation=4)


# A live member that others hold dead -----------------------------------------------------------------------------

LIES = {
    "a later life that left": [member("n1", State.LEFT, epoch=9)],
    "two leaps of incarnations": [
        member("n1", State.LEFT, incarnation=INCARNATION_JUMP),
        member("n1", State.LEFT, incarnation=2 * INCARNATION_JUMP),
    ],
    "a later life, said to be alive": [member("n1", epoch=9)],
    "a later life elsewhere that failed": [replace(member("n1", State.FAILED, epoch=9), host="10.0.0.77")],
}


def exchange(dialler: Membership, acceptor: Membership, now: float) -> None:
    """One push-pull, as the shells do it."""
    acceptor.on_table(dialler.table(), now)
    dialler.on_table(acceptor.table(), now, (acceptor.me.host, acceptor.me.port))


@pytest.mark.parametrize("lies", LIES.values(), ids=LIES)
def test_a_live_member_refutes_whatever_is_told_of_it(lies: list[Member]) -> None:
    victim, other = core(member("n2"), me="n1"), core(member("n1"), me="n2")
    hear(other, *lies)
    assert other.members["n1"] == lies[-1]
    effects = victim.on_table(other.table(), 1.0)  # or in an answer to its probe
    assert victim.me.epoch == 1, "an epoch is raised by a start, and by nothing else"
    dialled = [effect.address for effect in run_until(victim, 1.0 + FOLLOW_UP_S) if isinstance(effect, PushPull)]
    assert at("n2") in dialled or not lies, effects
    exchange(victim, other, 3.0)
    answers = [effect.address for effect in run_until(other, 3.0 + FOLLOW_UP_S) if isinstance(effect, PushPull)]
    assert at("n1") in answers, "who says over a stream that it lives is dialled there"
    exchange(other, victim, 5.0)
    assert other.members["n1"] == victim.me
    hear(other, lies[-1], now=6.0)
    assert other.members["n1"].state == State.ALIVE, "the lie is not believed again"
    assert other.members["n1"].epoch == 1
    if lies[-1].epoch > 1:  # a real start is, at once
        again = core(member("n2"), me="n1")
        other.on_table(MemberTable("n1", (replace(again.me, epoch=2),)), 7.0)
        assert other.members["n1"].epoch == 2


def test_the_probe_of_a_member_that_holds_us_dead_is_followed_by_our_word() -> None:
    victim = core(member("n2"), member("n3"), me="n1")
    victim.on_datagram(Ack(5, "n3", (member("n1", State.LEFT, epoch=9),)), at("n3"), 1.0)
    assert PushPull(at("n3")) in run_until(victim, 1.0 + FOLLOW_UP_S)


def test_a_refuted_life_is_forgotten_after_a_while() -> None:
    other = core(member("n1"), me="n2")
    hear(other, member("n1", State.LEFT, epoch=9))
    other.on_table(MemberTable("n1", (member("n1"),)), 1.0, at("n1"))
    assert other.members["n1"] == member("n1")
    hear(other, member("n1", epoch=9), now=1.0 + DISOWNED_S)
    assert other.members["n1"].epoch == 9


def test_a_stream_from_elsewhere_raises_no_dead() -> None:
    other = core(member("n1"), me="n2")
    hear(other, member("n1", State.LEFT, epoch=9))
    other.on_table(MemberTable("n1", (member("n1"),)), 1.0, ("10.9.9.9", 7000))
    other.on_table(MemberTable("n3", (member("n1"),)), 1.0, at("n1"))
    assert other.members["n1"].state == State.LEFT


@PROPERTY
@given(
    records=st.lists(
        st.builds(
            member, st.sampled_from(["n0", "n1", "n2"]), st.sampled_from(State),
            st.sampled_from([0, 1, INCARNATION_JUMP, 2 * INCARNATION_JUMP, NUMBER_END - 1, NUMBER_END, 1 << 70]),
            st.sampled_from([0, 1, 2, EPOCH_JUMP, EPOCH_JUMP + 2, NUMBER_END - 1, 1 << 70]),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_no_record_moves_a_number_by_more_than_its_bound(records: list[Member]) -> None:
    membership = core(member("n1"), member("n2"))
    for record in records:
        before = dict(membership.members)
        hear(membership, record)
        assert membership.me.epoch == 1
        assert membership.me.incarnation - before["n0"].incarnation <= INCARNATION_JUMP + 1
        for id, now in membership.members.items():
            assert now.epoch - before[id].epoch <= EPOCH_JUMP
            reached = before[id].incarnation if now.epoch == before[id].epoch else 0
            assert now.incarnation - reached <= INCARNATION_JUMP + 1
            assert max(now.epoch, now.incarnation) < NUMBER_END


def test_a_member_that_lost_its_count_of_lives_goes_on_from_the_clock_where_records_are_signed() -> None:
    known = replace(member("n1"), epoch=1)
    for signed, refused in ((False, "epoch_jump"), (True, "")):
        roster = Roster(member("n0"), signed=signed)
        assert roster.refusal(known) == ""
        roster.put(known)
        assert roster.refusal(replace(known, epoch=1_800_000_000)) == refused


# What is kept of what peers send ---------------------------------------------------------------------------------


def test_a_member_that_comes_and_goes_is_in_the_round_once() -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 8)])
    for flap in range(1000):
        hear(membership, member("n1", State.FAILED, incarnation=flap), member("n1", incarnation=flap + 1))
    probed: list[str] = []
    while len(probed) < 14:
        now = membership.deadline
        for effect in membership.on_timer(now):
            if isinstance(effect, SendDatagram) and isinstance(effect.message, Ping):
                probed.append(effect.message.target)
                membership.on_datagram(Ack(effect.message.seq, effect.message.target, ()), effect.address, now)
    assert set(probed) == {f"n{number}" for number in range(1, 8)}, "who waits behind it is probed all the same"


def test_suspicions_that_come_and_go_leave_nothing_behind() -> None:
    suspicions = Suspicions(LAN)
    for _ in range(10_000):
        suspicions.begin("n1", "n2", 10, 0.0)
        suspicions.clear("n1")
    suspicions.begin("n3", "n2", 10, 0.0)
    assert len(suspicions._heap) < 1000
    assert suspicions.expired(1000.0) == ["n3"]


def test_members_that_a_full_table_forgets_are_no_news() -> None:
    membership = core()
    for number in range(3 * TABLE_MEMBERS):
        hear(membership, member(f"n{number + 1}", State.FAILED))
        if len(membership.members) == TABLE_MEMBERS:
            hear(membership, member(f"n{number + 1}"), member(f"n{number + 1}", State.FAILED, incarnation=1))
    assert len(membership.members) <= TABLE_MEMBERS
    assert len(membership._news) <= TABLE_MEMBERS


HOSTS = [
    "nosuch.example",
    "localhost",
    "",
    "10.0.0",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "::ffff:224.0.0.1",
    "::",
    "ff02::1",
]


@pytest.mark.parametrize("host", [*HOSTS, "010.0.0.1", "1.2.3.4\n", "fe80::1%[/x]", "x" * 255])
def test_a_record_whose_host_is_no_address_is_refused(host: str) -> None:
    membership = core(member("n1"))
    hear(membership, replace(member("n2"), host=host))
    membership.on_table(MemberTable("n1", (replace(member("n2"), host=host),)), 0.0)
    assert "n2" not in membership.members
    assert membership.counts["host_names"] == 2


@pytest.mark.parametrize("host", ["10.1.2.3", "127.0.0.1", "2001:db8::7", "fe80::1%eth0"])
def test_addresses_are_taken(host: str) -> None:
    membership = core(member("n1"))
    hear(membership, replace(member("n2"), host=host))
    assert membership.members["n2"].host == host


def test_a_host_over_its_budget_waits_and_others_do_not() -> None:
    budget = TableBudget()
    assert budget.wait_s("a", BURST_ROWS, 0.0) == 0.0
    assert budget.wait_s("a", ROWS_PER_S, 0.0) == pytest.approx(1.0)
    assert budget.wait_s("b", ROWS_PER_S, 0.0) == 0.0
    assert budget.wait_s("a", 0, 1.0) == 0.0
    for number in range(3 * SOURCES_MAX):
        budget.wait_s(f"host {number}", 100, 1.0)
    assert len(budget._full_at) <= SOURCES_MAX
    budget.wait_s("a", BURST_ROWS + ROWS_PER_S, 60.0)
    for number in range(SOURCES_MAX):
        budget.wait_s(f"new {number}", 0, 60.0)
    assert budget.wait_s("a", 0, 60.0) == pytest.approx(1.0), "those whose budget is whole are forgotten first"


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["lie", "word"]), st.integers(1, 9), st.floats(0, 300)))
)
def test_only_a_life_that_its_member_has_disowned_is_not_believed_and_only_for_a_while(
    course: list[tuple[str, str, int, float]],
) -> None:
    disowned, now, until = Disowned(), 0.0, dict[str, tuple[int, float]]()
    for id, what, epoch, passes_s in course:
        if what == "lie":
            disowned.add(replace(member("n1", epoch=epoch), id=id), now)
            until[id] = epoch, now + DISOWNED_S
        else:
            disowned.forget(id)
            until.pop(id, None)
        now += passes_s
        for said in range(1, 11):
            record = replace(member("n1", epoch=said), id=id)
            highest, end = until.get(id, (0, 0.0))
            assert disowned.has(record, None, now) == (said <= highest and now < end)
            for lives in range(1, 11):
                known = replace(record, epoch=lives)
                assert disowned.has(record, known, now) == (lives < said <= highest and now < end)


# Datagrams -------------------------------------------------------------------------------------------------------


def sent(effects: list[MembershipEffect]) -> list[tuple[Address, Message]]:
    return [(effect.address, effect.message) for effect in effects if isinstance(effect, SendDatagram)]


def telling() -> Membership:
    """A node with much to tell, and a failed member."""
    others = [replace(member(f"n{number}"), meta=b"m" * 100) for number in range(1, 30)]
    membership = core(*others)
    hear(membership, replace(others[4], state=State.FAILED))
    return membership


@PROPERTY
@given(
    sender=st.sampled_from(["stranger", "n1", "n5", "nobody", "x" * 100]),
    source=st.sampled_from([STRANGER, at("n2"), at("n5"), at("n0")]),
    seq=st.integers(0, NUMBER_END - 1),
)
def test_an_answer_is_no_larger_than_the_question_unless_a_member_asks_from_its_host(
    sender: str, source: Address, seq: int
) -> None:
    membership = telling()
    ping, request = Ping(seq, sender, "n0", ()), PingRequest(seq, sender, "n3", *at("n3"), ())
    for question in (ping, request):
        for where, answer in sent(membership.on_datagram(question, source, 0.0)):
            row = membership.members.get(sender)
            at_home = row is not None and row.host == source[0]
            assert at_home or len(wire.encode_datagram(answer)) <= len(wire.encode_datagram(question))
            assert where == (source if question is ping else at("n3"))
    for _, late in sent(membership.on_timer(10.0)):
        assert not isinstance(late, Ack) or late.seq == 0 or late.news == ()


def test_a_probe_for_a_stranger_that_is_answered_late_is_one_answer() -> None:
    membership = telling()
    membership.on_timer(0.0)
    request = PingRequest(77, "stranger", "n3", *at("n3"), ())
    [(_, ping)] = sent(membership.on_datagram(request, STRANGER, 0.0))
    assert isinstance(ping, Ping)
    effects = [effect for tenth in range(1, 11) for effect in membership.on_timer(0.1 * tenth)]
    effects += membership.on_datagram(Ack(ping.seq, "n3", ()), at("n3"), 1.0)
    late = [message for where, message in sent(effects) if where == STRANGER]
    assert sum(len(wire.encode_datagram(one)) for one in late) <= len(wire.encode_datagram(request))
    assert late == [Nack(77, "n0")]


def test_a_member_at_its_host_hears_the_news() -> None:
    [(where, answer)] = sent(telling().on_datagram(Ping(1, "n2", "n0", ()), at("n2"), 0.0))
    assert isinstance(answer, Ack)
    assert where == at("n2")
    assert answer.news


def test_a_member_whom_another_row_has_moved_away_still_hears_of_it() -> None:
    membership = core(member("n1"))
    moved = replace(member("n1", epoch=2), host="10.0.0.77")
    hear(membership, moved)
    [(_, answer)] = sent(membership.on_datagram(Ping(1, "n1", "n0", ()), at("n1"), 0.0))
    assert isinstance(answer, Ack)
    assert answer.news[0] == moved


def test_nobody_is_probed_for_another_where_no_member_is() -> None:
    membership = core(member("n1"), member("n2"))
    for target, where in (("n2", STRANGER), ("nobody", at("n2")), ("n2", ("nosuch.example", 7000))):
        assert not sent(membership.on_datagram(PingRequest(1, "n1", target, *where, ()), at("n1"), 0.0))
    assert membership.counts["relays_refused"] == 3


def test_the_number_of_a_probe_says_nothing_of_the_next() -> None:
    membership = core(*[member(f"n{number}") for number in range(1, 8)])
    seqs: list[int] = []
    while len(seqs) < 50:
        now = membership.deadline
        for where, message in sent(membership.on_timer(now)):
            if isinstance(message, Ping):
                seqs.append(message.seq)
                membership.on_datagram(Ack(message.seq, message.target, ()), where, now)
    assert len({(later - earlier) % (1 << 32) for earlier, later in itertools.pairwise(seqs)}) == 49
    assert all(0 < seq < 1 << 32 for seq in seqs)
