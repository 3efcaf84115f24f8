"""Experiments: one simulated run, or many over several processes, and what came of each.

    scenario = Scenario(peers=8, problem="teacher", steps=400, compute="fixed:0.05", mode="allreduce", every=10,
                        lr=0.1, batch=16, faults="none", look_every=0.5, target="accuracy:0.85")
    outcome = run(scenario)
    outcome.result["accuracy"]    # of the averaged model on all test examples, at the end
    outcome.time_to()             # virtual seconds to the target; None: never
    outcome.time_to("loss:0.7")   # to any other one
    outcome.bytes_to()            # what all nodes had sent by then
    [(look.at, look.bytes_sent, look.loss, look.accuracy, look.distance) for look in outcome.series]

    outcomes = run_all([replace(scenario, seed=seed) for seed in range(5)], workers=2)

Each run depends on its scenario alone (its seed, too): neither the number of processes nor the others change a bit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

from peerd.simulation.outcome import Outcome
from peerd.simulation.scenario import Scenario, simulate
from peerd.training.modes.own_mode import adopted, as_told
from peerd.transport.errors import UserError

Task = TypeVar("Task")
Found = TypeVar("Found")
Done = Callable[[int, Outcome], None]
"""Told the place of a scenario in the list and its outcome, when its run has ended: in any order, in the caller."""


def run(scenario: Scenario) -> Outcome:
    """Run it here. Raises UserError for settings that make no sense; a violated invariant is in `violations`."""
    return simulate(scenario)


def run_all(
    scenarios: Sequence[Scenario], workers: int = 1, progress: Done = lambda place, outcome: None
) -> list[Outcome]:
    """Run all, `workers` at a time, each in a process of its own (1: here); the outcomes in the scenarios' order.

    A script that asks for more than one worker must start below `if __name__ == "__main__"`: the processes import it.
    Raises UserError as `run` does; what runs then comes to its end, and nothing more is begun.
    """
    outcomes: dict[int, Outcome] = {}
    tasks = [(as_told(scenario.mode), scenario) for scenario in scenarios]
    with processes(max(1, min(workers, len(scenarios)))) as pool:
        for place, outcome in as_they_end(pool, _run_told, tasks):
            outcomes[place] = outcome
            progress(place, outcome)
    return [outcomes[place] for place in range(len(scenarios))]


def _run_told(task: tuple[str, Scenario]) -> Outcome:
    """In a process that may not have read the file of a user's own mode yet."""
    told, scenario = task
    adopted(told)
    return run(scenario)


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor | None]:
    """So many; one is this process itself. Each has one thread for torch's and numpy's sums.

    Raises UserError when one is ended from outside.
    """
    if count == 1:
        yield None
        return
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    os.environ.update(dict.fromkeys(before, "1"))
    try:
        with ProcessPoolExecutor(count, get_context("spawn"), _end_at_interrupt) as pool:
            yield pool
    except BrokenProcessPool:
        raise UserError("a process was ended while it ran (did memory run out?): try fewer at a time") from None
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def as_they_end(
    pool: ProcessPoolExecutor | None, do: Callable[[Task], Found], tasks: Sequence[Task]
) -> Iterator[tuple[int, Found]]:
    """The place of each task and what came of it; without a pool it is done here. Nothing more is begun after one that
    raises."""
    if pool is None:
        for place, task in enumerate(tasks):
            yield place, do(task)
        return
    places: dict[Future[Found], int] = {pool.submit(do, task): place for place, task in enumerate(tasks)}
    try:
        for done in as_completed(places):
            yield places[done], done.result()
    finally:
        for future in places:
            future.cancel()


def _end_at_interrupt() -> None:
    """In a process of the pool: Ctrl-C is for all of them, and the first one has the words for it."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))
