"""One worker of one method: a task's training with a rival of torch's, or with peerd; its weights go to files.

Started by `python -m benchmarks.versus`; peerd's are started by a daemon, as a user's script is.
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path

import numpy as np
import torch

import peerd
from benchmarks.versus.place import Place
from benchmarks.versus.rivals import QUASI_GLOBAL, RIVALS
from peerd.training.tasks import TASKS
from peerd.training.tasks.run import Run
from peerd.training.tasks.script import Pace


class Snapshots:
    """Weights with the time at which they were held: RANK.SECONDS.npy."""

    def __init__(self, run: Run, rank: int, folder: Path, every: int) -> None:
        self._run, self._rank, self._folder, self._every = run, rank, folder, every

    def after(self, number: int) -> None:
        """Step `number`."""
        if number % self._every == 0:
            self.write()

    def write(self) -> None:
        flat = torch.nn.utils.parameters_to_vector(self._run.model.parameters()).detach().numpy()
        path = self._folder / f"{self._rank}.{time.monotonic():.4f}.part"
        with path.open("wb") as file:
            np.save(file, flat)
        path.rename(path.with_suffix(".npy"))


def against(run: Run, row: str, steps: int, place: Place, pace: Pace, late_s: float, snapshots: Snapshots) -> None:
    """A rival's training; who joins makes the second half of it."""
    rival = RIVALS[row](run, place)
    snapshots.write()
    for number in range(steps // 2 if place.joins else 0, steps):
        pace.wait()
        time.sleep(late_s)
        rival.step(number)
        snapshots.after(number + 1)
    rival.end()
    snapshots.write()


def ours(run: Run, row: str, steps: int, pace: Pace, late_s: float, snapshots: Snapshots) -> None:
    """peerd's training, as README shows it."""
    with peerd.attach(run.model, run.optimizer, quasi_global_momentum=row == QUASI_GLOBAL) as swarm:
        snapshots.write()
        for step in swarm.steps(steps):
            pace.wait()
            time.sleep(late_s)
            loss, samples = run.step(step)
            swarm.step(loss=loss, samples=samples)
            snapshots.after(swarm.step_count)
    snapshots.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds: dict[str, type] = {"row": str, "task": str, "shard": str, "lr": str, "seed": str, "steps": int, "rank": int}
    kinds |= {"peers": int, "pace": float, "late": float, "look": int, "out": Path, "host": str, "port": int}
    kinds |= {"joins": int}
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    told = parser.parse_args()
    torch.set_num_threads(1)
    said = {"shard": told.shard, "steps": told.steps, "seed": told.seed, "rank": told.rank, "peers": told.peers}
    said |= {"lr": told.lr} if told.lr else {}
    run = TASKS[told.task].prepare([part for key, value in said.items() for part in (f"--{key}", str(value))])
    pace, snapshots = Pace(told.pace), Snapshots(run, told.rank, told.out, told.look)
    if told.row in RIVALS:
        place = Place(told.rank, told.peers, told.host, told.port, told.out, bool(told.joins))
        against(run, told.row, told.steps, place, pace, told.late, snapshots)
    else:
        ours(run, told.row, told.steps, pace, told.late, snapshots)
    (told.out / f"{told.rank}.done").touch()
    if told.row in RIVALS:
        signal.pause()  # others may need what it holds; who started it ends it


if __name__ == "__main__":
    main()
