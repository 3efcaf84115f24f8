"""How much memory does a node take for its model, when, and how long does what it does with it take?

    python benchmarks/memory.py [--parameters 50e6] [--nodes 2] [--seconds 30] [--times] [--format json]

Real daemons on this machine, each with a trainer that holds a bfloat16 model and moves all of it each step. A run has
four parts: after the attach nothing moves, then models are exchanged, then nothing moves again, then the run's flush.
Of each the most that any node took, of what the kernel says of its two processes (smaps_rollup), in bytes a parameter:
above what the daemon had before its script came, and the script before its attach. RSS of a daemon counts what it
shares with its script as its own; `node` is both processes' PSS, which counts it once.

A process cannot change its maps while the kernel counts them, tens of milliseconds for gigabytes: whoever wants memory
of the system meanwhile waits, and a daemon's loop with it. With --times nobody looks at memory.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from peerd.cli.demo.local_swarm import LocalSwarm
from peerd.transport.errors import UserError

TRAINER = """
import json, os, sys, time
import torch, peerd

folder, parameters, seconds, pause = sys.argv[1], int(float(sys.argv[2])), float(sys.argv[3]), float(sys.argv[4])
rank = os.environ["PEERD_RANK"]

def begin(part, **said):
    with open(f"{folder}/{rank}", "a") as file:
        file.write(json.dumps({"part": part, "pid": os.getpid(), "at": time.monotonic(), **said}) + chr(10))

torch.set_num_threads(1)
torch.manual_seed(0)
width = 1024
rows = max(1, parameters // width // 8)
layers = [torch.nn.Linear(width, rows, bias=False, dtype=torch.bfloat16) for _ in range(8)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
noise = (0.02 * torch.randn(width)).to(torch.bfloat16) * layers[0].weight.std()
with torch.no_grad():
    for layer in layers:
        layer.weight.mul_(1.0)
begin("alone")
time.sleep(2)
swarm = peerd.attach(model, optimizer)
swarm.step()
begin("attached")
time.sleep(5)
begin("exchanging")
took, until = [], time.monotonic() + seconds
while time.monotonic() < until:
    with torch.no_grad():
        for layer in layers:
            for block in layer.weight.split(4096):
                block.add_(torch.roll(noise, int(torch.randint(width, ()))) * torch.randn(len(block), 1).bfloat16())
    began = time.perf_counter()
    swarm.step()
    took.append(time.perf_counter() - began)
    time.sleep(pause)
begin("still", steps=len(took), step_median_ms=1e3 * sorted(took)[len(took) // 2], step_max_ms=1e3 * max(took))
time.sleep(5)
begin("flush")
swarm.finish()
begin("ended")
time.sleep(2)
begin("over")
"""
PARTS = ("attached", "exchanging", "still", "flush", "ended")
COUNTED = ("daemon_rss", "daemon_pss", "script_pss", "node")
EVERY_S = 0.1
FIELDS = re.compile(r"^(Rss|Pss|Pss_Anon|Pss_Shmem):\s+(\d+) kB", re.MULTILINE)


def taken(pid: int) -> dict[str, int]:
    """Bytes that the kernel counts for a process; nothing of one that is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return {}
    return {name: 1024 * int(count) for name, count in FIELDS.findall(text)}


class Node:
    """What is seen of one node from outside."""

    def __init__(self, name: str, notes: Path, *, weighed: bool) -> None:
        self.name = name
        self.daemon_pid = 0
        self.first_exchange_at = float("inf")
        self.loop_p99_s = 0.0
        self.peaks: dict[str, dict[str, float]] = {}
        self._notes = notes
        self._weighed = weighed
        self._alone: dict[str, dict[str, int]] = {}

    @property
    def notes(self) -> list[dict[str, Any]]:
        """What its script has noted, one a part."""
        return [json.loads(line) for line in self._notes.read_text().splitlines()] if self._notes.exists() else []

    def look(self, swarm: LocalSwarm) -> str:
        """Take a sample; returns the part that the script is in."""
        if not (notes := self.notes):
            return ""
        part, pid = notes[-1]["part"], notes[-1]["pid"]
        status = swarm.status(self.name)
        self.daemon_pid = self.daemon_pid or parent(pid)
        script, daemon = (taken(pid), taken(self.daemon_pid)) if self._weighed else ({}, {})
        if part == "alone":  # which ends with the attach: what that takes is not a part of it
            self._alone = self._alone or {"daemon": daemon, "script": script}
        elif part in PARTS and script and daemon:
            found = {
                "daemon_rss": daemon["Rss"] - self._alone["daemon"]["Rss"],
                "daemon_pss": daemon["Pss"] - self._alone["daemon"]["Pss"],
                "script_pss": script["Pss"] - self._alone["script"]["Pss"],
            }
            found["node"] = found["daemon_pss"] + found["script_pss"]
            peaks = self.peaks.setdefault(part, dict.fromkeys(found, 0))
            self.peaks[part] = {key: max(value, peaks[key]) for key, value in found.items()}
        if status["exchanges"] and part == "exchanging":
            self.first_exchange_at = min(self.first_exchange_at, time.monotonic())
        self.loop_p99_s = max(self.loop_p99_s, status["loop_latency_p99_s"])
        return str(part)


def parent(pid: int) -> int:
    """The process that started this one: the daemon, of a script."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def measure(
    parameters: float, nodes: int, seconds: float, pause_s: float, settings: dict[str, str], *, weighed: bool = True
) -> dict[str, Any]:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(TRAINER)
        arguments = [str(script), folder, str(parameters), str(seconds), str(pause_s)]
        with LocalSwarm(nodes, {"--wait-for": str(nodes), **settings}, arguments) as swarm:
            notes_of = [Path(folder) / str(rank) for rank in range(nodes)]
            seen = [Node(name, at, weighed=weighed) for name, at in zip(swarm.names, notes_of, strict=True)]
            exchanges: list[int] = []
            while True:
                parts = [node.look(swarm) for node in seen]
                if all(part in ("ended", "over") for part in parts) and not exchanges:
                    exchanges = [swarm.status(node.name)["exchanges"] for node in seen]
                if all(part == "over" for part in parts):
                    break
                if swarm.ended():
                    raise UserError(f"a node ended: {swarm.last_words(next(iter(swarm.ended())))}")
                time.sleep(EVERY_S)
            notes = [{note["part"]: note for note in node.notes} for node in seen]
    values = parameters
    first = [node.first_exchange_at - note["exchanging"]["at"] for node, note in zip(seen, notes, strict=True)]
    return {
        "parameters": parameters,
        "nodes": nodes,
        "exchanges": min(exchanges, default=0),
        "bytes_a_parameter": {
            part: {
                key: round(max(node.peaks[part][key] for node in seen if part in node.peaks) / values, 2)
                for key in COUNTED
            }
            for part in PARTS
            if any(part in node.peaks for node in seen)
        },
        "attach_s": round(max(note["attached"]["at"] - note["alone"]["at"] - 2 for note in notes), 2),
        "first_exchange_s": round(max(first), 2),
        "flush_s": round(max(note["ended"]["at"] - note["flush"]["at"] for note in notes), 2),
        "step_median_ms": round(statistics.median(note["still"]["step_median_ms"] for note in notes), 2),
        "step_max_ms": round(max(note["still"]["step_max_ms"] for note in notes), 1),
        "loop_latency_p99_ms": round(1e3 * max(node.loop_p99_s for node in seen), 1),
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=50e6)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two steps")
    parser.add_argument("--mode", default="gossip")
    parser.add_argument("--times", action="store_true", help="do not look at memory, which holds the nodes up")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    told = parser.parse_args()
    found = measure(
        told.parameters, told.nodes, told.seconds, told.pause, {"--mode": told.mode}, weighed=not told.times
    )
    found["mode"] = told.mode
    if told.format == "json":
        print(json.dumps(found))
        return
    for key, value in found.items():
        if key != "bytes_a_parameter":
            print(f"{key:<22}{value:>12}")
    if told.times:
        return
    print(
        f"\n{'bytes a parameter':<22}"
        + "".join(f"{key:>12}" for key in ("daemon_rss", "daemon_pss", "script_pss", "node"))
    )
    for part, row in found["bytes_a_parameter"].items():
        print(f"{part:<22}" + "".join(f"{value:>12.2f}" for value in row.values()))


if __name__ == "__main__":
    main()
