"""A task of `peerd.training.tasks` in a simulated swarm: real models on real data, with the trainer's own flat view."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from peerd.simulation.problems import Learner, Moved
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.model.flat import FlatModel
from peerd.training.tasks import TASKS
from peerd.training.tasks.run import Run


class TaskProblem:
    """All replicas live in this process and take their steps one after the other."""

    size_scale = 1.0

    def __init__(self, task: str, peers: int, steps: int | None, seed: int, shard: str) -> None:
        """Raises UserError when the task's data cannot be had."""
        torch.set_num_threads(1)  # the same sums in the same order on any machine
        self._task = TASKS[task]
        self._seed = seed
        self._argv = ["--peers", str(peers), "--seed", str(seed), "--shard", shard]
        self._argv += ["--steps", str(steps)] if steps is not None else []

    def learner(self, rank: int) -> Learner:
        """See `Problem.learner`."""
        return _Training(self._task.prepare([*self._argv, "--rank", str(rank)]))

    def score(self, models: Sequence[Vector]) -> dict[str, float]:
        """The accuracy of the averaged model, and the mean and worst of the nodes' own."""
        scores = [self._evaluate(model) for model in models]
        averaged = self._evaluate(np.mean(models, axis=0, dtype=np.float64))
        accuracies = [score["accuracy"] for score in scores]
        return {
            "accuracy": averaged["accuracy"],
            "accuracy_mean": sum(accuracies) / len(accuracies),
            "accuracy_worst": min(accuracies),
            "loss_mean": sum(score["loss"] for score in scores) / len(scores),
        }

    def _evaluate(self, values: Vector) -> dict[str, float]:
        model, _ = self._task.build(self._seed)
        flat = FlatModel(model)
        flat.load(values.astype(np.float32))
        return self._task.evaluate(model)


class _Training:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._flat = FlatModel(run.model)
        self._lr_most = 0.0
        self.layout = Layout(self._flat.parameters, self._flat.total)

    def step(self, number: int) -> Moved:
        loss, _ = self._run.step(number)
        lr = max(float(group["lr"]) for group in self._run.optimizer.param_groups)
        self._lr_most = max(self._lr_most, lr)
        return Moved(loss, lr / self._lr_most)

    def change(self) -> float:
        return float(self._flat.change())

    def publish(self) -> Vector:
        return self._flat.gather().numpy().copy()

    def values(self) -> Vector:
        pieces = [piece.tensor.detach().reshape(-1) for piece in self._flat.pieces]
        values: Vector = torch.cat(pieces).float().numpy()
        return values

    def add(self, correction: Vector) -> None:
        self._flat.add(correction.astype(np.float32, copy=False))

    def load(self, values: Vector) -> None:
        self._flat.load(values.astype(np.float32, copy=False))
