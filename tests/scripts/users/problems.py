"""What the scripts beside this file learn, and what they say of it: one line of their test loss after each step."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    import peerd

STEPS = int(os.environ.get("STEPS", "1000000"))
PACE_S = float(os.environ.get("PACE_S", "0.005"))
WORDS = 16
NODE = int(os.environ.get("SEED", "0"))
HALVES = "HALVES" in os.environ  # this node's examples show half of what is to be learned, the other node's the rest

_teacher = torch.Generator().manual_seed(7)
_WEIGHTS = 3.0 * torch.randn(8, 1, generator=_teacher)


def numbers(count: int, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x, shape (count, 8), and y, shape (count, 1): a sum with noise; who knows nothing has a loss of 60."""
    x = torch.randn(count, 8, generator=generator)
    return x, x @ _WEIGHTS + 0.3 * torch.randn(count, 1, generator=generator)


def images(count: int, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, shape (count, 1, 8, 8), and which of four quarters is bright; who knows nothing has a loss of 1.4."""
    labels = torch.randint(0, 4, (count,), generator=generator)
    pictures = 2.0 + 0.5 * torch.randn(count, 1, 8, 8, generator=generator)
    for row in range(count):
        top, left = divmod(int(labels[row]), 2)
        pictures[row, :, 4 * top : 4 * top + 4, 4 * left : 4 * left + 4] += 0.5
    return pictures, labels


def sentences(count: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Words that follow each other by a constant, shape (count, 12): who knows nothing has a loss of 2.8."""
    start = torch.randint(0, WORDS, (count, 1), generator=generator)
    stride = torch.randint(1, 3, (count, 1), generator=generator)
    return (start + stride * torch.arange(12)) % WORDS


def own_numbers(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a node trains with: with `HALVES`, only four of the eight are ever other than 0."""
    x, y = numbers(count)
    if HALVES:
        seen = torch.arange(8) // 4 == NODE % 2
        y, x = y - (x * ~seen) @ _WEIGHTS, x * seen
    return x, y


def fixed() -> torch.Generator:
    """Of the test sets: the same on every node, and in the test that judges what was exported."""
    return torch.Generator().manual_seed(11)


@torch.no_grad()
def squares(model: nn.Module) -> float:
    """The test loss on `numbers`."""
    x, y = numbers(256, fixed())
    return float(functional.mse_loss(model(x).float(), y))


@torch.no_grad()
def quarters(model: nn.Module) -> float:
    """The test loss on `images`, with the statistics that the model holds."""
    was = model.training
    model.eval()
    x, y = images(256, fixed())
    loss = float(functional.cross_entropy(model(x).float(), y))
    model.train(was)
    return loss


@torch.no_grad()
def next_words(model: nn.Module) -> float:
    """The test loss of a language model of transformers on `sentences`."""
    was = model.training
    model.eval()
    words = sentences(32, fixed())
    loss = float(model(input_ids=words, labels=words).loss)
    model.train(was)
    return loss


def own_data() -> None:
    """From here on every node draws other examples."""
    torch.manual_seed(1000 + NODE)


def say(swarm: peerd.Swarm, loss: float) -> None:
    """What the tests read, right after `swarm.step`, of the model as it then is."""
    # at once: `print` may write the end of the line apart, and the daemon's lines go to the same file
    print(f"at step {swarm.step_count} the test loss is {loss:.9g}\n", end="", flush=True)
    time.sleep(PACE_S)
