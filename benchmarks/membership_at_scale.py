"""Does membership keep its promises in large swarms? The production core in the simulator, three questions.

crashes   how soon do 99 % of the nodes know of a crash?
stops     a quarter of the nodes is stopped and continued for ever: is anybody declared failed who never was?
loss      every twentieth packet is lost: is anybody declared failed at all?

python benchmarks/membership_at_scale.py crashes|stops|loss [--peers 1000] [--seconds 600] [--seed 7] [--format json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from peerd.simulation.network import Profile
from peerd.simulation.swarm import Swarm
from peerd.simulation.world import Violation, World

CRASH_EVERY_S = 5.0
AWAY_S = 60.0  # much longer than a crash takes to be known
STOP_S = (2.0, 4.0, 16.0)
LOSS = 0.05


def crashes(swarm: Swarm) -> None:
    """One node after the other is killed, and comes back."""
    rng = swarm.world.rng("crashes")

    def back(victim: int) -> None:
        swarm.start(victim)

    def strike() -> None:
        victim = rng.choice(sorted(swarm.nodes)[1:])
        swarm.crash(victim)
        swarm.world.later(AWAY_S, lambda: back(victim))
        swarm.world.later(CRASH_EVERY_S, strike)

    swarm.world.later(10.0, strike)


def stops(swarm: Swarm) -> None:
    """A quarter is stopped for 2, 4 or 16 s, runs as long, and so on."""
    rng = swarm.world.rng("stops")
    for index in range(swarm.peers // 4):
        seconds = STOP_S[index % len(STOP_S)]

        def stop(index: int = index, seconds: float = seconds) -> None:
            swarm.pause(index)
            swarm.world.later(seconds, lambda: go_on(index, seconds))

        def go_on(index: int, seconds: float) -> None:
            swarm.resume(index)
            swarm.world.later(seconds, lambda: stop(index, seconds))

        swarm.world.later(10.0 + rng.random() * 2 * seconds, stop)


def loss(swarm: Swarm) -> None:
    """A twentieth of all packets is lost, everywhere."""
    swarm.set_conditions(Profile(0.0, loss=LOSS))


TRIALS = {"crashes": crashes, "stops": stops, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", choices=TRIALS)
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    options = parser.parse_args()
    began = time.perf_counter()
    swarm = Swarm(World(options.seed), options.peers)
    swarm.start_formed()
    TRIALS[options.trial](swarm)
    with Progress(console=Console(file=sys.stderr)) as bar:
        row = bar.add_task(options.trial, total=options.seconds)
        try:
            while swarm.world.now < options.seconds:
                swarm.run(min(10.0, options.seconds - swarm.world.now))
                bar.update(row, completed=swarm.world.now)
        except Violation as violation:
            sys.exit(f"violation: {violation}")
    found = swarm.detections_s
    counts = swarm.counts()
    figures: dict[str, Any] = {
        "trial": options.trial,
        "peers": options.peers,
        "virtual_seconds": options.seconds,
        "seconds": round(time.perf_counter() - began, 1),
        "probes": counts["probes"],
        "suspicions": counts["suspicions"],
        "false_deaths": swarm.checkers.false_deaths,  # of nodes that were never stopped or killed
        "verdicts": len(swarm.verdicts),
        "crashes_known": len(found),
        "detection_median_s": float(np.median(found)) if found else None,
        "detection_p99_s": float(np.percentile(found, 99)) if found else None,
        "bytes_a_node_and_second": swarm.bytes_sent / options.peers / options.seconds,
        "digest": swarm.world.digest,
    }
    if options.format == "json":
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:<26}{value}")


if __name__ == "__main__":
    main()
