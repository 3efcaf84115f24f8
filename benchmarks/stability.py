"""Where do runs of each codec diverge? Over thin lines, with stale answers and high learning rates, simulated.

    python benchmarks/stability.py [--mode gossip] [--seeds 2]

A markdown table: the averaged model's accuracy on digits at the end, the least of the seeds.
"""

from __future__ import annotations

import argparse
from typing import Any

from peerd.simulation.scenario import Scenario, simulate
from peerd.training.codecs import CODECS
from peerd.training.mode_settings import AUTO

RATES = (0.1, 0.4, 0.8)  # the task's own is the first
PLACES: dict[str, dict[str, Any]] = {
    "10 Mbit/s": {},
    "1 Mbit/s": {"uplink_mbit": 1.0, "downlink_mbit": 1.0},
    ".1 Mbit/s": {"uplink_mbit": 0.1, "downlink_mbit": 0.1},
    "WAN": {"network": "wan"},
    "one 8 times slower": {"slow_node": 8.0},
}


def accuracy(**told: Any) -> float:
    """Of the averaged model. Raises AssertionError: an invariant did not hold."""
    lines = {} if "network" in told else {"uplink_mbit": 10.0, "downlink_mbit": 10.0}
    settings = {"peers": 4, "problem": "digits", "steps": 200, "compute": "fixed:0.02", "faults": "none", **lines}
    result = simulate(Scenario(**{**settings, **told})).result
    assert not result["violations"], result["violations"]
    return float(result["accuracy"])


def main() -> None:
    """Print the table, a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="gossip")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--shard", default="dirichlet:0.3")
    options = parser.parse_args()
    print("| codec, learning rate | " + " | ".join(PLACES) + " |")
    print("|---|" + "---|" * len(PLACES))
    for codec in (AUTO, *CODECS):
        for lr in RATES:
            row = [
                min(
                    accuracy(mode=options.mode, codec=codec, lr=lr, shard=options.shard, seed=seed, **place)
                    for seed in range(options.seeds)
                )
                for place in PLACES.values()
            ]
            print(f"| {codec}, {lr:g} | " + " | ".join(f"{found:.3f}" for found in row) + " |", flush=True)


if __name__ == "__main__":
    main()
