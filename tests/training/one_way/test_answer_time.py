"""What is said again is neither said too soon nor later than a link may be silent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.training.one_way.answer_time import LOST_MAX, SURE_AFTER, WAIT_MIN_S, AnswerTime
from peerd.training.trigger import SILENCE_MAX_S

seconds = st.floats(0, 1e4)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.one_of(st.none(), seconds)), max_size=30))
def test_the_wait_is_bounded_and_grows_with_repeats(events: list[tuple[str, float | None]]) -> None:
    answers = AnswerTime()
    assert answers.wait_s("a") == SILENCE_MAX_S
    repeats, measured = dict.fromkeys("ab", 0), False
    for peer, took in events:
        before = answers.wait_s(peer)
        assert WAIT_MIN_S <= before <= SILENCE_MAX_S
        if took is None:
            answers.repeated(peer)
            repeats[peer] += 1
            quick = measured and before == WAIT_MIN_S
            if not quick or repeats[peer] > LOST_MAX:
                assert answers.wait_s(peer) == min(SILENCE_MAX_S, 2 * before)
            assert not measured or repeats[peer] <= LOST_MAX or answers.wait_s(peer) > WAIT_MIN_S
        else:
            measured |= not repeats[peer]
            answers.came(peer, took)
            repeats[peer] = 0


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


@given(st.lists(seconds, max_size=2 * SURE_AFTER))
def test_a_run_that_ends_waits_no_longer_than_it_is_sure_to_have_to(took: list[float]) -> None:
    answers, hurried = AnswerTime(), AnswerTime()
    hurried.hurries = True
    for one in (answers, hurried):
        for each in took:
            one.came("a", each)
    if len(took) >= SURE_AFTER:
        assert hurried.wait_s("a") == answers.wait_s("a")
    else:
        assert hurried.wait_s("a") == min(SILENCE_MAX_S, max(WAIT_MIN_S, 2 * min(took, default=0.0)))
