"""How many steps a second does the simulator's teacher task make, alone and in a swarm? Of one core's time.

python benchmarks/laboratory.py [--peers 8] [--steps 400]
"""

from __future__ import annotations

import argparse
import time

from peerd.simulation.laboratory import run
from peerd.simulation.options import Learning, Scenario
from peerd.simulation.teacher import Teacher

MODES = (("gossip", 1), ("allreduce", 10), ("diloco", 50))
ALONE = 5000  # steps


def main() -> None:
    """Print a line each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    for batch in (16, 64):
        learner = Teacher("teacher", 1, None, 0, "iid", Learning(batch=batch)).learner(0)
        began = time.process_time()
        for number in range(ALONE):
            learner.step(number)
        print(f"alone, batch {batch}: {ALONE / (time.process_time() - began):,.0f} steps a second of CPU time")
    for mode, every in MODES:
        began = time.process_time()
        run(
            Scenario(
                peers=options.peers, problem="teacher", steps=options.steps, compute="fixed:0.05", mode=mode,
                every=every, faults="none", look_every=0.5,
            )
        )  # fmt: skip
        rate = options.peers * options.steps / (time.process_time() - began)
        print(f"{options.peers} peers, {mode} every {every}: {rate:,.0f} steps of a node a second of CPU time")


if __name__ == "__main__":
    main()
