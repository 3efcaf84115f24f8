"""Strikes, in plain numbers: who is refused, for how long, and what is forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.node.strikes import REMEMBERED_MAX, STRIKES_MAX, WINDOW_S, Strikes
from peerd.training.refusal import REFUSED_MAX_S, REFUSED_S

WAITS = st.lists(st.sampled_from([0.0, 1.0, WINDOW_S / 2, WINDOW_S, REFUSED_S, 2 * REFUSED_S, 1e5]), max_size=40)


def refuse(strikes: Strikes, now: float) -> float:
    return [strikes.strike("a", now) for _ in range(STRIKES_MAX)][-1]


def test_three_within_a_minute_are_ten_minutes_then_twice_as_long() -> None:
    strikes = Strikes()
    assert [strikes.strike("a", at) for at in (0.0, 1.0, 2.0)] == [0.0, 0.0, REFUSED_S]
    assert strikes.refused_s("a", 2.0 + REFUSED_S / 2) == REFUSED_S / 2
    assert strikes.refused_s("a", 2.0 + REFUSED_S) == 0.0
    assert strikes.refused_s("b", 2.0) == 0.0
    assert refuse(strikes, 3.0 + REFUSED_S) == 2 * REFUSED_S


def test_who_behaves_for_as_long_as_it_was_refused_begins_anew() -> None:
    strikes = Strikes()
    refuse(strikes, 0.0)
    assert refuse(strikes, 2 * REFUSED_S) == REFUSED_S


@given(WAITS)
def test_it_takes_three_strikes_within_the_window_and_a_refusal_is_bounded(waits: list[float]) -> None:
    strikes, now, recent = Strikes(), 0.0, list[float]()
    for wait in waits:
        now += wait
        refused_before = strikes.refused_s("a", now)
        refused = strikes.strike("a", now)
        assert strikes.refused_s("a", now) == refused <= REFUSED_MAX_S
        if refused_before:
            assert refused == refused_before, "what comes from before a refusal does not make it longer"
            continue
        recent = [at for at in recent if now - at < WINDOW_S] + [now]
        assert bool(refused) == (len(recent) >= STRIKES_MAX)
        if refused:
            recent = []


@given(st.lists(st.floats(WINDOW_S / (STRIKES_MAX - 1), 1e6), max_size=40))
def test_a_damaged_line_now_and_then_is_forgiven(waits: list[float]) -> None:
    strikes, now = Strikes(), 0.0
    for wait in waits:
        now += wait
        assert strikes.strike("a", now) == 0.0


def test_any_number_of_names_takes_bounded_memory_and_sets_nobody_free() -> None:
    strikes = Strikes()
    refuse(strikes, 0.0)
    for number in range(3 * REMEMBERED_MAX):
        strikes.strike(number, 1.0)
    assert len(strikes) <= REMEMBERED_MAX
    assert strikes.refused_s("a", 1.0) > 0


def test_who_is_forgiven_is_heard_and_the_others_are_not() -> None:
    strikes = Strikes()
    for who in (("a", "h"), ("a", "i"), ("b", "h")):
        for _ in range(STRIKES_MAX):
            strikes.strike(who, 0.0)
    strikes.forgive(lambda who: isinstance(who, tuple) and who[0] == "a")
    assert strikes.refused_s(("a", "h"), 1.0) == strikes.refused_s(("a", "i"), 1.0) == 0.0
    assert strikes.refused_s(("b", "h"), 1.0) > 0
    strikes.forgive(lambda who: who == "c")
