"""The encoding: one for each message, nothing else decodes, and no input costs much."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import datagrams, instances_of, messages

from peerd.transport import wire
from peerd.transport.errors import PeerError
from peerd.transport.messages import (
    MESSAGES,
    Ack,
    Delta,
    Hello,
    LinkClose,
    LinkClosed,
    Member,
    Message,
    ModelSnapshot,
    PiecesTaken,
    Ping,
    PingRequest,
    Plan,
    Promise,
    RoundBegin,
    RoundCommit,
    State,
)

MEMBER = Member("id", "name", "host", 1, 2, 3, State.SUSPECT, "accuser", b"meta")
PING = Ping(7, "me", "you", (MEMBER,))
ROW = msgpack.unpackb(wire.encode(PING)[0])
LIMIT = 1 << 30


def decoded(message: Message) -> Message:
    header, chunks = wire.encode(message)
    return wire.decode(message.KIND, header, LIMIT).message(chunks)


@given(messages)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decoded(message) == message


@given(messages)
def test_there_is_one_encoding_of_a_message(message: Message) -> None:
    assert wire.encode(decoded(message))[0] == wire.encode(message)[0]


@given(st.sampled_from([*MESSAGES, 0, 200]), st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_peer_error(kind: int, header: bytes) -> None:
    try:
        head = wire.decode(kind, header, LIMIT)
    except PeerError:
        return
    assert isinstance(head.message(tuple(bytes(n) for n in head.lengths or ())), MESSAGES[kind])


nested = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3) | st.binary(),
    lambda items: st.lists(items, max_size=9) | st.dictionaries(st.text(max_size=3), items, max_size=2),
    max_leaves=20,
)


@given(st.sampled_from([*MESSAGES]), nested)
def test_any_msgpack_is_a_message_or_a_peer_error(kind: int, value: object) -> None:
    try:
        head = wire.decode(kind, msgpack.packb(value), LIMIT)
    except PeerError:
        return
    assert isinstance(head.message(()), MESSAGES[kind])


def at(path: list[int], value: object) -> list[Any]:
    """Return the row of PING with one value replaced."""
    row: list[Any] = msgpack.unpackb(wire.encode(PING)[0])
    place = row
    for index in path[:-1]:
        place = place[index]
    place[path[-1]] = value
    return row


BAD_PINGS = {
    "bool for int": at([0], True),
    "float for int": at([0], 7.0),
    "bytes for str": at([1], b"me"),
    "str for bytes": at([3, 0, 8], "meta"),
    "None": at([2], None),
    "no such state": at([3, 0, 6], 4),
    "bool for state": at([3, 0, 6], True),
    "member is a string": at([3, 0], "member"),
    "news is a member": at([3], ROW[3][0]),
    "a field too few": ROW[:-1],
    "a field of the member too few": at([3, 0], ROW[3][0][:-1]),
    "a map": dict(zip(["seq", "sender", "target", "news"], ROW, strict=True)),
    "a long string": at([1], "x" * 257),
    "a string of many bytes": at([1], "é" * 129),
    "long meta": at([3, 0, 8], b"x" * 513),
    "too many members": at([3], [ROW[3][0]] * 1025),
    "an extension": at([1], msgpack.ExtType(5, b"")),
    "a time": at([1], msgpack.Timestamp(0, 0)),
    "surrogates": at([1], b"\xed\xa0\x80"),
}


@pytest.mark.parametrize("row", BAD_PINGS.values(), ids=BAD_PINGS.keys())
def test_what_the_schema_does_not_allow_is_refused(row: object) -> None:
    with pytest.raises(PeerError):
        wire.decode(Ping.KIND, msgpack.packb(row), LIMIT)


def test_invalid_utf8_is_refused() -> None:
    header = wire.encode(replace(PING, sender="me"))[0].replace(b"\xa2me", b"\xa2\xff\xff")
    with pytest.raises(PeerError):
        wire.decode(Ping.KIND, header, LIMIT)


@pytest.mark.parametrize("gain", [math.nan, math.inf, -math.inf, 1])
def test_numbers_are_finite_floats(gain: float) -> None:
    row = [[], 1, 2, "codec", gain, True, False]
    with pytest.raises(PeerError):
        wire.decode(Delta.KIND, msgpack.packb(row), LIMIT)


def test_fields_of_a_newer_minor_version_are_ignored() -> None:
    longer = [*at([3, 0], [*ROW[3][0], "newer"]), {"newer": [1]}, None]
    assert wire.decode(Ping.KIND, msgpack.packb(longer), LIMIT).message() == PING


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(PeerError):
        wire.decode(Ping.KIND, wire.encode(PING)[0] + b"\xc0", LIMIT)


LENGTHS = {
    "not a list": 5, "negative": [-1], "bool": [True], "huge": [wire.CHUNK_MAX + 1], "many": [0] * 1025,
    "rows and none": [[1], 1], "rows of rows": [[[1]]], "a huge one in a row": [[1], [wire.CHUNK_MAX + 1]],
    "a negative one in a row": [[1] * 1024, [-1]], "few in a row": [[60], [41]], "one row": [[1] * 1024],
    "no row": [[]],    "rows that are not full": [[1] * 1000, [1] * 1000], "an empty row": [[1] * 1024, [1], []],
}  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_chunk_lengths_are_checked(lengths: object) -> None:
    with pytest.raises(PeerError):
        wire.decode(ModelSnapshot.KIND, msgpack.packb([lengths, 1, "codec"]), 1 << 36)


@pytest.mark.parametrize("count", [1024, 1025, 2048, 3000])
def test_a_message_may_have_more_chunks_than_an_array_has_items(count: int) -> None:
    message = ModelSnapshot(1, "codec", tuple(bytes(number % 7) for number in range(count)))
    header, chunks = wire.encode(message)
    head = wire.decode(ModelSnapshot.KIND, header, 1 << 34)
    assert head.lengths == tuple(map(len, message.chunks))
    assert wire.encode(head.message(chunks)) == (header, chunks)
    with pytest.raises(PeerError, match=f"{sum(head.lengths)} bytes in one message"):
        wire.decode(ModelSnapshot.KIND, header, sum(head.lengths) - 1)


def test_the_payload_limit_is_checked_before_any_chunk_comes() -> None:
    header, _ = wire.encode(ModelSnapshot(1, "codec", (bytes(60), bytes(41))))
    assert wire.decode(ModelSnapshot.KIND, header, 101).lengths == (60, 41)
    with pytest.raises(PeerError, match="101 bytes"):
        wire.decode(ModelSnapshot.KIND, header, 100)


def test_chunks_are_not_copied() -> None:
    memory = bytearray(8)
    (view,) = wire.encode(ModelSnapshot(1, "codec", (cast("memoryview", memoryview(memory).cast("f")),)))[1]
    memory[0] = 9
    assert len(view) == 8
    assert view[0] == 9


OURS = {
    "int for float is taken": (Delta(1, 2, "c", 1, True, True, b"", 0, 0, ()), True),
    "bool for int": (LinkClosed(True), False),
    "float for int": (LinkClosed(1.0), False),  # type: ignore[arg-type]
    "int over 64 bit": (LinkClosed(2**64), False),
    "not finite": (Delta(1, 2, "c", math.nan, True, True, b"", 0.0, 0.0, ()), False),
    "a long string": (replace(PING, sender="x" * 257), False),
    "long meta": (replace(PING, news=(replace(MEMBER, meta=bytes(513)),)), False),
    "too many members": (replace(PING, news=(MEMBER,) * 1025), False),
    "a long header": (replace(PING, news=(replace(MEMBER, meta=bytes(512)),) * 200), False),
    "not a text": (Hello(1, "", "", "", "", 1, "", 1, "", "", (b"x",)), False),  # type: ignore[arg-type]
    "a big chunk": (ModelSnapshot(1, "c", (bytes(wire.CHUNK_MAX + 1),)), False),
}


@pytest.mark.parametrize(("message", "fine"), OURS.values(), ids=OURS.keys())
def test_our_own_mistakes_show_before_the_peer_sees_them(message: Message, fine: bool) -> None:
    if fine:
        assert decoded(message) == message
    else:
        with pytest.raises((ValueError, OverflowError)):
            wire.encode(message)


# ------------------------------------------------------------------------------------------------------ datagrams


@given(datagrams)
def test_every_membership_message_survives_a_datagram(message: Message) -> None:
    datagram = wire.encode_datagram(message)
    assert len(datagram) <= wire.DATAGRAM_MAX
    found = wire.decode_datagram(datagram)
    if found != message:  # some news did not fit
        assert isinstance(message, Ping | PingRequest | Ack)
        assert isinstance(found, Ping | PingRequest | Ack)
        assert message.news[: len(found.news)] == found.news
        assert replace(message, news=found.news) == found


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda rest: wire.DATAGRAM_PREFIX + rest))
def test_any_datagram_is_a_message_or_a_peer_error(datagram: bytes) -> None:
    with suppress(PeerError):
        assert isinstance(wire.decode_datagram(datagram), Message)


def test_news_that_does_not_fit_is_left_out_the_last_first() -> None:
    news = tuple(replace(MEMBER, port=port, meta=bytes(300)) for port in range(9))
    found = wire.decode_datagram(wire.encode_datagram(replace(PING, news=news)))
    assert found == replace(PING, news=news[:4])


@pytest.mark.parametrize("message", [LinkClosed(1), ModelSnapshot(1, "c", ())])
def test_only_membership_travels_in_datagrams(message: Message) -> None:
    with pytest.raises(ValueError, match="datagram"):
        wire.encode_datagram(message)
    with pytest.raises(PeerError):
        wire.decode_datagram(wire.DATAGRAM_PREFIX + bytes([message.KIND]) + wire.encode(message)[0])


def test_a_datagram_of_another_version_is_refused() -> None:
    datagram = bytearray(wire.encode_datagram(PING))
    datagram[2] += 1
    with pytest.raises(PeerError, match="version"):
        wire.decode_datagram(bytes(datagram))


# --------------------------------------------------------------------------------------------------------- ranges

OUT_OF_RANGE = {
    "a negative number": (at([0], -1), Ping),
    "a number of 64 bits": (at([0], 2**64 - 1), Ping),
    "no port": (at([3, 0, 3], 65536), Ping),
    "a negative port": (at([3, 0, 3], -1), Ping),
    "an epoch that no sum holds": (at([3, 0, 4], 2**53), Ping),
    "an incarnation that no sum holds": (at([3, 0, 5], 2**53), Ping),
    "a name of markup": (at([3, 0, 1], "[/x]"), Ping),
    "a name with a colour": (at([3, 0, 1], "\x1b[31m"), Ping),
    "a name with a line": (at([3, 0, 1], "a\nb"), Ping),
    "a name that ends a line": (at([3, 0, 1], "a\n"), Ping),
    "no id": (at([1], ""), Ping),
    "a host with a blank": (at([3, 0, 2], "a b"), Ping),
    "a round that no sum holds": ([2**53, 1, 0.0], RoundCommit),
    "the number of a later plan than people make": ([2**32 + 1, "a", True, "gossip", b""], Plan),
    "a plan of control characters": ([1, "a", True, "gossip\x1b[2J", b""], Plan),
    "a negative step": ([[], -1, "sign"], ModelSnapshot),
    "a negative length of life": ([1, -1], LinkClose),
    "one of the lives": (
        [1, 2, "sign", "ring", True, True, ["a"], [-1], [], [], False, "", 0, 0, [], 0, []],
        RoundBegin,
    ),
    "a worker with a name longer than an id": ([[], 1, 1, 1, 1, [["a" * 33, 1, 1]]], Promise),
    "one of the pieces": ([1, 2, [3, 2**53]], PiecesTaken),
}


@pytest.mark.parametrize(("row", "cls"), OUT_OF_RANGE.values(), ids=OUT_OF_RANGE.keys())
def test_what_is_out_of_its_range_is_refused_before_anything_is_built(row: list[Any], cls: type[Message]) -> None:
    with pytest.raises(PeerError, match=r"is .*, not (from|like) "):
        wire.decode(cls.KIND, msgpack.packb(row), LIMIT)


def ours_out_of_range() -> list[Message]:
    return [
        RoundCommit(2**53, 1),
        RoundCommit(-1, 1),
        PiecesTaken(1, 1, (-1,)),
        replace(PING, news=(replace(MEMBER, port=65536),)),
        replace(PING, sender="[/x]"),
        Plan(2**32 + 1, "a"),
    ]


@pytest.mark.parametrize("message", ours_out_of_range(), ids=repr)
def test_what_we_send_is_in_its_range(message: Message) -> None:
    with pytest.raises(ValueError, match=r"not (from|like) "):
        wire.encode(message)


@given(st.sampled_from([*MESSAGES.values()]), st.data())
def test_every_whole_number_has_a_range_and_is_held_to_it(cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(instances_of(cls))
    header = list(msgpack.unpackb(wire.encode(message)[0]))
    for index, value in enumerate(header):
        if type(value) is int:
            beyond = [
                *header[:index],
                data.draw(st.integers(2**63, 2**64 - 1) | st.integers(-(2**63), -2)),
                *header[index + 1 :],
            ]
            with pytest.raises(PeerError):
                wire.decode(cls.KIND, msgpack.packb(beyond), LIMIT)
