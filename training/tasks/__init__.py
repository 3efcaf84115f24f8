"""Which tasks does peerd bring along? Ordinary PyTorch scripts, each of which a user could have written.

Run one under the daemon (`peerd start digits`) or alone (`python -m peerd.training.tasks.digits`). A new task is one
file and one line in TASKS. Nothing here imports torch: the command line reads TASKS for its choices.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from peerd.training.tasks.run import Run


@dataclass(frozen=True, slots=True)
class Task:
    """One script; its module has `main(argv)`, `parse(argv)`, `prepare(options)`, `build(seed)` and `evaluate(model)`.

    It does nothing on import.
    """

    module: str
    brings_data: bool = False  # none of its samples can be missing

    def build(self, seed: int = 0) -> tuple[nn.Module, Optimizer]:
        """The model and its optimizer; the same seed gives the same initial weights on every node."""
        model, optimizer = importlib.import_module(self.module).build(seed)
        return model, optimizer

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The model's `loss` and `accuracy` on held-out samples."""
        scores: dict[str, float] = importlib.import_module(self.module).evaluate(model)
        return scores

    def prepare(self, argv: Sequence[str]) -> Run:
        """One rank's training, from the script's own arguments."""
        module = importlib.import_module(self.module)
        run: Run = module.prepare(module.parse(argv))
        return run


# A module is named, not imported: `python -m` would otherwise find it already loaded and warn, and torch takes seconds.
TASKS = {
    "digits": Task("peerd.training.tasks.digits", brings_data=True),
    "fashion-mnist": Task("peerd.training.tasks.fashion_mnist"),
    "shakespeare": Task("peerd.training.tasks.shakespeare"),
}
