"""Several processes train one model on one node (torchrun and DDP over NCCL or gloo): who of them talks to the daemon?

Rank 0 does, and the others follow it. DDP keeps them equal from step to step; whatever the swarm changes, rank 0
broadcasts over the same process group at the end of its `swarm.step`, so all go on from the same bits. A step in which
the swarm changed nothing costs one broadcast of 24 bytes. Of a sharded model all do each part together (sharded.py),
which costs a step two and a sum of 16 bytes.
"""

from __future__ import annotations

from contextlib import suppress
from enum import IntEnum
from pathlib import Path

import torch
from torch import distributed

from peerd.training.model.flat import FlatModel

PATH_BYTES_MAX = 4096  # as Linux has it


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
    """The default process group."""

    def __init__(self) -> None:
        """Use `of_this_job`."""
        cuda = distributed.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.leads = distributed.get_rank() == 0
        self.count = distributed.get_world_size()
        self.others = 0  # how far they are in their runs, as rank 0 said it last

    def say(self, command: RankCommand, step: int = 0) -> tuple[RankCommand, int]:
        """Rank 0's command and step, and `others`, on every rank."""
        said = torch.tensor([command, step, self.others], dtype=torch.int64, device=self.device)
        distributed.broadcast(said, 0)
        command, step, self.others = RankCommand(int(said[0])), int(said[1]), int(said[2])
        if command == RankCommand.STOP:
            with suppress(RuntimeError):  # of one that is gone already
                distributed.all_reduce(said)  # nobody ends before all have heard it, or gloo fails theirs
        return command, step

    def share(self, flat: FlatModel) -> None:
        """Give every rank rank 0's model, to the bit."""
        values = flat.values().to(self.device)
        distributed.broadcast(values, 0)
        flat.put(values)

    def share_path(self, path: Path | None) -> Path | None:
        """Rank 0's path, on every rank; None stays None."""
        text = str(path).encode()[:PATH_BYTES_MAX] if path is not None else b""
        padded = torch.zeros(PATH_BYTES_MAX, dtype=torch.uint8, device=self.device)
        padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        distributed.broadcast(padded, 0)
        found = bytes(padded.cpu().tolist()).rstrip(b"\0")
        return Path(found.decode()) if found else None


def of_this_job() -> Ranks | None:
    """The ranks of this process's job; None when it is the only one."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    return Ranks()
