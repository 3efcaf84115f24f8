"""A link between equal models starts from what both ends hold: no model travels, and the mean is kept all the same."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from gossip_swarm import KeptMessages, assert_references_agree
from hypothesis import given
from hypothesis import strategies as st

from peerd.training.effects import Vector
from peerd.transport.errors import PeerError
from peerd.transport.messages import LinkEqual, LinkOpen, LinkSnapshot

NAMES = "abc"
PAIRS = list(permutations(NAMES, 2))


class Alike(KeptMessages):
    """Nodes of one letter in `models` start from one model."""

    def __init__(self, models: str, **settings: Any) -> None:
        self._models = iter(models)
        self._known: dict[str, Vector] = {}
        super().__init__(len(models), 50, "sign", **settings)

    def first_model(self) -> Vector:
        model = super().first_model()
        return self._known.setdefault(next(self._models), model).copy()


def test_between_equal_models_none_travels() -> None:
    swarm = Alike("xxx")
    swarm.everyone_alive()
    swarm.settle()
    assert (swarm.count(LinkEqual), swarm.count(LinkSnapshot)) == (3, 0)
    assert_references_agree(swarm)
    assert all(len(node.core.references()) == 2 for node in swarm.nodes.values())


def test_between_others_it_does() -> None:
    swarm = Alike("xyx")
    swarm.everyone_alive()
    swarm.settle()
    assert (swarm.count(LinkEqual), swarm.count(LinkSnapshot)) == (1, 2)
    assert_references_agree(swarm)


def test_a_model_that_moves_before_the_answer_comes_does_no_harm() -> None:
    swarm = Alike("xx")
    swarm.everyone_alive()
    swarm.deliver("b", "a")  # who has the larger id is answered
    for name in "ab":
        swarm.step(name, swarm.rng.normal(size=50))
    swarm.settle()
    assert swarm.count(LinkEqual) == 1
    assert_references_agree(swarm)
    for _ in range(200):
        for name in "ab":
            swarm.step(name, 0.0)
        swarm.settle()
    assert np.abs(swarm.nodes["a"].x - swarm.nodes["b"].x).max() < 0.1, "they come together"
    assert swarm.drift() < 1e-9


events = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.sampled_from(PAIRS)),
        st.tuples(st.just("cut"), st.sampled_from(PAIRS)),
        st.tuples(st.just("step"), st.sampled_from(NAMES)),
        st.tuples(st.just("sees"), st.tuples(st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES)))),
    ),
    max_size=60,
)


@given(st.sampled_from(["xxx", "xxy", "xyx"]), events, st.integers(0, 99))
def test_whatever_happens_both_ends_start_from_the_same_bits(models: str, script: list[Any], seed: int) -> None:
    swarm = Alike(models, seed=seed, view=2)
    for what, about in script:
        match what:
            case "deliver":
                swarm.deliver(*about)
            case "cut":
                swarm.cut(*about)
            case "step":
                swarm.step(about, swarm.rng.normal(size=50))
            case "sees":
                name, seen = about
                node = swarm.nodes[name]
                swarm.perform(name, node.core.on_peers(frozenset(seen - {name}), swarm.now))
        assert_references_agree(swarm)
    swarm.calm()
    assert_references_agree(swarm)
    assert swarm.drift() < 1e-9


def test_who_was_told_of_no_model_cannot_have_an_equal_one() -> None:
    swarm = Alike("xx")
    core = swarm.nodes["a"].core
    swarm.nodes["a"].x[0] = np.nan
    [asked] = [each.message for each in core.on_peers(frozenset("b"), 0.0)]
    assert isinstance(asked, LinkOpen)
    assert asked.digest == b""
    with pytest.raises(PeerError):
        core.on_message("b", LinkEqual(asked.link), 0.0)
