"""What a membership message weighs is what it is when it is really encoded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import datagrams, instances_of

from peerd.membership.table_exchange import TABLE_PART
from peerd.simulation.weight import datagram_bytes, table_bytes
from peerd.transport import wire
from peerd.transport.framing import frames
from peerd.transport.messages import NAME, Ack, Member, MemberTable, Message, Ping, PingRequest, State

MEMBER = Member("n1", "node-1", "10.0.0.1", 7946, 1, 0, State.ALIVE, "", b"meta")
EDGES = [0, 1, 14, 15, 16, 17, TABLE_PART - 1, TABLE_PART, TABLE_PART + 1, TABLE_PART + 15, TABLE_PART + 16, 100]

members = st.lists(instances_of(Member), max_size=20).map(tuple)


def encoded_bytes(message: Message) -> int:
    """As one datagram, however long."""
    return len(wire.DATAGRAM_PREFIX) + 1 + len(wire.encode(message)[0])


def parts_bytes(table: MemberTable) -> int:
    """In the parts that a push-pull sends."""
    rows = table.members
    parts = [rows[start : start + TABLE_PART] for start in range(0, len(rows), TABLE_PART)] + [()]
    return sum(len(piece) for part in parts for piece in frames(MemberTable(table.sender, part)))


@given(datagrams)
def test_any_datagram_weighs_what_it_is(message: Message) -> None:
    assert datagram_bytes(message) == encoded_bytes(message)


@given(instances_of(Ping) | instances_of(PingRequest) | instances_of(Ack), members)
def test_any_news_weighs_what_it_is(message: Ping | PingRequest | Ack, news: tuple[Member, ...]) -> None:
    message = replace(message, news=news)
    assert datagram_bytes(message) == encoded_bytes(message)


@given(st.from_regex(NAME, fullmatch=True), members, st.sampled_from(EDGES))
def test_any_table_weighs_what_its_parts_are(sender: str, some: tuple[Member, ...], more: int) -> None:
    table = MemberTable(sender, some + (MEMBER,) * more)
    assert table_bytes(table) == parts_bytes(table)


@pytest.mark.parametrize("count", EDGES)
def test_the_header_of_a_long_array_is_weighed(count: int) -> None:
    news = tuple(replace(MEMBER, port=port) for port in range(count))
    assert datagram_bytes(Ack(1, "me", news)) == encoded_bytes(Ack(1, "me", news))
    assert table_bytes(MemberTable("me", news)) == parts_bytes(MemberTable("me", news))
