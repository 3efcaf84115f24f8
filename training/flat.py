"""How does a model become one flat vector, and a correction become part of the model?

Order: trainable parameters, then floating-point buffers (BatchNorm's statistics are averaged; integer buffers are left
alone, and so is one with infinities from the start, such as an attention mask). Tied parameters appear once. Frozen
parameters never travel: they take part in the signature only, so peers with another frozen base are refused. Everything
is float32 on the way; parameters of lower precision keep what a correction could not yet move in a float32 carry, or
small corrections would be rounded away for ever.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from peerd.training.shards import shard_of, whole

Flat = npt.NDArray[np.float32]

EXACT = (torch.float32, torch.float64)  # what holds a float32 without loss; others need a carry
_CHECKSUM_BYTES = 64 << 20  # at a time: a frozen base may fill the GPU's memory


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one tensor sits in the flat vector."""

    name: str
    held: torch.Tensor
    start: int
    stop: int

    @property
    def tensor(self) -> torch.Tensor:
        """What of it is in this process: this rank's shard of a DTensor. It may move, so look again."""
        return shard_of(self.held)


class FlatModel:
    """The flat view of one module, and its copy last published; of a sharded module, of this rank's shards."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ValueError for a model without trainable parameters, or with complex ones.

        When it has shards that are frozen, all ranks have to call it at once.
        """
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not trainable:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to train together")
        for name, parameter in trainable:
            if not parameter.is_floating_point():
                raise ValueError(
                    f"parameter {name} is {_dtype(parameter)}: only real floating-point ones can be averaged"
                )
        averaged = [(name, b) for name, b in model.named_buffers() if _is_averaged(b)]
        self.pieces: list[Piece] = []
        start = 0
        for name, tensor in [*trainable, *averaged]:
            count = shard_of(tensor).numel()
            self.pieces.append(Piece(name, tensor, start, start + count))
            start += count
        self.total = start
        self.parameters = sum(shard_of(p).numel() for _, p in trainable)
        self.tensors = _describe(model)
        self.signature = hashlib.sha256("\n".join(self.tensors).encode()).hexdigest()
        self._device = trainable[0][1].device
        self._trainable = len(trainable)
        self._buffers = [b for _, b in averaged if b.numel()]
        self._base = torch.zeros(self.total, dtype=torch.float32, device=self._device)
        self._carry: dict[str, torch.Tensor] = {}

    @property
    def on_cuda(self) -> bool:
        """Whether the first trainable parameter lives on a GPU."""
        return self._device.type == "cuda"

    @torch.no_grad()
    def gather(self) -> torch.Tensor:
        """Make the model as it is now the base that `change` measures from; returns it, flat, on its device."""
        self._read_into(self._base)
        return self._base

    @torch.no_grad()
    def change(self) -> torch.Tensor:
        """||x - base|| over the parameters: one fused pass a tensor, a 0-dimensional result on the device.

        Not finite when a parameter or a buffer is not: BatchNorm's statistics may be spoilt by a batch that left no
        gradient.
        """
        norm: torch.Tensor = torch.linalg.vector_norm(self.distances())
        return norm + self.spoilt() if self._buffers else norm

    @torch.no_grad()
    def distances(self) -> torch.Tensor:
        """||x - base|| of each parameter in turn, on the device."""
        norms = []
        for piece in self.pieces[: self._trainable]:
            value = piece.tensor.reshape(-1).float()
            if piece.name in self._carry:
                value = value + self._carry[piece.name].reshape(-1)
            base = self._base[piece.start : piece.stop].to(value.device)
            norms.append(torch.dist(value, base).to(self._device))
        return torch.stack(norms)

    @torch.no_grad()
    def spoilt(self) -> torch.Tensor:
        """0 when all buffers are finite, else NaN."""
        # of all reductions the largest magnitude is the one that never overflows
        peaks = [torch.linalg.vector_norm(buffer, ord=math.inf) for buffer in self._buffers]
        zeros = [0 * peak.to(self._device, torch.float32) for peak in peaks]
        return torch.stack(zeros).sum() if zeros else torch.zeros((), device=self._device)

    def add(self, correction: Flat) -> None:
        """x += correction, shape (total,). The base moves along, so that `change` stays the trainer's own."""
        self.shift(torch.from_numpy(correction))

    @torch.no_grad()
    def shift(self, delta: torch.Tensor) -> None:
        """The same with a tensor."""
        delta = delta.to(self._device)
        self._base += delta
        for piece in self.pieces:
            part = delta[piece.start : piece.stop].view(piece.tensor.shape)
            if piece.tensor.dtype in EXACT:
                piece.tensor.add_(part.to(piece.tensor.device, piece.tensor.dtype))
            else:
                self._add_with_carry(piece, part.to(piece.tensor.device))

    def load(self, values: Flat) -> None:
        """x = values, shape (total,)."""
        self.replace(torch.from_numpy(values))

    @torch.no_grad()
    def replace(self, values: torch.Tensor) -> None:
        """The same with a tensor."""
        self._base.copy_(values)
        self.restore()

    def restore(self) -> None:
        """x = base: go back to the last published copy."""
        self.put(self._base)

    @torch.no_grad()
    def values(self) -> torch.Tensor:
        """The model as it is now, shape (total,), with the carries; the base stays."""
        values = torch.empty_like(self._base)
        self._read_into(values)
        return values

    @torch.no_grad()
    def put(self, values: torch.Tensor) -> None:
        """x = values, shape (total,); the base stays."""
        for piece in self.pieces:
            wanted = values[piece.start : piece.stop].view(piece.tensor.shape)
            piece.tensor.copy_(wanted)
            if piece.tensor.dtype not in EXACT:
                self._carry[piece.name] = wanted.to(piece.tensor.device) - piece.tensor.float()

    def _read_into(self, flat: torch.Tensor) -> None:
        for piece in self.pieces:
            part = flat[piece.start : piece.stop]
            part.copy_(piece.tensor.reshape(-1))
            if piece.name in self._carry:
                part += self._carry[piece.name].reshape(-1).to(self._device)

    def _add_with_carry(self, piece: Piece, part: torch.Tensor) -> None:
        wanted = part + self._carry.get(piece.name, 0.0)
        before = piece.tensor.float()  # of lower precision, so a copy
        piece.tensor.add_(wanted.to(piece.tensor.dtype))
        self._carry[piece.name] = wanted - (piece.tensor.float() - before)


def pin(memory: npt.NDArray[np.float32]) -> bool:
    """Have CUDA copy to and from `memory` at the full speed of the bus; False when it will not (copies still work)."""
    try:
        code = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # type: ignore[no-untyped-call]
        return int(code) == 0
    except (RuntimeError, AttributeError):
        return False


def _describe(model: nn.Module) -> list[str]:
    """One line a tensor, "name dtype shape"; frozen ones with a checksum, for their values must agree too."""
    lines = []
    for name, parameter in model.named_parameters():
        kind = "" if parameter.requires_grad else f" frozen {_checksum(parameter)}"
        lines.append(f"{name} {_dtype(parameter)} {_shape(parameter)}{kind}")
    for name, buffer in model.named_buffers():
        if _is_averaged(buffer):
            lines.append(f"{name} {_dtype(buffer)} {_shape(buffer)} buffer")
    return lines


def _is_averaged(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and bool(torch.isfinite(buffer).all())


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(str(size) for size in tensor.shape) or "scalar"


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> str:
    """Of the bits, in order: a sum would miss two values that changed places."""
    bits = whole(tensor).contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256()
    for start in range(0, len(bits), _CHECKSUM_BYTES):
        digest.update(bits[start : start + _CHECKSUM_BYTES].cpu().numpy().data)
    return digest.hexdigest()[:16]
