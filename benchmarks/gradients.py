"""How fast does a swarm train that exchanges gradients: peerd's all-reduce beside torch's DDP over gloo, in turn.

    python benchmarks/gradients.py [--peers 4] [--parameters 25000000] [--steps 12] [--repeat 3] [--format json]
    python benchmarks/gradients.py --mbit 100                   each in a network namespace of its own (root, ip and tc)
    python benchmarks/gradients.py --mbit 10 --codec int8 --parameters 2500000

Both sides run one script over the same examples: on peerd's each node has a daemon, started as a user starts it, with
`--mode allreduce --exchange gradients`; on torch's a process is a rank of DDP. A step counts from its end on the
slowest member to the next one's there. With `--device-ms T` the backward pass of each layer stands still for T ms, as
one does for the processor whose layers a device computes: what travels meanwhile is not waited for. After the last step
the models of a side are compared to the bit, and with `float32` the two sides' with each other.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peerd.process.ending import kill_cleans_up
from peerd.reproduce.sockets.lines import free_ports, namespaces

SIDES = ("ddp", "peerd")
PORT = 7946
WIDTH = 1024  # of the layers
BATCH = 8
WARM = 2  # steps that are not counted: connections, allocations
APART_MAX = 1e-5  # of the two sides' models in float32, relative: a ReLU whose sum is about 0 may flip
PATIENCE_S = 900.0


# ---------------------------------------------------------------------------------------------------------- one rank


def train(side: str, rank: int, peers: int, parameters: int, steps: int, device_ms: float, out: Path) -> None:
    """A perceptron of about so many parameters; the ends of its steps and its model go to `out`."""
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = max(1, round(parameters / WIDTH**2) - 1)

    def stand(_: torch.nn.Module, __: object, out: torch.Tensor) -> None:
        out.register_hook(lambda _: time.sleep(device_ms / 1000))  # type: ignore[no-untyped-call]

    inner = [part for _ in range(layers) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*inner, torch.nn.Linear(WIDTH, WIDTH))
    for part in model:
        if isinstance(part, torch.nn.Linear):  # or the gradients of a deep one vanish
            torch.nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
            part.register_forward_hook(stand)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    ends: list[float] = []

    def step(forward: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(len(ends) * peers + rank)
        x = torch.randn(BATCH, WIDTH, generator=generator)
        torch.nn.functional.mse_loss(forward(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    if side == "ddp":
        torch.distributed.init_process_group("gloo", rank=rank, world_size=peers)
        ranked = torch.nn.parallel.DistributedDataParallel(model)
        for _ in range(steps):
            step(ranked)
            ends.append(time.monotonic())
        torch.distributed.destroy_process_group()
    else:
        import peerd

        with peerd.attach(model, optimizer) as swarm:
            for _ in range(steps):
                step(model)
                swarm.step()
                ends.append(time.monotonic())
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    crc = 0
    for value in state.values():
        crc = zlib.crc32(value.numpy().tobytes(), crc)
    if rank == 0:
        save_file(state, out / f"{side}.safetensors")
    (out / "written").mkdir(exist_ok=True)
    whole = out / "written" / str(rank)
    whole.write_text(json.dumps({"ends": ends, "crc": crc}))
    whole.rename(out / f"{side}.{rank}.json")


# -------------------------------------------------------------------------------------------------------- all of them


class Bench:
    """Where the ranks of both sides run."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self._options = options
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-")))
        if options.mbit:
            self._within = stack.enter_context(namespaces(options.peers, options.mbit))
            self._hosts = [f"10.77.0.{rank + 1}" for rank in range(options.peers)]
        else:
            self._within = [[] for _ in range(options.peers)]
            self._hosts = ["127.0.0.1"] * options.peers

    def run(self, side: str, turn: int) -> list[float]:
        """Seconds of each step that counts."""
        out = self._folder / f"{side}{turn}"
        out.mkdir()
        ports = [PORT + rank for rank in range(self._options.peers)]
        if not self._options.mbit:
            ports = free_ports(self._options.peers)
        processes = [self._start(side, rank, ports, out) for rank in range(self._options.peers)]
        told_by = [out / f"{side}.{rank}.json" for rank in range(self._options.peers)]
        began = time.monotonic()
        try:
            while not all(path.exists() for path in told_by):
                if any(process.poll() for process in processes) or time.monotonic() - began > PATIENCE_S:
                    logs = "\n".join(path.read_text() for path in sorted(out.glob("*.log")))
                    raise SystemExit(f"{side} did not get to its end:\n{logs}")
                time.sleep(0.1)
        finally:
            for process in processes:
                process.send_signal(signal.SIGINT)  # a daemon stays a member when its trainer has ended
            for process in processes:
                process.wait(PATIENCE_S)
        told = [json.loads(path.read_text()) for path in told_by]
        assert len({each["crc"] for each in told}) == 1, f"{side}: the members' models differ"
        ends = [max(each) for each in zip(*(each["ends"] for each in told), strict=True)]
        return [after - before for before, after in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]

    def apart(self) -> float:
        """How far the two sides' models are from each other, relative to torch's."""
        import torch
        from safetensors.torch import load_file

        ours, theirs = (load_file(self._folder / f"{side}0" / f"{side}.safetensors") for side in ("peerd", "ddp"))
        squares = [((ours[name] - theirs[name]).double().square().sum(), theirs[name].double().square().sum())
                   for name in theirs]  # fmt: skip
        above, below = (torch.stack(list(each)).sum().sqrt() for each in zip(*squares, strict=True))
        return float(above / below)

    def _start(self, side: str, rank: int, ports: list[int], out: Path) -> subprocess.Popen[bytes]:
        told = self._options
        script = [__file__, "--side", side, "--rank", str(rank), "--peers", str(told.peers), "--parameters",
                  str(told.parameters), "--steps", str(told.steps), "--device-ms", str(told.device_ms),
                  "--out", str(out)]  # fmt: skip
        runtime = out / str(rank)
        runtime.mkdir(mode=0o700)
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PEERD_")},
            "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(runtime), "XDG_STATE_HOME": str(runtime / "state"),
            "MASTER_ADDR": self._hosts[0], "MASTER_PORT": str(ports[0]),
            "GLOO_SOCKET_IFNAME": "eth0" if told.mbit else "lo",
        }  # fmt: skip
        if side == "peerd":
            peerd = [sys.executable, "-m", "peerd.cli.main", "start", "--name", f"n{rank}", "--insecure-plaintext"]
            peerd += ["--bind", f"{self._hosts[rank]}:{ports[rank]}", "--wait-for", str(told.peers)]
            peerd += ["--mode", "allreduce", "--exchange", "gradients", "--topology", told.topology]
            peerd += ["--codec", told.codec, "--log", "human"]
            peerd += ["--join", f"{self._hosts[0]}:{ports[0]}"] if rank else []
            command = [*peerd, "--", sys.executable, *script]
        else:
            command = [sys.executable, *script]
        with (out / f"{side}.{rank}.log").open("wb") as log:
            return subprocess.Popen([*self._within[rank], *command], env=environment, stdout=log, stderr=log)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Each side in turn, so often."""
    with ExitStack() as stack:
        bench = Bench(options, stack)
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(options.repeat):
            for side in SIDES if turn % 2 else SIDES[::-1]:
                seconds[side].append(statistics.mean(bench.run(side, turn)))
        apart = bench.apart()
    if options.codec == "float32":
        assert apart <= APART_MAX, f"the models of the two sides are {apart:.2g} apart"
    medians = {side: statistics.median(found) for side, found in seconds.items()}
    bits = 2 * (options.peers - 1) / options.peers * 32 * options.parameters
    return {
        "peers": options.peers, "parameters": options.parameters, "mbit": options.mbit, "codec": options.codec,
        "device_ms": options.device_ms, "topology": options.topology, "seconds_of_a_step": seconds,
        "median_s": medians, "models_apart": apart,
        "rate_of_ddp": medians["ddp"] / medians["peerd"],
        "rates_in_turn": [a / b for a, b in zip(seconds["ddp"], seconds["peerd"], strict=True)],
        "line_s": bits / (1e6 * options.mbit) if options.mbit else 0.0,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--steps", type=int, default=12, help=f"the first {WARM} do not count")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--topology", default="ring", help="of peerd's side")
    parser.add_argument("--codec", default="float32", help="of peerd's side")
    parser.add_argument("--mbit", type=float, default=0.0, help="of each process's line; 0: loopback")
    parser.add_argument("--device-ms", type=float, default=0.0, help="for which each layer's backward pass stands")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.side, options.rank, options.peers, options.parameters, options.steps,
              options.device_ms, options.out)  # fmt: skip
        return
    if options.mbit and not (os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")):
        parser.error("--mbit: needs root, ip and tc")
    if options.steps <= WARM:
        parser.error(f"--steps {options.steps}: wanted more than {WARM}")
    with kill_cleans_up():
        result = measure(options)
    if options.format == "json":
        print(json.dumps(result))
        return
    for side, found in result["seconds_of_a_step"].items():
        print(f"{side:<8}{result['median_s'][side]:.3f} s a step, {min(found):.3f} to {max(found):.3f}")
    turns = result["rates_in_turn"]
    print(f"peerd makes {result['rate_of_ddp']:.2f} of DDP's steps a second (in turn {min(turns):.2f} to", end=" ")
    print(f"{max(turns):.2f}); the models are {result['models_apart']:.1g} apart")


if __name__ == "__main__":
    main()
