"""How well does a model do on samples it was not trained on?"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from peerd.training.tasks.data import Samples

ROWS_AT_ONCE = 500  # a chunk's activations stay in the cache; those of all 10,000 Fashion-MNIST images do not


@torch.no_grad()
def score(model: nn.Module, samples: Samples) -> dict[str, float]:
    """Mean cross-entropy and the share of right answers, over every target."""
    loss, correct = 0.0, 0
    for start in range(0, len(samples.inputs), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        logits, targets = model(samples.inputs[rows]).flatten(0, -2), samples.targets[rows].flatten()
        loss += functional.cross_entropy(logits, targets, reduction="sum").item()
        correct += int((logits.argmax(-1) == targets).sum())
    return {"loss": loss / samples.targets.numel(), "accuracy": correct / samples.targets.numel()}
