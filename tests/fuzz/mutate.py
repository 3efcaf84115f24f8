"""What is done to something valid so that it is nearly so: to its bytes, and to the values that they encode."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

import msgpack
from material import pick

EXTREMES = (
    0, 1, -1, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 - 1, 2**53, 2**62,
    2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63),
)  # fmt: skip
ODD_FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, 5e-324, 1e300, -1e300, 1e30, 0.5)
ODD_TEXTS = ("", "x" * 128, "x" * 129, "x" * 256, "[/x]", "\x1b[2J", "a\nb", "é" * 64, "\0", "../x", "gossip", "b")
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    "",
    b"",
    [],
    {},
    [[]],
    {"a": 1},
    -1,
    1.5,
    "b",
    b"b",
    msgpack.ExtType(1, b"x"),
)
LONGEST = 1 << 17  # bytes: nothing grows beyond
TOUCH_BYTES = 4


def bent(rng: Random, data: bytes, other: bytes = b"") -> bytes:
    """Up to three changes of bytes: flipped, overwritten, cut, repeated, or exchanged with a part of `other`."""
    buffer = bytearray(data[:LONGEST])
    for _ in range(1 + int(rng.random() * 3)):
        size = len(buffer)
        at = int(rng.random() * (size + 1))
        what = int(rng.random() * 9)
        if what <= 1 and at < size:
            buffer[at] ^= 1 << int(rng.random() * 8)
        elif what == 2 and at < size:
            buffer[at] = pick(rng, (0, 1, 0x7F, 0x80, 0xFF, 0xC1, 0xDC, 0xDF, int(rng.random() * 256)))
        elif what == 3:
            del buffer[at : at + 1 + int(rng.random() * 8)]
        elif what == 4:
            buffer[at:at] = rng.randbytes(1 + int(rng.random() * 8))
        elif what == 5:
            buffer[at:at] = buffer[at : at + 1 + int(rng.random() * 32)]
        elif what == 6:
            form = pick(rng, (">I", ">Q", "<I", "<Q", ">H", "<H"))
            packed = struct.pack(form, pick(rng, EXTREMES) % (1 << (8 * struct.calcsize(form))))
            buffer[at : at + len(packed)] = packed
        elif what == 7:
            del buffer[at:]
        else:
            start = int(rng.random() * (len(other) + 1))
            buffer[at:] = other[start:]
    return bytes(buffer)


def altered(rng: Random, value: Any) -> Any:
    """The same, but for one value somewhere within: another number, text or type; or one too many, or too few."""
    if not isinstance(value, list) or not value or rng.random() < 0.03:
        return odd(rng, value)
    copy = list(value)
    at = int(rng.random() * len(copy))
    what = rng.random()
    if what < 0.8:
        copy[at] = altered(rng, copy[at])
    elif what < 0.86:
        del copy[at]
    elif what < 0.92:
        copy.insert(at, pick(rng, copy))
    elif what < 0.98:
        copy[at] = pick(rng, copy)
    else:
        copy = (copy * 40)[:1100]
    return copy


def odd(rng: Random, value: Any) -> Any:
    """Something in the place of one value: most often of its type."""
    if rng.random() < 0.1:
        return pick(rng, ODD)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + pick(rng, (-1, 1, 2)) if rng.random() < 0.4 else pick(rng, EXTREMES)
    if isinstance(value, float):
        return pick(rng, ODD_FLOATS)
    if isinstance(value, str):
        return pick(rng, ODD_TEXTS)
    if isinstance(value, bytes):
        return bent(rng, value)
    return pick(rng, ODD)


def packed(row: Any) -> bytes:
    """As msgpack; a number that does not fit makes another one of it."""
    try:
        found: bytes = msgpack.packb(row)
    except OverflowError:
        return b"\xc1"
    return found


def touched(how: bytes, sealed: bytes, other: bytes) -> bytes:
    """What `TOUCH_BYTES` say becomes of it: a kind of change, where, and with what."""
    at = int.from_bytes(how[1:3], "big") % (len(sealed) + 1)
    changed = bytearray(sealed)
    match how[0] % 6:
        case 0 if at < len(changed):
            changed[at] ^= how[3] or 1
        case 1:
            del changed[at:]
        case 2:
            changed[at:at] = bytes([how[3]])
        case 3:
            del changed[at : at + 1 + how[3] % 20]
        case 4:
            changed[at:] = other[at:]
        case _:
            changed[how[3] % 4] ^= 1 + how[2] % 255  # of its length, or of the name of its key
    return bytes(changed)
