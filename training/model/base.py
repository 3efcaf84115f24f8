"""What was a model when it was last published, and what do its weights lack of their float32 values?

The base is kept in the model's own types, and moves with corrections: what is left between the two is the trainer's own
way. Of weights of lower precision the carries (carries.py) belong to the model and to its base, as no step moves them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from peerd.training.model.carries import add, carry_type, joined, part
from peerd.training.model.masters import EXACT
from peerd.training.model.pieces import Piece

RUN = 1 << 18
"""Values: what is computed of more is computed in parts, whose temporaries malloc keeps and a cache holds. A look at 37
million bfloat16 weights takes 5.1 ns a value in one piece, in these parts 0.4: the rest are page faults."""
RUN_ON_GPU = 1 << 24  # where each part costs launches


class Base:
    """The base of one model; `pieces` are always the same ones, whatever tensors they hold."""

    def __init__(self, pieces: Sequence[Piece], total: int, device: torch.device) -> None:
        """Zeros; `device` is where whole vectors of this model are."""
        self._device = device
        self._carries: dict[str, torch.Tensor] = {}  # shape (count,)
        self.whole: torch.Tensor | None = None
        """All of it as one vector, where it is float32 and in one place."""
        kinds = [_kind_of(piece) for piece in pieces]
        if set(kinds) == {(device, torch.float32)}:
            self.whole = torch.zeros(total, device=device)
            self.of = [self.whole[piece.start : piece.stop] for piece in pieces]
            """Each piece, shape (count,), where it lives."""
        else:
            counts = [piece.stop - piece.start for piece in pieces]
            self.of = [torch.zeros(n, dtype=dtype, device=at) for n, (at, dtype) in zip(counts, kinds, strict=True)]

    @torch.no_grad()
    def keep(self, pieces: Sequence[Piece]) -> None:
        """Be what the model is now."""
        for piece, base in zip(pieces, self.of, strict=True):
            base.copy_(piece.source.reshape(-1) if piece.has_carry else self.value(piece))

    @torch.no_grad()
    def parts(self, pieces: Sequence[Piece]) -> Iterator[tuple[slice, torch.Tensor]]:
        """With the carries: where each part is, and its float32 values, on `device` or the host."""
        if self.whole is not None:
            _read_here(self.whole)
            yield slice(0, len(self.whole)), self.whole
            return
        for piece, base in zip(pieces, self.of, strict=True):
            carry = self._carries.get(piece.name) if piece.has_carry else None
            _read_here(base, carry)
            for where in runs(base):
                values = base[where].float() if carry is None else joined(base[where], carry[where])
                at = slice(piece.start + where.start, piece.start + where.stop)
                yield at, values if values.device.type == "cpu" else values.to(self._device)

    def follow(self, pieces: Sequence[Piece]) -> None:
        """Be where the tensors are, and of their types, which change with masters, and with `model.to`."""
        for index, (piece, base) in enumerate(zip(pieces, self.of, strict=True)):
            device, dtype = _kind_of(piece)
            carry = self._carries.get(piece.name)
            if base.dtype != dtype or base.device != device:
                exact = base if carry is None or piece.is_buffer else joined(base, carry)
                self.of[index], self.whole = exact.to(device, dtype), None
            elif carry is None or (carry.dtype == carry_type(piece.source.dtype) and carry.device == device):
                continue
            self.drop_carries(piece.name)

    def value(self, piece: Piece) -> torch.Tensor:
        """The tensor's values (count,) where it lives: float32 where there is a carry, else in its own type."""
        value = piece.source.reshape(-1)
        carry = self._carries.get(piece.name)
        return value if carry is None else joined(value, carry)

    def write(self, piece: Piece, values: torch.Tensor) -> None:
        """Make the tensor, of lower precision, and its carry these (count,); what it is already stays the same bits."""
        carry = self._carry_of(piece)
        with _flat(piece.tensor) as flat:
            for where in runs(flat):
                wanted, own = values[where].to(flat.device, torch.float32), flat[where]
                stays = own.float() == wanted
                after, left = own.clone(), carry[where].clone()
                part(wanted, after, left)
                own.copy_(torch.where(stays, own, after))
                carry[where] = torch.where(stays, 0, left)

    def add(self, index: int, piece: Piece, delta: torch.Tensor) -> None:
        """Correct the tensor, of lower precision; the base moves as it does: a carry is seen nowhere yet."""
        carry, base = self._carry_of(piece), self.of[index]
        with _flat(piece.tensor) as flat:
            for where in runs(flat):
                add(delta[where].to(flat.device, torch.float32), flat[where], carry[where], base[where])

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


def _kind_of(piece: Piece) -> tuple[torch.device, torch.dtype]:
    """Where its base is, and of which type."""
    source = piece.source
    return source.device, torch.float32 if piece.is_buffer or source.dtype in EXACT else source.dtype


def _read_here(*tensors: torch.Tensor | None) -> None:
    """These are read in this stream, perhaps not in the one that has their memory again when they go."""
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


def runs(values: torch.Tensor) -> Iterator[slice]:
    """Where the parts are in which it is computed."""
    step = RUN if values.device.type == "cpu" else RUN_ON_GPU
    return (slice(start, min(start + step, len(values))) for start in range(0, len(values), step))
