"""How many bytes is a membership message on the line? Those of `peerd.transport.wire`, without encoding all of it.

A record travels in thousands of datagrams; its own length is computed once. A sample of datagrams is encoded all the
same, and compared.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from peerd.membership.table_exchange import TABLE_PART
from peerd.transport import wire
from peerd.transport.framing import FIXED_SIZE
from peerd.transport.messages import Ack, Member, MemberTable, Message, Ping, PingRequest

WEIGHED_MAX = 1 << 15  # records of which the length is kept
_ARRAY_SHORT = 15  # items of an array whose header is one byte; that of a longer one is three
_weighed: dict[int, tuple[Member, int]] = {}  # by id, as a hash of all fields takes longer than all else here


def datagram_bytes(message: Message) -> int:
    """Of one datagram, before news that does not fit is left out."""
    match message:
        case Ping(seq, sender, target, news):
            return _ping_bytes(_magnitude(seq), len(sender.encode()), len(target.encode())) + _rows_bytes(news)
        case Ack(seq, sender, news):
            return _ack_bytes(_magnitude(seq), len(sender.encode())) + _rows_bytes(news)
        case PingRequest():
            return len(wire.encode_datagram(replace(message, news=()))) + _rows_bytes(message.news)
        case _:
            return len(wire.encode_datagram(message))


@functools.lru_cache(maxsize=1 << 12)
def _ping_bytes(seq: int, sender: int, target: int) -> int:
    """Of one without news, with a number as long as `seq` and ids of so many bytes."""
    return len(wire.encode_datagram(Ping(seq, "x" * sender, "x" * target, ())))


@functools.lru_cache(maxsize=1 << 12)
def _ack_bytes(seq: int, sender: int) -> int:
    return len(wire.encode_datagram(Ack(seq, "x" * sender, ())))


def _magnitude(number: int) -> int:
    """A number that msgpack writes in as many bytes."""
    return number if number < 128 else 1 << (number.bit_length() - 1)


def table_bytes(table: MemberTable) -> int:
    """Of one whole table, in the parts that it travels in."""
    rows = table.members
    parts = [rows[start : start + TABLE_PART] for start in range(0, len(rows), TABLE_PART)]
    bare = FIXED_SIZE + len(wire.encode(MemberTable(table.sender, ()))[0])
    return (len(parts) + 1) * bare + sum(map(_rows_bytes, parts))  # an empty part ends it


def _rows_bytes(records: tuple[Member, ...]) -> int:
    """What they add to a message that has none."""
    total = 2 * (len(records) > _ARRAY_SHORT)
    weighed = _weighed.get
    for record in records:  # a call for each would take most of the time
        known = weighed(id(record))
        total += known[1] if known is not None else _record_bytes(record)
    return total


def _record_bytes(record: Member) -> int:
    with_it, without = (wire.encode(Ack(0, "x", news))[0] for news in ((record,), ()))
    if len(_weighed) >= WEIGHED_MAX:
        _weighed.clear()
    _weighed[id(record)] = record, len(with_it) - len(without)
    return len(with_it) - len(without)
