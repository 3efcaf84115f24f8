"""What does the robust merge cost honest runs, and what does it save of one with liars? Simulated swarms.

    python benchmarks/robust.py honest --peers 8 --steps 80 --seeds 5
    python benchmarks/robust.py attacks --peers 16 --steps 80
    python benchmarks/robust.py toy --peers 16 --steps 80

A table of lines; one run follows the other in this process.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from typing import Any

from peerd.simulation.byzantine import ATTACKS
from peerd.simulation.scenario import Scenario, simulate

SHARDS = ("iid", "dirichlet:0.3")
SPEEDS = (1.0, 4.0)


def run(scenario: Scenario) -> dict[str, Any]:
    """The figures. Raises AssertionError: an invariant did not hold."""
    result = simulate(scenario).result
    assert not result["violations"], result["violations"]
    return result


def honest(base: Scenario, seeds: int) -> None:
    """Each setting over some seeds, with the merge bounded and not, in turn."""
    print("shard, first node slower by, bounded: accuracy, worst node's, exchanges, MB, virtual s (means)")
    for shard, slow in product(SHARDS, SPEEDS):
        rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for seed, robust in product(range(seeds), (True, False)):
            rows[robust].append(run(replace(base, shard=shard, slow_node=slow, seed=seed, robust=robust)))
        for robust, results in rows.items():
            means = {name: sum(row[name] for row in results) / seeds for name in results[0] if name in SHOWN}
            told = ", ".join(f"{means[name] * scale:.{digits}f}" for name, (scale, digits) in SHOWN.items())
            print(f"{shard}, {slow:g}, {'yes' if robust else 'no'}: {told}", flush=True)


SHOWN = {
    "accuracy": (100, 2),
    "accuracy_worst": (100, 2),
    "exchanges": (1, 0),
    "bytes_sent_total": (1e-6, 2),
    "virtual_seconds": (1, 1),
}


def attacks(base: Scenario, names: list[str], liars: list[int], shards: list[str]) -> None:
    """Each attack by so many members, with the merge bounded and not."""
    print("shard, attack, bounded: accuracy of the honest members' mean, worst of them (without lies), MB")
    for shard, attack, count, robust in product(shards, names, liars, (True, False)):
        result = run(replace(base, shard=shard, byzantine=f"{attack}:{count}", robust=robust, slow_node=4.0))
        print(
            f"{shard}, {attack}:{count}, {'yes' if robust else 'no'}: {result['accuracy']:.2%}, "
            f"{result['accuracy_worst']:.2%} ({result['clean_accuracy']:.2%}), {result['bytes_sent_total'] / 1e6:.0f}",
            flush=True,
        )


def toy(base: Scenario, names: list[str], liars: list[int]) -> None:
    """The same of a quadratic: how far the honest members' mean is from the optimum, relative."""
    print("attack: error bounded, not bounded, without lies")
    for attack, count in product(names, liars):
        scenario = replace(base, problem="consensus", byzantine=f"{attack}:{count}", slow_node=4.0)
        bounded, free = (run(replace(scenario, robust=robust)) for robust in (True, False))
        print(
            f"{attack}:{count}: {bounded['error']:.3g}, {free['error']:.3g}, {bounded['clean_error']:.3g}", flush=True
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["honest", "attacks", "toy"])
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--mode", default="gossip")
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--liars", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--shards", nargs="+", default=list(SHARDS))
    told = parser.parse_args()
    base = Scenario(
        peers=told.peers, problem="digits", steps=told.steps, compute="fixed:1", mode=told.mode, faults="none"
    )  # fmt: skip
    if told.what == "honest":
        honest(base, told.seeds)
    elif told.what == "toy":
        toy(base, told.attacks, told.liars)
    else:
        attacks(base, told.attacks, told.liars, told.shards)


if __name__ == "__main__":
    main()
