"""One rank's training of a task, step by step: what a script's loop and the simulator share.

A step depends on its number and the rank's seed alone, so a resumed run sees what it had not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from peerd.training.tasks import data_partition, schedule
from peerd.training.tasks.arguments import Arguments
from peerd.training.tasks.data import Samples


class Run:
    """A model, its optimizer, and this rank's part of the samples."""

    def __init__(
        self,
        build: Callable[[int, float], tuple[nn.Module, Optimizer]],
        train: Samples,
        labels: data_partition.Labels,
        options: Arguments,
        warmup: int = 0,
    ) -> None:
        """`labels` say what the data is split by, one for each of `train`; `warmup` is in steps."""
        self.model, self.optimizer = build(options.seed, options.lr)
        self._train = train
        self._mine = data_partition.of_rank(options.shard, labels, options.rank, options.peers, options.seed)
        self._options = options
        self._warmup = warmup
        self._batches: Iterator[data_partition.Indices] | None = None
        self._next = -1

    def step(self, number: int) -> tuple[float, int]:
        """Make optimizer step `number`; returns the loss before it and the samples that it saw.

        Where gradients are exchanged its learning rate may have become the swarm's with the gradient.
        """
        found = self.backward(number)
        self._update()
        return found

    def descend(self, number: int) -> None:
        """The optimizer's step `number`, by the gradients that there are."""
        self._schedule(number)  # whoever has taken over a model since its gradient is at another step
        self._update()

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, number: int) -> tuple[float, int]:
        """The half of step `number` before the optimizer's; returns the same."""
        options, train = self._options, self._train
        if self._batches is None or number != self._next:
            self._batches = data_partition.batches(self._mine, options.batch, options.rank, options.seed, number)
        self._next = number + 1
        batch = torch.from_numpy(next(self._batches))
        self._schedule(number)
        logits = self.model(train.inputs[batch]).flatten(0, -2)
        loss = functional.cross_entropy(logits, train.targets[batch].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it so
        return loss.item(), len(batch)

    def _schedule(self, number: int) -> None:
        schedule.set_lr(self.optimizer, self._options.lr, number, self._options.steps, self._warmup)
