"""What trainer and daemon say: it comes back as it was, and anything else is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.local.local_socket import pack
from peerd.protocol.trainer import (
    DRAWS_BYTES,
    FROM_DAEMON,
    FROM_TRAINER,
    Attach,
    GradientPart,
    GradientReady,
    Said,
    decoded,
    encoded,
)

TABLES = [FROM_TRAINER, FROM_DAEMON]
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: st.text(max_size=5),
    bytes: st.binary(min_size=DRAWS_BYTES, max_size=DRAWS_BYTES),
    list[str]: st.lists(st.text(max_size=5), max_size=3),
    list[Any]: st.just([]),
    int | None: st.none() | st.integers(0, 1),
    str | None: st.none() | st.text(max_size=5),
}
WRONG: dict[Any, list[Any]] = {
    int: ["1", 1.0, True, None],
    float: ["1", None, True],
    bool: [1, None],
    str: [1, None, b"x"],
    bytes: ["12345678", None, b"1234567", b"123456789"],
    list[str]: ["x", [1], None],
    list[Any]: [1, [[1]], [["a", "b"]], [[2, 1]], [[0, 10**9]]],
    int | None: ["1", 1.5, True],
    str | None: [1, b"x"],
}


def of(cls: type[Said]) -> st.SearchStrategy[Said]:
    hints = get_type_hints(cls)
    drawn = {item.name: VALUES[hints[item.name]] for item in fields(cls)}
    if cls is Attach:
        drawn |= {"parameters": st.integers(1, 5), "total": st.integers(5, 9), "variances": st.just([[1, 4]])}
        drawn["states"] = st.just(0)
    if cls in (GradientPart, GradientReady):
        drawn["samples"] = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
    if cls is GradientPart:
        drawn["first"] = st.integers(1, 9)
    if cls is GradientReady:
        drawn["rate"] = st.floats(min_value=0, allow_infinity=False)
    return st.builds(cls, **drawn)


@given(st.data())
@pytest.mark.parametrize("table", TABLES, ids=["trainer", "daemon"])
def test_all_that_is_said_comes_back(table: dict[str, type[Said]], data: st.DataObject) -> None:
    said = data.draw(st.one_of(*map(of, table.values())))
    message = encoded(said)
    assert pack(message)
    assert decoded({**message, "a newer field": 1}, table) == said


@pytest.mark.parametrize("table", TABLES, ids=["trainer", "daemon"])
@given(data=st.data())
def test_a_field_of_another_type_is_named(table: dict[str, type[Said]], data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from([cls for cls in table.values() if fields(cls)]))
    message = encoded(data.draw(of(cls)))
    name = data.draw(st.sampled_from([item.name for item in fields(cls)]))
    message[name] = data.draw(st.sampled_from(WRONG[get_type_hints(cls)[name]]))
    with pytest.raises(ValueError, match=cls.KIND):
        decoded(message, table)


@given(st.dictionaries(st.text(max_size=6), st.none() | st.integers() | st.text(max_size=4), max_size=4))
def test_anything_else_is_refused(message: dict[str, Any]) -> None:
    for table in TABLES:
        if message.get("kind") not in table:
            with pytest.raises(ValueError, match="nothing that is said here"):
                decoded(message, table)


def test_a_kind_said_both_ways_means_one_thing() -> None:
    """`spare` and `barrier` are asked or told of, and heard; a gradient that is ready is no mean."""
    both = FROM_TRAINER.keys() & FROM_DAEMON.keys()
    assert both == {"spare", "barrier"}
    assert all(not fields(FROM_TRAINER[kind]) for kind in both)


@pytest.mark.parametrize(
    "message", [{"kind": "taken"}, {"kind": "taken", "half": 2}, {"kind": "step", "step": 1}, {"kind": ["step"]}, {}]
)
def test_what_lacks_or_does_not_exist_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lacks|no buffer|nothing that is said"):
        decoded(message, FROM_TRAINER)
