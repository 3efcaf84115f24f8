"""Several ranks hold a shard of each parameter (`fully_shard`, or any DTensor): how do they act as one model?

Rank 0 has what looks like a `FlatModel`. Each of its methods first says which one it is, then all ranks do their part
of it (`take_part`): a flat vector is put together on rank 0's host, or sent from there, a tensor at a time. What need
not travel stays sharded: the base, the carries, and the change since.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from peerd.trainer import checkpoint
from peerd.trainer.kept import NOTHING, Kept
from peerd.trainer.optimizers import forget
from peerd.trainer.ranks import RankCommand, Ranks
from peerd.training.model.flat import Flat, FlatModel
from peerd.training.model.pieces import Piece, variances_of
from peerd.training.model.shards import copies, is_sharded, put_together, shard_of, taken_apart


def has_shards(model: nn.Module) -> bool:
    """Whether ranks hold parts of its parameters. Raises ValueError for the wrapper that hides which."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError("FullyShardedDataParallel hides its shards: use torch.distributed.fsdp.fully_shard instead")
    _reshard(model)
    return any(map(is_sharded, model.parameters()))


def _reshard(model: nn.Module) -> None:
    """Drop whole parameters that a forward pass without a backward one has left: the next would use those."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # who has such a module has loaded it; it takes seconds
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


class ShardedModel:
    """One rank's part of a model; on rank 0 the whole, seen as a `FlatModel`."""

    device = torch.device("cpu")  # where its flat vectors are

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, ranks: Ranks, exclude: Sequence[str] = (), kept: Kept = NOTHING
    ) -> None:
        """On all ranks at once, by rank 0 after `RankCommand.COMES`. Raises ValueError as `FlatModel` does."""
        _reshard(model)
        self._model, self._optimizer, self._ranks, self._kept = model, optimizer, ranks, kept
        self._shards = FlatModel(model, optimizer, exclude)
        self.tensors, self.signature = self._shards.tensors, self._shards.signature
        self.pieces: list[Piece] = []
        start = 0
        for piece in self._shards.pieces:
            self.pieces.append(replace(piece, start=start, stop=start + piece.held.numel()))
            start += piece.held.numel()
        self.total = start
        self.parameters = sum(piece.held.numel() for piece in self.pieces if not piece.is_buffer)
        self.variances = variances_of(self.pieces)
        size = distributed.get_world_size()
        self._copies = torch.tensor([copies(piece.held, size) for piece in self.pieces], device=ranks.device)

    # ---------------------------------------------------------------- on rank 0

    def snapshot(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """See `FlatModel.snapshot`; a part is one tensor, put together when it is asked for: ask for all."""
        self._ranks.say(RankCommand.GATHER)
        return self._gather()

    def change(self) -> torch.Tensor:
        """See `FlatModel.change`."""
        self._ranks.say(RankCommand.MEASURE)
        return self._measure()

    def add(self, correction: Flat) -> None:
        """See `FlatModel.add`."""
        self._ranks.say(RankCommand.ADD)
        self._add(torch.from_numpy(correction))

    def load(self, values: Flat) -> None:
        """See `FlatModel.load`."""
        self._ranks.say(RankCommand.LOAD)
        self._load(torch.from_numpy(values))

    def restore(self) -> None:
        """See `FlatModel.restore`."""
        self._ranks.say(RankCommand.RESTORE)
        self._restore()

    def unshared(self) -> list[str]:
        """See `FlatModel.unshared`; of this rank's shards, as of all."""
        return self._shards.unshared()

    def beyond_float32(self) -> str | None:
        """See `FlatModel.beyond_float32`; of this rank's shards alone."""
        return self._shards.beyond_float32()

    def loaded(self) -> None:
        """See `FlatModel.loaded`; each rank says so itself."""
        self._shards.loaded()

    def about_to_capture(self) -> None:
        """Have the others help with `checkpoint.capture`."""
        self._ranks.say(RankCommand.CAPTURE)

    def about_to_resume(self, folder: Path, step: int) -> None:
        """Have the others restore the checkpoint of this step, too."""
        self._ranks.say(RankCommand.RESUME, step)
        self._ranks.share_path(folder)

    # ---------------------------------------------------------------- on every rank

    def take_part(self, command: RankCommand, step: int) -> None:
        """Do what rank 0 has begun. Ends the script when this rank cannot."""
        match command:
            case RankCommand.GATHER:
                deque(self._gather(), maxlen=0)  # its part of each collective, though nothing comes of it here
            case RankCommand.MEASURE:
                self._measure()
            case RankCommand.ADD:
                self._add(None)
            case RankCommand.LOAD:
                self._load(None)
            case RankCommand.RESTORE:
                self._restore()
            case RankCommand.CAPTURE:
                checkpoint.help_capture(self._model, self._optimizer)
            case RankCommand.RESUME:
                self._resume(self._ranks.share_path(None), step)

    def _resume(self, folder: Path | None, step: int) -> None:
        generation = checkpoint.newest(folder, self.signature, lambda _: None) if folder is not None else None
        if generation is None or generation.step != step:
            raise SystemExit(f"peerd: this rank does not find the checkpoint of step {step} that rank 0 has read")
        with suppress(checkpoint.Damaged):  # rank 0 says so
            checkpoint.restore(generation, self._model, self._optimizer)
            self.loaded()
            self._kept.restore(generation.kept, generation.tensors, generation.step)

    @torch.no_grad()
    def _gather(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The parts, on rank 0; the others only help, and yield nothing."""
        _reshard(self._model)
        self._shards.keep()
        for index, piece in enumerate(self.pieces):
            values = put_together(self._shards.kept(index), piece.held)
            if self._ranks.leads:
                yield slice(piece.start, piece.stop), values.reshape(-1)

    @torch.no_grad()
    def _measure(self) -> torch.Tensor:
        _reshard(self._model)
        distances = self._shards.distances().to(self._ranks.device, torch.float64)
        squares = (distances**2 / self._copies[: len(distances)]).sum()
        both = torch.stack([squares, self._shards.nonfinite_rest().to(squares)])
        distributed.all_reduce(both)
        return both[0].sqrt() + both[1]

    def _add(self, correction: torch.Tensor | None) -> None:
        _reshard(self._model)
        self._shards.shift(self._spread(correction))

    def _load(self, values: torch.Tensor | None) -> None:
        _reshard(self._model)
        self._shards.replace(self._spread(values))

    def _restore(self) -> None:
        _reshard(self._model)
        self._shards.restore()
        forget(self._optimizer)  # at once, on every rank: the next command may ask for it

    @torch.no_grad()
    def _spread(self, values: torch.Tensor | None) -> torch.Tensor:
        """Rank 0's flat vector as this rank's shards of it."""
        shards = torch.empty(self._shards.total, dtype=torch.float32, device=self._ranks.device)
        for piece, own in zip(self.pieces, self._shards.pieces, strict=True):
            part = torch.empty(piece.held.shape, dtype=torch.float32, device=self._ranks.device)
            if values is not None:
                part.copy_(values[piece.start : piece.stop].view(part.shape))
            distributed.broadcast(part, 0)
            shards[own.start : own.stop] = shard_of(taken_apart(part, piece.held)).reshape(-1)
        return shards
