"""Streams that lose messages: only those that a mode can do without, which then keeps its promises all the same."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.simulation.laboratory import run
from peerd.simulation.network import PROFILES, Network, uniform
from peerd.simulation.scenario import Scenario
from peerd.simulation.world import World
from peerd.training.modes import MODES
from peerd.transport.errors import UserError
from peerd.transport.messages import Delta, LinkOpen, Message, ModelRequest, Pull, Pushed, PushForgotten

LOSSY = [name for name, mode in MODES.items() if mode.MAY_BE_LOST]
RUN = Scenario(mode="push-sum", peers=5, steps=60, compute="lognormal:0.3:0.3", faults="none", drop=0.3)
MESSAGES: list[Message] = [
    ModelRequest(),
    LinkOpen(1),
    Pull(1, 1, False),
    Pushed(1, 1, 0.5, False),
    PushForgotten(1, 1),
]


@given(st.integers(0, 1000), st.floats(0.1, 0.9), st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=50))
def test_only_what_may_be_lost_is(seed: int, share: float, messages: list[Message]) -> None:
    may = MODES["push-sum"].MAY_BE_LOST
    network, none = (Network(World(seed), uniform(PROFILES["lan"], 2), drop, may) for drop in (share, 0.0))
    lost = [message for message in messages if network.drops(message)]
    assert all(isinstance(message, may) for message in lost)
    assert network.dropped == len(lost)
    assert not any(none.drops(message) for message in messages)
    certain = Network(World(seed), uniform(PROFILES["lan"], 2), 1.0, may)
    assert [certain.drops(message) for message in messages] == [isinstance(message, may) for message in messages]


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", LOSSY)
def test_a_mode_that_can_do_with_loss_ends_its_run_with_one_model(mode: str) -> None:
    distances = []
    for seed in range(9):
        result = run(replace(RUN, mode=mode, seed=seed)).result
        assert result["violations"] == []
        assert result["steps_least"] == RUN.steps
        assert result["dropped"] > 0.1 * result["exchanges"]
        assert (result["mean_bias"] < 1e-12) == (mode == "push-sum"), "it alone keeps the mean"
        distances.append(result["consensus_distance"])
    assert median(distances) < 0.005
    assert sorted(distances)[-2] < 0.02, "the flush loses its messages, too: now and then a member gives up early"


def test_what_is_lost_is_drawn_from_the_seed() -> None:
    first, again, other = (run(replace(RUN, steps=20, seed=seed)).result for seed in (1, 1, 2))
    assert first["digest"] == again["digest"] != other["digest"]
    assert first["dropped"] == again["dropped"]


@pytest.mark.parametrize("mode", sorted(MODES.keys() - set(LOSSY)))
def test_a_mode_that_needs_every_message_refuses_loss(mode: str) -> None:
    with pytest.raises(UserError, match=f"--drop 0.3: mode {mode}.* needs every message; those that do not: gossip-p"):
        replace(RUN, mode=f"{mode}:2" if mode == "softsync" else mode)


def test_gossip_keeps_the_mean() -> None:
    result = run(replace(RUN, mode="gossip", drop=0.0)).result
    assert result["mean_bias"] < 1e-12
    assert result["dropped"] == 0


def test_the_messages_of_whole_models_and_of_links_are_never_lost() -> None:
    for name in LOSSY:
        assert not {ModelRequest, Delta, LinkOpen} & set(MODES[name].MAY_BE_LOST)
