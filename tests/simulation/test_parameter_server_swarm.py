"""Parameter servers on virtual time: Rudra's staleness law, and a swarm whose servers crash."""

from __future__ import annotations

import itertools

import pytest

from peerd.simulation.scenario import Scenario, simulate


@pytest.mark.cases(1)
@pytest.mark.parametrize("topology", ["auto", "adv:2"])
@pytest.mark.parametrize(("n", "group"), [(1, 10), (2, 5), (10, 1)])
def test_mean_staleness_is_that_of_the_law(n: int, group: int, topology: str) -> None:
    """(workers - 1) / c, for c pushes in one update; few are more than 2n stale. A tree's sums name their parts."""
    outcome = simulate(
        Scenario(
            peers=10, steps=150, mode=f"softsync:{n}", topology=topology, codec="float32", compute="lognormal:1:0.05",
            faults="none",
        )
    )  # fmt: skip
    pushes = outcome.staleness.total()
    assert outcome.result["violations"] == []
    assert pushes == 10 * 150
    mean = sum(staleness * count for staleness, count in outcome.staleness.items()) / pushes
    assert mean == pytest.approx(9 / group, rel=0.06), "the first pushes of a run are fresher"
    assert sum(count for staleness, count in outcome.staleness.items() if staleness > 2 * n) <= 0.01 * pushes


@pytest.mark.parametrize("topology", ["auto", "adv:2"])
def test_gradients_keep_the_law_and_reach_the_optimum(topology: str) -> None:
    """And a schedule with an optimizer of the servers'; the answer has the histogram."""
    outcome = simulate(
        Scenario(
            peers=6, steps=120, mode="softsync:3", topology=topology, exchange="gradients",
            server_optimizer="sgd:momentum=0.5", compute="lognormal:1:0.05", faults="none",
        )
    )  # fmt: skip
    result = outcome.result
    assert result["violations"] == []
    pushes = outcome.staleness.total()
    assert pushes == 6 * 120
    assert result["staleness"]["counts"] == {str(age): count for age, count in sorted(outcome.staleness.items())}
    mean = sum(age * count for age, count in outcome.staleness.items()) / pushes
    assert mean == pytest.approx(5 / 2, rel=0.06)
    assert result["consensus_distance"] < 1e-6
    assert result["error"] < 0.05


@pytest.mark.parametrize("mode", ["hardsync", "async"])
def test_servers_of_gradients_may_crash(mode: str) -> None:
    outcome = simulate(
        Scenario(
            peers=5, steps=80, mode=mode, servers=2, exchange="gradients", server_optimizer="adamw:weight_decay=0",
            compute="fixed:1", fault_every=15, seed=3,
        )
    )  # fmt: skip
    assert outcome.result["violations"] == []
    assert outcome.result["crashes"] > 0
    assert outcome.result["ended_by"] == "steps"
    assert outcome.result["consensus_distance"] < 1e-6


def test_hardsync_is_never_stale_and_all_end_with_one_model() -> None:
    outcome = simulate(Scenario(peers=6, steps=40, mode="hardsync", codec="int8", faults="none"))
    assert set(outcome.staleness) == {0}
    assert outcome.result["consensus_distance"] < 1e-6
    assert outcome.result["steps"] == 40


def test_a_round_takes_time_in_proportion_to_the_workers() -> None:
    """FireCaffe's reason for reduction trees: all weights leave by one server's line."""
    seconds = {}
    for peers in (5, 9, 17, 33):
        outcome = simulate(
            Scenario(
                peers=peers, steps=5, mode="hardsync", codec="float32", problem="bytes", parameters=1_000_000,
                compute="fixed:0.01", uplink_mbit=100, downlink_mbit=100, faults="none",
            )
        )  # fmt: skip
        seconds[peers - 1] = outcome.result["virtual_seconds"]
    for others, longer in ((4, 8), (8, 16), (16, 32)):
        assert seconds[longer] / seconds[others] == pytest.approx(2, rel=0.1)


def test_with_a_tree_a_round_takes_time_in_proportion_to_its_depth() -> None:
    """Rudra-adv's reason: two sums and two weights a level, where the server's own line was the bottleneck.

    Of two runs the difference, for all first weights leave by the server's line, with a tree, too.
    """

    def seconds(peers: int, steps: int) -> float:
        outcome = simulate(
            Scenario(
                peers=peers, steps=steps, mode="hardsync", topology="adv:2", codec="float32", problem="bytes",
                parameters=1_000_000, compute="fixed:0.01", uplink_mbit=100, downlink_mbit=100, faults="none",
            )
        )  # fmt: skip
        return float(outcome.result["virtual_seconds"])

    rounds = [seconds(peers, 6) - seconds(peers, 3) for peers in (7, 15, 31)]
    levels = [after - before for before, after in itertools.pairwise(rounds)]
    assert 0 < levels[1] < 1.3 * levels[0], rounds


def test_the_rate_suits_the_samples_of_all_workers() -> None:
    """Two batches of 16 are the 32 that the rate is for; of 8 they are half as many, and the steps are shorter."""

    def series(mode: str, batch: int) -> object:
        scenario = Scenario(
            peers=2, problem="teacher:6-8-3:examples=300", steps=10, batch=batch, mode=mode, exchange="gradients",
            faults="none", look_every=2.0,
        )  # fmt: skip
        looks = simulate(scenario).series
        return [(look.loss, look.accuracy, look.validation_loss) for look in looks[1:]]

    assert series("hardsync:batch=32", 16) == series("hardsync", 16)
    assert series("hardsync:batch=32", 8) != series("hardsync", 8)


def test_a_run_that_a_lying_server_holds_up_ends_and_says_so() -> None:
    outcome = simulate(Scenario(peers=3, steps=3, mode="softsync", faults="none", byzantine="nan:1", seed=0))
    assert outcome.result["violations"] == []
    assert (outcome.result["ended_by"], outcome.result["liars"]) == ("standstill", [0])
    assert outcome.result["virtual_seconds"] < 4000
