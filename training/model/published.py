"""What was a model when it was last published, and what do its weights lack of their float32 values?

What it was moves with corrections, so what is left between the two is the trainer's own way. Parameters of lower
precision are kept in their own type, and share their carries (carries.py) with what they were, as no step moves a
carry; all else is kept in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from peerd.training.kernels.passes import parts
from peerd.training.model.carries import add, carry_type, joined, split
from peerd.training.model.pieces import Piece

PART_ON_CPU = 1 << 18
"""Values: what is computed of more is computed in parts, whose temporaries malloc keeps and a cache holds. A look at 37
million bfloat16 weights takes 5.1 ns a value in one piece, in these parts 0.4: the rest are page faults."""
PART_ON_GPU = 1 << 22  # where each part costs launches, and ten such vectors the memory of a correction


class Published:
    """Of one model."""

    def __init__(self, pieces: Sequence[Piece], total: int, device: torch.device) -> None:
        """Zeros. `pieces` may hold other tensors later; whole vectors of this model are on `device`."""
        self._pieces = pieces
        self._device = device
        self._carries: dict[str, torch.Tensor] = {}  # shape (count,)
        self._whole: torch.Tensor | None = None  # all of it as one vector, where it is float32 and in one place
        kinds = [_kind_of(piece) for piece in pieces]
        if set(kinds) == {(device, torch.float32)}:
            self._whole = torch.zeros(total, dtype=torch.float32, device=device)
            self.values = [self._whole[piece.start : piece.stop] for piece in pieces]
            """Each piece, shape (count,), where it lives."""
        else:
            counts = [piece.stop - piece.start for piece in pieces]
            self.values = [torch.zeros(n, dtype=dtype, device=at) for n, (at, dtype) in zip(counts, kinds, strict=True)]

    @torch.no_grad()
    def keep(self) -> None:
        """Be what the model is now."""
        for piece, values in zip(self._pieces, self.values, strict=True):
            values.copy_(piece.source.reshape(-1) if piece.is_low_parameter else self.now(piece))

    @torch.no_grad()
    def replace(self, values: torch.Tensor) -> None:
        """The model has just become these values, shape (total,)."""
        if self._whole is not None:
            self._whole.copy_(values)
        else:
            self.keep()

    @torch.no_grad()
    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """With the carries: where each part is, and its float32 values, on `device` or the host."""
        if self._whole is not None:
            _in_use_here(self._whole)
            yield slice(0, len(self._whole)), self._whole
            return
        for index, piece in enumerate(self._pieces):
            for where in parts_of(self.values[index]):
                values = self.exact(index, where)
                at = slice(piece.start + where.start, piece.start + where.stop)
                yield at, values if values.device.type == "cpu" else values.to(self._device)

    @torch.no_grad()
    def exact(self, index: int, where: slice = slice(None)) -> torch.Tensor:
        """Float32 values of this piece, with their carries, where it lives."""
        piece, values = self._pieces[index], self.values[index]
        carry = self._carries.get(piece.name) if piece.is_low_parameter else None
        _in_use_here(values, carry)
        return values[where].float() if carry is None else joined(values[where], carry[where])

    def follow(self) -> None:
        """Be where the tensors are, and of their types, which change with masters, and with `model.to`."""
        for index, piece in enumerate(self._pieces):
            device, dtype = _kind_of(piece)
            values, carry = self.values[index], self._carries.get(piece.name)
            if values.dtype != dtype or values.device != device:
                exact = values if carry is None or piece.is_buffer else joined(values, carry)
                self.values[index], self._whole = exact.to(device, dtype), None
            elif carry is None or (carry.dtype == carry_type(piece.source.dtype) and carry.device == device):
                continue
            self.drop_carries(piece.name)

    def now(self, piece: Piece) -> torch.Tensor:
        """The tensor's values (count,) where it lives: float32 where there is a carry, else in its own type."""
        value = piece.source.reshape(-1)
        carry = self._carries.get(piece.name)
        return value if carry is None else joined(value, carry)

    def write(self, piece: Piece, values: torch.Tensor) -> None:
        """Make the tensor, of lower precision, and its carry these (count,), where it lives.

        What it is already stays the same bits.
        """
        carry = self._carry_of(piece)
        with _flat(piece.tensor) as flat:
            for where in parts_of(flat):
                wanted, own = values[where].float(), flat[where]
                stays = own.float() == wanted
                after, left = torch.empty_like(own), torch.empty_like(carry[where])
                split(wanted, after, left)
                own.copy_(torch.where(stays, own, after))
                carry[where] = torch.where(stays, 0, left)

    def add(self, index: int, delta: torch.Tensor) -> None:
        """Correct the tensor, of lower precision, by (count,), where it lives.

        What it was moves as far as the tensor does, not by `delta`: what is only carried is in both.
        """
        piece, values = self._pieces[index], self.values[index]
        carry = self._carry_of(piece)
        with _flat(piece.tensor) as flat:
            for where in parts_of(flat):
                add(delta[where].float(), flat[where], carry[where], values[where])

    def drop_carries(self, *names: str) -> None:
        """Of these, or of all: their tensors are others now."""
        for name in names or list(self._carries):
            self._carries.pop(name, None)

    def _carry_of(self, piece: Piece) -> torch.Tensor:
        if (carry := self._carries.get(piece.name)) is None:
            source = piece.source
            kind = carry_type(source.dtype)
            carry = self._carries[piece.name] = torch.zeros(source.numel(), dtype=kind, device=source.device)
        return carry


def parts_of(values: torch.Tensor) -> Iterator[slice]:
    """In which it is computed."""
    return parts(len(values), PART_ON_CPU if values.device.type == "cpu" else PART_ON_GPU)


def _kind_of(piece: Piece) -> tuple[torch.device, torch.dtype]:
    """Where it is kept what the piece was, and in which type."""
    return piece.source.device, piece.source.dtype if piece.is_low_parameter else torch.float32


def _in_use_here(*tensors: torch.Tensor | None) -> None:
    """Tell the allocator that this stream reads these, so that it does not give their memory away too early."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@contextmanager
def _flat(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its values, shape (count,), to be written."""
    if tensor.is_contiguous():
        yield tensor.view(-1)
        return
    flat = tensor.reshape(-1)
    yield flat
    tensor.copy_(flat.view(tensor.shape))
