"""What do people use instead? Synchronous and local-step methods over torch.distributed (gloo), as their papers say.

A rival is one class and one line in RIVALS: it takes a task's run, and makes its steps. What comes from packages that
bring their own versions of others is in files of its own, and has an environment of its own (environments.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.versus.place import Place
from peerd.training.tasks.run import Run


class Rival(Protocol):
    """One rank of it; the process group is there."""

    def step(self, number: int) -> None:
        """Optimizer step `number`, and what follows it."""
        ...

    def end(self) -> None:
        """The last exchange, where the method has one."""
        ...


class Ddp:
    """DistributedDataParallel; `rank` above 0: with PowerSGD of that rank (Vogels et al. 2019, arXiv:1905.13727)."""

    def __init__(self, run: Run, rank: int = 0) -> None:
        self._run, self._plain = run, run.model
        # by default a model above 1 MB has two buckets, whose sums come in another order on each worker over gloo
        model = DistributedDataParallel(run.model, bucket_cap_mb=25 if rank else None)
        if rank:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        run.model = model

    def step(self, number: int) -> None:
        self._run.step(number)

    def end(self) -> None:
        self._run.model = self._plain


class LocalSgd:
    """The mean of all models after every `every` steps (Stich 2019, arXiv:1805.09767)."""

    def __init__(self, run: Run, every: int) -> None:
        self._run, self._every = run, every

    def step(self, number: int) -> None:
        self._run.step(number)
        if (number + 1) % self._every == 0:
            self.end()

    @torch.no_grad()
    def end(self) -> None:
        parameters = list(self._run.model.parameters())
        flat = torch.nn.utils.parameters_to_vector(parameters)
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat / dist.get_world_size(), parameters)


class Outer:
    """What the outer-step methods share: an agreed model, and every `every` steps a step of it by how far all came."""

    def __init__(self, run: Run, every: int) -> None:
        self._run, self._every = run, every
        self._parameters = list(run.model.parameters())
        self._agreed = torch.nn.utils.parameters_to_vector(self._parameters).detach().clone()
        self._since = 0  # steps after the last outer one

    def step(self, number: int) -> None:
        self._run.step(number)
        self._since += 1
        if (number + 1) % self._every == 0:
            self.end()

    @torch.no_grad()
    def end(self) -> None:
        if not self._since:  # an outer step of no steps moves the model by momentum alone, and costs as much
            return
        self._since = 0
        came = self._agreed - torch.nn.utils.parameters_to_vector(self._parameters)
        self._agreed -= self.outer_step(came)
        torch.nn.utils.vector_to_parameters(self._agreed.clone(), self._parameters)

    def outer_step(self, came: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class DiLoCo(Outer):
    """Nesterov's outer momentum of .9 at the outer rate of .7 (Douillard et al. 2023, arXiv:2311.08105)."""

    def __init__(self, run: Run, every: int) -> None:
        super().__init__(run, every)
        self._momentum = torch.zeros_like(self._agreed)

    def outer_step(self, came: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(came)
        came /= dist.get_world_size()
        self._momentum.mul_(0.9).add_(came)
        return 0.7 * (came + 0.9 * self._momentum)


class SparseLoCo(Outer):
    """The largest of each chunk in 2 bits, with error feedback in place of momentum (arXiv:2508.15706).

    Of each chunk of 4096 values the 64 largest, each as one of four levels; 12 bits of place and 2 of value travel as
    16. Error feedback decays by .95, the outer rate is 1.
    """

    CHUNK, KEPT, DECAY = 4096, 64, 0.95

    def __init__(self, run: Run, every: int) -> None:
        super().__init__(run, every)
        self._pad = -len(self._agreed) % self.CHUNK
        self._error = torch.zeros(len(self._agreed) + self._pad)

    def outer_step(self, came: torch.Tensor) -> torch.Tensor:
        self._error.mul_(self.DECAY)
        self._error[: len(came)] += came
        chunks = self._error.view(-1, self.CHUNK)
        places = chunks.abs().topk(self.KEPT, dim=1).indices
        kept = chunks.gather(1, places)
        scale = kept.abs().mean(dim=1, keepdim=True)
        large = kept.abs() > scale
        codes = places | (large.long() << 12) | ((kept < 0).long() << 13)
        mine = (codes.to(torch.int16).contiguous(), scale.to(torch.float16))
        chunks -= self._decoded(*mine)
        theirs = [[torch.empty_like(part) for _ in range(dist.get_world_size())] for part in mine]
        for part, gathered in zip(mine, theirs, strict=True):
            dist.all_gather([each.view(torch.uint8) for each in gathered], part.view(torch.uint8))
        mean = sum(self._decoded(*each) for each in zip(*theirs, strict=True)) / dist.get_world_size()
        return torch.as_tensor(mean).reshape(-1)[: len(came)]

    def _decoded(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        said = codes.long()
        size = torch.where(((said >> 12) & 1) == 1, 1.5, 0.5) * scale.float()
        values = torch.where(((said >> 13) & 1) == 1, -size, size)
        return torch.zeros(len(codes), self.CHUNK).scatter_(1, said & 0xFFF, values)


def over_gloo(rival: Callable[..., Any], *arguments: int) -> Callable[[Run, Place], Any]:
    """One that needs torch's process group, which is all workers from beginning to end."""

    def begun(run: Run, place: Place) -> Any:
        dist.init_process_group("gloo", rank=place.rank, world_size=place.peers)
        return rival(run, *arguments)

    return begun


def with_hivemind(run: Run, place: Place) -> Any:
    from benchmarks.versus.hivemind_rival import Hivemind  # only its environment has it

    return Hivemind(run, place, 32)


def with_torchft(run: Run, place: Place) -> Any:
    from benchmarks.versus.torchft_rival import TorchFt  # only its environment has it

    return TorchFt(run, place, 32)


RIVALS: dict[str, Callable[[Run, Place], Any]] = {
    "DDP": over_gloo(Ddp),
    "DDP, PowerSGD 4": over_gloo(Ddp, 4),
    "local SGD 8": over_gloo(LocalSgd, 8),
    "local SGD 32": over_gloo(LocalSgd, 32),
    "local SGD 128": over_gloo(LocalSgd, 128),
    "DiLoCo 32": over_gloo(DiLoCo, 32),
    "SparseLoCo 32": over_gloo(SparseLoCo, 32),
    "hivemind 32": with_hivemind,
    "torchft DiLoCo 32": with_torchft,
}
ROUNDS_OF_2 = ["--mode", "allreduce", "--every", "2", "--overlap", "quorum"]
ROUNDS_OF_8 = ["--mode", "allreduce", "--every", "8", "--overlap", "blocking"]
QUASI_GLOBAL = "peerd, quasi-global momentum"
OURS: dict[str, list[str]] = {
    "peerd": [],
    QUASI_GLOBAL: [],  # an option of attach, in worker.py
    "peerd --codec sign": ["--codec", "sign"],
    "peerd --trigger change:0.1": ["--trigger", "change:0.1"],
    "peerd --codec top_k_3 --trigger change:0.1": ["--codec", "top_k_3", "--trigger", "change:0.1"],
    "peerd allreduce": ["--mode", "allreduce"],
    "peerd allreduce 32 int8": ["--mode", "allreduce", "--overlap", "delayed", "--every", "32", "--codec", "int8"],
    "peerd allreduce 2 top_k_2bit": [*ROUNDS_OF_2, "--codec", "top_k_2bit"],
    "peerd allreduce 8 top_k_2bit": [*ROUNDS_OF_8, "--codec", "top_k_2bit"],
    "peerd allreduce 8 top_k_3": [*ROUNDS_OF_8, "--codec", "top_k_3"],
    "peerd allreduce 8 int4": [*ROUNDS_OF_8, "--codec", "int4"],
    "peerd diloco int8": ["--mode", "diloco", "--codec", "int8"],
}
"""Options of `peerd start`."""
