"""How does a round's time grow with the peers: parameter server, tree, ring and halving in the simulator, equal links.

    python benchmarks/scaling.py [--most 256] [--only tree:2 ...] [--format json] [--report scaling.html]

One round of a model of 4 MB on lines of 100 Mbit/s both ways, 0.2 ms apart, with the production modes; times are told
in transfers of the whole model over one line. The server's model is a 20th of that: in a first round of more than 10 s
workers push again. Fitted: a + b * peers and a + b * log2(peers). Also told: the bytes that a node sends over 2(p-1)/p
of the model, the law of the ring.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from peerd.simulation.network import BYTES_PER_MBIT, Profile, uniform
from peerd.simulation.problems import BytesOnly
from peerd.simulation.report import page, picture, table
from peerd.simulation.swarm import Swarm
from peerd.simulation.world import World
from peerd.training.mode_settings import ModeSettings

WAYS = ("parameter server", "tree:2", "ring", "halving")
LATENCY_S = 0.0002
MBIT = 100.0
COMPUTE_S = 0.01
SERVED_SHARE = 20


def run(peers: int, parameters: int, seed: int, steps: int, mode: str, **told: Any) -> tuple[float, int]:
    """Virtual seconds until all have ended, and the bytes of the model's messages that the median node sends."""
    swarm = Swarm(
        World(seed), peers, BytesOnly(seed, parameters, steps), mode=mode, steps=steps,
        told=ModeSettings(codec="float32", **told), compute=f"fixed:{COMPUTE_S}",
        topology=uniform(Profile(LATENCY_S, uplink_mbit=MBIT, downlink_mbit=MBIT), peers),
    )  # fmt: skip
    swarm.start_formed()
    assert swarm.run(3600, swarm.finished), "not ended in an hour"
    assert not swarm.verdicts, "nobody died"
    return max(trainer.trained_until for trainer in swarm.trainers), sorted(
        node.bytes_sent for node in swarm.nodes.values()
    )[peers // 2]


def measure(way: str, peers: int, parameters: int, seed: int) -> dict[str, Any]:
    """One round: of a server, what a second and third step add to a first; else the one that ends a run."""
    began = time.perf_counter()
    if way == "parameter server":
        parameters //= SERVED_SHARE
        one, three = (run(peers, parameters, seed, steps, mode="hardsync") for steps in (1, 3))
        seconds, sent = (three[0] - one[0]) / 2 - COMPUTE_S, (three[1] - one[1]) // 2
    else:
        seconds, sent = run(peers, parameters, seed, 1, mode="allreduce", overlap="blocking", topology=way)
        seconds -= COMPUTE_S
    transfers = seconds * MBIT * BYTES_PER_MBIT / (4 * parameters)
    share = sent / (2 * (peers - 1) / peers * 4 * parameters)
    return {
        "way": way,
        "peers": peers,
        "seconds": seconds,
        "transfers": transfers,
        "bytes_sent": sent,
        "of_ring_law": share,
        "simulated_in_s": time.perf_counter() - began,
    }


def r_squared(across: list[float], seconds: list[float]) -> float:
    """Of the best straight line."""
    slope, start = np.polyfit(across, seconds, 1)
    left = np.asarray(seconds) - (slope * np.asarray(across) + start)
    return float(1 - left.var() / np.var(seconds))


def fits(rows: list[dict[str, Any]], ways: list[str]) -> list[dict[str, Any]]:
    found = []
    for way in ways:
        mine = [row for row in rows if row["way"] == way]
        peers, times = [float(row["peers"]) for row in mine], [row["transfers"] for row in mine]
        found.append(
            {
                "way": way,
                "r2_linear": r_squared(peers, times),
                "r2_logarithmic": r_squared(list(np.log2(peers)), times),
                "transfers_per_peer": float(np.polyfit(peers, times, 1)[0]),
                "transfers_per_doubling": float(np.polyfit(np.log2(peers), times, 1)[0]),
            }
        )
    return found


def report(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> str:
    """The page with the plots."""

    def draw(axes: Any) -> None:
        for axis, scale in zip(axes, ("linear", "log"), strict=True):
            for way in dict.fromkeys(row["way"] for row in rows):
                mine = [row for row in rows if row["way"] == way]
                seconds = [row["transfers"] for row in mine]
                axis.plot([row["peers"] for row in mine], seconds, marker="o", markersize=3, linewidth=1.2, label=way)
            axis.set_xscale(scale, **({"base": 2} if scale == "log" else {}))
            axis.set_title("one round, in transfers of the whole model", fontsize=10)
            axis.set_xlabel("peers" if scale == "linear" else "peers, doubling")
            axis.grid(alpha=0.3)
        axes[1].set_ylim(0, 24)
        axes[0].legend(fontsize=8)

    parts = [picture(1, draw)]
    parts += [f"<h2>{each['way']}</h2>{table(each)}" for each in found]
    parts += ["<h2>Measured</h2>", *(table(row) for row in rows)]
    return page("peerd, rounds and peers", "A round's time and the number of peers", "".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=256)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--only", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--report", type=Path, help="write the plots to this .html file")
    options = parser.parse_args()
    sizes = [2**power for power in range(1, options.most.bit_length()) if 2**power <= options.most]
    rows: list[dict[str, Any]] = []
    for peers, way in itertools.product(sizes, options.only):
        rows.append(measure(way, peers, options.parameters, options.seed))
        print(rows[-1], file=sys.stderr, flush=True)
    found = fits(rows, options.only)
    if options.report:
        options.report.write_text(report(rows, found), encoding="utf-8")
    if options.format == "json":
        print(json.dumps({"rows": rows, "fits": found}))
        return
    shown = Table("peers", *options.only, "bytes / ring's law", "simulated in, s")
    for count in sizes:
        mine = [row for row in rows if row["peers"] == count]
        seconds = [f"{row['transfers']:.2f}" for row in mine]
        shares = ", ".join(f"{row['of_ring_law']:.4f}" for row in mine if row["way"] in ("ring", "halving"))
        shown.add_row(str(count), *seconds, shares, f"{sum(row['simulated_in_s'] for row in mine):.1f}")
    Console(width=120).print(shown)
    for each in found:
        print(f"{each['way']:<17} R2 linear {each['r2_linear']:.5f}, logarithmic {each['r2_logarithmic']:.5f}")


if __name__ == "__main__":
    main()
