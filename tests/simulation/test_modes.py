"""Does every mode live through crashes and pauses in a whole swarm, with the invariants watched?"""

from __future__ import annotations

import pytest

from peerd.simulation.scenario import Scenario, simulate
from peerd.training.modes import MODES

VARIANTS = ["diloco:4", "elastic:pairwise"]  # arguments that make other machines of a mode


@pytest.mark.parametrize("mode", sorted(MODES) + VARIANTS)
def test_a_mode_lives_through_faults(mode: str) -> None:
    scenario = Scenario(peers=6, seed=1, minutes=4, mode=mode, compute="fixed:0.5", faults="crash,pause")
    result = simulate(scenario).result
    assert result["violations"] == []
    assert result["exchanges"] + result["rounds"] > 5  # diloco: one round in 25 s


@pytest.mark.parametrize("mode", sorted(MODES) + VARIANTS)
def test_a_run_of_a_mode_ends_with_one_model(mode: str) -> None:
    scenario = Scenario(peers=6, seed=1, problem="consensus", steps=120, mode=mode, compute="lognormal:0.1:0.2")
    result = simulate(scenario).result
    assert result["ended_by"] == "steps"
    assert result["consensus_distance"] < 0.01
