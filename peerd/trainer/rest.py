"""What has a model beside what nodes share? Frozen parameters, integer buffers, second names of tied tensors.

    rest-0123456789abcdef.safetensors    one for a model (its signature), beside the checkpoints

It is written once, when a trainer attaches, and anew where it cannot be read. Checkpoints then leave out a frozen
base, which the script makes again, and `peerd export --complete` puts the model together: what is shared from the node,
the rest from the newest checkpoint that has it, else from here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from peerd.local.durable import flush
from peerd.trainer.states import tensors_held
from peerd.training.model.pieces import Piece
from peerd.training.model.published import parts_of
from peerd.training.model.shards import is_sharded
from peerd.training.model.transfers import wait_for
from peerd.transport.errors import cause

SHARED, REST, UNKNOWN = "shared", "rest", "unknown"
UNREADABLE = (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError)
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Incomplete(Exception):
    """The model cannot be put together; the text says why."""


class FrozenBase:
    """Which parameters nobody trains: frozen when the trainer attached, and still the same bits."""

    def __init__(self, model: nn.Module) -> None:
        """One pass over the frozen parameters. Of a sharded model none: its ranks would have to agree."""
        named = dict(model.named_parameters(remove_duplicate=False))
        sharded = any(map(is_sharded, named.values()))
        self._sums = {name: _sum(p) for name, p in named.items() if not p.requires_grad and not sharded}

    def unchanged(self, model: nn.Module) -> set[str]:
        """Their names now. A momentum encoder, say, is frozen, too, but its script moves it."""
        if not self._sums:
            return set()
        named = dict(model.named_parameters(remove_duplicate=False))
        return {
            name
            for name, at_first in self._sums.items()
            if at_first is not None
            and (now := named.get(name)) is not None
            and not now.requires_grad
            and _sum(now) == at_first
        }


@torch.no_grad()
def _sum(tensor: torch.Tensor) -> int | None:
    """Of its bits, as integers, modulo 2^64: no training step keeps it. None for what has no plain bits.

    In parts, as torch makes int64 of all that it adds up.

    Signatures have a checksum that misses nothing, but it copies all from the GPU: once an attach, not each checkpoint.
    """
    try:
        bits = tensor.contiguous().view(_SAME_SIZE[tensor.element_size()]).reshape(-1)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for where in parts_of(bits):
            total += bits[where].sum()
        return int(total)
    except (RuntimeError, KeyError, NotImplementedError):
        return None


class Rest:
    """What is to be written of one model."""

    def __init__(self, model: nn.Module, pieces: Iterable[Piece], signature: str) -> None:
        """Buffers are copied now, frozen parameters are read when it is written, or fetched."""
        shared = {id(piece.held): piece.name for piece in pieces}
        parameters = {id(p) for p in model.parameters()}
        buffers = {id(b) for b in model.buffers()}
        self._signature = signature
        self._sources: dict[str, tuple[str, str, str]] = {}  # by name: whence, under which name there, dtype
        self._tensors: dict[str, torch.Tensor] = {}
        self._no_tensors: list[str] = []
        first: dict[int, str] = {}
        for name, value in tensors_held(model).items():
            if not isinstance(value, torch.Tensor):
                self._no_tensors.append(name)
                continue
            source = UNKNOWN, name
            if id(value) in shared:
                source = SHARED, shared[id(value)]
            elif (id(value) in parameters or id(value) in buffers) and not is_sharded(value):
                source = REST, first.setdefault(id(value), name)
                if source[1] == name:
                    self._tensors[name] = value.detach().clone() if id(value) in buffers else value.detach()
            self._sources[name] = (*source, str(value.dtype).removeprefix("torch."))
        wait_for(value.device for value in self._tensors.values())  # another thread reads them, by a stream of its own

    def fetch(self, folder: Path) -> None:
        """Take from a GPU what is to be written there, in the script's thread.

        While it captures a CUDA graph no other may copy, or the capture fails (cudaStreamCaptureModeGlobal).
        """
        if not _is_whole(_path(folder, self._signature), self._signature):
            self._tensors = {name: value.cpu() for name, value in self._tensors.items()}

    def write(self, folder: Path) -> None:
        """Unless it is there, whole by its length; that of an earlier model goes. Raises OSError."""
        path = _path(folder, self._signature)
        if _is_whole(path, self._signature):
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in folder.glob(".rest-*.tmp"):
            leftover.unlink(missing_ok=True)
        temporary = folder / f".rest-{os.getpid()}.tmp"  # not as checkpoints have it: other ranks clear those away
        header = {"signature": self._signature, "sources": self._sources, "no_tensors": self._no_tensors}
        try:
            tensors = {name: value.cpu().contiguous() for name, value in self._tensors.items()}
            header["sums"] = {name: _sum(value) for name, value in tensors.items()}
            save_file(tensors, temporary, metadata={"rest": json.dumps(header)})
            flush(temporary)
            for other in folder.glob("rest-*.safetensors"):
                other.unlink()
            temporary.replace(path)
            flush(folder)
        except SafetensorError as error:  # it wraps what the disk said
            raise OSError(str(error)) from None
        finally:
            temporary.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Kept:
    """What was written."""

    signature: str
    tensors: dict[str, torch.Tensor]
    sources: dict[str, tuple[str, str, str]]
    no_tensors: list[str]
    """Names of what is in the model's state and is no tensor."""

    def complete(self, shared: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole state under all its names, in its own types.

        `shared` is the node's model, `kept` the model's tensors in the newest checkpoint, if there is one. Raises
        Incomplete.
        """
        found: dict[str, torch.Tensor] = {}
        for name, (whence, where, dtype) in self.sources.items():
            held = shared if whence == SHARED else {where: kept.get(name, kept.get(where, self.tensors.get(where)))}
            if (value := held.get(where)) is None:
                raise Incomplete(f"{name} is in no file of this node: only its script has it")
            found[name] = value.to(getattr(torch, dtype)).clone()
        return found


def read(folder: Path, signature: str) -> Kept:
    """That of this model, of whose signature the beginning is enough. Raises Incomplete."""
    path = _path(folder, signature)
    try:
        with safe_open(path, "pt") as file:
            header: dict[str, Any] = json.loads(file.metadata()["rest"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        if damaged := [name for name, value in tensors.items() if _sum(value) != header["sums"][name]]:
            raise ValueError(f"{damaged[0]} is not what was written")
        sources = {str(name): (str(a), str(b), str(c)) for name, (a, b, c) in header["sources"].items()}
        return Kept(str(header["signature"]), tensors, sources, list(map(str, header["no_tensors"])))
    except FileNotFoundError:
        raise Incomplete(f"{path} is missing: frozen tensors and second names stand there alone") from None
    except UNREADABLE as error:
        raise Incomplete(
            f"{path} cannot be read: {cause(error)}; delete it, and the next start of the script writes it anew"
        ) from None


def _is_whole(path: Path, signature: str) -> bool:
    try:
        with safe_open(path, "pt") as file:  # it compares the lengths
            header = json.loads(file.metadata()["rest"])
            return bool(header["signature"] == signature and header["sums"].keys() == set(file.keys()))
    except UNREADABLE:
        return False


def _path(folder: Path, signature: str) -> Path:
    return folder / f"rest-{signature[:16]}.safetensors"
