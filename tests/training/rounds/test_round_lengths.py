"""What one member of a round can do to the agreed model: no more than the members' own words of their steps allow."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mode_swarm import ModeSwarm
from round_swarm import RoundSwarm

from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.mode_settings import ROSTER_MAX
from peerd.training.rounds.lengths import (
    FAR,
    FORGIVEN,
    GROUPS,
    KEPT,
    LIMIT,
    PATIENCE,
    SHORTENED,
    FarRounds,
    Usual,
    are_lengths,
    far_off,
    lengths_of,
    limits_of,
    longest_mean,
    shorten,
    shortening,
)
from peerd.transport import wire
from peerd.transport.errors import PeerError
from peerd.transport.messages import RoundBegin, RoundPieces

SIZE, PARAMETERS = 8, 6
LAYOUT = Layout(PARAMETERS, SIZE)
one = st.just(0.0) | st.floats(1e-100, 1e6)  # of less the squares are no numbers any more: a norm of it is not exact
lengths = st.lists(st.tuples(one, one), min_size=3, max_size=9)


@given(lengths, st.lists(st.floats(-1e30, 1e30), min_size=SIZE, max_size=SIZE))
def test_no_mean_is_longer_than_its_limits(said: list[tuple[float, float]], values: list[float]) -> None:
    limits = limits_of([length for pair in said for length in pair])
    mean = np.array(values)
    shorten(mean, LAYOUT, limits)
    for group, limit in zip((slice(0, PARAMETERS), slice(PARAMETERS, SIZE)), limits, strict=True):
        assert np.linalg.norm(mean[group]) <= limit * (1 + 1e-9)


@given(lengths, st.integers(0, 8), st.floats(0, 1e300))
def test_who_lies_about_its_length_moves_no_limit_beyond_the_honest(
    said: list[tuple[float, float]], place: int, lie: float
) -> None:
    """Where two honest ones have moved at least: of one beside a liar nobody could say who it is."""
    place %= len(said)
    honest = [pair[0] for index, pair in enumerate(said) if index != place]
    told = [length for index, pair in enumerate(said) for length in ((lie, 0.0) if index == place else pair)]
    if sum(length > 0 for length in honest) >= 2:
        assert limits_of(told)[0] <= LIMIT * max(honest)


@given(lengths, st.lists(st.floats(1 / 16, 1.0), min_size=9, max_size=9))
def test_no_mean_of_gradients_is_longer_than_can_be_and_no_honest_one_is_shortened(
    said: list[tuple[float, float]], of_nine: list[float]
) -> None:
    shares, told = of_nine[: len(said)], [length for length, _ in said]
    most, usual = longest_mean(told, shares), limits_of([length for pair in said for length in pair])[0] / LIMIT
    worth = [share * min(length, FAR * usual) for (length, _), share in zip(said, shares, strict=True)]
    assert most >= sum(worth) / sum(shares) * (1 - 1e-12)
    assert most <= max(LIMIT, FAR) * usual * (1 + 1e-5)


def test_a_length_that_none_has_makes_no_limit_that_is_none() -> None:
    assert math.isfinite(longest_mean([1.79e308, 1.0], [1.0, 0.0]))


def test_who_was_but_rounded_has_not_moved_and_what_is_not_finite_is_as_long_as_can_be() -> None:
    """Such a length would be a median of the others', beside which any step is far too long."""
    since = np.full(SIZE, 1000.0, np.float32)
    rounded = np.nextafter(since, np.float32(0))
    moved = since + np.array([3.0, 4.0, 0, 0, 0, 0, 0, 2.0], np.float32)
    lost = np.zeros(SIZE, np.float32)
    for beside in (None, lost):
        assert lengths_of(rounded, LAYOUT, since, beside) == (0.0, 0.0)
        assert lengths_of(moved, LAYOUT, since, beside) == pytest.approx((5.0, 2.0))
        assert lengths_of(np.where(moved == since, np.inf, moved), LAYOUT, since, beside) == (1e300, 1e300)
    assert lengths_of(since, LAYOUT, since, moved - since) == pytest.approx((5.0, 2.0))


def test_an_order_to_as_many_as_there_may_be_can_be_sent() -> None:
    ids = tuple(f"{number:032x}" for number in range(ROSTER_MAX))
    many = (2**61,) * ROSTER_MAX
    order = RoundBegin(1, 2**52, "top_k_2bit", "halving", False, False, ids, many, (1.5,) * GROUPS * ROSTER_MAX)
    order = replace(order, waited=(0.5,) * ROSTER_MAX, shares=(0.5,) * ROSTER_MAX)
    assert wire.decode(order.KIND, wire.encode(order)[0], 0).message() == order


def test_who_is_far_longer_than_the_others_is_told_apart() -> None:
    said = {name: (1.0 + place, 0.0) for place, name in enumerate("abcd")}
    assert far_off(said) == set()
    assert far_off(said | {"x": (FAR * 4.0, 0.0)}) == {"x"}
    assert far_off({"a": (1.0, 0.0), "x": (1e9, 0.0)}) == set(), "of two nobody can say"
    assert not are_lengths([1.0, math.nan], 1)
    assert not are_lengths([1.0], 1)


@given(st.lists(st.booleans(), max_size=60))
def test_a_round_that_is_too_long_is_forgiven_by_those_that_are_not(course: list[bool]) -> None:
    rounds, taken, near = FarRounds(), 0, 0
    for is_far in course:
        far = {"x"} if is_far else set()
        if rounds.worn_out(far):
            assert taken >= PATIENCE
            return
        rounds.note(far, "abx")
        taken, near = taken + is_far, near + (not is_far)
        assert taken <= PATIENCE + near * FORGIVEN
    apart = 1 / FORGIVEN
    seldom = FarRounds()
    for _ in range(20):
        assert not seldom.worn_out({"x"})
        seldom.note({"x"}, "abx")
        for _ in range(int(apart)):
            seldom.note(set(), "abx")


def trained(names: str = "abcde", mode: str = "allreduce", **told: object) -> RoundSwarm:
    swarm = RoundSwarm(names, SIZE, mode=mode, robust=True, **told)  # type: ignore[arg-type]
    swarm.all_hear()
    swarm.settle()
    return swarm


@pytest.mark.parametrize("mode", ["allreduce", "diloco"])
@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_who_alone_trains_most_of_a_model_is_taken_as_it_is(mode: str, codec: str) -> None:
    """The others train twelve values of two thousand: it is thirteen times as long as they are, and no liar."""
    swarm = ModeSwarm(mode, "abcd", 2000, codec=codec, every=10, robust=True)
    swarm.all_hear()
    swarm.settle()

    def move(name: str) -> Vector:
        moved = np.full(2000, 0.01)
        if name != "d":
            moved[12:] = 0.0
        return moved

    swarm.train(90, move)
    swarm.end()
    counts = [node.core.counts for node in swarm.nodes.values()]
    assert not any(each["members_left_out"] + each["rounds_shortened"] for each in counts)
    way = (swarm.nodes["a"].x - swarm.start)[12:] / 0.01
    assert way.mean() >= 90 / 4 - 3


@pytest.mark.parametrize("lost", [None, 0.0])
def test_members_who_train_a_small_head_above_all_and_are_alike_are_not_far_from_each_other(lost: float | None) -> None:
    """Below a fourth of the head's way the rest counted for as much as one head of its size: ten times and more."""
    head, size = 10, 30_000
    layout = Layout(size, size, (), (head, size))
    said = {}
    for name, rest in {"a": 0.2, "b": 0.24, "c": 0.26, "d": 0.28, "e": 0.3}.items():
        moved = np.full(size, rest / math.sqrt(size - head), np.float32)
        moved[:head] = 1 / math.sqrt(head)
        zeros = np.zeros(size, np.float32)
        said[name] = lengths_of(moved, layout, zeros, None if lost is None else zeros)
    assert far_off(said, 1.1) == set()


def rounds(swarm: RoundSwarm, count: int, names: str) -> None:
    for _ in range(count):
        for _ in range(60):
            for name in names:
                swarm.step(name, 1.0)
            before = len(swarm.nodes["a"].rounds)
            swarm.settle()
            swarm.pass_time(2.5)
            swarm.settle()
            if len(swarm.nodes["a"].rounds) > before:
                break


@pytest.mark.parametrize("mode", ["allreduce", "diloco"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_member_whose_model_is_far_off_is_left_out_and_the_others_go_on(mode: str, at: int) -> None:
    swarm = trained(mode=mode, every=2, overlap="blocking")
    rounds(swarm, at, "abcde")
    before = swarm.nodes["a"].x.copy()
    swarm.nodes["d"].x = swarm.nodes["d"].x + 1e6
    rounds(swarm, 3, "abcde")
    assert swarm.nodes["a"].core.counts["members_left_out"] == 1
    for name in "abce":
        assert np.abs(swarm.nodes[name].x - before).max() < 100
        assert len(swarm.nodes[name].rounds) >= at + 3
    assert len(swarm.nodes["d"].rounds) == at
    told = {name: node.core.counts["left_out_of_rounds"] for name, node in swarm.nodes.items()}
    assert told == {name: name == "d" for name in "abcde"}, "it alone, and once"


@pytest.mark.parametrize("times", [1, 2, 5])
def test_who_is_long_once_stays_and_who_is_so_again_and_again_does_not(times: int) -> None:
    """As a trainer is that went through a round in which the others stood still."""
    swarm = trained("abcd", every=2, overlap="blocking")
    rounds(swarm, 2, "abcd")
    for _ in range(times):
        before = swarm.nodes["a"].x.copy()
        swarm.nodes["d"].x = swarm.nodes["d"].x + 2 * FAR * 2
        rounds(swarm, 1, "abcd")
        assert np.linalg.norm(swarm.nodes["a"].x - before) <= LIMIT * 2 * math.sqrt(SIZE) + 2 * math.sqrt(SIZE)
    assert swarm.nodes["a"].core.counts["members_left_out"] == (times > PATIENCE)
    if times <= PATIENCE:
        rounds(swarm, 1, "abcd")
        swarm.end()
        assert all((node.x == swarm.nodes["a"].x).all() for node in swarm.nodes.values())


@pytest.mark.parametrize("mode", ["allreduce", "diloco"])
@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("overlap", ["delayed", "hpsgd"])
def test_who_trains_on_when_most_have_finished_is_not_too_long(mode: str, codec: str, overlap: str) -> None:
    """Those go no further: what they said at their end, a moment after a round, is no measure of who still goes."""
    swarm = RoundSwarm("abcde", mode=mode, overlap=overlap, every=40, codec=codec, robust=True)
    swarm.all_hear()
    going = "abcde"
    for step in range(400):
        if step == 121:  # the first step of a window
            going = "e"
            for name in "abcd":
                swarm.finish(name)
        for name in going:
            swarm.step(name, 1.0)
        swarm.settle()
        swarm.pass_time(0.1)
        swarm.settle()
    swarm.finish("e")
    for _ in range(40):
        swarm.settle()
        swarm.pass_time(1.0)
    assert all(node.proceeded[-1:] == [True] for node in swarm.nodes.values())
    assert swarm.nodes["a"].core.counts["members_left_out"] == 0
    assert len({node.x.tobytes() for node in swarm.nodes.values()}) == 1


@pytest.mark.parametrize("mode", ["allreduce", "diloco"])
@pytest.mark.parametrize("codec", ["float32", "int8", "auto"])
@pytest.mark.parametrize("liar", ["a", "e"])  # the leader, and another
def test_who_trains_on_when_all_others_have_ended_moves_them_no_further_than_before(
    mode: str, codec: str, liar: str
) -> None:
    swarm = ModeSwarm(mode, "abcde", SIZE, codec=codec, every=2, overlap="blocking", robust=True)
    swarm.all_hear()
    swarm.settle()

    def steps(count: int, names: str) -> None:
        for _ in range(count):
            for name in names:
                swarm.step(name, 1.0)
            swarm.settle()
            swarm.pass_time(0.1)
            swarm.settle()

    steps(40, "abcde")
    others = "abcde".replace(liar, "")
    for name in others:
        swarm.finish(name)
    steps(8, liar)
    before = {name: swarm.nodes[name].x.copy() for name in others}
    swarm.nodes[liar].x = swarm.nodes[liar].x + 1e6
    steps(20, liar)
    usual = swarm.nodes["b"].core._usual.or_longer((0.0, 0.0))[0]
    assert usual >= math.sqrt(SIZE), "or this tries nothing"
    rounds_of_it = 10 * LIMIT * usual
    most = rounds_of_it * (1.33 + 0.7 * 0.9 * 3)  # what DiLoCo's momentum makes of it
    for name in others:
        assert np.linalg.norm(swarm.nodes[name].x - before[name]) <= most


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=4 * KEPT), st.floats(0.0, 100.0))
def test_who_has_ended_says_what_was_usual_or_what_is_left_if_that_is_longer(said: list[float], left: float) -> None:
    usual = Usual()
    assert usual.or_longer((left, 0.0)) == (left, 0.0)
    for length in said:
        usual.note((length, 0.0))
    ours, buffers = usual.or_longer((left, 0.0))
    assert max(left, min(said)) <= ours <= max(left, max(said))
    assert buffers == 0.0


def test_what_was_usual_is_of_all_of_a_run_however_long() -> None:
    usual = Usual()
    for number in range(100 * KEPT):
        usual.note((1.0 if number < 60 * KEPT else 1e-6, 0.0))
    assert usual.or_longer((0.0, 0.0)) == (1.0, 0.0)


@given(st.floats(1e-30, 1e30), st.floats(1.0, 1e30), st.floats(-1e-13, 1e-13))
def test_a_shortened_mean_is_within_its_limit_and_the_same_wherever_it_was_measured(
    limit: float, times: float, apart: float
) -> None:
    length = limit * times
    factor = shortening(limit, length)
    assert (1 - 2 / SHORTENED) * limit <= factor * length <= limit * (1 + 1e-15)
    other = shortening(limit, length * (1 + apart))
    on_a_step = (limit / length * SHORTENED / 2.0 ** math.frexp(limit / length)[1]) % 1
    assert other == factor or min(on_a_step, 1 - on_a_step) < 1e-8


@settings(deadline=None, max_examples=15)
@given(lie=st.floats(-1e20, 1e20), mode=st.sampled_from(["allreduce", "diloco"]))
def test_who_says_little_and_hands_in_much_moves_all_by_the_limit(lie: float, mode: str) -> None:
    """It reports the length of an honest step; the others keep one model, to the bit."""
    swarm = trained("abcd", mode, every=2, overlap="blocking")
    rounds(swarm, 2, "abcd")
    before = swarm.nodes["a"].x.copy()
    contribute = swarm.nodes["d"].core._rounds._contribute

    def lied(begin: RoundBegin, where: slice) -> Vector:
        summand: Vector = contribute(begin, where)
        return np.full_like(summand, lie)

    swarm.nodes["d"].core._rounds._contribute = lied
    swarm.committed = lambda name, committed: swarm.nodes[name].rounds.update(  # type: ignore[method-assign]
        {committed.begin.round: committed.begin.attempt}
    )
    rounds(swarm, 1, "abcd")
    steps = 2 * math.sqrt(SIZE)
    most = LIMIT * steps * (1.33 + 0.7 * 0.9 * 3)  # what DiLoCo's momentum makes of it
    for name in "abc":
        assert np.linalg.norm(swarm.nodes[name].x - before) <= most + 2 * steps
        assert (swarm.nodes[name].core._agreed == swarm.nodes["a"].core._agreed).all()


def ordered() -> tuple[RoundSwarm, RoundBegin]:
    """Three members, and the order of their third round that b has not yet heard."""
    swarm = trained("abc", every=2, overlap="blocking")
    rounds(swarm, 2, "abc")
    for name in "abcabc":
        swarm.step(name, 1.0)
    while not (orders := [each for each in swarm.queues["a", "b"] if isinstance(each, RoundBegin)]):
        assert any(swarm.deliver(*link) for link in swarm.waiting() if link[1] == "a")
    (order,) = orders
    return swarm, order


def test_a_leader_that_puts_other_words_in_a_members_mouth_is_refused() -> None:
    swarm, order = ordered()
    assert len(order.lengths) == 6
    forged = tuple(1000 * length for length in order.lengths)
    core = swarm.nodes["b"].core
    for lie in (forged, order.lengths[:2], (math.inf,) * 6):
        with pytest.raises(PeerError):
            core.on_message("a", replace(order, lengths=lie), swarm.now)


def test_a_leader_that_stood_still_says_lengths_of_long_ago_and_breaks_no_rule() -> None:
    """It had made its order of a round that the others have ended with another leader."""
    swarm, order = ordered()
    swarm.settle()
    rounds(swarm, 8, "abc")
    core = swarm.nodes["b"].core
    before = core.counts["rounds"]
    lengths = tuple(3 * length for length in order.lengths)  # of a contribution that it has long forgotten
    core.on_message("a", replace(order, lengths=lengths), swarm.now)
    assert core.counts["rounds"] == before


@pytest.mark.parametrize("topology", ["ring", "tree:2", "halving"])
@pytest.mark.parametrize("liar", ["d", "a"])
def test_who_sends_what_is_not_finite_is_named_and_left_out_leader_or_not(topology: str, liar: str) -> None:
    swarm = trained("abcde", every=2, overlap="blocking", topology=topology)
    rounds(swarm, 2, "abcde")
    deliver = swarm.deliver

    def spoilt(source: str, target: str) -> bool:
        queue = swarm.queues[source, target]
        if source == liar and queue and isinstance(queue[0], RoundPieces):
            pieces = queue.popleft()
            assert isinstance(pieces, RoundPieces)
            chunks = tuple(b"\xff" * len(chunk) for chunk in pieces.chunks)
            queue.appendleft(RoundPieces(pieces.round, pieces.attempt, pieces.seqs, chunks))
        try:
            return deliver(source, target)
        except PeerError:
            swarm.lose(source, target)
            return True

    swarm.deliver = spoilt  # type: ignore[method-assign]
    rounds(swarm, 3, "abcde")
    others = [node for name, node in swarm.nodes.items() if name != liar]
    assert any(node.core.counts["members_left_out"] for node in others)
    for node in others:
        assert len(node.rounds) >= 4
        assert len(node.rounds) * 6.0 > swarm.now, "nobody waits for a leader's patience to end"
        assert np.isfinite(node.x).all()
