"""Which codec `auto` gives a link, by what its exchanges take."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from peerd.training.codecs.concentration import CONCENTRATED, RECENT
from peerd.training.codecs.vector import Layout
from peerd.training.pairs.codec_choice import CYCLE, CYCLE_CONCENTRATED, SPARSE_WORTH, STEPS_MAX, CodecChoice
from peerd.training.pairs.duration import BY_BYTES, COARSE, SPARSE, STEPS, TIMES, Durations, StepTime
from peerd.training.pairs.link import LinkState, PairLink
from peerd.training.pairs.reference import PairedReference
from peerd.training.scratch import Scratch

BYTES = {COARSE: 0.133, SPARSE: 0.038}
STEP_S = 0.1
seconds = st.floats(1e-3, 1e3)
codecs = st.sampled_from(BY_BYTES)


class Line:
    """A link of a node whose steps take STEP_S, over a line of its own."""

    def __init__(self) -> None:
        self.step_time = StepTime()
        self.choice = CodecChoice(Counter(), self.step_time)
        layout = Layout(2, 2)
        reference = PairedReference(1, np.zeros(2, np.float32), layout, Scratch())
        self.link = PairLink("b", reference, np.zeros(2, np.float32), 0.0, 0.0, 0.0, LinkState.OPEN)
        self.now = 0.0
        self.step = 0

    def exchanges(self, count: int, delay_s: float, by_one_bit_s: float) -> list[str]:
        """So many, each of which takes this line's delay and what its bytes take; and by what."""
        return [self.exchange(delay_s, by_one_bit_s) for _ in range(count)]

    def exchange(self, delay_s: float, by_one_bit_s: float) -> str:
        self.step, self.now = self.step + 1, self.now + STEP_S
        self.step_time.heard(self.step, self.now)
        codec = self.link.codec
        self.link.began_at, self.now = self.now, self.now + delay_s + by_one_bit_s * BYTES[codec] / BYTES[COARSE]
        made = int((self.now - self.link.began_at) / STEP_S)
        self.step += made
        self.step_time.heard(self.step, self.link.began_at + made * STEP_S)
        self.choice.ended(self.link, codec, codec, self.now)
        self.link.exchanges += 1
        self.choice.choose(self.link)
        return codec


lines = st.tuples(st.floats(0, 100), st.floats(1e-3, 100))
pasts = st.lists(st.tuples(st.integers(1, 12), lines), max_size=6)


@given(pasts, st.floats(0, 9), st.floats(0.01, 0.5))
@example([(5, (78.0, 75.0))], 3.6875, 0.3125)
def test_a_line_on_which_one_bit_a_value_takes_few_steps_has_that_in_its_turn_whatever_it_was_before(
    past: list[tuple[int, tuple[float, float]]], delay: float, by_one_bit: float
) -> None:
    line = Line()
    for count, (slow, slower) in past:
        line.exchanges(count, slow * STEP_S, slower * STEP_S)
    line.exchanges(60, delay * STEP_S, by_one_bit * STEP_S)
    assert line.exchanges(7 * CYCLE, delay * STEP_S, by_one_bit * STEP_S).count(COARSE) == 7


@given(st.lists(st.floats(CONCENTRATED, 1), min_size=RECENT), st.integers(0, RECENT // 2))
def test_two_of_three_are_by_the_largest_where_few_values_are_most_of_what_steps_change(
    shares: list[float], others: int
) -> None:
    """Said anew at each exchange; a run of steps that changed nothing says nothing."""
    line = Line()

    def turns(said: list[float], cycle: int) -> int:
        for share in said:
            line.choice.moved(share)
        chosen, worth = line.link.codec, line.link.worth
        line.exchange(0.0, 0.1)
        assert worth == (1.0 if chosen == COARSE or line.link.exchanges == 1 else SPARSE_WORTH), "chosen together"
        return line.exchanges(2 * cycle, 0.0, 0.1).count(COARSE)

    assert turns([], CYCLE) == 2
    assert turns([*[0.0] * others, *shares, *[0.01] * (others - 1)], CYCLE_CONCENTRATED) == 2
    assert turns([0.0] * RECENT, CYCLE_CONCENTRATED) == 2
    assert turns([CONCENTRATED / 2] * RECENT, CYCLE) == 2


@given(pasts, st.floats(0, 4), st.floats(4, 1000))
def test_a_thin_line_has_the_largest_values_alone(
    past: list[tuple[int, tuple[float, float]]], delay: float, times: float
) -> None:
    line, by_one_bit = Line(), times * STEPS_MAX * STEP_S
    for count, (slow, slower) in past:
        line.exchanges(count, slow * STEP_S, slower * STEP_S)
    line.exchanges(40 * CYCLE, delay * STEP_S, by_one_bit)
    assert line.exchanges(20, delay * STEP_S, by_one_bit).count(SPARSE) >= 16
    assert line.choice._counts["slow_by_one_bit"] >= 16


def test_over_a_thin_line_the_largest_values_wait_for_all_of_the_change() -> None:
    """An exchange for less would only take the line from the next."""
    for by_one_bit, waits_for in ((0.5, SPARSE_WORTH), (4.0 * STEPS_MAX, 1.0)):
        line = Line()
        line.exchanges(10 * CYCLE, 0.0, by_one_bit * STEP_S)
        assert line.link.codec == SPARSE
        assert line.link.worth == waits_for


@given(st.floats(2, 100), st.floats(0.01, 0.2))
def test_where_bytes_are_not_what_takes_so_long_one_bit_a_value_stays(times: float, share: float) -> None:
    """But for trying it again now and then."""
    line, delay = Line(), times * STEPS_MAX * STEP_S
    line.exchanges(20, delay, share * delay)
    assert line.exchanges(40 * CYCLE, delay, share * delay).count(COARSE) >= 36


def test_a_hiccup_where_delay_alone_takes_many_steps_is_soon_forgotten() -> None:
    line = Line()
    line.exchanges(40, 12 * STEP_S, 0.1 * STEP_S)
    line.exchange(100 * STEP_S, 0.1 * STEP_S)
    line.exchanges(60, 12 * STEP_S, 0.1 * STEP_S)
    assert line.exchanges(100, 12 * STEP_S, 0.1 * STEP_S).count(COARSE) > 24


def test_before_steps_are_known_nothing_takes_many_of_them() -> None:
    line = Line()
    line.link.exchanges = CYCLE - 1
    line.choice.ended(line.link, COARSE, COARSE, 1e6)
    line.choice.choose(line.link)
    assert line.link.codec == COARSE


@given(st.lists(st.tuples(codecs, codecs, seconds), max_size=60))
def test_what_a_codec_takes_lies_within_what_was_measured_of_late(past: list[tuple[str, str, float]]) -> None:
    durations = Durations()
    assert [durations.of(codec) for codec in BY_BYTES] == [0.0] * 2
    for ours, theirs, took in past:
        durations.ended(ours, theirs, took)
        durations.ended(ours, "int8", 1e9)  # none of ours: it says nothing
        for codec in BY_BYTES:
            known = durations.of(codec)
            assert 0 <= known <= TIMES * max(took for _, _, took in past) * (1 + 1e-9)
        dearer = min(ours, theirs, key=BY_BYTES.index)
        assert durations.of(dearer) > 0


def test_an_exchange_of_two_codecs_took_as_long_as_the_dearer() -> None:
    durations = Durations()
    durations.ended(SPARSE, COARSE, 8.0)
    assert (durations.of(SPARSE), durations.of(COARSE)) == (0.0, 8.0)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.5, 2)), min_size=STEPS, max_size=40), st.floats(10, 1e5))
def test_the_usual_step_is_told_from_steps_that_were_left_out_and_from_pauses(
    reports: list[tuple[int, float]], pause: float
) -> None:
    time, step, now = StepTime(), 0, 0.0
    time.heard(0, 0.0)
    for number, (steps, took) in enumerate(reports):
        step, now = step + steps, now + steps * took + (pause if number == len(reports) // 2 else 0)
        time.heard(step, now)
    assert 0.5 - 1e-9 <= time.seconds <= 2 + 1e-9
    before = time.seconds
    time.heard(1, now + 1000)  # another run, which counts anew: what lies between is no step
    assert time.seconds == before
