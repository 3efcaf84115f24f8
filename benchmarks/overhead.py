"""What does a training pay for being in a swarm? Its rate beside the same script without peerd, in turn.

    python benchmarks/overhead.py                       # 1.1M, 25M and 100M parameters; alone, and two nodes
    python benchmarks/overhead.py --nodes 2 --parameters 150e6
    python benchmarks/overhead.py --nodes 2 --trigger period:20  # though its model soon stands still
    python benchmarks/overhead.py --beside ../before         # another checkout too, in the same rounds

The script is an ordinary one: a stack of linear layers, SGD with momentum, a batch that makes a step as long as such a
model's is on a processor. Each node has its cores' share of torch's threads, with peerd and without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SCRIPT = """
import json, math, os, sys, time
import torch
from torch import nn

torch.set_num_threads(int(os.environ["THREADS"]))
torch.manual_seed(0)
width, depth = int(os.environ["WIDTH"]), int(os.environ["DEPTH"])
model = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
target = torch.randn(width, width) / math.sqrt(width)
swarm = None
if os.environ.get("WITH"):
    import peerd
    swarm = peerd.attach(model, optimizer)
steps, inside, took = 0, [], []
until = time.monotonic() + float(os.environ["SECONDS"])
warm = time.monotonic() + 0.4 * float(os.environ["SECONDS"])  # until partners know each other's models
while (now := time.monotonic()) < until:
    x = torch.randn(int(os.environ["BATCH"]), width)
    loss = ((model(x) - x @ target) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    before = time.perf_counter()
    if swarm is not None:
        swarm.step(loss=value, samples=len(x))
    if now > warm:
        inside.append(time.perf_counter() - before)
        took.append(time.monotonic() - now)
print("RESULT " + json.dumps({"rate": len(took) / sum(took), "step_ms": 1e3 * sorted(took)[len(took) // 2],
      "inside_median_ms": 1e3 * sorted(inside)[len(inside) // 2], "inside_mean_ms": 1e3 * sum(inside) / len(inside)}),
      flush=True)
os._exit(0)
"""
PEERD = [sys.executable, "-m", "peerd.cli.main"]
SIZES = {  # depth and batch that give about so many parameters in layers of a width
    1.1e6: (4, 64),
    25e6: (8, 32),
    100e6: (12, 16),
    150e6: (12, 16),
}


def environment(parameters: float, nodes: int, seconds: float, checkout: Path | None, folder: str) -> dict[str, str]:
    """For one run; without a checkout it is one without peerd."""
    depth, batch = SIZES.get(parameters, (12, 16))
    cores = len(os.sched_getaffinity(0))
    told = {
        "WIDTH": str(int((parameters / depth) ** 0.5)),
        "DEPTH": str(depth),
        "BATCH": str(batch),
        "SECONDS": str(seconds),
        "THREADS": str(max(1, cores // nodes)),
        "XDG_RUNTIME_DIR": folder,
        "XDG_STATE_HOME": f"{folder}/state",
    }
    if checkout is not None:
        told |= {"WITH": "1", "PYTHONPATH": str(checkout)}
    return {**os.environ, **told}


def run(
    parameters: float, nodes: int, seconds: float, checkout: Path | None, flags: Sequence[str] = ()
) -> list[dict[str, float]]:
    """What each node's script found, and how many exchanges its node made in all. All train at once."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        env = environment(parameters, nodes, seconds, checkout, folder)
        processes: list[subprocess.Popen[str]] = []
        for node in range(nodes):
            command = [sys.executable, str(script)]
            if checkout is not None:
                base = 17946 + os.getpid() % 1000
                join = ["--join", f"127.0.0.1:{base}"] if node else []
                start = ["start", str(script), "--name", f"n{node}", "--bind", f"127.0.0.1:{base + node}"]
                command = [*PEERD, *start, *join, "--wait-for", str(nodes), *flags]
            said = subprocess.PIPE
            processes.append(
                subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT, text=True, cwd=folder)
            )
            time.sleep(1.5 if checkout is not None and nodes > 1 else 0)
        found = []
        for process in processes:
            assert process.stdout is not None, "it is piped"
            said_lines = []
            for line in process.stdout:
                said_lines.append(line)
                if "RESULT " in line:
                    found.append(json.loads(line.split("RESULT ", 1)[1]))
                    break
            else:
                raise SystemExit(f"a node ended without a result:\n{''.join(said_lines)}")
        for node, one in enumerate(found if checkout is not None else []):
            asked = subprocess.run(
                [*PEERD, "status", "--name", f"n{node}", "--format", "json"], env=env, cwd=folder, capture_output=True
            )
            one["exchanges"] = json.loads(asked.stdout)["exchanges"]
        for process in processes:
            process.kill()
            process.wait()
        return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", default="1.1e6,25e6,100e6")
    parser.add_argument("--nodes", default="1,2")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trigger", help="as peerd start takes it")
    parser.add_argument("--beside", type=Path, help="another checkout, measured in the same rounds")
    told = parser.parse_args()
    here = Path(__file__).parents[1]
    flags = ["--trigger", told.trigger] if told.trigger else []
    checkouts = {"peerd": here} | ({"beside": told.beside.resolve()} if told.beside else {})
    for nodes in map(int, told.nodes.split(",")):
        for parameters in map(float, told.parameters.split(",")):
            ratios: dict[str, list[float]] = {name: [] for name in checkouts}
            inside: dict[str, list[float]] = {name: [] for name in checkouts}
            exchanges: dict[str, list[float]] = {name: [] for name in checkouts}
            step_ms = []
            for _ in range(told.rounds):
                plain = run(parameters, nodes, told.seconds, None)
                step_ms += [found["step_ms"] for found in plain]
                without = statistics.mean(found["rate"] for found in plain)
                for name, checkout in checkouts.items():
                    found = run(parameters, nodes, told.seconds, checkout, flags)
                    exchanges[name].append(statistics.mean(one["exchanges"] for one in found))
                    ratios[name].append(statistics.mean(one["rate"] for one in found) / without)
                    inside[name].append(statistics.mean(one["inside_median_ms"] for one in found))
            for name, values in ratios.items():
                shown = " ".join(f"{value:.3f}" for value in values)
                print(
                    f"{parameters / 1e6:6.1f}M parameters, {nodes} node{'s' * (nodes > 1)}, a step of "
                    f"{statistics.median(step_ms):.1f} ms: {name} {statistics.median(values):.3f} of the rate without "
                    f"({shown}), in swarm.step {statistics.median(inside[name]):.3f} ms (median), "
                    f"{statistics.median(exchanges[name]):.0f} exchanges",
                    flush=True,
                )


if __name__ == "__main__":
    main()
