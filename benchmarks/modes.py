"""Does every mode train, what does it cost, and what does the death of a node do to it? Real daemons on this machine.

python benchmarks/modes.py [--task digits] [--peers 4] [--only NAME ...]     one row a mode, without and with a SIGKILL
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

RUNS = (  # options of `peerd demo`; each mode at its own defaults
    "gossip", "gossip-push", "gossip-pull", "push-sum", "elastic", "elastic:pairwise", "noloco", "diloco", "diloco:4",
    "allreduce", "allreduce --overlap delayed", "allreduce --overlap hpsgd", "allreduce --overlap blocking",
    "hardsync", "softsync:2", "async", "hardsync --topology adv:2", "softsync:2 --topology adv:2",
)  # fmt: skip


def run(task: str, peers: int, options: list[str]) -> dict[str, Any]:
    """One demo; its last line, or what it said instead."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "peerd.cli.main", "demo", "--task", task, "--peers", str(peers), *options]
        command += ["--format", "json", "--picture", str(Path(folder) / "run.png")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        result: dict[str, Any] = json.loads(lines[-1]) if lines else {"failures": [done.stderr.strip()[-200:]]}
        return result


def row(name: str, result: dict[str, Any]) -> str:
    """A row of a Markdown table."""
    if "accuracy_averaged_model" not in result:
        return f"| {name} | failed: {result['failures']} |"
    return (
        f"| {name} | {result['accuracy_averaged_model']:.4f} | {result['accuracy_worst']:.4f} | {result['steps']} "
        f"| {result['seconds']:.0f} | {result['bytes_sent_total'] / 1e6:.1f} | {result['consensus_distance']:.3%} "
        f"| {'-' if result['stalled_s'] is None else result['stalled_s']} | {'; '.join(result['failures']) or '-'} |"
    )


def main() -> None:
    """Run them one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=RUNS, choices=RUNS)
    options = parser.parse_args()
    print("| mode | averaged model | worst node | steps | seconds | MB sent | distance | stalled, s | failures |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in track(options.only, console=Console(stderr=True)):
        for kill in ([], ["--kill", "1@0.5"]):
            given = ["--mode", *name.split(" "), *kill]
            print(row(f"`{' '.join([name, *kill])}`", run(options.task, options.peers, given)), flush=True)


if __name__ == "__main__":
    main()
