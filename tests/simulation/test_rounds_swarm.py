"""All-reduce in simulated swarms: models agree to the bit, bytes and times are those of the cost model."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from peerd.simulation.network import Profile, uniform
from peerd.simulation.options import Learning
from peerd.simulation.problems import BytesOnly, Problem, mean_and_distance
from peerd.simulation.scenario import Scenario, _Run, simulate
from peerd.simulation.swarm import Swarm
from peerd.simulation.task_problem import TaskProblem
from peerd.simulation.teacher import Teacher
from peerd.simulation.world import World
from peerd.training.mode_settings import OVERLAPS, ModeSettings
from peerd.training.rounds.quorum import GRACE

MBIT = 100.0
PARAMETERS = 10_000_000


def one_round(peers: int, topology: str) -> tuple[float, list[int]]:
    """Seconds of one final round over equal lines, and the bytes that each node sent."""
    swarm = Swarm(
        World(1), peers, BytesOnly(1, PARAMETERS, 1), mode="allreduce", compute="fixed:1", steps=1,
        told=ModeSettings(codec="float32", overlap="blocking", topology=topology),
        topology=uniform(Profile(0.0002, uplink_mbit=MBIT, downlink_mbit=MBIT), peers),
    )  # fmt: skip
    swarm.start_formed()
    assert swarm.run(120, swarm.finished)
    assert mean_and_distance(swarm.models())[1] == 0.0
    return max(trainer.trained_until for trainer in swarm.trainers) - 1, [
        node.bytes_sent for node in swarm.nodes.values()
    ]


def test_a_ring_costs_each_node_two_models_less_its_share() -> None:
    for peers in (2, 4, 8):
        _, sent = one_round(peers, "ring")
        model = 4 * PARAMETERS
        share = [each / (2 * (peers - 1) / peers * model) for each in sent]
        assert all(1.0 <= each < 1.001 for each in share), "the values as they are, and the frames around them"


def test_a_trees_time_grows_with_the_logarithm_of_the_peers() -> None:
    seconds = [one_round(peers, "tree")[0] for peers in (2, 4, 8, 16)]
    steps = [after - before for before, after in itertools.pairwise(seconds)]
    whole_s = 4 * PARAMETERS / (MBIT * 125_000)
    assert all(1.0 <= step / (2 * whole_s) < 1.01 for step in steps), "one level more, up and down"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("overlap", "steps", "least", "most"),
    [("blocking", 60, 0.0, 0.12), ("quorum", 200, 0.4, 0.55), ("delayed", 500, 0.95, 1.0), ("hpsgd", 500, 0.95, 1.0)],
)
def test_trainers_compute_while_a_round_takes_eight_steps(overlap: str, steps: int, least: float, most: float) -> None:
    """A ring of 40 MB among 4 takes 4.8 s on 100 Mbit/s; a step takes 0.6 s. The last rounds of the run count, too.

    With `quorum` the leader orders as many steps before a round as take its time."""
    scenario = Scenario(
        peers=4, seed=1, problem="bytes", parameters=10_000_000, steps=steps, mode="allreduce", topology="ring",
        codec="float32", overlap=overlap, compute="fixed:0.6", uplink_mbit=100, downlink_mbit=100, faults="none",
    )  # fmt: skip
    result = simulate(scenario).result
    assert result["violations"] == []
    assert least <= result["computing_share"] <= most


@pytest.mark.one_run_in(3)
@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", [1, 2])
def test_who_trains_on_is_in_the_rounds_of_those_who_have_just_ended(seed: int) -> None:
    """What waits beside a model is longer than the way since the last round: who ends says both, as the others do."""
    scenario = Scenario(
        peers=6, problem="digits", steps=60, mode="allreduce", compute="lognormal:0.05:0.5", uplink_mbit=10,
        faults="none", seed=seed,
    )  # fmt: skip
    result = simulate(scenario).result
    assert result["violations"] == []
    assert result["consensus_distance"] == 0.0
    assert result["virtual_seconds"] < 20, "who was left out waited for 60 s"


@pytest.mark.one_run_in(3)
@pytest.mark.cases(1)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_digits_train_and_end_as_one_model(overlap: str) -> None:
    scenario = Scenario(
        peers=8, problem="digits", steps=120, mode="allreduce", codec="float32", every=6, overlap=overlap,
        compute="fixed:0.2", faults="none",
    )  # fmt: skip
    result = simulate(scenario).result
    assert result["violations"] == []
    assert result["consensus_distance"] == 0.0
    assert result["rounds"] >= 15
    assert result["accuracy"] > 0.85


@pytest.mark.parametrize("peers", [3, 4])
@pytest.mark.parametrize("exchange", ["weights", "gradients"])
def test_rounds_go_on_where_two_cannot_connect_to_each_other(peers: int, exchange: str) -> None:
    """They waited for 5 minutes at the first round, and the last one was of one of the two."""
    scenario = Scenario(
        peers=peers, problem="consensus", steps=60, mode="allreduce", exchange=exchange, codec="float32", every=0,
        topology="ring", compute="fixed:1", faults="none",
    )  # fmt: skip
    run = _Run(scenario, None)
    heal = run.swarm.cut(lambda source, target: (source, target) == (1, 2), (1, 2))
    run.world.later(100.0, heal)  # the run has ended: members are to agree again
    assert run.go(lambda share, look: None) == []
    assert run.measured["virtual_seconds"] < 60 + 30
    assert run.measured["steps_least"] == 60
    assert run.measured["consensus_distance"] < 1e-12


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", ["allreduce", "diloco"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_members_crash_and_come_back_and_the_run_ends(mode: str, overlap: str) -> None:
    scenario = Scenario(
        peers=6, seed=2, problem="consensus", steps=100, mode=mode, codec="int8", every=2, overlap=overlap,
        faults="crash,weather", fault_every=60, minutes=30,
    )  # fmt: skip
    result = simulate(scenario).result
    assert result["violations"] == []
    assert result["virtual_seconds"] < 1200
    assert result["rounds"] > 20
    assert result["error"] < 0.5  # of the optimum, from 1.0; outer momentum one window late still rings, calm or not


def unequal(overlap: str, **told: Any) -> dict[str, Any]:
    scenario = Scenario(
        peers=4, problem="digits", steps=100, mode="allreduce", codec="top_k_2bit", every=2, overlap=overlap,
        compute="fixed:0.1", faults="none", **told,
    )  # fmt: skip
    result = simulate(scenario).result
    assert result["violations"] == []
    assert result["consensus_distance"] == 0.0
    return result


@pytest.mark.one_run_in(3)
def test_a_quorum_does_not_wait_for_one_that_is_slower() -> None:
    """Its rounds come at the pace of the others, by GRACE at most, and what it learns is in them, too."""
    waiting, going = (unequal(overlap, slow_node=6.0, ends_together=True) for overlap in ("blocking", "quorum"))
    equal = unequal("blocking")
    assert waiting["virtual_seconds"] > 5 * equal["virtual_seconds"]
    assert going["virtual_seconds"] < 1.1 * GRACE * equal["virtual_seconds"]
    assert going["rounds"] == pytest.approx(waiting["rounds"], rel=0.05)
    assert going["accuracy"] > waiting["accuracy"] - 0.02


@pytest.mark.one_run_in(3)
def test_a_quorum_of_members_alike_is_a_round_of_all() -> None:
    blocking, quorum = (unequal(overlap) for overlap in ("blocking", "quorum"))
    same = ("accuracy", "bytes_sent_total", "rounds", "virtual_seconds")
    assert [quorum[key] for key in same] == [blocking[key] for key in same]


def test_gradients_make_one_model_of_all_whatever_crashes_and_parts() -> None:
    scenario = Scenario(
        peers=5, seed=3, minutes=2.0, mode="allreduce", exchange="gradients", faults="crash,partition",
        fault_every=20.0, compute="fixed:1",
    )  # fmt: skip
    result = simulate(scenario).result
    assert result["violations"] == []
    assert result["consensus_distance"] < 1e-6, "a float64 model is rounded on the wire"


def test_digits_train_by_gradients() -> None:
    scenario = Scenario(
        peers=3, problem="digits", steps=20, mode="allreduce", exchange="gradients", compute="fixed:0.2", faults="none"
    )
    result = simulate(scenario).result
    assert result["violations"] == []
    assert result["consensus_distance"] == 0.0
    assert result["accuracy"] > 0.5


@pytest.mark.cases(2)
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adamw"])
@pytest.mark.parametrize("task", ["teacher", "digits"])
def test_who_comes_and_who_comes_back_take_over_the_optimizers_state(task: str, optimizer: str) -> None:
    """To the bit: all make the same steps by the same mean, in float32, from what has come as float32."""
    peers, steps, learning = 4, 40, Learning(optimizer, schedule="cosine")
    problem: Problem = (
        Teacher("teacher:6-8-3:examples=300", peers, steps, 1, "iid", learning, shares_optimizer=True)
        if task == "teacher"
        else TaskProblem(task, peers, steps, 1, "iid", learning, shares_optimizer=True)
    )
    told = ModeSettings(codec="float32", exchange="gradients")
    swarm = Swarm(World(1), peers, problem, mode="allreduce", told=told, compute="lognormal:1:0.3", steps=steps)
    for index in range(3):
        swarm.start(index, wait_for=3)
    swarm.run(15)
    swarm.start(3)
    swarm.run(10)
    swarm.crash(1)
    swarm.run(8)
    swarm.start(1)
    assert swarm.run(300, swarm.finished)
    assert sum(node.counts["models_taken_over"] for node in swarm.nodes.values()) > 0
    ends = [trainer.values() for trainer in swarm.trainers]
    assert len({values.tobytes() for values in ends}) == 1
    layout = problem.learner(0).layout
    assert layout.states >= layout.parameters
    assert np.count_nonzero(ends[0][-layout.states :]) > layout.states / 2
    assert all(len(model) == layout.total - layout.states for model in swarm.models())


def test_only_members_that_make_the_steps_themselves_share_its_state() -> None:
    shares = {
        (mode, exchange): Scenario(mode=mode, exchange=exchange).shares_optimizer
        for mode in ("allreduce", "hardsync", "softsync:2", "async")
        for exchange in ("weights", "gradients")
    }
    assert [what for what, does in shares.items() if does] == [("allreduce", "gradients")]


def test_all_skip_a_step_whose_gradient_is_not_finite() -> None:
    learning = Learning(lr=1e12)
    problem = Teacher("teacher:6-8-3:examples=300", 3, 12, 1, "iid", learning, shares_optimizer=True)
    swarm = Swarm(World(1), 3, problem, mode="allreduce", told=ModeSettings(exchange="gradients"), steps=12)
    swarm.start_formed()
    with np.errstate(all="ignore"):
        assert swarm.run(60, swarm.finished)
    assert all(node.counts["gradients_not_finite"] > 0 for node in swarm.nodes.values())
    assert all(np.isfinite(trainer.values()).all() for trainer in swarm.trainers)
    assert len({trainer.values().tobytes() for trainer in swarm.trainers}) == 1
