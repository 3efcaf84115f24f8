"""Do peerd's CUDA paths work on this machine's GPU, and what do they cost? A line each; exit code 1 if any failed.

    python benchmarks/on_gpu.py [--format json]     # one NVIDIA GPU of 16 GB, 32 GB of memory, within ten minutes
    python benchmarks/on_gpu.py --device cpu        # tries this script itself, on a small model: needs no GPU

First the machine. Then a model on the GPU beside its like on the CPU, through the same courses of what a trainer does
with it, and where there are two GPUs one that lies on both. Then a step in a CUDA graph beside its like without, after
a rollback and after a checkpoint was loaded. Then two nodes on the one GPU (on_gpu_node.py): how long a step takes
before they attach and after; for how long `swarm.step` holds a GPU that had nothing left to do (the stall); how many
float32 copies of the model more are on the GPU; and whether both end with the same model. Where there are two GPUs,
two nodes of two ranks each come last. Figures are of the node that fared worse, and need a quiet machine.

On a machine that is lent for minutes: in the checkout, after `pip install -e .`, or with nothing installed but what
peerd needs, as `PYTHONPATH=$PWD python benchmarks/on_gpu.py`. If it has no network, `pip download -d wheels` what is
missing there beforehand, for its Python, and `pip install --no-index --find-links wheels` it there.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "training"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "training" / "model"))
from on_device import Node, Passes, made

from peerd.cli.demo.local_swarm import LocalSwarm
from peerd.local.shared_memory import SharedMemory
from peerd.trainer.optimizers import forget, load
from peerd.training.model.transfers import pin, unpin

SCRIPT = str(Path(__file__).resolve().with_name("on_gpu_node.py"))
SIZES = {  # what a device can do in the time
    "cuda": ["--parameters", "100e6", "--batch", "256", "--alone", "100", "--seconds", "15"],
    "cpu": ["--parameters", "2e5", "--batch", "16", "--alone", "20", "--seconds", "2"],
}
RUNS: dict[str, tuple[dict[str, str], list[str]]] = {  # options of the nodes, and of their script
    "weights": ({}, []),
    "gradients": ({"--mode": "allreduce", "--exchange": "gradients"}, ["--steps", "20"]),  # each waits for the other
    "bfloat16": ({}, ["--dtype", "bfloat16"]),
    "a CUDA graph": ({}, ["--graph"]),
    "a default device": ({}, ["--steps", "40", "--default-device"]),
    "forked workers": ({}, ["--steps", "40", "--forks"]),
    "forked workers, cudaMallocAsync": ({}, ["--steps", "40", "--forks"]),
}
RANKS = "of two ranks"
RUNS_OF_RANKS = {RANKS: (dict[str, str](), ["--steps", "40"])}  # over NCCL, for which each has a GPU of its own
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {"forked workers, cudaMallocAsync": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}}
OPTIMIZERS: dict[str, Callable[[Any, bool], torch.optim.Optimizer]] = {
    "SGD": lambda held, _: torch.optim.SGD(held, lr=0.1, momentum=0.9),
    "Adam": lambda held, graphs: torch.optim.Adam(held, lr=0.1, capturable=graphs),
    "NAdam": lambda held, graphs: torch.optim.NAdam(held, lr=0.1, capturable=graphs),
}
KINDS = ("float32", "bfloat16", "motley")
COURSES = 20  # of each kind; every other one in a stream of its own
LIMIT_S = 100.0  # for two nodes
END_S = 20.0  # until the kernel has ended what was killed
APART_MAX = 0.01  # of the model's norm, as the last flush has it
LEFT_MAX_MB = 64  # on the GPU, once all nodes are gone
TAIL = 12  # lines of a node's log
Figures = dict[str, Any]


def machine(device: torch.device) -> Figures:
    found: Figures = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    if device.type == "cpu":
        return {**found, "gpu": "none: a dry run"}
    gpu = torch.cuda.get_device_properties(device)
    found |= {"gpu": gpu.name, "gpu_gb": round(gpu.total_memory / 1e9), "capability": f"{gpu.major}.{gpu.minor}"}
    found |= {"driver": driver(), "cuda": torch.version.cuda}
    memory = SharedMemory.create(16 << 20)
    memory.close_fd()
    assert pin(memory.vectors, device), f"the shared memory cannot be page-locked: copies are slower ({text(found)})"
    unpin(memory.vectors, device)
    return {**found, "page_locked": True}


def driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "not told"
    except OSError:  # some containers have none
        return "no nvidia-smi"


def own_stream(device: torch.device, number: int) -> torch.cuda.StreamContext:
    """For every other course; without an effect where there is no CUDA."""
    wanted = device.type == "cuda" and number % 2
    return torch.cuda.stream(torch.cuda.Stream(device) if wanted else None)  # type: ignore[no-untyped-call]


def compare(near: Node, far: Node, when: str) -> None:
    for place, (own, other) in enumerate(zip(near.seen(), far.seen(), strict=True)):
        rtol = 1e-5 if place == 1 else 0  # a norm: a GPU sums in another order
        try:
            torch.testing.assert_close(other, own, rtol=rtol, atol=0, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{when}, value {place} of Node.seen: {error}") from None


def courses(kind: str, device: torch.device, place: Callable[[nn.Module], nn.Module] | None = None) -> Figures:
    """`place` puts the model elsewhere than on the one device."""
    for number in range(COURSES):
        course = random.Random(number).choices(["step", "step", "publish", "add", "restore", "load"], k=12)
        near = Node(made(kind))
        with own_stream(device, number), closing(Node((place or moved_to(device))(made(kind)))) as far:
            for seed, what in enumerate(course):
                near.do(what, seed)
                far.do(what, seed)
                if number % 4 >= 2 or seed == len(course) - 1:  # each look waits for the GPU, which hides what is late
                    compare(near, far, f"course {number}, {course[: seed + 1]}")
    return {"courses": COURSES}


def moved_to(device: torch.device) -> Callable[[nn.Module], nn.Module]:
    return lambda model: model.to(device)


def over_two(model: nn.Module) -> nn.Module:
    """Its layers on the two GPUs in turn, as stages of a pipeline are."""
    for number, layer in enumerate(model.children()):
        layer.to(torch.device("cuda", number % 2))
    return model


class Stepping:
    """A small model and a step of it, in a CUDA graph or not."""

    def __init__(self, kind: str, device: torch.device, *, graphs: bool) -> None:
        torch.manual_seed(2)
        self.model = nn.Linear(8, 4).to(device)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters(), device.type == "cuda")
        self.x = torch.ones(3, 8, device=device)
        self.step: Callable[[], object] = self._eager
        stream = torch.cuda.Stream(device) if graphs else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # what a graph is captured after must not be in the default one
            for _ in range(3):
                self._eager()
        if graphs:
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._eager()
            self.step = graph.replay
        self.began = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.whole = copy.deepcopy(self.optimizer.state_dict())

    def _eager(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def steps(self) -> list[torch.Tensor]:
        """Weights after some, where memory that was let go is others' by now."""
        others = [torch.full((8, 4), torch.nan, device=self.x.device) for _ in range(100)]
        for _ in range(5):
            self.step()
        assert all(bool(other.isnan().all()) for other in others), "a step has written where it has no memory any more"
        return [parameter.detach().cpu() for parameter in self.model.parameters()]

    def roll_back(self, clear: Callable[[torch.optim.Optimizer], None]) -> None:
        self.x.fill_(torch.nan)
        self.step()
        self.x.fill_(1.0)
        for parameter, value in zip(self.model.parameters(), self.began, strict=True):
            parameter.data.copy_(value)
        clear(self.optimizer)


def graphs_go_on(kind: str, device: torch.device) -> Figures:
    near = Stepping(kind, device, graphs=False)
    far = Stepping(kind, device, graphs=device.type == "cuda")
    near.roll_back(lambda optimizer: optimizer.state.clear())
    far.roll_back(forget)
    torch.testing.assert_close(far.steps(), near.steps(), msg=lambda why: f"after a rollback: {why}")
    near.optimizer.load_state_dict(near.whole)
    load(far.optimizer, far.whole)
    torch.testing.assert_close(far.steps(), near.steps(), msg=lambda why: f"after a checkpoint: {why}")
    return {"optimizer": kind}


def gradients_in_parts(device: torch.device) -> Figures:
    near, told = Passes(made("motley"), 8), 0
    with closing(Passes(made("motley").to(device), 8)) as far:
        for number in range(COURSES):
            with own_stream(device, number):
                own, other = near.backward(number), far.backward(number)
            np.testing.assert_allclose(other, own, rtol=0.05, atol=0.01)  # of bfloat16 and TF32
            for first, part in far.told:
                now = other[first : far.flat.parameters]
                np.testing.assert_array_equal(part, now, f"told of value {first} too early")
            told += len(far.told)
    assert told, "nothing was said of any gradient before its pass ended"
    return {"passes": COURSES, "parts_told_of": told}


def two_nodes(name: str, device: torch.device) -> Figures:
    """From their start to the end of their scripts."""
    options, arguments = {**RUNS, **RUNS_OF_RANKS}[name]
    with tempfile.TemporaryDirectory(prefix="peerd-gpu-") as made_folder:
        folder = Path(made_folder)
        command = [
            *(TORCHRUN if name == RANKS else []),
            SCRIPT,
            str(folder),
            "--device",
            device.type,
            *SIZES[device.type],
            *arguments,
        ]
        ends = [folder / f"end-{rank}.json" for rank in range(2)]
        with (
            patch.dict(os.environ, ENVIRONMENT.get(name, {})),
            LocalSwarm(2, {"--wait-for": "2", **options}, command) as swarm,
        ):
            deadline = time.monotonic() + LIMIT_S
            while not all(end.exists() for end in ends) and not swarm.ended() and time.monotonic() < deadline:
                time.sleep(0.1)
            said = [json.loads(end.read_text()) if end.exists() else {} for end in ends]
            if not all(said) or any("error" in each for each in said):
                errors = [each["error"] for each in said if "error" in each]
                why = "a node ended" if swarm.ended() else f"it was not over after {LIMIT_S:.0f} s"
                raise AssertionError("\n".join(errors or [why]) + tails(swarm))
            exchanges = min(swarm.status(node)["exchanges"] for node in swarm.names)
        own, other = (np.load(folder / f"{rank}.npy") for rank in range(2))
    numbers = {key: [each[key] for each in said if each[key] is not None] for key in said[0]}
    found = {key: (min if key in ("steps", "pinned") else max)(each, default=None) for key, each in numbers.items()}
    apart = float(np.linalg.norm(own - other) / np.linalg.norm(own))
    found |= {"exchanges": exchanges, "apart": apart}
    assert apart <= APART_MAX, f"the two end with different models: {text(found)}"
    assert found["pinned"] or device.type == "cpu", f"the shared memory is not page-locked: {text(found)}"
    return found


def tails(swarm: LocalSwarm) -> str:
    """The last lines of both logs."""
    logs = {name: (swarm.folder / f"{name}.log").read_text(errors="replace").splitlines() for name in swarm.names}
    return "".join(f"\n--- {name}\n" + "\n".join(lines[-TAIL:]) for name, lines in logs.items())


def left(device: torch.device, free_before: int) -> Figures:
    """Of nodes that are gone."""
    deadline = time.monotonic() + END_S
    while (running := nodes_running()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not running, f"processes that go on: {running}"
    taken_mb = (free_before - free_bytes(device)) / 1e6
    assert taken_mb <= LEFT_MAX_MB, f"{taken_mb:.0f} MB of the GPU's memory are taken that were free before the nodes"
    return {"gpu_mb": round(taken_mb)}


def nodes_running() -> list[int]:
    """Daemons and scripts of these runs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # gone meanwhile
            continue
        if SCRIPT.encode() in words:
            found.append(int(path.parent.name))
    return found


def free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def text(figures: Figures) -> str:
    shown = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in figures.items()}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def passes(name: str, part: Callable[[], Figures], form: str) -> bool:
    """Print what was found, or what differed."""
    began, passed = time.monotonic(), False
    try:
        found = part()
        passed = True
    except Exception as error:  # whatever it is, the next part may say more
        found = {"differs": f"{type(error).__name__}: {error}"}
    found["took_s"] = round(time.monotonic() - began, 1)
    line = f"{'passed' if passed else 'FAILED'}  {name}: {text(found)}"
    print(json.dumps({"part": name, "passed": passed, **found}) if form == "json" else line, flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="json: an object a line")
    told = parser.parse_args()
    if told.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no CUDA GPU here; --device cpu tries the script alone")
    device = torch.device("cuda", 0) if told.device == "cuda" else torch.device("cpu")
    one = partial(passes, form=told.format)
    passed = [one("the machine", partial(machine, device))]
    passed += [one(f"courses of {kind}, as on the CPU", partial(courses, kind, device)) for kind in KINDS]
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        passed += [one("courses over two GPUs, as on the CPU", partial(courses, "motley", device, over_two))]
    passed += [one("gradients in parts, as on the CPU", partial(gradients_in_parts, device))]
    passed += [one(f"a CUDA graph goes on, {kind}", partial(graphs_go_on, kind, device)) for kind in OPTIMIZERS]
    free = free_bytes(device)
    runs = [*RUNS, *(RUNS_OF_RANKS if device.type == "cpu" or torch.cuda.device_count() > 1 else {})]
    passed += [one(f"two nodes, {name}", partial(two_nodes, name, device)) for name in runs]
    passed += [one("nothing is left", partial(left, device, free))]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
