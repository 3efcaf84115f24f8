"""A task of `peerd.training.tasks` in a simulated swarm: real models on real data, with the trainer's own flat view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import SGD, AdamW

from peerd.simulation.options import QUASI_GLOBAL, Learning
from peerd.simulation.problems import Learner, Moved, scores_of
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.model.flat import FlatModel
from peerd.training.model.gradients import FlatGradients
from peerd.training.model.optimizer_state import OptimizerState
from peerd.training.model.quasi_global import QuasiGlobalMomentum
from peerd.training.tasks import TASKS
from peerd.training.tasks.run import Run
from peerd.transport.errors import UserError


class TaskProblem:
    """All replicas live in this process and take their steps one after the other."""

    size_scale = 1.0

    def __init__(
        self, task: str, peers: int, steps: int | None, seed: int, split: str, learning: Learning,
        *, shares_optimizer: bool = False,
    ) -> None:  # fmt: skip
        """With `shares_optimizer` its state is a part of the model.

        Raises UserError when the task's data cannot be had.
        """
        torch.set_num_threads(1)  # the same sums in the same order on any machine
        self._task = TASKS[task]
        self._seed = seed
        self._argv = ["--peers", str(peers), "--seed", str(seed), "--shard", split]
        said = {"--steps": steps, "--lr": learning.lr, "--batch": learning.batch}
        self._argv += [word for name, value in said.items() if value is not None for word in (name, str(value))]
        self._learning = learning
        self._shares_optimizer = shares_optimizer

    def learner(self, rank: int) -> Learner:
        """See `Problem.learner`. Raises UserError for a setting that the task's optimizer has not got."""
        run = self._task.prepare([*self._argv, "--rank", str(rank)])
        _tune(run, self._learning)
        return _Training(run, shares_optimizer=self._shares_optimizer)

    def score(self, models: Sequence[Vector]) -> dict[str, float]:
        """The accuracy of the averaged model, and the mean and worst of the nodes' own."""
        return scores_of(models, self._evaluate)

    def look(self, model: Vector) -> dict[str, float]:
        """On the test samples: these tasks have no others."""
        return self._evaluate(model)

    def _evaluate(self, values: Vector) -> dict[str, float]:
        model, _ = self._task.build(self._seed)
        flat = FlatModel(model)
        flat.load(values.astype(np.float32))
        return self._task.evaluate(model)


def _tune(run: Run, learning: Learning) -> None:
    """The optimizer that was asked for; torch's own defaults are what is not said."""
    said = {"momentum": learning.momentum, "weight_decay": learning.weight_decay}
    given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    (group,) = run.optimizer.param_groups
    if learning.optimizer == "adamw":
        run.optimizer = AdamW(group["params"], lr=group["lr"], **given)
    elif learning.optimizer is not None:
        given = {"momentum": 0.9, **given}
        run.optimizer = SGD(group["params"], lr=group["lr"], **given, nesterov=learning.optimizer == "nesterov")
        if learning.optimizer == QUASI_GLOBAL:
            QuasiGlobalMomentum(run.optimizer)
    elif idle := given.keys() - group.keys():
        option = idle.pop()
        raise UserError(f"--{option}: the task trains with {type(run.optimizer).__name__}, which has none")
    else:
        group.update(given)


class _Training:
    def __init__(self, run: Run, *, shares_optimizer: bool) -> None:
        self._run = run
        self._flat = FlatModel(run.model)
        if shares_optimizer:
            self._flat.share_states(OptimizerState(run.optimizer, self._flat.pieces).tensors)
        self._gradients = FlatGradients(self._flat)
        self._lr_most = self._loss = 0.0
        self._samples = 0
        ends = tuple(piece.stop for piece in self._flat.pieces)
        self.layout = Layout(self._flat.parameters, self._flat.total, tensors=ends, states=self._flat.states)

    def step(self, number: int) -> Moved:
        loss, self._samples = self._run.step(number)
        return self._moved(loss)

    def gradient(self, number: int) -> Vector:
        self._loss, self._samples = self._run.backward(number)
        gradient = np.empty(self.layout.gradients.total, np.float32)
        self._gradients.gather(torch.from_numpy(gradient))
        return gradient

    def descend(self, number: int, gradient: Vector | None) -> Moved:
        self._gradients.scatter(None if gradient is None else torch.from_numpy(gradient))
        self._run.descend(number)
        return self._moved(self._loss)

    @property
    def samples(self) -> float:
        return float(self._samples)

    @property
    def rate(self) -> float:
        return max(float(group["lr"]) for group in self._run.optimizer.param_groups)

    def _moved(self, loss: float) -> Moved:
        lr = self.rate
        self._lr_most = max(self._lr_most, lr)
        return Moved(loss, lr / self._lr_most)

    def change(self) -> float:
        return float(self._flat.change())

    def publish(self) -> Vector:
        return self._flat.gather().numpy()

    def values(self) -> Vector:
        pieces = [piece.tensor.detach().reshape(-1) for piece in self._flat.pieces]
        values: Vector = torch.cat(pieces).float().numpy()
        return values

    def add(self, correction: Vector) -> None:
        self._flat.add(correction.astype(np.float32, copy=False))

    def load(self, values: Vector) -> None:
        self._flat.load(values.astype(np.float32, copy=False))
