"""One page of numbers, seen from two processes."""

from __future__ import annotations

import math
import mmap

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.local.board import METRICS_BYTES_MAX, NUMBER_MAX, PAGE_BYTES, Board, LastStep
from peerd.training.model.over import OVER, parts_of
from peerd.training.model.quiet import Quiet

numbers = st.floats(allow_nan=False)
steps = st.integers(0, 1 << 53)


def two_views() -> tuple[Board, Board]:
    page = mmap.mmap(-1, PAGE_BYTES)
    return Board(memoryview(page)), Board(memoryview(page))


def test_a_fresh_page_wants_each_step_and_has_no_figures() -> None:
    trainers, daemons = two_views()
    assert (trainers.quiet, trainers.sent, trainers.current) == (Quiet(0.0, 0, 0, 0, 0), 0, 0)
    assert daemons.last_step() is None


@given(
    step=steps,
    samples=steps,
    at=numbers,
    loss=numbers,
    lr=numbers,
    metrics=st.dictionaries(st.text(max_size=20), st.floats(allow_nan=False, allow_infinity=False), max_size=5),
)
def test_figures_are_read_as_they_were_noted(
    step: int, samples: int, at: float, loss: float, lr: float, metrics: dict[str, float]
) -> None:
    trainers, daemons = two_views()
    trainers.note(step, samples, at, loss, lr, 2 * lr, metrics)
    assert daemons.last_step() == LastStep(step, samples, at, loss, lr, 2 * lr, metrics)
    trainers.note(step + 1, samples, at, loss, lr, 2 * lr, {})
    assert daemons.last_step() == LastStep(step + 1, samples, at, loss, lr, 2 * lr, metrics), "what was not said stays"


@given(step=steps, theirs=steps)
def test_the_step_of_a_model_that_was_taken_over_stands_with_the_last_figures(step: int, theirs: int) -> None:
    trainers, daemons = two_views()
    trainers.go_on_from(theirs)
    assert daemons.last_step() is None
    trainers.note(step, 8, 1.0, 0.5, 0.1, 0.2, {"accuracy": 0.5})
    trainers.go_on_from(theirs)
    assert daemons.last_step() == LastStep(theirs, 8, 1.0, 0.5, 0.1, 0.2, {"accuracy": 0.5})


@given(quiet=st.builds(Quiet, numbers, steps, steps, steps, steps), copy=st.integers(0, 1), others=st.integers(0, OVER))
def test_what_the_daemon_says_is_read_as_it_was_said(quiet: Quiet, copy: int, others: int) -> None:
    trainers, daemons = two_views()
    assert trainers.others == 0
    daemons.say_others(others)
    daemons.be_quiet(quiet)
    daemons.reads(copy)
    daemons.sends()
    assert (trainers.quiet, trainers.current, trainers.sent, trainers.others) == (quiet, copy, 1, others)


@given(total=st.integers(1, 1 << 70), step=st.integers(0, NUMBER_MAX))
def test_a_daemon_sees_how_far_a_run_is(total: int, step: int) -> None:
    trainers, daemons = two_views()
    trainers.say_total(total)
    assert daemons.made == 0
    trainers.note(step, 0, 0.0, 0.5, 0.0, 0.0, {"accuracy": 0.5})
    assert daemons.made == parts_of(step, min(total, NUMBER_MAX))
    figures = daemons.last_step()
    assert figures is not None
    assert figures.metrics == {"accuracy": 0.5}, "the number stands beside them"


def test_figures_that_are_being_written_are_not_read() -> None:
    trainers, daemons = two_views()
    trainers.note(1, 0, 0.0, 0.0, 0.0, 0.0, {})
    trainers._numbers[8] += 1  # its writer was killed in the middle
    assert daemons.last_step() is None


def test_metrics_that_do_not_fit_are_left_out() -> None:
    trainers, daemons = two_views()
    trainers.note(1, 0, 0.0, 0.5, 0.0, 0.0, {"accuracy": 0.5})
    trainers.note(2, 0, 0.0, 0.5, 0.0, 0.0, {"x" * METRICS_BYTES_MAX: 1.0})
    figures = daemons.last_step()
    assert figures is not None
    assert (figures.step, figures.metrics) == (2, {"accuracy": 0.5})
    trainers.note(3, 0, 0.0, 0.5, 0.0, 0.0, {str(n): n / 2 for n in range(1000)} | {"accuracy": 0.75})
    figures = daemons.last_step()
    assert figures is not None
    assert (figures.metrics["accuracy"], figures.metrics["99"]) == (0.75, 49.5), "as many as there is room for"


@given(
    first=st.dictionaries(st.text(max_size=900), numbers, max_size=6),
    then=st.dictionaries(st.text(max_size=900), numbers, max_size=6),
)
def test_of_many_metrics_those_are_there_for_which_there_is_room(
    first: dict[str, float], then: dict[str, float]
) -> None:
    """In their order, and none loses its place."""
    trainers, daemons = two_views()
    trainers.note(1, 0, 0.0, 0.5, 0.0, 0.0, first)
    trainers.note(2, 0, 0.0, 0.5, 0.0, 0.0, then)
    expected: dict[str, float] = {}
    for metrics in (first, then):
        for name, number in metrics.items():
            if len(msgpack.packb({**expected, name: number})) <= METRICS_BYTES_MAX:
                expected[name] = number
    figures = daemons.last_step()
    assert figures is not None
    assert figures.metrics == {name: number for name, number in expected.items() if math.isfinite(number)}


@pytest.mark.parametrize("noise", [b"\xc1" * 40, b"\x93\x01\x02\x03", b"\x81\x01\xa1x"])
def test_metrics_that_are_none_are_left_out(noise: bytes) -> None:
    trainers, daemons = two_views()
    trainers.note(1, 0, 0.0, math.inf, 0.0, 0.0, {"x" * len(noise): 1.0})
    figures = daemons.last_step()
    assert figures is not None
    trainers._page[124 : 124 + len(noise)] = noise
    again = daemons.last_step()
    assert again is not None
    assert all(isinstance(name, str) for name in again.metrics)


@given(barrier=st.integers(0, 5), stand_step=st.integers(0, 40))
def test_a_trainer_stands_at_the_barriers_multiples_from_the_step_that_is_told_on(
    barrier: int, stand_step: int
) -> None:
    quiet = Quiet(stand_step=stand_step)
    stands = [step for step in range(1, 60) if quiet.stands_at(step, barrier)]
    assert stands == [step for step in range(max(1, stand_step), 60) if barrier and step % barrier == 0]


def test_a_note_that_is_interrupted_hides_none_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does in a notebook, whose process trains on."""

    def interrupted(_: object) -> bytes:
        raise KeyboardInterrupt

    trainers, daemons = two_views()
    with monkeypatch.context() as patch:
        patch.setattr(msgpack, "packb", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainers.note(1, 1, 1.0, 0.5, 0.1, 0.1, {"a": 1.0})
    assert daemons.last_step() is None
    trainers.note(2, 2, 2.0, 0.5, 0.1, 0.1, {"a": 2.0})
    assert daemons.last_step() == LastStep(2, 2, 2.0, 0.5, 0.1, 0.1, {"a": 2.0})
