"""What of a model waits beside it, with sparse codecs: nothing of it is lost, and nothing of it is left."""

from __future__ import annotations

import numpy as np
import pytest
from gossip_swarm import GossipSwarm
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.training.codecs import CODECS, SPARSE
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Apply, Effect, Shift
from peerd.training.pairs.feedback import Feedback
from peerd.training.pairs.reference import PairedReference
from peerd.training.scratch import Scratch


def test_sparse_codecs_are_those_that_name_values() -> None:
    assert {"top_k", "top_k_3", "top_k_2bit"} == SPARSE


@given(seed=st.integers(0, 2**16), buffers=st.integers(0, 5), gain=st.floats(0.01, 0.5))
@settings(deadline=None)
def test_a_model_and_what_waits_are_moved_by_the_correction_alone(seed: int, buffers: int, gain: float) -> None:
    rng = np.random.default_rng(seed)
    layout = Layout(40, 40 + buffers, tensors=(7, 40))
    x = rng.normal(size=layout.total)
    feedback = Feedback(layout, lambda: x)
    reference = PairedReference(1, rng.normal(size=layout.total), layout, Scratch())
    for _ in range(3):
        reference.theirs[:] = rng.normal(size=layout.total)
        reference.mine[:] = rng.normal(size=layout.total)
        towards = rng.uniform(0, 0.5, size=2 + (buffers > 0))
        difference = reference.theirs[:] - reference.mine[:]
        correction = gain * difference
        whole, shift = feedback.whole().copy(), np.empty_like(x)
        feedback.exchanged(reference, towards, whole, correction, shift)
        x = x + correction + shift
        assert np.allclose(feedback.whole(), whole + correction, rtol=0, atol=1e-12)
        share = np.repeat(towards[:2], [7, 33])
        assert np.allclose(x[:40], reference.mine[:40] + share * difference[:40], rtol=0, atol=1e-12)
        assert not feedback.rest[40:].any()
        x = x + rng.normal(size=layout.total)  # steps
    waits = feedback.give_back().copy()
    assert np.array_equal(feedback.whole(), x), "nothing waits any more"
    assert np.isfinite(waits).all()


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_two_who_have_exchanged_train_one_model_where_a_codec_names_few_values(codec: str) -> None:
    swarm = GossipSwarm(2, 600, codec, view=1, seed=2)
    swarm.everyone_alive()
    swarm.settle()
    for _ in range(4):
        swarm.step("a", swarm.rng.normal(size=swarm.layout.total) / 10)
        swarm.settle()
    a, b = swarm.nodes.values()
    kept_back = [node.core.kept_back for node in (a, b)]
    assert all((kept is not None) == (codec in SPARSE) for kept in kept_back)
    assert swarm.drift() < 1e-12
    if codec in SPARSE:
        assert np.allclose(a.x, b.x, rtol=0, atol=1e-6)
        assert all(kept.any() for kept in kept_back)
        for name in "ab":
            swarm.step(name, finishing=True)
        swarm.settle()
        assert not any(kept.any() for kept in (a.core.kept_back, b.core.kept_back))
        assert swarm.drift() < 1e-12
        assert swarm.spread() < 1e-2


def test_what_waits_is_in_the_model_once_a_run_ends_and_stays_there() -> None:
    swarm = GossipSwarm(3, 600, "top_k", seed=4)
    swarm.everyone_alive()
    swarm.settle()
    for name in "abcabc":
        swarm.step(name, swarm.rng.normal(size=swarm.layout.total) / 10)
        swarm.settle()
    waits, model = swarm.nodes["a"].core.kept_back.copy(), swarm.nodes["a"].x.copy()
    assert waits.any()
    swarm.step("a", finishing=True)
    assert np.array_equal(swarm.nodes["a"].x, model + waits)
    swarm.step("b", 0.1)  # it trains on, and is answered
    swarm.settle()
    assert not swarm.nodes["a"].core.kept_back.any()
    assert swarm.drift() < 1e-12


def test_a_mode_that_takes_over_is_handed_what_waits() -> None:
    swarm = GossipSwarm(2, 600, "top_k_3", view=1, seed=2)
    swarm.everyone_alive()
    swarm.settle()
    swarm.step("a", swarm.rng.normal(size=swarm.layout.total))
    swarm.settle()
    core = swarm.nodes["a"].core
    assert core.kept_back.any()
    assert np.array_equal(core.end(), core.kept_back)
    assert core.end() is not core.kept_back


def test_a_model_that_is_not_finite_does_not_spoil_what_waits() -> None:
    swarm = GossipSwarm(2, 600, "top_k_3", view=1, seed=2)
    swarm.everyone_alive()
    swarm.settle()
    swarm.step("a", swarm.rng.normal(size=swarm.layout.total))
    node = swarm.nodes["a"]
    sound = node.x.copy()
    node.x[0] = np.nan
    node.publish()
    swarm.settle()
    assert np.isfinite(node.core.kept_back).all()
    node.x[0] = sound[0]


class Seen(GossipSwarm):
    """Of whose effects the types are kept."""

    def perform(self, name: str, effects: list[Effect]) -> None:
        self.types = [*getattr(self, "types", ()), *map(type, effects)]
        super().perform(name, effects)


def test_it_is_one_effect_of_its_own() -> None:
    swarm = Seen(2, 600, "top_k_3", view=1, seed=2)
    swarm.everyone_alive()
    swarm.settle()
    swarm.step("a", 0.1)
    swarm.settle()
    assert swarm.types.count(Shift) == swarm.types.count(Apply) == 2, "one at each end"
