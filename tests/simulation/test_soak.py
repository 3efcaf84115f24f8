"""Hundreds of simulated hours with every fault drawn at random: by hand, `make soak`."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor

import pytest
from rich.progress import Progress

from peerd.simulation.scenario import Scenario, simulate

HOURS = 500
HOURS_EACH = 5  # swarm-hours of one seed


def one(seed: int) -> tuple[list[str], int]:
    scenario = Scenario(peers=16, seed=seed, minutes=60.0 * HOURS_EACH, compute="lognormal:10:0.5", faults="all")
    result = simulate(scenario).result
    return result["violations"], result["exchanges"]


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_every_invariant_holds_for_500_swarm_hours(capsys: pytest.CaptureFixture[str]) -> None:
    exchanges = 0
    with capsys.disabled(), ProcessPoolExecutor(os.cpu_count()) as pool, Progress() as bar:
        row = bar.add_task("swarm-hours", total=HOURS)
        for violations, count in pool.map(one, range(3000, 3000 + HOURS // HOURS_EACH)):
            assert not violations, violations
            exchanges += count
            bar.advance(row, HOURS_EACH)
    assert exchanges > HOURS * 100
