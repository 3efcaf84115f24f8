"""Which matrices of a model stay orthogonal by what is true to the bit alone? Those that torch makes of reflections.

`torch.nn.utils.parametrizations.orthogonal` takes Householder reflections for a matrix that is not square, and the
whole part of the diagonal of its parameter, ones and minus ones that have no gradient, for their signs. A codec that
moves every value makes .999 of a one, which is 0 to it: a column of the matrix is gone, and no error tells of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from peerd.training.model.names import walk
from peerd.training.model.pieces import Piece

_MAKES_THEM = "torch.nn.utils.parametrizations", "_Orthogonal"  # importing it takes time, and it is torch's own name


def told(model: nn.Module, pieces: Iterable[Piece]) -> str:
    """A line that names the first of those that are shared, and what to do; "" where there is none."""
    shared = {piece.name for piece in pieces}
    for _, plain, module in walk(model):
        kind = type(module)
        if (kind.__module__, kind.__name__) != _MAKES_THEM or _map_of(module) != "householder":
            continue
        name = f"{plain.rstrip('.').rpartition('.')[0]}.original"
        if name in shared:
            return (
                f"{name} is made orthogonal by Householder reflections, which end where a codec moves every value, as "
                'the default does: say orthogonal(..., orthogonal_map="cayley"), or start all nodes with --codec top_k'
            )
    return ""


def _map_of(module: Any) -> str:
    return str(module.orthogonal_map.name)
