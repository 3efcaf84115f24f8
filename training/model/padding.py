"""Which rows of a model are to stay zeros? Those of the padding of an Embedding, which get no gradient.

A codec of one bit a value moves each one, as far as the others of its block have gone: what torch leaves at zero would
be so no longer. So a correction leaves such a row as it is while that is zeros. One that is trained all the same, as
its weight is another layer's, too, is no zeros after a step, and is corrected like all else.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from peerd.training.model.pieces import Piece


def padding_of(model: nn.Module, pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Where in the flat vector of these pieces, each of a whole tensor, they are, as start and stop."""
    shared = {id(piece.held): piece for piece in pieces if not piece.is_buffer and piece.stop > piece.start}
    found = set()
    for layer in model.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.padding_idx is not None:
            piece = shared.get(id(layer._parameters.get("weight")))  # `weight` may be computed, by a parametrization
            # another weight may have been put there since, of another shape
            if piece is not None and piece.held.dim() == 2 and 0 <= layer.padding_idx < len(piece.held):
                width = piece.held.shape[1]
                start = piece.start + layer.padding_idx * width
                found.add((start, start + width))
    return sorted(found)
