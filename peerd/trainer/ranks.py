"""Several processes train one model on one node (torchrun and DDP over NCCL or gloo): who of them talks to the daemon?

Rank 0 does, and the others follow it. DDP keeps them equal from step to step; whatever the swarm changes, rank 0
broadcasts at the end of its `swarm.step`, so all go on from the same bits: the model over the job's process group. What
it says goes over one of its own, of gloo: NCCL would have the script wait for its GPU in each step, and ends ranks that
hear nothing for ten minutes, as they do while rank 0 waits for the daemon. A step in which the swarm changed nothing
costs one broadcast of 24 bytes. Of a sharded model all do each part together (sharded.py), which costs a step two and a
sum of 16 bytes.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from peerd.training.model.flat import FlatModel

PATH_BYTES_MAX = 4096  # as Linux has it
PATIENCE = timedelta(days=30)  # with rank 0


class RankCommand(IntEnum):
    """What rank 0 says: how its step ended, or what of a sharded model's work all are to do now."""

    GO_ON = 0
    CHANGED = 1  # the model follows
    ROLLED_BACK = 2  # the model follows; forget the optimizer's state
    STOP = 3  # end the script
    ALONE = 4  # there is no daemon (any more): rank 0 says nothing further. In place of the step, what came before
    COMES = 5  # from here on of a sharded model: make a ShardedModel, of whose methods the others are
    GATHER = 6
    MEASURE = 7
    ADD = 8
    LOAD = 9
    RESTORE = 10
    CAPTURE = 11
    RESUME = 12


class Ranks:
    """Of this job. What is of the model goes over the default process group, from and to `device`."""

    def __init__(self, model: nn.Module) -> None:
        """On all ranks at once, of one model. Use `of_this_job`."""
        self._words = _group_for_words(distributed.group.WORLD)
        self.device = _device_of(model)
        self.leads = is_first()
        self.count = distributed.get_world_size()
        self.others = 0  # how far they are in their runs, as rank 0 said it last

    def say(self, command: RankCommand, step: int = 0) -> tuple[RankCommand, int]:
        """Rank 0's command and step, and `others`, on every rank."""
        said = torch.tensor([command, step, self.others], dtype=torch.int64, device="cpu")
        distributed.broadcast(said, 0, self._words)
        command, step, self.others = RankCommand(int(said[0])), int(said[1]), int(said[2])
        if command == RankCommand.STOP:
            with suppress(RuntimeError):  # of one that is gone already
                # nobody ends before all have heard it, or gloo fails theirs
                distributed.all_reduce(said, group=self._words)
        return command, step

    def share(self, flat: FlatModel) -> None:
        """Give every rank rank 0's model, to the bit."""
        flat.pass_on(lambda values: distributed.broadcast(values, 0), self.device)

    def share_restored(self, flat: FlatModel) -> None:
        """The same after a rollback, which has put back what is private, too."""
        self.share(flat)
        for tensor in flat.private.tensors:
            values = tensor.to(self.device).contiguous()
            distributed.broadcast(values, 0)
            tensor.copy_(values)

    def share_path(self, path: Path | None) -> Path | None:
        """Rank 0's path, on every rank; None stays None."""
        text = str(path).encode()[:PATH_BYTES_MAX] if path is not None else b""
        padded = torch.zeros(PATH_BYTES_MAX, dtype=torch.uint8, device="cpu")
        padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
        distributed.broadcast(padded, 0, self._words)
        found = bytes(padded.tolist()).rstrip(b"\0")
        return Path(found.decode()) if found else None


@lru_cache(maxsize=1)
def _group_for_words(_: object) -> Any:
    """One for each default group, whatever the number of models."""
    return distributed.new_group(backend="gloo", timeout=PATIENCE)


def of_this_job(model: nn.Module) -> Ranks | None:
    """The ranks of this process's job, which all call this at once; None when it is the only one."""
    return Ranks(model) if are_several() else None


def is_first() -> bool:
    """Whether this process is the one of its job that talks to the daemon."""
    return not are_several() or distributed.get_rank() == 0


def are_several() -> bool:
    """Whether this process's job has a process group of more than one."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _device_of(model: nn.Module) -> torch.device:
    """Where the default group takes this model's tensors: NCCL a GPU's, gloo those in host memory."""
    backends = dict(pair.split(":") for pair in distributed.get_backend_config().split(","))  # "cpu:gloo,cuda:nccl"
    own = {kind for kind, backend in backends.items() if kind != "cpu" and backend != backends.get("cpu")}
    # the one that it is on, whatever the process's current one is
    on_devices = [parameter.device for parameter in model.parameters() if parameter.device.type in own]
    if on_devices or not own or "cpu" in backends:
        return on_devices[0] if on_devices else torch.device("cpu")
    kind = min(own)
    return torch.device(kind, torch.get_device_module(kind).current_device())
