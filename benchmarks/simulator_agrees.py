"""Does the simulator tell the truth? One swarm as real daemons on this machine and in the simulator, several seeds.

    python benchmarks/simulator_agrees.py [--task digits] [--peers 8] [--steps 400] [--seeds 0,1,2,3,4] [--format json]

The simulated step time is what the real run took for a step. Prints the accuracy of the averaged model and the bytes of
each, and how far their means are apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

PEERD = [sys.executable, "-c", "from peerd.cli.main import run; run()"]


def _peerd(*words: str) -> dict[str, Any]:
    done = subprocess.run([*PEERD, *words, "--format", "json"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"peerd {' '.join(words)}: {done.stderr or done.stdout}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--peers", default="8")
    parser.add_argument("--steps", default="400")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    options = parser.parse_args()
    rows = []
    for seed in options.seeds.split(","):
        common = ["--peers", options.peers, "--steps", options.steps, "--seed", seed]
        with tempfile.TemporaryDirectory() as folder:
            real = _peerd("demo", "--task", options.task, *common, "--picture", str(Path(folder) / "p.png"))
        step_s = real["seconds"] / float(options.steps)
        compute = ["--compute", f"lognormal:{step_s:.4f}:0.2"]
        told = _peerd("simulate", "--problem", options.task, "--faults", "none", "--join-over", "1", *compute, *common)
        row = {
            "seed": int(seed),
            "accuracy": (real["accuracy_averaged_model"], told["accuracy"]),
            "mb": (real["bytes_sent_total"] / 1e6, told["bytes_sent_total"] / 1e6),
            "exchanges": (real["exchanges"], told["exchanges"]),
            "step_ms": step_s * 1e3,
        }
        rows.append(row)
        print(f"seed {seed}: {row}", file=sys.stderr)
    accuracy = [fmean(row["accuracy"][side] for row in rows) for side in (0, 1)]
    megabytes = [fmean(row["mb"][side] for row in rows) for side in (0, 1)]
    summary = {
        "accuracy_real": accuracy[0],
        "accuracy_simulated": accuracy[1],
        "accuracy_points_apart": abs(accuracy[0] - accuracy[1]) * 100,
        "mb_real": megabytes[0],
        "mb_simulated": megabytes[1],
        "bytes_ratio": megabytes[1] / megabytes[0],
        "runs": rows,
    }
    if options.format == "json":
        print(json.dumps(summary))
        return
    for key, value in summary.items():
        if key != "runs":
            print(f"{key:<24}{value:.4f}")


if __name__ == "__main__":
    main()
