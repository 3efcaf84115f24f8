"""Reminders: ever later while nothing comes, as before once answers are quick, and never again at once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.pairs.reminders import PATIENCE_MAX_S, REMINDERS, SILENT_DOUBLINGS_MAX, SOON, Reminders
from peerd.training.trigger import SILENCE_MAX_S

EVENTS = st.one_of(
    st.tuples(st.just("told"), st.sampled_from("ab"), st.booleans()),
    st.tuples(st.just("told first"), st.sampled_from("ab"), st.booleans()),
    st.tuples(st.just("answered"), st.sampled_from("ab"), st.sampled_from([0.0, 20.0, 100.0, 1000.0, math.inf])),
    st.tuples(st.just("begins"), st.sampled_from("ab"), st.none()),
    st.tuples(st.just("keep"), st.sampled_from(["", "a", "b", "ab"]), st.none()),
)


def wait_s(reminders: Reminders, peer: str) -> float:
    return reminders.due_at(peer, 0.0)


def waits(reminders: Reminders, peer: str, times: int) -> list[float]:
    """For how long each time, when no answer comes."""
    found = []
    for _ in range(times):
        found.append(wait_s(reminders, peer))
        reminders.reminded(peer, found[-1], owes_half=True)
    return found


@given(events=st.lists(EVENTS, max_size=60))
def test_whatever_happens_nothing_is_due_at_once_and_nobody_is_waited_for_without_end(
    events: list[tuple[str, str, float | bool | None]],
) -> None:
    reminders, now = Reminders(), 0.0
    for what, peer, value in events:
        before, other = wait_s(reminders, peer), "ab".replace(peer, "")
        others = [wait_s(reminders, one) for one in other]
        match what:
            case "told":
                now = reminders.due_at(peer, now)
                reminders.reminded(peer, now, owes_half=bool(value))
                assert wait_s(reminders, peer) == min(2 * before, PATIENCE_MAX_S)
            case "told first":
                reminders.reminded(peer, -math.inf, owes_half=bool(value))
                assert wait_s(reminders, peer) == before
            case "answered":
                took_s = float(value or 0)
                reminders.answered(peer, took_s)
                assert wait_s(reminders, peer) == max(SILENCE_MAX_S, before / 2 if took_s < SOON * before else before)
                assert peer not in reminders.silent("ab")
            case "begins":
                reminders.begins(peer)
                assert wait_s(reminders, peer) == SILENCE_MAX_S
            case "keep":
                reminders.keep(peer)
                assert all(wait_s(reminders, one) == SILENCE_MAX_S for one in other)
                assert not set(reminders.silent("ab")) & set(other)
        assert what == "keep" or [wait_s(reminders, one) for one in other] == others
        assert all(SILENCE_MAX_S <= wait_s(reminders, one) <= PATIENCE_MAX_S for one in "ab")


def test_who_answers_quickly_again_is_waited_for_as_before() -> None:
    reminders = Reminders()
    found = waits(reminders, "a", 20)
    assert found[:4] == [60, 120, 240, 480]
    assert found == sorted(found)
    assert found[-1] == PATIENCE_MAX_S
    for _ in range(20):
        reminders.answered("a", SOON * SILENCE_MAX_S - 1)
    assert waits(reminders, "a", 4) == found[:4]


@pytest.mark.parametrize("first", [False, True])
def test_who_owes_no_half_is_never_silent(*, first: bool) -> None:
    reminders = Reminders()
    for _ in range(100 * REMINDERS):
        reminders.reminded("a", -math.inf if first else wait_s(reminders, "a"), owes_half=False)
    assert not reminders.silent("a")


@given(given_up=st.integers(0, 2 * SILENT_DOUBLINGS_MAX))
def test_the_more_were_given_up_in_vain_the_longer_another_is_waited_for(given_up: int) -> None:
    """It may be the line of this node; an exchange says that it is not."""

    def minutes(peer: str) -> float:
        """Until it is silent."""
        found = 0.0
        while not reminders.silent([peer]):
            found += round(waits(reminders, peer, 1)[0] / 60)
        return found

    reminders = Reminders()
    for number in range(given_up):
        minutes(f"peer {number}")
        reminders.given_up(f"peer {number}")
        assert not reminders.silent([f"peer {number}"])
    limit = REMINDERS * 2 ** min(given_up, SILENT_DOUBLINGS_MAX)
    assert limit <= minutes("a") < limit + PATIENCE_MAX_S / 60
    reminders.answered("b", math.inf)
    assert REMINDERS <= minutes("c") < 2 * REMINDERS


def test_the_longest_silent_come_first() -> None:
    reminders = Reminders()
    for peer, times in (("c", 4), ("a", 5), ("b", 5), ("d", 1)):
        waits(reminders, peer, times)
    assert reminders.silent("abcd") == ["a", "b", "c"]
    assert reminders.silent("dc") == ["c"]
