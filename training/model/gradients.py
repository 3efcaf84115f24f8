"""How do a model's gradients become one flat vector, and the vector gradients again?

As `Layout.gradients` has it: parameters' gradients in the order of the flat model, float buffers as they are, then a
flag for each tensor of parameters, 1 where a gradient came to it. Everything is float32 on the way.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import nn

from peerd.training.model.flat import FlatModel
from peerd.training.model.pieces import Piece
from peerd.training.model.transfers import fetch, sent, wait_for

_SPARSE = "the gradient of {} is sparse: make it with sparse=False, or exchange weights"


def require_dense(model: nn.Module, pieces: Iterable[Piece]) -> None:
    """Raises ValueError: a layer of torch's that gives a sparse gradient to one of `pieces`, as its options say."""
    names = {id(piece.held): piece.name for piece in pieces}
    for layer in model.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and id(layer.weight) in names:
            raise ValueError(_SPARSE.format(names[id(layer.weight)]))


class FlatGradients:
    """The gradients of a flat model's parameters."""

    def __init__(self, flat: FlatModel) -> None:
        self._flat = flat
        self._stop = flat.total - flat.states  # of the buffers; flags follow
        self.total = self._stop + sum(piece.stop <= flat.parameters for piece in flat.pieces)

    @torch.no_grad()
    def gather(self, out: torch.Tensor, leave: Container[int] = ()) -> None:
        """Overwrite `out`, shape (total,), float32; the parts of parameters to `leave`, by their order, are there.

        Raises ValueError: a gradient is sparse.
        """
        flags = out[self._stop :]
        flags.zero_()
        for index, piece in enumerate(self.parameters):
            part = out[piece.start : piece.stop]
            gradient = piece.held.grad
            if index in leave:
                flags[index] = 0.0 if gradient is None else 1.0
                continue
            if gradient is None:
                part.zero_()
                continue
            if gradient.layout != torch.strided:
                raise ValueError(_SPARSE.format(piece.name))
            flags[index] = 1.0
            fetch(gradient, part.view(gradient.shape))
        for piece in self._flat.buffers:
            fetch(piece.source.reshape(-1), out[piece.start : piece.stop])
        wait_for(piece.held.device for piece in self._flat.pieces)  # a master may be elsewhere

    @torch.no_grad()
    def scatter(self, values: torch.Tensor | None) -> None:
        """Give each parameter its part of `values`, shape (total,), where its flag is not 0, and the buffers theirs.

        None takes every gradient away, so that an optimizer of torch's leaves the parameters as they are.
        """
        if values is None:
            for piece in self.parameters:
                piece.held.grad = None
            return
        used = values[self._stop :].tolist()
        for index, piece in enumerate(self.parameters):
            if not used[index]:  # by anybody whose gradient counts
                piece.held.grad = None
                continue
            part = values[piece.start : piece.stop].view(piece.held.shape)
            if piece.held.grad is None:
                piece.held.grad = torch.empty_like(piece.held)
            piece.held.grad.copy_(sent(part, piece.held.grad.device))
        self._flat.put_buffers(values)
        wait_for(piece.held.device for piece in self._flat.pieces)

    @property
    def parameters(self) -> list[Piece]:
        """As they are in the flat vector, in order."""
        return [piece for piece in self._flat.pieces if not piece.is_buffer]
