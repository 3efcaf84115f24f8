"""A model as one vector, as it is now."""

from __future__ import annotations

import torch

from peerd.training.model.flat import FlatModel


def values_of(flat: FlatModel) -> torch.Tensor:
    """Shape (total,), in host memory; nothing of the model or its base changes."""
    parts: list[torch.Tensor] = []
    flat.pass_on(lambda values: parts.append(values.clone()), torch.device("cpu"))
    return torch.cat(parts)
