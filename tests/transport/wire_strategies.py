"""Hypothesis strategies for every message, built from the type hints: a new message is tested without a line here."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from peerd.transport.messages import COUNT, MESSAGES, Chunk, Message, Within

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=64)  # at most 256 bytes
chunks = st.lists(st.binary(max_size=64), max_size=4).map(tuple)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if hint is bool:
        return st.booleans()
    if hint is int:
        hint = Annotated[int, COUNT]
    if get_origin(hint) is Annotated:
        rule = get_args(hint)[1]
        if isinstance(rule, Within):
            return st.integers(rule.low, rule.high)
        return st.from_regex(rule, fullmatch=True)
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if hint is str:
        return texts
    if hint is bytes:
        return st.binary(max_size=64)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return chunks if item == Chunk else st.lists(values_of(item), max_size=4).map(tuple)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return st.sampled_from(list(hint))
    assert is_dataclass(hint)
    return instances_of(hint)


def instances_of(cls: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{field.name: values_of(hints[field.name]) for field in fields(cls)})


messages: st.SearchStrategy[Message] = st.one_of([instances_of(cls) for cls in MESSAGES.values()])
datagrams: st.SearchStrategy[Message] = st.one_of([instances_of(cls) for kind, cls in MESSAGES.items() if kind < 5])
