"""What membership hears, and says, of a member that is revoked: nothing any more."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.membership.core import Membership
from peerd.membership.effects import MemberChanged, MembershipEffect, PushPull, SendDatagram
from peerd.training.effects import Log
from peerd.transport.messages import Ack, Member, MemberTable, Nack, Ping, PingRequest, State

HERE = ("10.0.0.1", 7000)


def member(number: int, state: State = State.ALIVE, incarnation: int = 0, epoch: int = 1, accuser: str = "") -> Member:
    return Member(f"n{number}", f"n{number}", "10.0.0.1", 7000 + number, epoch, incarnation, state, accuser, b"")


def core(*others: Member, seed: int = 7) -> Membership:
    membership = Membership(member(0), (), random.Random(seed), 0.0)
    membership.on_timer(0.0)
    membership.on_table(MemberTable("n1", others), 0.0)
    return membership


def run(membership: Membership, until: float) -> list[MembershipEffect]:
    effects: list[MembershipEffect] = []
    while membership.deadline <= until:
        effects += membership.on_timer(membership.deadline)
    return effects


def messages(effects: list[MembershipEffect]) -> list[SendDatagram]:
    return [one for one in effects if isinstance(one, SendDatagram)]


def test_it_has_failed_at_once_and_is_no_news() -> None:
    swarm = core(member(1), member(2))
    run(swarm, 1.0)
    effects = swarm.revoke("n2", 1.0)
    assert effects == [MemberChanged("n2")]
    assert swarm.members["n2"].state == State.FAILED
    assert "n2" not in {row.id for row in swarm.table().members}
    later = run(swarm, 300.0)
    told = [record.id for one in messages(later) if isinstance(one.message, Ping | Ack) for record in one.message.news]
    assert "n2" not in told
    assert not [one for one in later if isinstance(one, PushPull) and one.address == ("10.0.0.1", 7002)], "nor dialled"


@pytest.mark.parametrize(
    ("before", "after"),
    [(State.SUSPECT, State.FAILED), (State.FAILED, State.FAILED), (State.LEFT, State.LEFT)],
)
def test_one_that_is_suspect_has_failed_too_and_of_one_that_is_gone_nothing_is_said(
    before: State, after: State
) -> None:
    swarm = core(member(1), member(2))
    swarm.on_datagram(Ack(0, "n1", (member(2, before, accuser="n2" if before == State.LEFT else "n1"),)), HERE, 0.0)
    assert swarm.members["n2"].state == before
    assert [effect for effect in swarm.revoke("n2", 1.0) if isinstance(effect, MemberChanged)] == [
        MemberChanged("n2")
    ] * (before != after)
    assert swarm.members["n2"].state == after


anything = st.builds(
    member, st.sampled_from([0, 2, 3]), st.sampled_from(State), st.integers(0, 9), st.integers(1, 9),
    st.sampled_from(["", "n1", "n2"]),
)  # fmt: skip


@given(st.lists(st.tuples(anything, st.sampled_from(["news", "table", "own table", "dialled"])), max_size=8))
def test_nothing_brings_it_back(said: list[tuple[Member, str]]) -> None:
    swarm = core(member(1), member(2), member(3))
    swarm.revoke("n2", 0.0)
    row = swarm.members["n2"]
    for record, how in said:
        if how == "news":
            swarm.on_datagram(Ack(0, "n1", (record,)), HERE, 0.0)
        else:
            teller = record.id if how != "table" else "n1"
            where = (record.host, record.port) if how == "dialled" else None
            swarm.on_table(MemberTable(teller, (record,)), 0.0, where)
        assert swarm.members["n2"] == row
        assert swarm.members["n3"].accuser != "n2"


def test_what_it_sends_is_not_heard() -> None:
    swarm = core(member(1), member(2))
    swarm.revoke("n2", 0.0)
    for message in (Ping(1, "n2", "n0", ()), Ack(1, "n2", (member(9),)), Nack(1, "n2"),
                    PingRequest(1, "n2", "n1", "10.0.0.1", 7001, ())):  # fmt: skip
        assert not swarm.on_datagram(message, HERE, 0.0)
    assert "n9" not in swarm.members
    assert swarm.counts["revoked_datagrams"] == 4


def test_what_it_said_of_us_is_still_denied() -> None:
    """Others may have heard it before they knew."""
    swarm = core(member(1), member(2))
    swarm.revoke("n2", 0.0)
    swarm.on_datagram(Ack(0, "n1", (member(0, State.SUSPECT, accuser="n2"),)), HERE, 0.0)
    assert swarm.me.incarnation == 1


def test_who_was_never_here_does_not_come_and_we_ourselves_stay() -> None:
    swarm = core(member(1))
    assert not swarm.revoke("n2", 0.0)
    assert not swarm.revoke("n0", 0.0)
    swarm.on_table(MemberTable("n1", (member(2), replace(member(2), epoch=5))), 0.0)
    assert set(swarm.members) == {"n0", "n1"}
    assert swarm.me.state == State.ALIVE
    assert swarm.counts["revoked_records"] == 2


def test_news_beside_the_tables_has_a_few_exchanged_soon() -> None:
    swarm = core(*(member(number) for number in range(1, 17)))
    run(swarm, 5.0)
    swarm.spread(5.0)
    now, before = 5.0, swarm.counts["push_pulls"]
    while swarm.deadline < 25.0:
        now = swarm.deadline
        effects = swarm.on_timer(now)
        for one in messages(effects):
            if isinstance(one.message, Ping):
                swarm.on_datagram(Ack(one.message.seq, one.message.target, ()), one.address, now)
        assert not [one for one in effects if isinstance(one, Log)]
    soon = swarm.counts["push_pulls"] - before
    assert 7 <= soon <= 12
