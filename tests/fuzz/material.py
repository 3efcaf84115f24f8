"""Valid messages of every type, drawn from the type hints: a message that is new is fuzzed without a line here."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from random import Random
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack

from peerd.transport import wire
from peerd.transport.messages import COUNT, MESSAGES, Chunk, Chunks, Within

EACH = 24  # samples of a type
SAMPLE_IDS = ("a", "b", "c", "x")
TEXTS = (
    "a", "b", "c", "x", "", "float32", "bfloat16", "int8", "int4", "sign", "sign_largest", "top_k", "top_k_3",
    "top_k_2bit", "ring", "tree:0", "halving", "gossip", "hardsync servers=3", "allreduce every=2", "127.0.0.1",
    "10.9.9.9", "::1", "fe80::1%lo", "node.invalid",
)  # fmt: skip
NUMBERS = (0, 1, 2, 3, 7, 127, 128, 255, 256, 1000, 65535, 65536, 2**31, 2**32, 2**52, 2**53 - 1, 2**62, 2**63 - 1)
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 0.001, 1e-300, 5e-324, 1e6, 1e30, 1e300)


@dataclass(frozen=True, slots=True)
class Sample:
    """One message on the wire, and its header taken apart."""

    kind: int
    header: bytes
    row: list[Any]
    chunks: Chunks


def pick(rng: Random, items: Any) -> Any:
    """One of them; a third of the time that `choice` takes."""
    return items[int(rng.random() * len(items))]


def sampled(cls: Any, rng: Random) -> Any:
    """An instance of a dataclass that is a message or part of one."""
    return cls(**{item.name: _value(_hints(cls)[item.name], rng) for item in fields(cls)})


def on_the_wire(message: Any) -> Sample:
    """Raises ValueError: too long for the wire."""
    header, chunks = wire.encode(message)
    return Sample(message.KIND, header, msgpack.unpackb(header, use_list=True), chunks)


@functools.cache
def samples() -> dict[int, list[Sample]]:
    """By kind; the same in every run."""
    rng = Random("samples")
    return {kind: [on_the_wire(sampled(cls, rng)) for _ in range(EACH)] for kind, cls in sorted(MESSAGES.items())}


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _value(hint: Any, rng: Random) -> Any:
    if hint is int:
        hint = Annotated[int, COUNT]
    if get_origin(hint) is Annotated:
        rule = get_args(hint)[1]
        if isinstance(rule, Within):
            return pick(rng, [number for number in (rule.low, rule.high, *NUMBERS) if rule.low <= number <= rule.high])
        return pick(rng, [text for text in TEXTS if rule.fullmatch(text)])
    if hint is bool:
        return rng.random() < 0.5
    if hint is float:
        return pick(rng, FLOATS)
    if hint is str:
        return pick(rng, TEXTS)
    if hint is bytes:
        return rng.randbytes(pick(rng, (0, 1, 16, 32, 64)))
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        if item == Chunk:
            return tuple(rng.randbytes(int(rng.random() * 64)) for _ in range(int(rng.random() * 4)))
        return tuple(_value(item, rng) for _ in range(int(rng.random() * 4)))
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return pick(rng, list(hint))
    assert is_dataclass(hint), hint
    return sampled(hint, rng)
