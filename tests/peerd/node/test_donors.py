"""Whom a newcomer asks for its first model, and when again, whatever the donors do; no clock, no network."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.node.donors import (
    ASK_AGAIN_S,
    ASK_SOON_S,
    ASKS_MAX,
    EARLY_SHARE,
    MAKES_S,
    SLOWEST_DONOR,
    DonorChoice,
    RequestLimit,
)

LOOK_S = 0.5
TURN_S = ASK_SOON_S + (ASKS_MAX - 1) * ASK_AGAIN_S  # from the first request to a silent donor to the next donor


def looks(seconds: float) -> list[float]:
    return [LOOK_S * number for number in range(int(seconds / LOOK_S) + 1)]


def test_a_silent_donor_is_asked_soon_then_seldom_and_then_another_one() -> None:
    choice = DonorChoice()
    asked = [(now, donor) for now in looks(TURN_S) if (donor := choice.ask("ab", 0, now))]
    again = [ASK_SOON_S + number * ASK_AGAIN_S for number in range(ASKS_MAX - 1)]
    assert asked == [(now, "a") for now in (0.0, *again)] + [(TURN_S, "b")]


def test_while_a_donor_makes_what_it_sends_of_a_large_model_no_other_is_asked() -> None:
    choice, values = DonorChoice(), 7_000_000_000
    made_s = MAKES_S * values
    assert made_s > 3 * TURN_S
    asked = [(now, donor) for now in looks(2 * made_s) if (donor := choice.ask("ab", 0, now, values))]
    assert asked[0] == (0.0, "a")
    assert asked[1] == (ASK_SOON_S, "a"), "the first request may be lost"
    assert [donor for _, donor in asked].count("a") == ASKS_MAX
    assert min(now for now, donor in asked if donor == "b") >= made_s


def test_all_that_are_silent_are_asked_in_turns() -> None:
    choice = DonorChoice()
    asked = [donor for now in looks(6 * TURN_S) if (donor := choice.ask("abc", 0, now))]
    assert asked[: 6 * ASKS_MAX] == [donor for donor in "abcabc" for _ in range(ASKS_MAX)]


def test_a_donor_that_sends_is_not_asked_again() -> None:
    choice = DonorChoice()
    assert [choice.ask("ab", round(2 * SLOWEST_DONOR * now), now) for now in looks(1000)] == ["a"] + 2000 * [None]
    came = 2000 * SLOWEST_DONOR
    silent = [donor for now in looks(ASK_AGAIN_S) if (donor := choice.ask("ab", came, 1000 + now))]
    assert silent == ["a"], "it has stopped"


def test_a_donor_that_is_gone_or_sent_no_model_is_left_for_another() -> None:
    choice = DonorChoice()
    assert choice.ask("ab", 0, 0.0) == "a"
    assert choice.ask("b", 0, 0.1) == "b"
    assert choice.ask("ab", 0, 0.2) is None
    choice.pass_over()
    assert choice.donor is None
    assert choice.ask("ab", 0, 0.3) == "a", "all were passed over: the next turn"


def test_who_sent_no_model_has_had_its_turn_and_takes_nobody_elses() -> None:
    choice = DonorChoice()
    for now in looks(TURN_S):
        choice.ask("ab", 0, now)
    choice.reject("a")
    assert (choice.donor, choice.asked) == ("b", {"b"})
    choice.reject("b")
    assert not choice.asked


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 30.0), st.integers(0, 100_000), st.lists(st.sampled_from("abcde"), min_size=1, unique=True)
        )
    )
)
def test_whoever_is_asked_lives_and_nobody_is_asked_without_a_pause(looks: list[tuple[float, int, list[str]]]) -> None:
    choice = DonorChoice()
    now, received, last = 0.0, 0, (-1.0, "")
    for passed_s, came, givers in looks:
        now, received = now + passed_s, received + came
        if (donor := choice.ask(givers, received, now)) is not None:
            assert donor in givers
            assert donor == choice.donor
            assert donor != last[1] or now - last[0] >= ASK_SOON_S or len(givers) == 1
            last = now, donor
        assert choice.donor in givers


@given(st.lists(st.floats(0.0, EARLY_SHARE - 0.01), min_size=ASKS_MAX, max_size=ASKS_MAX))
def test_an_honest_newcomers_requests_are_all_heard_though_each_may_be_late(late: list[float]) -> None:
    limit, choice = RequestLimit(), DonorChoice()
    at = [now for now in looks(TURN_S - 1) if choice.ask("a", 0, now)]
    assert len(at) == ASKS_MAX
    assert all(limit.admits("newcomer", now + share * ASK_SOON_S) for now, share in zip(at, late, strict=True))


def test_who_asks_all_the_time_is_shown_the_model_hardly_more_often() -> None:
    limit = RequestLimit()
    shown = [now for now in looks(10 * ASK_AGAIN_S) if limit.admits("greedy", now)]
    assert shown[:3] == [0.0, EARLY_SHARE * ASK_SOON_S, EARLY_SHARE * (ASK_SOON_S + ASK_AGAIN_S)]
    assert len(shown) == 2 + round((10 * ASK_AGAIN_S - shown[1]) // (EARLY_SHARE * ASK_AGAIN_S))
    assert limit.admits("another", 0.0)
