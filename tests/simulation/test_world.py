"""Virtual time: what happens first, when it ends, and a digest that tells any two runs apart."""

from __future__ import annotations

import io
import json
import math
from functools import partial
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from peerd.simulation.world import Kind, World

numbers = st.integers(-(2**31), 2**31 - 1)
values = st.floats(allow_nan=False).filter(lambda value: math.copysign(1, value) > 0 or value != 0)
rows = st.tuples(st.floats(0.0, 100.0), st.sampled_from(list(Kind)), numbers, numbers, values)
histories = st.lists(rows, max_size=30)
Row = tuple[float, Kind, int, int, float]


def lived(seed: int, history: list[Row]) -> World:
    """A world in which these things happened."""
    world = World(seed)
    for after_s, kind, node, other, value in history:
        world.later(after_s, partial(world.note, kind, node, other, value))
    world.run(1000.0)
    return world


@given(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0]), max_size=30))
def test_what_is_due_goes_first_and_of_equals_the_first_asked_for(delays: list[float]) -> None:
    world = World(0)
    seen: list[tuple[float, int]] = []

    def see(number: int) -> None:
        seen.append((world.now, number))

    for number, delay_s in enumerate(delays):
        world.later(delay_s, partial(see, number))
    world.run(10.0)
    assert seen == sorted((delay_s, number) for number, delay_s in enumerate(delays))


def test_an_event_for_now_goes_after_those_that_were_there() -> None:
    world = World(0)
    seen: list[str] = []

    def first() -> None:
        seen.append("a")
        world.later(0.0, lambda: seen.append("c"))

    world.later(1.0, first)
    world.later(1.0, lambda: seen.append("b"))
    world.run(1.0)
    assert seen == ["a", "b", "c"]


@given(st.floats(-1e9, 0.0))
def test_nothing_happens_in_the_past(delay_s: float) -> None:
    world = World(0)
    world.run(5.0)
    seen: list[float] = []
    world.later(delay_s, lambda: seen.append(world.now))
    world.run(5.0)
    assert seen == [5.0]


def test_time_ends_where_it_was_to_and_goes_on_from_there() -> None:
    world = World(0)
    seen: list[float] = []
    for at in (1.0, 2.0, 3.0):
        world.later(at, lambda: seen.append(world.now))
    world.run(2.0)
    assert (world.now, seen) == (2.0, [1.0, 2.0])
    world.run(2.5)
    assert (world.now, seen) == (2.5, [1.0, 2.0])
    world.run(10.0)
    assert (world.now, seen) == (10.0, [1.0, 2.0, 3.0])
    world.run(4.0)
    assert world.now == 10.0, "time does not go back"


@given(st.integers(0, 100), histories)
def test_the_same_history_has_the_same_digest_whatever_the_seed(seed: int, history: list[Row]) -> None:
    assert lived(seed, history).digest == lived(0, history).digest


@given(histories, rows, st.data())
def test_one_difference_anywhere_is_another_digest(history: list[Row], other: Row, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(history)))
    more = [*history[:at], other, *history[at:]]
    before, after = lived(0, history), lived(0, more)
    assert before.digest != after.digest
    index = data.draw(st.integers(0, len(other) - 1))
    changed = list(other)
    changed[index] = data.draw(rows)[index]
    if changed[index] != other[index]:
        assert lived(0, [*history, cast("Row", tuple(changed))]).digest != lived(0, [*history, other]).digest


def test_the_digest_of_a_long_run_is_of_all_of_it_and_may_be_asked_midway() -> None:
    first, second = World(0), World(0)
    seen = set()
    for number in range(10_000):
        first.note(Kind.STEP, 1, value=number)
        second.note(Kind.STEP, 1, value=number)
        if number % 1000 == 0:
            seen.add(first.digest)
    assert first.digest == second.digest
    assert len({*seen, first.digest}) == 11
    assert first.events == 10_000


@given(st.integers(0, 2**32), st.integers(0, 50))
def test_streams_are_apart(seed: int, draws: int) -> None:
    """However much one draws, the others draw the same."""
    world = World(seed)
    for stream in (world.rng("network"), world.rng("node", 1)):
        for _ in range(draws):
            stream.random()
    assert world.rng("node", 2).random() == World(seed).rng("node", 2).random()
    names = [("network",), ("node", 1), ("node", 2), ("node", 12), ("node", 1, 2)]
    first_draws = {World(seed).rng(*name).random() for name in names}
    assert len(first_draws) == len(names)
    assert World(seed + 1).rng("network").random() not in first_draws


def test_the_trace_has_a_line_an_event_and_changes_nothing() -> None:
    text = io.StringIO()
    traced, plain = World(0, text), World(0)
    for world in (traced, plain):
        world.later(1.5, partial(world.note, Kind.DATAGRAM, 1, 2, 300.0))
        world.later(2.0, partial(world.note, Kind.CRASH, 0))
        world.run(3.0)
    assert [json.loads(line) for line in text.getvalue().splitlines()] == [
        {"t": 1.5, "event": "datagram", "node": 1, "other": 2, "value": 300.0},
        {"t": 2.0, "event": "crash", "node": 0},
    ]
    assert traced.digest == plain.digest
