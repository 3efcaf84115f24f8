"""How large is the learning rate at a step? A function of the step alone: a resumed run needs no other state."""

from __future__ import annotations

import math

from torch.optim import Optimizer

LR_FLOOR = 0.005
"""Of the peak. It ends client drift (at 0.05 skewed data lost up to 5 points) and keeps the trigger's ratio off 0."""


def set_lr(optimizer: Optimizer, peak: float, step: int, steps: int, warmup: int = 0) -> None:
    """A linear rise over `warmup` steps, then half a cosine from `peak` down to LR_FLOOR of it at the last step."""
    rise = min(1.0, (step + 1) / (warmup + 1))
    fall = LR_FLOOR + (1 - LR_FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    for group in optimizer.param_groups:
        group["lr"] = peak * rise * fall
