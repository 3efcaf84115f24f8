"""Elastic pairs: the force is alpha times the distance, the same at both ends, and never more than the codec allows."""

from __future__ import annotations

import numpy as np
import pytest
from gossip_swarm import GossipSwarm, assert_references_agree
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.training.codecs import CODECS
from peerd.training.modes import class_of, parse_mode
from peerd.transport.errors import UserError


def pair(mode: str, codec: str, seed: int = 0) -> GossipSwarm:
    swarm = GossipSwarm(2, 64, codec, seed=seed, mode=mode)
    swarm.everyone_alive()
    swarm.settle()
    return swarm


@settings(deadline=None)
@given(alpha=st.floats(0.01, 0.5), meetings=st.integers(1, 12), seed=st.integers(0, 1000))
def test_of_a_pairs_distance_one_less_twice_alpha_is_left(alpha: float, meetings: int, seed: int) -> None:
    swarm = pair(f"elastic:pairwise:{alpha!r}", "float32", seed)
    a, b = swarm.nodes["a"], swarm.nodes["b"]
    swarm.step("a")  # the first gain is a guess: nothing was measured
    swarm.settle()
    apart = a.x - b.x
    for _ in range(meetings):
        before = a.x, b.x
        swarm.step("a")
        swarm.settle()
        np.testing.assert_allclose(a.x - before[0], alpha * (before[1] - before[0]), atol=1e-5)
        np.testing.assert_allclose(b.x - before[1], alpha * (before[0] - before[1]), atol=1e-5)
    np.testing.assert_allclose(a.x - b.x, (1 - 2 * alpha) ** meetings * apart, atol=1e-5)
    assert swarm.drift() < 1e-12


@settings(max_examples=30, deadline=None)
@given(codec=st.sampled_from(sorted(CODECS)), seed=st.integers(0, 1000))
def test_any_meetings_keep_the_mean(codec: str, seed: int) -> None:
    swarm = GossipSwarm(4, 64, codec, seed=seed, mode="elastic:pairwise", buffers=7)
    swarm.everyone_alive()
    swarm.settle()
    rng = np.random.default_rng(seed)
    for _ in range(30):
        swarm.step(rng.choice(sorted(swarm.nodes)), rng.normal(size=64))
        swarm.settle()
        assert swarm.drift() < 1e-12
        assert_references_agree(swarm)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_lossy_codec_may_lower_the_force_but_nothing_raises_it(codec: str) -> None:
    gains = {}
    for mode in ("gossip", "elastic:pairwise", "elastic:pairwise:0.05"):
        swarm = pair(mode, codec)
        for _ in range(5):
            swarm.step("a", np.ones(64))
            swarm.settle()
        (gains[mode],) = [link.gain for link in swarm.nodes["a"].core.links()]
    assert gains["elastic:pairwise"] == min(0.25, gains["gossip"])
    assert gains["elastic:pairwise:0.05"] == min(0.05, gains["gossip"])


@pytest.mark.parametrize(
    "argument", ["pair", "pairwise:", "pairwise:0", "pairwise:0.6", "pairwise:nan", "pairwise:x", "0", "2", "nan"]
)
def test_a_bad_force_is_the_users_error(argument: str) -> None:
    with pytest.raises(UserError, match=f"--mode elastic:{argument}: with an argument it is "):
        parse_mode(f"elastic:{argument}")


def test_pairs_that_are_to_stay_apart_use_no_finer_codec_for_it() -> None:
    assert class_of("elastic:pairwise:0.1").CODEC == "sign"
