"""A DataLoader with forked workers and a forked helper: both outlive their trainer when it is killed."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator

import torch
from problems import STEPS, numbers, own_data, say, squares
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import peerd

Pair = tuple[torch.Tensor, torch.Tensor]


class Stream(IterableDataset[Pair]):
    def __iter__(self) -> Iterator[Pair]:
        info = get_worker_info()
        generator = torch.Generator().manual_seed(torch.initial_seed() % 1000 + (info.id if info else 0))
        while True:
            x, y = numbers(1, generator)
            yield x[0], y[0]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


test_loss = squares


def main() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    own_data()
    fork = multiprocessing.get_context("fork")
    with peerd.attach(model, optimizer) as swarm:
        fork.Process(target=time.sleep, args=(3600,), daemon=True).start()  # a helper, which never looks for its parent
        loader = DataLoader(Stream(), batch_size=32, num_workers=2, multiprocessing_context=fork)
        for x, y in loader:  # its workers are forked here, with all that is open
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.step(loss=loss.item(), samples=len(x))
            say(swarm, test_loss(model))
            if swarm.step_count >= STEPS or swarm.alone:
                break
    print(f"ends with a test loss of {test_loss(model):.9g}", flush=True)


if __name__ == "__main__":
    main()
