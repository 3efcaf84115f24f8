"""By how much what each node has made counts where their batches differ in size."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from gossip_swarm import GossipSwarm
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.batch_sizes import ALIKE, PAIR_MIN, SHARES_MAX, SHARES_MIN, are_shares, share_of_pair, shares

odd = st.sampled_from([0.0, -1.0, math.inf, math.nan, 1e-300, 1e300])
sizes = st.one_of(st.floats(1e-3, 1e6), odd)


@given(st.lists(sizes, min_size=1, max_size=12))
def test_shares_follow_samples_within_bounds_whatever_is_said(said: list[float]) -> None:
    found = shares(said)
    assert are_shares(found, len(said))
    if not found:
        return
    assert max(found) == 1
    usual = [(size, share) for size, share in zip(said, found, strict=True) if 0 < size < math.inf]
    for (_, less), (_, more) in pairwise(sorted(usual)):
        assert less <= more
    assert min(found) >= SHARES_MIN / SHARES_MAX * 0.99


def test_what_hardly_differs_is_one_size() -> None:
    for said in ([32, 32, 32], [32, 31, 33], [0, 0], [16, 0, 0], [math.nan, 5]):
        assert shares(said) == ()
    assert shares([64, 16, 0]) == (1, 0.25, 0.625)
    assert shares([1e9, 16, 16]) == (1, 0.25, 0.25)
    assert shares([1, 1600, 1600]) == (SHARES_MIN, 1, 1)


@pytest.mark.parametrize(
    "wrong", [(1.0,), (1.0, 0.0), (0.5, 0.5), (2.0, 1.0), (1.0, -1.0), (1.0, math.nan), (1.0, 1e-9), (1.0, 1.0, 1.0)]
)
def test_no_others_are_given(wrong: tuple[float, ...]) -> None:
    assert not are_shares(wrong, 2)


@given(sizes, sizes)
def test_two_go_their_shares_of_one_way_and_nobody_goes_further_than_all_of_it(ours: float, theirs: float) -> None:
    here, there = share_of_pair(ours, theirs), share_of_pair(theirs, ours)
    assert PAIR_MIN <= min(here, there) <= max(here, there) == 1
    if min(ours, theirs) > 0 and max(ours, theirs) < math.inf and PAIR_MIN < ours / theirs < 1 / PAIR_MIN:
        assert here * ours == pytest.approx(there * theirs, rel=ALIKE - 1)
        if not 1 / ALIKE <= ours / theirs <= ALIKE:
            assert here * ours == pytest.approx(there * theirs)


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
