"""What a node makes of members that could have shown a certificate here, and have not: the core, unsigned."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from test_membership import HERE, hear, member, messages, run_until

from peerd.membership.core import Membership
from peerd.membership.roster import STRANGERS_ONE_IN, TABLE_MEMBERS, Roster
from peerd.transport.messages import Ack, Member, MemberTable, Ping, State

SUSPECT, FAILED = State.SUSPECT, State.FAILED


def core(*others: Member, met: tuple[str, ...] = ()) -> Membership:
    membership = Membership(member("n0"), (), random.Random(7), 0.0, handshakes=True)
    membership.on_timer(0.0)
    membership.on_table(MemberTable("n1", others), 0.0)
    for id in met:
        membership.met(id, 0.0)
    return membership


def dead(met: tuple[str, ...] = ()) -> Membership:
    return core(member("n1"), member("n2", FAILED, accuser="n1"), met=met)


@pytest.mark.parametrize(
    "said", [member("n2", incarnation=5), member("n2", SUSPECT, 5, accuser="n1"), member("n2", epoch=2)]
)
def test_a_dead_stranger_that_is_said_to_live_is_one_to_go_and_see(said: Member) -> None:
    membership = dead()
    assert hear(membership, said) == []
    assert membership.members["n2"].state == FAILED
    assert membership.hearsay["n2"].incarnation == said.incarnation
    membership.met("n2", 1.0)
    assert membership.members["n2"] == member("n2", incarnation=said.incarnation, epoch=said.epoch)
    assert membership.hearsay == {}


def test_of_what_is_said_the_last_counts_and_none_of_it_once_it_is_over() -> None:
    membership = dead()
    hear(membership, member("n2", incarnation=5), member("n2", incarnation=3), member("n2", incarnation=6))
    assert membership.hearsay == {"n2": member("n2", incarnation=6)}
    hear(membership, member("n2", State.LEFT, incarnation=6))
    assert membership.hearsay == {}
    assert membership.members["n2"].state == State.LEFT


def test_who_was_met_is_believed_as_ever() -> None:
    membership = dead(met=("n2",))
    hear(membership, member("n2", incarnation=1))
    assert membership.members["n2"].state == State.ALIVE


def test_a_stranger_that_is_dialled_in_vain_is_suspected_unless_it_has_answered() -> None:
    membership = core(member("n1"), member("n2"), member("n3"), met=("n3",))
    while not (pings := messages(membership.on_timer(now := membership.deadline), Ping)):
        pass
    [(where, ping)] = pings
    assert isinstance(ping, Ping)
    answered = ping.target
    membership.on_datagram(Ack(ping.seq, answered, ()), where, now)
    for id in ("n1", "n2", "n3"):
        membership.missed(id, now)
    suspected = {id for id, row in membership.members.items() if row.state == SUSPECT}
    assert suspected == {"n1", "n2"} - {answered}


def test_what_a_suspected_stranger_says_does_not_save_it_and_others_words_hasten_its_end() -> None:
    membership = core(*(member(f"n{number}") for number in range(1, 8)), met=("n1", "n3", "n4", "n5"))
    membership.missed("n2", 0.0)
    hear(membership, member("n2", incarnation=1))
    hear(membership, *(member("n2", SUSPECT, accuser=accuser) for accuser in ("n3", "n4", "n5")))
    run_until(membership, 5.1)
    assert membership.members["n2"].state == FAILED
    assert not membership.counts["last_words"], "it has been dialled"


def test_news_of_those_who_proved_themselves_goes_first() -> None:
    """It goes with the very next message, whatever is said of the others."""
    crowd = [member(f"n{number}") for number in range(10, 310)]
    membership = core(member("n1"), *crowd, met=("n1",))
    hear(membership, member("n1", incarnation=1))
    [(_, ack)] = messages(membership.on_datagram(Ping(1, "n1", "n0", ()), HERE, 0.0), Ack)
    assert isinstance(ack, Ack)
    assert ack.news[0] == member("n1", incarnation=1)
    assert len(ack.news) > 1, "the others have what is left"
    assert membership.on_datagram(Ack(0, "n1", ()), HERE, 0.0) == []


def test_who_is_met_while_it_is_a_rumour_becomes_news() -> None:
    membership = core(member("n1"), *(member(f"n{number}") for number in range(10, 310)), met=("n1",))
    membership.met("n309", 0.0)
    [(_, ack)] = messages(membership.on_datagram(Ping(1, "n1", "n0", ()), HERE, 0.0), Ack)
    assert isinstance(ack, Ack)
    assert member("n309") in ack.news


def test_one_probe_in_a_few_goes_to_strangers_and_each_has_its_turn() -> None:
    met = ("n1", "n2", "n3")
    membership = core(*(member(f"n{number}") for number in range(1, 14)), met=met)
    probed: list[str] = []
    while len(probed) < 10 * STRANGERS_ONE_IN:
        now = membership.deadline
        for where, ping in messages(membership.on_timer(now), Ping):
            assert isinstance(ping, Ping)
            probed.append(ping.target)
            membership.on_datagram(Ack(ping.seq, ping.target, ()), where, now)
    assert set(probed) == {f"n{number}" for number in range(1, 14)}
    assert sum(id in met for id in probed) == 10 * (STRANGERS_ONE_IN - 1)


def test_draws_prefer_who_has_proved_itself_and_leave_nobody_out() -> None:
    roster, rng = Roster(member("n0")), random.Random(3)
    for number in range(1, 101):
        roster.put(member(f"n{number}"))
        roster.put(member(f"n{number + 200}", FAILED))
    for id in ("n1", "n2", "n201"):
        roster.prove(id)
    drawn = Counter(one.id for _ in range(4000) for one in roster.pick(1, rng))
    assert drawn["n1"] + drawn["n2"] == pytest.approx(3000, abs=200)
    assert len(drawn) == 100
    assert len(roster.pick(3, rng)) == 3
    dialled = Counter(one.id for _ in range(4000) for one in roster.failed(1, rng))
    assert dialled["n201"] == pytest.approx(3000, abs=200)
    assert len(dialled) == 100
    assert len({one.id for one in roster.failed(8, rng)}) == 8


def test_in_a_full_table_a_stranger_makes_way_for_whoever_shows_a_certificate() -> None:
    """Made-up members that answer fill it, and nobody else was let in; nor is what was suspected of one remembered."""
    membership = core(member("n1"), met=("n1",))
    for first in range(2, TABLE_MEMBERS, 64):
        hear(membership, *[member(f"n{number}") for number in range(first, min(first + 64, TABLE_MEMBERS))])
    hear(membership, *[member(f"n{number}", SUSPECT, accuser="n1") for number in range(2, 20)])
    assert len(membership.members) == TABLE_MEMBERS
    hear(membership, member("n9000"))
    assert "n9000" not in membership.members
    for number in range(9000, 9030):
        membership.met(f"n{number}", 0.0)
        hear(membership, member(f"n{number}"))
        assert f"n{number}" in membership.members
    assert {"n0", "n1"} <= membership.members.keys()
    assert len(membership.members) == TABLE_MEMBERS
    run_until(membership, 30.0)
    assert {f"n{number}" for number in range(9000, 9030)} <= membership.members.keys()


def test_whoever_has_shown_a_certificate_makes_way_for_nobody() -> None:
    everybody = [f"n{number}" for number in range(1, TABLE_MEMBERS)]
    membership = core(*map(member, everybody), met=(*everybody, "n9000"))
    hear(membership, member("n9000"))
    assert membership.members.keys() == {"n0", *everybody}
    assert membership.counts["table_full"] == 1
