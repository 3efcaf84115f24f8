"""Hundreds of simulated hours with every fault drawn at random: by hand, `make soak`."""

from __future__ import annotations

import pytest

from peerd.simulation.scenario import Scenario, simulate

HOURS = 500
HOURS_EACH = 5  # swarm-hours of one seed


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3000, 3000 + HOURS // HOURS_EACH))
def test_every_invariant_holds_for_500_swarm_hours(seed: int) -> None:
    """One seed a case: what has been run is not lost where the rest is not."""
    scenario = Scenario(peers=16, seed=seed, minutes=60.0 * HOURS_EACH, compute="lognormal:10:0.5", faults="all")
    result = simulate(scenario).result
    assert not result["violations"], result["violations"]
    assert result["exchanges"] > HOURS_EACH * 100
