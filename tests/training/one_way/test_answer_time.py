"""What is said again is neither said too soon nor later than a link may be silent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.training.one_way.answer_time import WAIT_MIN_S, AnswerTime
from peerd.training.trigger import SILENCE_MAX_S

seconds = st.floats(0, 1e4)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.one_of(st.none(), seconds)), max_size=30))
def test_the_wait_is_bounded_and_grows_with_repeats(events: list[tuple[str, float | None]]) -> None:
    answers = AnswerTime()
    assert answers.wait_s("a") == SILENCE_MAX_S
    for peer, took in events:
        before = answers.wait_s(peer)
        assert WAIT_MIN_S <= before <= SILENCE_MAX_S
        if took is None:
            answers.repeated(peer)
            assert answers.wait_s(peer) == min(SILENCE_MAX_S, 2 * before)
        else:
            answers.came(peer, took)


@given(st.floats(0.01, 50), st.integers(20, 60))
def test_even_answers_are_waited_for_a_little_longer_than_they_take(took: float, count: int) -> None:
    answers = AnswerTime()
    for _ in range(count):
        answers.came("a", took)
    assert min(SILENCE_MAX_S, max(WAIT_MIN_S, took)) <= answers.wait_s("b")
    assert answers.wait_s("b") <= min(SILENCE_MAX_S, max(WAIT_MIN_S, 1.02 * took))


@given(seconds, seconds)
def test_an_answer_to_what_was_repeated_says_nothing_of_how_long_one_takes(first: float, late: float) -> None:
    answers, other = AnswerTime(), AnswerTime()
    for one in (answers, other):
        one.came("a", first)
    answers.repeated("a")
    answers.came("a", late)
    assert answers.wait_s("a") == other.wait_s("a")
