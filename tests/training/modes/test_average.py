"""One exact average: all who live become the mean of all who came, to the bit, and stand there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from round_swarm import RoundSwarm

NAMES = "abcde"
orders = st.permutations(NAMES)


def come(swarm: RoundSwarm, name: str, trains: bool) -> None:
    """Its trainer reaches the barrier, or it has none."""
    if trains:
        swarm.step(name)
    else:
        swarm.finish(name)


def wait(swarm: RoundSwarm) -> None:
    """As long as it takes for everything that is repeated."""
    for _ in range(40):
        swarm.settle()
        swarm.pass_time(1.0)


def have_it(swarm: RoundSwarm) -> set[str]:
    return {name for name, node in swarm.nodes.items() if node.proceeded[-1:] == [True]}


@given(orders, st.lists(st.booleans(), min_size=5, max_size=5), st.integers(1, 5), st.integers(0, 99))
def test_all_models_become_their_mean(order: list[str], train: list[bool], count: int, seed: int) -> None:
    swarm = RoundSwarm("".join(order[:count]), mode="average", codec="sign", every=5, overlap="hpsgd", seed=seed)
    models = {}
    swarm.all_hear()
    for name, trains in zip(order[:count], train, strict=False):
        swarm.nodes[name].x = swarm.integers()
        come(swarm, name, trains)
        models[name] = swarm.nodes[name].x.copy()
    wait(swarm)
    mean = np.sum(list(models.values()), axis=0) / count
    assert have_it(swarm) == set(models)
    for name, trains in zip(order[:count], train, strict=False):
        node = swarm.nodes[name]
        assert (node.x == mean).all(), "in float32, whatever the codec of the mode that was"
        assert node.waits == trains, "a trainer that has come stands still"
        assert len(node.rounds) == 1


@pytest.mark.parametrize("topology", ["adv:2", "tree:2"])
def test_servers_and_rounds_in_any_shape_are_averaged(topology: str) -> None:
    swarm = RoundSwarm("abc", mode="average", topology=topology)
    swarm.all_hear()
    for name in "abc":
        come(swarm, name, True)
    wait(swarm)
    assert have_it(swarm) == set("abc")


@given(orders, st.integers(0, 99), st.integers(0, 60))
def test_a_death_at_any_message_leaves_the_others_with_one_model(order: list[str], seed: int, at: int) -> None:
    swarm = RoundSwarm(NAMES, mode="average", seed=seed)
    swarm.all_hear()
    for name in order:
        swarm.nodes[name].x = swarm.integers()
        swarm.step(name)
    links = [(one, other) for one in order for other in order if one != other]
    for _ in range(at):
        next((True for one, other in links if swarm.deliver(one, other)), None)
    swarm.die(order[0])
    swarm.all_hear()
    wait(swarm)
    assert have_it(swarm) == set(order[1:])
    assert len({node.x.tobytes() for node in swarm.nodes.values()}) == 1


@pytest.mark.parametrize("late", ["a", "c"])
def test_who_does_not_come_is_waited_for_and_then_left_out(late: str) -> None:
    swarm = RoundSwarm("abc", mode="average", seed=3)
    swarm.all_hear()
    came = sorted({*"abc"} - {late})
    for name in came:
        swarm.nodes[name].x = swarm.integers()
        swarm.step(name)
    mean = np.mean([swarm.nodes[name].x for name in came], axis=0)
    before = swarm.nodes[late].x.copy()
    wait(swarm)
    assert not have_it(swarm)
    swarm.pass_time(400.0)
    wait(swarm)
    assert have_it(swarm) == set(came)
    assert all((swarm.nodes[name].x == mean).all() for name in came)
    assert (swarm.nodes[late].x == before).all()


@pytest.mark.parametrize("pair", ["bc", "cb", "ac"])
def test_two_who_cannot_connect_to_each_other_have_the_mean_of_all(pair: str) -> None:
    """But for whom the leader cannot reach: the others have their own."""
    source, target = pair[0], pair[1]
    swarm = RoundSwarm("abc", mode="average")
    swarm.lies[source] = lambda to, message: None if to == target else message
    swarm.all_hear()
    for name in "abc":
        swarm.nodes[name].x = swarm.integers()
        come(swarm, name, True)
    models = {name: node.x.copy() for name, node in swarm.nodes.items()}
    for _ in range(20):
        swarm.settle()
        swarm.pass_time(1.0)
        swarm.perform(source, swarm.nodes[source].core.on_unreached(target, swarm.now))
    those = "ab" if pair == "ac" else "abc"
    assert have_it(swarm) == set(those)
    mean = np.sum([models[name] for name in those], axis=0) / len(those)
    assert all((swarm.nodes[name].x == mean).all() for name in those)
