"""Which bytes is a message: fields by position in a msgpack array, and the limits that every decoder keeps.

How this works. A schema is compiled once for each message class from its type hints. To encode, the fields in order
make one row (a nested dataclass makes a row within); to decode, msgpack gives rows back, whose types are compared
with the schema in one step before anything is built. Positions instead of names: there is one encoding of a message,
and no key can come twice. A row may be longer than the schema (a newer minor version): the rest is ignored.
Chunks are not in the row; their lengths are, in front of the fields, so that later fields can still be appended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import IntEnum
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import msgpack

from peerd.transport.errors import PeerError
from peerd.transport.messages import COUNT, MESSAGES, Ack, Chunks, Message, Ping, PingRequest, Within

VERSION = 1
"""Major version of the encoding: another one is refused."""

HEADER_MAX = 64 << 10  # bytes of msgpack
CHUNK_MAX = 4 << 20  # bytes
ITEMS_MAX = 1024  # of any array; the lengths of more chunks come in rows of so many
LENGTH_MAX = 5  # bytes of msgpack
STRING_MAX = 256  # bytes of UTF-8
BYTES_MAX = 512  # the meta of a member
DATAGRAM_MAX = 1400  # bytes: fits an Ethernet frame with room for a tunnel's headers

DATAGRAM_PREFIX = b"pd" + bytes([VERSION])
FIRST_HANDSHAKE_KIND = 16  # below: membership
FIRST_MODE_KIND = 32

# Without these limits a 64 KiB header of nested array headers costs 71 MB (msgpack has no limit on depth).
_unpack = partial(
    msgpack.unpackb,
    use_list=False,
    raw=False,
    strict_map_key=True,
    max_array_len=ITEMS_MAX,
    max_map_len=64,
    max_str_len=STRING_MAX,
    max_bin_len=BYTES_MAX,
    max_ext_len=0,
)

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Head:
    """A decoded header: a whole message, but for its chunks."""

    kind: int
    values: Row
    lengths: tuple[int, ...] | None  # of the chunks to come; None: this message has none

    def message(self, chunks: Chunks = ()) -> Message:
        """Return the message, given the chunks that the header announced."""
        message: Callable[..., Message] = MESSAGES[self.kind]
        return message(*self.values) if self.lengths is None else message(*self.values, chunks)


# ------------------------------------------------------------------------------------------------------- schemas


class _Schema:
    """One dataclass on the wire: its fields, their wire types, and what to do with those that are not plain."""

    def __init__(self, cls: type) -> None:
        hints = get_type_hints(cls, include_extras=True)
        self.cls = cls
        self.names = [field.name for field in fields(cls)]
        self.bulk = self.names[-1:] == ["chunks"]
        if self.bulk:
            del self.names[-1]
        self.types: tuple[type, ...] = ()
        self.builders: list[tuple[int, Callable[[Any], Any]]] = []
        self.flatteners: list[tuple[int, Callable[[Any], Any]]] = []
        for index, name in enumerate(self.names):
            wire_type, build, flatten = _field(hints[name], f"{cls.__name__}.{name}")
            self.types += (wire_type,)
            if build:
                self.builders.append((index, build))
            if flatten:
                self.flatteners.append((index, flatten))
        self.row = _row_getter(self.names)

    def flatten(self, value: Any) -> Row:
        """Return the row of one dataclass; ValueError says that it is not what its type hints promise (our bug)."""
        row = self.row(value)
        if self.flatteners:
            changed = list(row)
            for index, flatten in self.flatteners:
                changed[index] = flatten(row[index])
            row = tuple(changed)
        if tuple(map(type, row)) != self.types:
            raise ValueError(f"{self._mismatch(row)}: {value!r}")
        return row

    def values(self, row: Any) -> Row:
        """Return the field values in a received row, checked; or raise PeerError."""
        if type(row) is not tuple or len(row) < len(self.types):
            raise PeerError(f"{self.cls.__name__}: expected {len(self.types)} fields")
        row = row[: len(self.types)]
        if tuple(map(type, row)) != self.types:
            raise PeerError(self._mismatch(row))
        if not self.builders:
            return cast(Row, row)
        values = list(row)
        for index, build in self.builders:
            values[index] = build(row[index])
        return tuple(values)

    def build(self, row: Any) -> Any:
        """Return the dataclass in a received row, or raise PeerError."""
        return self.cls(*self.values(row))

    def _mismatch(self, row: Row) -> str:
        found = zip(self.names, row, self.types, strict=True)
        wrong = next((name, type(value), wanted) for name, value, wanted in found if type(value) is not wanted)
        return f"{self.cls.__name__}.{wrong[0]} is of type {wrong[1].__name__}, not {wrong[2].__name__}"


def _row_getter(names: list[str]) -> Callable[[Any], Row]:
    """Return a function from a dataclass to the tuple of its fields (attrgetter alone does not make tuples of 0, 1)."""
    if len(names) > 1:
        return cast(Callable[[Any], Row], attrgetter(*names))
    return lambda value: tuple(getattr(value, name) for name in names)


def _field(hint: Any, where: str) -> tuple[type, Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    """Return a field's type on the wire, what builds it from there, and what flattens it to there."""
    if hint is bool:
        return bool, None, None
    if hint is int:
        return int, *_within(COUNT, where)
    if get_origin(hint) is Annotated:
        wire_type, rule = get_args(hint)
        return wire_type, *(_within(rule, where) if isinstance(rule, Within) else _like(rule, where))
    if hint is str:  # unpackb has checked the length already
        return str, None, _short_string
    if hint is bytes:
        return bytes, None, _short_bytes
    if hint is float:
        return float, _finite, _finite_ours
    if get_origin(hint) is tuple and get_args(hint)[1:] == (Ellipsis,):
        return tuple, *_tuple_of(get_args(hint)[0], where)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return int, partial(_member_of, {member.value: member for member in hint}), hint.__int__
    assert is_dataclass(hint), f"no wire type for {hint}"
    schema = _Schema(cast(type, hint))
    return tuple, schema.build, schema.flatten


def _within(allowed: Within, where: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    low, high = allowed.low, allowed.high

    def build(value: int) -> int:
        if not low <= value <= high:
            raise PeerError(f"{where} is {value}, not from {low} to {high}")
        return value

    def flatten(value: Any) -> Any:
        if type(value) is int and not low <= value <= high:
            raise ValueError(f"{where} is {value}, not from {low} to {high}")
        return value

    return build, flatten


def _like(pattern: re.Pattern[str], where: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    fits = pattern.fullmatch

    def build(text: str) -> str:
        if fits(text) is None:
            raise PeerError(f"{where} is {text!r:.80}, not like {pattern.pattern}")
        return text

    def flatten(text: Any) -> Any:
        if type(text) is str and fits(text) is None:
            raise ValueError(f"{where} is {text!r:.80}, not like {pattern.pattern}")
        return text

    return build, flatten


def _tuple_of(hint: Any, where: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return what builds and what flattens a tuple of any length, whose items are of type `hint`."""
    wire_type, build, flatten = _field(hint, where)

    def build_all(items: Row) -> Row:
        if build is not None and is_dataclass(hint):
            return tuple(map(build, items))  # it checks the type
        if not all(type(item) is wire_type for item in items):
            raise PeerError(f"an item is not of type {wire_type.__name__}")
        return items if build is None else tuple(map(build, items))

    def flatten_all(items: Row) -> Row:
        if len(items) > ITEMS_MAX:
            raise ValueError(f"{len(items)} items, more than {ITEMS_MAX}")
        row = tuple(items) if flatten is None else tuple(map(flatten, items))
        if not all(type(item) is wire_type for item in row):
            raise ValueError(f"an item is not of type {wire_type.__name__}")
        return row

    return build_all, flatten_all


def _short_string(text: Any) -> Any:
    # 64 characters never exceed 256 bytes, and nearly all strings are shorter: no need to encode them to know
    if len(text) > STRING_MAX // 4 and len(text.encode()) > STRING_MAX:
        raise ValueError(f"a string longer than {STRING_MAX} bytes: {text!r}")
    return text


def _short_bytes(data: Any) -> Any:
    if len(data) > BYTES_MAX:
        raise ValueError(f"{len(data)} bytes, more than {BYTES_MAX}")
    return data


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise PeerError(f"a number is {value}")
    return value


def _finite_ours(value: Any) -> float:
    """Take numpy's floats too; modes compute with them."""
    if not math.isfinite(value):
        raise ValueError(f"a number is {value}")
    return float(value)


def _member_of(members: dict[int, IntEnum], value: int) -> IntEnum:
    if value not in members:
        raise PeerError(f"{value} is no member of its enumeration")
    return members[value]


_schemas: dict[int, _Schema] = {}


def _schema(kind: int) -> _Schema:
    """Compiled when it is needed first: a mode from outside the package may come late with messages of its own."""
    schema = _schemas.get(kind)
    if schema is None:
        schema = _schemas[kind] = _Schema(MESSAGES[kind])
    return schema


# ------------------------------------------------------------------------------------------------------- messages


def is_bulk(kind: int) -> bool:
    """Say whether messages of this kind carry chunks."""
    return _schema(kind).bulk


def is_urgent(kind: int) -> bool:
    """Say whether messages of this kind overtake others: the handshake's and the membership's do."""
    return kind < FIRST_MODE_KIND


def chunks_max(payload_limit: int) -> int:
    """How many chunks a message with so many bytes of them has at most: twice as many as there are full ones."""
    return max(ITEMS_MAX, 2 * (payload_limit // CHUNK_MAX))


def header_max(payload_limit: int) -> int:
    """Bytes of the longest header of such a message."""
    return _header_max(chunks_max(payload_limit))


def _header_max(chunks: int) -> int:
    return HEADER_MAX + LENGTH_MAX * max(0, chunks - ITEMS_MAX)


def encode(message: Message) -> tuple[bytes, Chunks]:
    """Return the header of a message and its chunks as flat views of bytes; ValueError when over a limit (our bug)."""
    schema = _schema(message.KIND)
    row = schema.flatten(message)
    chunks: Chunks = ()
    if schema.bulk:
        chunks = tuple(map(_flat, cast(Any, message).chunks))
        lengths = tuple(map(len, chunks))
        if len(lengths) > ITEMS_MAX**2 or max(lengths, default=0) > CHUNK_MAX:
            raise ValueError(f"{len(chunks)} chunks, or one of them, are too many bytes")
        row = (_in_rows(lengths) if len(lengths) > ITEMS_MAX else lengths, *row)
    header: bytes = msgpack.packb(row)
    if len(header) > (limit := _header_max(len(chunks))):
        raise ValueError(f"a header of {len(header)} bytes, more than {limit}: split the {schema.cls.__name__}")
    return header, chunks


def decode(kind: int, header: bytes | bytearray | memoryview, payload_limit: int) -> Head:
    """Return what a header says, checked; any other bytes raise PeerError."""
    if kind not in MESSAGES:
        raise PeerError(f"no message is of kind {kind}")
    schema = _schema(kind)
    if len(header) > header_max(payload_limit):
        raise PeerError(f"a header of {len(header)} bytes, more than {header_max(payload_limit)}")
    try:
        row = _unpack(header)
    except (ValueError, msgpack.UnpackException) as error:  # UnicodeDecodeError and StackError are ValueErrors
        raise PeerError(f"{schema.cls.__name__}: not msgpack within the limits ({error!r:.80})") from None
    if not schema.bulk:
        return Head(kind, schema.values(row), None)
    if type(row) is not tuple or not row:
        raise PeerError(f"{schema.cls.__name__}: expected {1 + len(schema.types)} fields")
    return Head(kind, schema.values(row[1:]), _chunk_lengths(row[0], payload_limit))


def _in_rows(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(lengths[start : start + ITEMS_MAX] for start in range(0, len(lengths), ITEMS_MAX))


def _chunk_lengths(lengths: Any, payload_limit: int) -> tuple[int, ...]:
    if type(lengths) is tuple and lengths and all(type(row) is tuple for row in lengths):
        rows, lengths = lengths, tuple(chain.from_iterable(lengths))
        if len(lengths) <= ITEMS_MAX or rows != _in_rows(lengths):
            raise PeerError(f"the lengths of {len(lengths)} chunks are not in rows of {ITEMS_MAX}")
    if type(lengths) is not tuple or not all(type(length) is int and 0 <= length <= CHUNK_MAX for length in lengths):
        raise PeerError(f"chunk lengths are not integers up to {CHUNK_MAX}")
    if sum(lengths) > payload_limit:
        raise PeerError(f"{sum(lengths)} bytes in one message, more than the limit of {payload_limit}")
    if len(lengths) > chunks_max(payload_limit):
        raise PeerError(f"{len(lengths)} chunks in one message, more than {chunks_max(payload_limit)}")
    return lengths


def _flat(chunk: bytes | bytearray | memoryview) -> memoryview:
    view = memoryview(chunk)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view with a zero in its shape cannot be cast


# ------------------------------------------------------------------------------------------------------ datagrams


def encode_datagram(message: Message) -> bytes:
    """Return a membership message as one datagram; news that does not fit is left out, the last first."""
    if message.KIND >= FIRST_HANDSHAKE_KIND:
        raise ValueError(f"a {type(message).__name__} does not travel in a datagram")
    while True:
        datagram = DATAGRAM_PREFIX + bytes([message.KIND]) + encode(message)[0]
        if len(datagram) <= DATAGRAM_MAX:
            return datagram
        if not (isinstance(message, Ping | PingRequest | Ack) and message.news):
            raise ValueError(f"a {type(message).__name__} of {len(datagram)} bytes, more than {DATAGRAM_MAX}")
        message = replace(message, news=message.news[:-1])


def decode_datagram(datagram: bytes) -> Message:
    """Return the message in a datagram; any other bytes raise PeerError."""
    if len(datagram) > DATAGRAM_MAX or len(datagram) <= len(DATAGRAM_PREFIX):
        raise PeerError(f"a datagram of {len(datagram)} bytes")
    if not datagram.startswith(DATAGRAM_PREFIX):
        raise PeerError(f"a datagram of another version or program: {datagram[:3]!r}, not {DATAGRAM_PREFIX!r}")
    kind = datagram[len(DATAGRAM_PREFIX)]
    if kind >= FIRST_HANDSHAKE_KIND:
        raise PeerError(f"a message of kind {kind} does not travel in a datagram")
    return decode(kind, memoryview(datagram)[len(DATAGRAM_PREFIX) + 1 :], payload_limit=0).message()
