"""What bounds one peer's say: limits hold for any half, both ends scale alike, and who comes closer is not refused."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from peerd.training.codecs import CODECS
from peerd.training.codecs.vector import Gain, Layout
from peerd.training.effects import Vector
from peerd.training.flush import CLOSER, FLUSH_REACH
from peerd.training.pairs import graylist as graylists
from peerd.training.pairs import robust
from peerd.training.pairs.graylist import FAR_MAX, WEIGHT_MAX, Graylist
from peerd.training.pairs.reference import PROGRESS_MIN, ExchangeHalf, PairedReference
from peerd.training.pairs.robust import (
    FAR,
    FULL,
    RATE,
    STEP_MIN,
    CentreAllowances,
    PairAllowances,
    Tensors,
    factors,
    packed,
    tensors_of,
    unpacked,
)
from peerd.training.refusal import REFUSED_S
from peerd.training.sample import RANGES_MAX, TENSOR_MIN
from peerd.training.scratch import Scratch
from peerd.transport.errors import PeerError

LAYOUT = Layout(11, 14, ((12, 14),), (2, 8, 11, 12, 14))
COUNT = len(tensors_of(LAYOUT))

finite = st.floats(-(2.0**40), 2.0**40, width=32)
some_limits = st.one_of(st.none(), st.lists(st.floats(0, 1e6, width=32), min_size=COUNT, max_size=COUNT))


def half(codec: str, limits: list[float] | None, *, finishing: bool = False) -> ExchangeHalf:
    gain = Gain()
    return ExchangeHalf(codec, gain, 0.5, finishing, b"" if limits is None else packed(np.array(limits)))


@settings(deadline=None)
@given(
    st.sampled_from(sorted(CODECS)),
    st.sampled_from(sorted(CODECS)),
    st.lists(st.tuples(finite, finite), min_size=14, max_size=14),
    some_limits,
    some_limits,
)
def test_no_half_moves_a_tensor_further_than_either_limit_and_both_ends_move_alike(
    codec: str, other: str, values: list[tuple[float, float]], mine: list[float] | None, theirs: list[float] | None
) -> None:
    ours, hostile = (np.array(one, np.float32) for one in zip(*values, strict=True))
    here, there = (PairedReference(1, np.zeros(14, np.float32), LAYOUT, Scratch()) for _ in range(2))
    said = there.begin(hostile, half(other, theirs))
    got = here.receive(said, ours, half(codec, mine)).exchanged
    assert got is not None
    moved = tensors_of(LAYOUT).norms(got.correction)
    for limits in (mine, theirs):
        if limits is not None:
            assert (moved <= np.array(limits, np.float32) * (1 + 1e-5) + 1e-30).all()
    np.testing.assert_allclose(moved, got.moved, rtol=1e-4, atol=1e-30)
    answer = here.answered
    assert answer is not None
    back = there.receive(answer, hostile, half(other, theirs)).exchanged
    assert back is not None
    np.testing.assert_array_equal(back.correction + 0.0, 0.0 - got.correction)


@settings(deadline=None)
@given(
    st.lists(st.tuples(finite, finite), min_size=14, max_size=14),
    some_limits,
    st.sampled_from([0.0, 1e-3, 0.5, 0.9, 1.0]),
    st.tuples(st.booleans(), st.booleans()),
)
@example([(0.0, 0.0)] * 13 + [(0.0, 1.0)], [0.0] * 5, 1e-3, (True, True))
def test_at_the_end_of_both_runs_an_end_goes_alone_where_the_other_hardly_may(
    values: list[tuple[float, float]], mine: list[float] | None, theirs: float, ends: tuple[bool, bool]
) -> None:
    ours, others = (np.array(one, np.float32) for one in zip(*values, strict=True))
    here, there = (PairedReference(1, np.zeros(14, np.float32), LAYOUT, Scratch()) for _ in range(2))
    allowed = (theirs * 0.5 * tensors_of(LAYOUT).norms(others - ours)).astype(np.float32).clip(0, 1e30).tolist()
    said = there.begin(others, half("float32", allowed, finishing=ends[0]))
    got = here.receive(said, ours, half("float32", mine, finishing=ends[1])).exchanged
    assert got is not None
    assert here.answered is not None
    gain = min(said.gain, here.answered.gain)
    back = there.receive(here.answered, others, half("float32", allowed)).exchanged
    assert back is not None
    own, other = np.full(COUNT, np.inf) if mine is None else np.array(mine, np.float32), np.array(allowed, np.float32)
    wanted = gain * got.distances
    both = np.minimum(wanted, np.minimum(own, other))
    way, least = np.linalg.norm(both), PROGRESS_MIN * np.linalg.norm(wanted)
    assume(abs(way - least) > 1e-3 * least or not least)
    alone = all(ends) and way < least
    np.testing.assert_allclose(got.moved, np.minimum(wanted, own) if alone else both, rtol=1e-4, atol=1e-30)
    np.testing.assert_allclose(back.moved, np.minimum(wanted, other) if alone else both, rtol=1e-4, atol=1e-30)
    if not alone:
        np.testing.assert_array_equal(back.correction + 0.0, 0.0 - got.correction)


@given(st.integers(0, 40), st.integers(0, 40), st.lists(st.integers(0, 80), max_size=400))
def test_tensors_cover_a_model_and_none_has_parameters_and_buffers(
    parameters: int, buffers: int, ends: list[int]
) -> None:
    if not parameters + buffers:
        return
    tensors = Tensors(Layout(parameters, parameters + buffers, (), tuple(sorted(ends))))
    assert len(tensors) <= RANGES_MAX
    stops = tensors.stops.tolist()
    assert stops == sorted(set(stops))
    assert stops[-1] == parameters + buffers
    assert all(stop <= parameters or start >= parameters for start, stop in pairwise([0, *stops]))
    assert tensors.of_parameters == sum(stop <= parameters for stop in stops)


@pytest.mark.parametrize("buffers", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_how_far_apart_two_models_are_is_said_of_all_parameters_and_of_no_buffer(count: int, buffers: int) -> None:
    total = count + buffers
    tensors = Tensors(Layout(count, total, (), tuple(range(1, total + 1))))
    assert len(tensors) == total
    apart = tensors.norms(np.arange(1.0, total + 1))
    assert tensors.whole(apart) == pytest.approx(math.sqrt(sum(value**2 for value in range(1, count + 1))))


def test_a_model_of_many_tensors_has_as_many_limits_as_fit_a_message() -> None:
    tensors = Tensors(Layout(5000, 5003, (), tuple(range(1, 5004))))
    assert len(tensors) <= RANGES_MAX
    assert len(packed(np.ones(len(tensors)))) <= 512
    assert tensors.stops[tensors.of_parameters - 1] == 5000


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_limits_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(PeerError, match="limit"):
        unpacked(np.array([1.0, bad], "<f4").tobytes(), 2)
    with pytest.raises(PeerError, match="limits"):
        unpacked(b"\0" * 7, 2)


def test_what_has_no_distance_is_left_as_it_is() -> None:
    zero = np.zeros(2)
    np.testing.assert_array_equal(factors(0.5, zero, zero), [0.5, 0.5])


ONE = Layout(3, 3)


moves = st.just(0.0) | st.floats(1e-3, 5)
rates = st.floats(0.001, 1.0)
far = st.floats(0, 1e9)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), moves, rates, far, far), min_size=1, max_size=60))
def test_whatever_peers_say_they_move_a_model_by_no_more_than_a_multiple_of_its_own_way(
    events: list[tuple[str, float, float, float, float]],
) -> None:
    """Each takes all that it is allowed, of exchanges at any distance; corrections widen nobody's limit."""
    allowances = PairAllowances(ONE)
    values, dragged, way, longest = np.zeros(3), 0.0, 0.0, 0.0
    walked = steps = 0.0
    allowances.look(values, 0, 1.0)
    for number, (peer, step, rate, distance, wanted) in enumerate(events, 1):
        values = values + np.array([step, 0.0, 0.0])
        allowances.look(values, number, rate)
        made = min(rate, steps) if steps else rate
        counted = max(step, STEP_MIN * made * walked / steps if steps else 0.0)
        if counted:
            way, longest = way + counted, max(longest, counted)
            walked, steps = walked + step, steps + made
        limit = float(allowances.limits(peer, "abcd")[0])
        moved = min(limit, wanted)
        correction = np.array([0.0, moved, 0.0])
        allowances.corrected(correction)
        values = values + correction
        allowances.spent(peer, np.array([moved]), np.array([distance]))
        dragged += moved
    assert dragged <= (RATE * way + RATE * longest) * (1 + 1e-6) + 1e-9


def after_eleven_steps() -> tuple[PairAllowances, Vector, float]:
    """Of length 1 each, with the model that they made, and what a peer is allowed."""
    allowances, values = PairAllowances(ONE), np.zeros(3)
    for number in range(11):
        allowances.look(values, number, 1.0)
        values = values + np.array([1.0, 0.0, 0.0])
    allowances.look(values, 11, 1.0)
    before = float(allowances.limits("a", "abcd")[0])
    return allowances, values, before


def test_a_node_whose_steps_move_nothing_any_more_can_still_be_brought_back() -> None:
    allowances, values, before = after_eleven_steps()
    allowances.look(values, 11, 1.0)
    assert float(allowances.limits("a", "abcd")[0]) == before, "no step was made"
    allowances.look(values, 21, 1.0)
    half = float(allowances.limits("a", "abcd")[0]) - before
    assert half == pytest.approx(RATE / 4 * STEP_MIN * 10)
    allowances.look(values, 31, 0.1)
    assert 0 < float(allowances.limits("a", "abcd")[0]) - before - half < 0.1 * half, "its rate has fallen"


@pytest.mark.parametrize("begins_at", [0, 100_000])
def test_a_newcomers_steps_count_from_its_first_report_on(begins_at: int) -> None:
    allowances, values = PairAllowances(ONE), np.zeros(3)
    allowances.look(values)  # before any report
    for number in range(11):
        values = values + np.array([1.0, 0.0, 0.0])
        allowances.look(values, begins_at + number, 1.0)
    before = float(allowances.limits("a", "abcd")[0])
    allowances.look(values, begins_at + 15, 1.0)
    widened = float(allowances.limits("a", "abcd")[0]) - before
    assert widened == pytest.approx(RATE / 4 * STEP_MIN * 5, rel=0.11)


@pytest.mark.parametrize("least", [0.0, 1e-7, 1e-3])
def test_no_tensor_of_parameters_counts_as_gone_less_than_a_share_of_the_rest_value_for_value(least: float) -> None:
    """Not moved at all, but for rounding, or by weight decay alone; and one that was trained before."""
    layout = Layout(8, 10, (), (4, 6, 8, 10))
    allowances, values = PairAllowances(layout), np.ones(10)
    for number in range(5):
        allowances.look(values, number, 1.0)
        values = values + np.array([1.0, 1.0, 1.0, 1.0, least, 0.0, 0.1, 0.1, 0.0, 0.0])
    allowances.look(values, 5, 1.0)
    before = allowances.limits("a", "abcd")
    values = values + np.array([1.0, 1.0, 1.0, 1.0, least, 0.0, 0.0, 0.0, 0.0, 0.0])
    allowances.look(values, 6, 1.0)
    grown = (allowances.limits("a", "abcd") - before) / (RATE / 4)
    assert grown.tolist() == pytest.approx([2.0, TENSOR_MIN * 2**0.5, TENSOR_MIN * 2**0.5, 0.0])


def test_what_most_agree_on_is_far_away_only_beyond_a_share_of_how_far_the_rest_is() -> None:
    layout = Layout(6, 6, (), (4, 6))
    allowances, values, found = PairAllowances(layout), np.zeros(6), []
    allowances.look(values, 0, 1.0)
    for number, far in enumerate((0.0, 0.0, FAR * TENSOR_MIN, 10 * FAR * TENSOR_MIN), 1):
        values = values + 1.0
        allowances.look(values, number, 1.0)
        for peer in "abcd":
            allowances.limits(peer, "abcd")
            allowances.spent(peer, np.zeros(2), np.array([2.0, far * 2**0.5 if peer == "d" else 0.0]))
        values = values + 1.0
        allowances.look(values, number + 1, 1.0)
        found.append(float(allowances.limits("d", "abcd")[1]))
    assert found[1] > 0
    assert found[2:] == pytest.approx([found[1], found[1] / 10])


def test_a_jump_of_the_step_number_is_no_way() -> None:
    allowances, values, before = after_eleven_steps()
    allowances.look(values, 1_000_000, 1.0)
    assert float(allowances.limits("a", "abcd")[0]) <= before + RATE / 4 * STEP_MIN * 11


def near(allowances: PairAllowances, values: Vector, rounds: int, far: float) -> None:
    for number in range(rounds):
        values += [1.0, 0.0, 0.0]
        allowances.look(values, number, 1.0)
        for peer in "abcz":
            allowances.limits(peer, "abcz")
            allowances.spent(peer, np.zeros(1), np.array([far if peer == "z" else 1.0]))


def test_who_is_far_from_the_others_has_less_to_say_the_further_it_is() -> None:
    found = []
    for far in (1.0, FAR, 10 * FAR, 1e9):
        allowances, values = PairAllowances(ONE), np.zeros(3)
        near(allowances, values, 3, far)
        values += [1.0, 0.0, 0.0]
        allowances.look(values, 3, 1.0)
        found.append(float(allowances.limits("z", "abcz")[0]))
        assert allowances.farness("z", "abcz") == pytest.approx(far / FAR)
        assert allowances.farness("a", "abcz") == pytest.approx(1 / FAR)
    assert found[0] == found[1]
    assert found[2] == pytest.approx(found[0] / 10)
    assert found[3] < 1e-6 * found[0]


def test_one_other_alone_does_not_say_who_is_far() -> None:
    """It may be the liar."""
    found = []
    for far in (1.0, 1e9):
        allowances, values = PairAllowances(ONE), np.zeros(3)
        near(allowances, values, 3, far)
        values += [1.0, 0.0, 0.0]
        allowances.look(values, 3, 1.0)
        found.append(float(allowances.limits("z", "az")[0]))
    assert found[0] == found[1] > 0


def test_who_is_far_is_asked_of_those_met_since_it_was_last_asked() -> None:
    """One that was away knows of the others what they were; one that comes again and again is not judged each time."""
    allowances, values = PairAllowances(ONE), np.zeros(3)
    near(allowances, values, 3, 10.0)

    def exchange(peer: str, distance: float) -> float | None:
        allowances.limits(peer, "abcz")
        allowances.spent(peer, np.zeros(1), np.array([distance]))
        return allowances.farness(peer, "abcz")

    assert exchange("z", 10.0) == pytest.approx(10 / FAR)
    for _ in range(9):
        assert exchange("z", 10.0) is None
    assert exchange("a", 10.0) is not None, "never asked of it before"
    assert exchange("z", 10.0) is None, "one other"
    exchange("b", 10.0)
    assert exchange("z", 10.0) == pytest.approx(1 / FAR)
    assert exchange("z", 10.0) is None


def test_a_run_that_has_ended_can_still_agree() -> None:
    allowances, values = PairAllowances(ONE), np.zeros(3)
    near(allowances, values, 3, 1.0)
    allowances.end_run("abcz")
    assert float(allowances.limits("a", "abcz")[0]) >= 1.0
    assert float(allowances.limits("new", "abcz")[0]) >= 1.0
    allowances.begin_run()
    assert float(allowances.limits("a", "abcz")[0]) < 1.0


def test_a_newcomer_at_a_runs_end_learns_what_is_usual_from_more_than_one() -> None:
    """It has come no way: the first that it meets may be the liar."""
    allowances = PairAllowances(ONE)
    allowances.look(np.zeros(3), 0, 1.0)
    allowances.look(np.array([0.01, 0.0, 0.0]), 1, 1.0)
    allowances.end_run("abz")
    far, near = np.array([1e6]), np.array([1.0])
    for _ in range(9):
        limit = allowances.limits("z", "abz")
        assert float(limit[0]) <= RATE * 0.01
        allowances.spent("z", limit, far)
    moved = dict.fromkeys("abz", 0.0)
    for peer in 9 * "abz":
        limit = allowances.limits(peer, "abz")
        moved[peer] += float(limit[0])
        allowances.spent(peer, limit, far if peer == "z" else near)
    assert 1.0 < moved["a"] < 3.0
    assert 1.0 < moved["b"] < 3.0
    assert moved["z"] < 0.1


def test_who_says_again_and_again_that_its_run_ends_moves_one_that_has_ended_twice_by_what_is_usual_and_no_more() -> (
    None
):
    """Nor does it help to go and come back."""
    allowances, values = PairAllowances(ONE), np.zeros(3)
    near(allowances, values, 3, 1.0)
    others = frozenset("abc")
    allowances.end_run("abcz")
    moved = 0.0
    for _ in range(20):
        limit = allowances.limits("z", "abcz")
        moved += float(limit[0])
        allowances.spent("z", limit, np.array([1.0]))
        allowances.peer_ended("z", "abcz")
        allowances.keep(others)
        allowances.keep(others | {"z"})
    assert FLUSH_REACH < moved <= 2 * FLUSH_REACH + 1e-9
    allowances.begin_run()
    allowances.end_run("abcz")
    assert float(allowances.limits("z", "abcz")[0]) > 1.0


def test_who_stands_after_its_run_is_moved_again_by_each_run_that_most_others_end() -> None:
    """Of a notebook whose loop is over, say: it agrees with those who train on each time that they end."""
    allowances = PairAllowances(ONE)
    near(allowances, np.zeros(3), 3, 1.0)
    allowances.end_run("abc")
    for run in range(4):
        for number, peer in enumerate("abc"):
            allowances.peer_ended(peer, "abc")
            if run and number == 0:
                assert not float(allowances.limits(peer, "abc")[0])
        for peer in "abc":
            limit = allowances.limits(peer, "abc")
            assert float(limit[0]) == pytest.approx(FLUSH_REACH)
            allowances.spent(peer, limit, np.array([1.0]))


def test_any_number_of_peers_has_allowances_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "PEERS_MAX", 5)
    allowances = PairAllowances(ONE)
    for number in range(50):
        allowances.limits(f"{number}", [f"{number}"])
    assert len(allowances._peers) == 5
    assert "49" in allowances._peers, "the oldest was forgotten"


def test_a_correction_that_a_variance_does_not_take_is_no_step_of_the_node() -> None:
    layout = Layout(1, 3, ((1, 3),), (1, 3))
    allowances = PairAllowances(layout)
    values = np.ones(3)
    allowances.look(values, 0, 1.0)
    allowances.corrected(np.array([0.0, -1e6, -1e6]))
    allowances.look(np.array([1.0, 0.1, 0.1]), 1, 1.0)
    assert not allowances.limits("a", "a").any()


def test_the_centre_is_moved_by_what_is_usual_among_the_other_workers() -> None:
    centre = CentreAllowances(ONE)
    assert np.isinf(centre.limits("a", "abc")).all()
    for peer, said in zip("abc", (1.0, 2.0, math.inf), strict=True):
        centre.heard(peer, np.array([said]))
    assert float(centre.limits("c", "abc")[0]) == 2.0
    assert float(centre.limits("a", "abc")[0]) == 4.0


def test_who_comes_to_the_centre_more_often_than_the_others_moves_it_no_further() -> None:
    moved = dict.fromkeys("abcd", 0.0)
    centre = _centre_of("abcd")
    for number in range(400):
        peer = "abc"[number // 4 % 3] if number % 4 == 0 else "d"
        limit = centre.limits(peer, "abcd")
        centre.spent(peer, limit, np.array([1.0]))
        moved[peer] += float(limit[0])
    assert moved["d"] <= 1.1 * max(moved[peer] for peer in "abc")


def test_a_worker_far_away_from_the_centre_has_less_say_and_is_told_from_the_others() -> None:
    centre = _centre_of("abcd")
    for peer, apart in zip("abcd", (1.0, 2.0, 1.0, 80.0), strict=True):
        centre.limits(peer, "abcd")
        centre.spent(peer, np.zeros(1), np.array([apart]))
    assert float(centre.limits("d", "abcd")[0]) == 2.0 * FAR / 80
    assert centre.farness("d", "abcd") == 20.0


def test_once_most_workers_have_ended_each_moves_the_centre_by_a_few_times_what_was_usual_in_all() -> None:
    centre = _centre_of("abcd")
    for peer in "abcd":
        centre.limits(peer, "abcd")
        centre.spent(peer, np.zeros(1), np.array([3.0]))
    for peer in "abc":
        centre.heard(peer, np.array([math.inf]))
    moved = 0.0
    for _ in range(50):
        limit = centre.limits("d", "abcd")
        centre.spent("d", 0.5 * limit, np.array([3.0]))
        moved += 0.5 * float(limit[0])
    assert 0.99 * FAR * 3.0 < moved <= FAR * 3.0
    for peer in "abc":
        centre.heard(peer, np.array([1.0]))  # they train again
    assert float(centre.limits("d", "abcd")[0]) <= 2 * FULL


def test_a_centre_half_of_whose_workers_have_ended_grants_nobody_the_same_again_and_again() -> None:
    centre = _met_once("abcd")
    for peer in "ab":
        centre.heard(peer, np.array([math.inf]))
    moved = 0.0
    for _ in range(100):
        limit = centre.limits("d", "abcd")
        centre.spent("d", limit, np.array([3.0]))
        moved += float(limit[0])
        centre.limits("a", "abcd")
        centre.spent("a", np.zeros(1), np.array([3.0]))
    assert moved <= 2 * FULL + 100 * 2 / 3, "as while all train, by the others' exchanges"


def test_who_comes_once_most_workers_have_ended_moves_the_centre_by_no_more_than_they() -> None:
    centre = _met_once("abcd")
    for peer in "abc":
        centre.heard(peer, np.array([math.inf]))
    assert float(centre.limits("e", "abcde")[0]) == float(centre.limits("d", "abcde")[0]) == FAR * 3.0


def _met_once(workers: str) -> CentreAllowances:
    centre = _centre_of(workers)
    for peer in workers:
        centre.limits(peer, workers)
        centre.spent(peer, np.zeros(1), np.array([3.0]))
    return centre


def _centre_of(workers: str) -> CentreAllowances:
    centre = CentreAllowances(ONE)
    for peer in workers:
        centre.heard(peer, np.array([1.0]))
    return centre


# ---------------------------------------------------------------- the graylist


@given(st.lists(st.tuples(st.floats(0.01, 0.97), st.floats(0.0, 1e12)), min_size=1, max_size=100), st.floats(1.0, 1e12))
def test_who_comes_closer_is_never_refused(course: list[tuple[float, float]], distance: float) -> None:
    graylist = Graylist()
    for share, farness in course:
        distance *= share
        assert not graylist.note("p", distance, 0.0, farness)


@given(st.lists(st.tuples(st.floats(1.001, 1e12), st.booleans()), min_size=1, max_size=30))
def test_who_goes_further_away_is_refused_the_sooner_the_further_it_is(course: list[tuple[float, bool]]) -> None:
    graylist, distance, held = Graylist(), 7.0, 1.0
    assert not graylist.note("p", distance, 0.0, 1e12), "the first says nothing of where it goes"
    for farness, goes_away in course:
        distance *= 1.01 if goes_away else 1.0
        held += min(farness, WEIGHT_MAX) if goes_away else 1.0
        refused = graylist.note("p", distance, 0.0, farness) > 0
        assert refused == graylist.refuses("p", 0.0) == (held >= FAR_MAX)
        if refused:
            break


def test_who_goes_to_and_fro_is_refused_and_who_comes_back_after_a_leap_is_not() -> None:
    fro, back = Graylist(), Graylist()
    said = [fro.note("p", 7.0 + number % 2, 0.0, 3.0) for number in range(20)]
    assert any(said)
    back.note("p", 2.0, 0.0, 1.5)
    for number in range(50):
        assert not back.note("p", 30.0 * 0.97**number, 0.0, 6.0)


def test_who_is_near_once_begins_anew() -> None:
    graylist = Graylist()
    for _ in range(50):
        assert not graylist.note("p", 7.0, 0.0, 5.0)
        assert not graylist.note("p", 7.0, 0.0, 1.0)


def test_who_stays_away_is_refused_for_longer_each_time_until_forgiven() -> None:
    graylist, now, said = Graylist(), 0.0, []
    for _ in range(3):
        while not (seconds := graylist.note("p", 7.0 / CLOSER, now, 1.5)):
            now += 1.0
        said.append(seconds)
        assert graylist.refuses("p", now)
        assert dict(graylist.refused(now)) == {"p": seconds}
        now += seconds
        assert not graylist.refuses("p", now)
    assert said == [REFUSED_S, 2 * REFUSED_S, 4 * REFUSED_S]
    for _ in range(FAR_MAX):
        graylist.note("p", 7.0, now, 1.5)
    graylist.forgive("p")
    assert not graylist.refuses("p", now)
    graylist.forgive("p")


def test_any_number_of_peers_that_are_far_takes_bounded_memory_and_sets_nobody_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graylists, "REMEMBERED_MAX", 5)
    graylist = Graylist()
    while not graylist.note("p", 7.0, 0.0, 1.5):
        pass
    for number in range(50):
        graylist.note(f"{number}", 7.0, 1.0, 1.5)
    assert len(graylist._records) == 5
    assert graylist.refuses("p", 1.0)
