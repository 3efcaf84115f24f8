"""By how much what each node has made counts where their batches differ in size."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from gossip_swarm import GossipSwarm
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.batch_sizes import (
    ALIKE,
    PAIR_MIN,
    SHARES_MAX,
    SHARES_MIN,
    Work,
    are_shares,
    share_of_pair,
    shares,
)

odd = st.sampled_from([0.0, -1.0, math.inf, math.nan, 1e-300, 1e300])
sizes = st.one_of(st.floats(1e-3, 1e6), odd)


works = st.builds(Work, sizes, sizes)


def at_one_speed(*samples: float) -> list[Work]:
    return [Work(size, 10.0) for size in samples]


@given(st.lists(works, min_size=1, max_size=12))
def test_shares_are_within_bounds_whatever_is_said(said: list[Work]) -> None:
    found = shares(said)
    assert are_shares(found, len(said))
    if found:
        assert max(found) == 1
        assert min(found) >= SHARES_MIN / SHARES_MAX * 0.99


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12))
def test_at_one_speed_shares_follow_samples(samples: list[float]) -> None:
    found = shares(at_one_speed(*samples))
    for (_, less), (_, more) in pairwise(sorted(zip(samples, found, strict=False))):
        assert less <= more


def test_what_hardly_differs_is_one_size() -> None:
    for said in ([32, 32, 32], [32, 31, 33], [0, 0], [16, 0, 0], [math.nan, 5]):
        assert shares(at_one_speed(*said)) == ()
    assert shares(at_one_speed(32, 16, 0)) == (1, 0.5, 0.5)
    assert shares(at_one_speed(1e9, 16, 16)) == (1, 1 / SHARES_MAX, 1 / SHARES_MAX)
    assert shares(at_one_speed(1e9, 16)) == (1, 1 / SHARES_MAX)
    assert shares(at_one_speed(1, 1600, 1600)) == (SHARES_MIN, 1, 1)


def test_who_has_larger_batches_and_makes_fewer_steps_counts_as_others() -> None:
    usual = Work(8, 10)
    for steps in (5, 2, 0.1):
        for slow in (1, 2):
            assert shares([*slow * [Work(64, steps)], usual, usual]) == ()
        assert shares([Work(64, steps), usual]) == (), "between two, too"
        assert share_of_pair(Work(64, steps), usual) == share_of_pair(usual, Work(64, steps)) == 1
    assert shares([Work(8, 80), usual, usual]) == (), "and who only makes more"
    assert shares([Work(64, 20), usual, usual]) == (1, 0.25, 0.25)
    assert share_of_pair(Work(64, 20), usual) == 1 / 8
    assert 1 / 8 < share_of_pair(Work(64, 9), usual) < 1 / 4


@pytest.mark.parametrize(
    "wrong",
    [
        (1.0,), (1.0, 0.0), (0.5, 0.5), (2.0, 1.0), (1.0, -1.0), (1.0, math.nan), (math.nan, 1.0), (1.0, 1e-9),
        (1.0, 1.0, 1.0), (1.0, 0.1),
    ],
)  # fmt: skip
def test_no_others_are_given(wrong: tuple[float, ...]) -> None:
    assert not are_shares(wrong, 2)


def test_no_leader_can_make_a_mean_its_own() -> None:
    assert not are_shares((1.0, *[1 / 64] * 7), 8)
    assert are_shares((1.0, *[1 / 4] * 7), 8)


@given(works, works)
def test_two_go_their_shares_of_one_way_and_nobody_goes_further_than_all_of_it(ours: Work, theirs: Work) -> None:
    here, there = share_of_pair(ours, theirs), share_of_pair(theirs, ours)
    assert PAIR_MIN <= min(here, there) <= max(here, there) == 1
    worth = ours.worth(theirs)
    assert worth * theirs.worth(ours) == pytest.approx(1.0) or worth in (0.0, math.inf)
    if PAIR_MIN < worth < 1 / PAIR_MIN and not 1 / ALIKE <= worth <= ALIKE:
        assert here * worth == pytest.approx(there)


@pytest.mark.one_run_in(3)
@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("codec", ["float32", "sign", "top_k_3", "auto"])
def test_gossip_comes_to_the_mean_by_samples(codec: str, seed: int) -> None:
    samples = (64.0, 16.0, 8.0, 8.0)
    swarm = GossipSwarm(4, 60, codec, seed=seed, samples=samples, trigger="always")
    wanted = np.average([node.x for node in swarm.nodes.values()], axis=0, weights=samples)
    swarm.everyone_alive()
    swarm.settle()
    before = max(np.linalg.norm(node.x - wanted) for node in swarm.nodes.values())
    for _ in range(400):
        for name in swarm.nodes:
            swarm.step(name, 0.0)
            swarm.settle()
    for node in swarm.nodes.values():
        assert np.linalg.norm(node.x - wanted) < 0.05 * before
    assert swarm.drift() < 1e-12


@given(st.integers(0, 2**16), st.floats(1.0, 1e9))
def test_who_says_that_its_batches_are_large_moves_nobody_further(seed: int, claimed: float) -> None:
    """Only itself less."""
    moved = {}
    for size in (16.0, claimed):
        swarm = GossipSwarm(2, 20, "float32", seed=seed, samples=(size, 16.0), view=1)
        swarm.everyone_alive()
        swarm.settle()
        liar, honest = (swarm.nodes[name].x.copy() for name in "ab")
        swarm.step("a", 0.0)
        swarm.settle()
        moved[size] = [
            np.linalg.norm(swarm.nodes[name].x - was) for name, was in zip("ab", (liar, honest), strict=True)
        ]
    assert moved[claimed][0] <= moved[16.0][0] * (1 + 1e-6)
    assert moved[claimed][1] <= moved[16.0][1] * (1 + 1e-6)
