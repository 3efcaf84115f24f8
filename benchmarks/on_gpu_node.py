"""What each of the two nodes of benchmarks/on_gpu.py runs: a training that is timed before it attaches, and after.

It leaves its figures as end-RANK.json in FOLDER, and its model as RANK.npy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import peerd

LAYERS = 8
WARM = 10  # steps: until torch has chosen its kernels and has its memory
STEPS_MIN, STEPS_MAX = 60, 3000
FORK_EVERY = 10  # steps
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))  # as torchrun says it
Step = Callable[[], torch.Tensor]


class Training:
    """A model of wide layers, and a step of it, which may be a CUDA graph."""

    def __init__(self, told: argparse.Namespace, rank: int) -> None:
        self.cuda, self.graph = told.device == "cuda", told.graph
        if self.cuda:
            torch.cuda.set_device(LOCAL_RANK)
        device, dtype = torch.device(told.device), getattr(torch, told.dtype)
        torch.manual_seed(0)
        width = int((told.parameters / LAYERS) ** 0.5)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model: nn.Module = nn.Sequential(*layers[:-1]).to(device, dtype)
        if "LOCAL_RANK" in os.environ:
            torch.distributed.init_process_group("nccl" if self.cuda else "gloo")
            self.model = DistributedDataParallel(self.model)
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
            if told.forks
            else torch.optim.Adam(self.model.parameters(), lr=1e-4, capturable=self.cuda)
        )
        torch.manual_seed(1 + rank + 10 * LOCAL_RANK)
        self.x = torch.randn(told.batch, width, device=device, dtype=dtype)
        self.step = self._prepared()

    def _eager(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=not self.graph)
        loss: torch.Tensor = (self.model(self.x) - self.x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def _prepared(self) -> Step:
        self.wait()
        captures = self.graph and self.cuda
        stream = torch.cuda.Stream() if captures else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # what a graph is captured after must not be in the default one
            for _ in range(WARM):
                self._eager()
        self.wait()
        if not captures:
            return self._eager
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._eager()

        def replay() -> torch.Tensor:
            graph.replay()
            return loss

        return replay

    def wait(self) -> float:
        """Until the GPU has done all; the time then."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def alone_s(self, steps: int) -> float:
        """What a step takes without peerd."""
        began = self.wait()
        for _ in range(steps):
            self.x.normal_()
            self.step()
        return (self.wait() - began) / steps

    def memory(self) -> tuple[int, int]:
        """Bytes of tensors on the GPU, and the most since this was asked last."""
        if not self.cuda:
            return 0, 0
        found = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found

    def values(self) -> torch.Tensor:
        return torch.cat([parameter.detach().float().view(-1) for parameter in self.model.parameters()]).cpu()


def train(told: argparse.Namespace, rank: int) -> dict[str, Any]:
    if told.default_device:
        torch.set_default_device(told.device)
    training = Training(told, rank)
    meet(told.folder, rank, "warm", 0.0)
    alone_s = max(meet(told.folder, rank, "alone", training.alone_s(told.alone)))  # both are to count as many steps
    total = told.steps or min(STEPS_MAX, max(STEPS_MIN, int(told.seconds / alone_s)))
    size = sum(4 * parameter.numel() for parameter in training.model.parameters())
    held, peak = training.memory()
    stalls: list[float] = []
    middle, free = 0.0, 0
    with peerd.attach(training.model, training.optimizer, quasi_global_momentum=told.forks) as swarm:
        assert swarm._session is not None or LOCAL_RANK, "a daemon started this"
        pinned = swarm._session is not None and bool(swarm._session._pinned)
        for number in swarm.steps(total):
            waits = number < total // 2
            if not waits and not free:
                middle = training.wait()
            training.x.normal_()
            loss = training.step()
            if told.forks and number % FORK_EVERY == FORK_EVERY - 1:
                fork_workers()
            if waits:  # the GPU is to have nothing left to do, so that all of the time is peerd's
                before = training.wait()
                swarm.step(loss=loss, samples=told.batch)
                stalls.append(training.wait() - before)
            else:  # as users do: the GPU is steps behind
                swarm.step(loss=loss, samples=told.batch)
                free += 1
        with_s = (training.wait() - middle) / free if free else None
        held_then, peak_then = training.memory()
        steps = swarm.step_count
    if LOCAL_RANK:
        assert rank_is_as_first(training.values()), "two ranks of a node end with different models"
        return {}
    if "LOCAL_RANK" in os.environ:
        rank_is_as_first(training.values())
    np.save(told.folder / f"{rank}.npy", training.values().numpy())
    return {
        "steps": steps,
        "pinned": pinned,
        "float32_copies_more_on_gpu": (held_then - held) / size,
        "more_at_most": (peak_then - peak) / size,
        "step_alone_ms": 1e3 * alone_s,
        "step_with_peerd_ms": 1e3 * with_s if with_s is not None else None,  # it came too late for that half
        "stall_p50_ms": 1e3 * statistics.median(stalls),
        "stall_max_ms": 1e3 * max(stalls),
    }


def rank_is_as_first(values: torch.Tensor) -> bool:
    """On both at once: whether the model is the first one's, to the bit."""
    there = values.cuda() if torch.distributed.get_backend() == "nccl" else values.clone()
    torch.distributed.broadcast(there, 0)
    return torch.equal(there.cpu(), values)


def fork_workers() -> None:
    """As a loader does, whose workers let go of what they find. Raises RuntimeError: one was aborted."""
    rows: Any = range(8)
    loader: DataLoader[Any] = DataLoader(rows, num_workers=2, worker_init_fn=_let_go, multiprocessing_context="fork")
    assert len(list(loader)) == 8


def _let_go(_: int) -> None:
    gc.collect()


def note(folder: Path, name: str, said: Any) -> None:
    (folder / f"{name}.part").write_text(json.dumps(said))
    (folder / f"{name}.part").rename(folder / f"{name}.json")


def meet(folder: Path, rank: int, name: str, said: float) -> list[float]:
    """What both nodes' scripts say, once both have: nobody is to measure beside one that only starts."""
    if LOCAL_RANK:  # which waits for the node's first in its next step
        return [said]
    note(folder, f"{name}-{rank}", said)
    both = [folder / f"{name}-{each}.json" for each in range(2)]
    while not all(path.exists() for path in both):
        time.sleep(0.01)
    return [float(path.read_text()) for path in both]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--parameters", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--alone", type=int, required=True, help="steps before it attaches")
    parser.add_argument("--seconds", type=float, required=True, help="what its steps would take without peerd")
    parser.add_argument("--steps", type=int, help="so many instead")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--graph", action="store_true", help="a step is a CUDA graph, where there is CUDA")
    parser.add_argument("--default-device", action="store_true", help="the script makes its tensors there")
    parser.add_argument("--forks", action="store_true", help="a loader's workers, and quasi-global momentum")
    told, rank = parser.parse_args(), int(os.environ["PEERD_RANK"])
    try:
        said = train(told, rank)
    except BaseException:  # a script that fails would be started again
        said = {"error": traceback.format_exc()}
    if LOCAL_RANK and "error" not in said:
        return
    note(told.folder, f"end-{rank}", said)


if __name__ == "__main__":
    main()
