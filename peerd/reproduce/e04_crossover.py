"""E4, Jin et al.: up to how many nodes is gossip sooner than a synchronous all-reduce?"""

from __future__ import annotations

import math
from typing import Any

from peerd.reproduce import swarms
from peerd.reproduce.experiment import Criterion, Curve, Experiment, Findings, NotRun, Plot, Run, Size
from peerd.reproduce.statistics import Estimate
from peerd.reproduce.swarms import Settings, course, differences, run_arms, times_sooner, tuned, validation

STEP_S, SIGMA, MBIT = 0.1, 0.3, 100.0
PLANS: dict[Size, dict[str, Any]] = {
    Size.TINY: {"peers": [2], "most": 4, "steps": 10, "seeds": 1, "sweep": 1, "lrs": [0.1]},
    Size.QUICK: {"peers": [8, 32], "most": 64, "steps": 60, "seeds": 2, "sweep": 1, "lrs": [0.1, 0.2]},
    Size.FULL: {
        "peers": [8, 32], "most": 128, "steps": 600, "seeds": 5, "sweep": 2,
        "lrs": [0.025, 0.05, 0.1, 0.2, 0.4, 0.8],
    },
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"mode": "allreduce", "overlap": "blocking", "topology": "tree:2"},
    "gossip-pull": {"mode": "gossip-pull", "trigger": "always", "codec": "float32"},
    "elastic": {"mode": "elastic", "trigger": "always", "codec": "float32"},
}
SOONER_MIN, WITHIN = 1.5, 0.015


def settings(method: str, peers: int, steps: int) -> dict[str, Any]:
    """Steps as long as lognormal stragglers make them, lines of 100 Mbit/s, minibatches of 16. Who waits for nobody
    makes about twice as many steps in the same time."""
    return {
        "peers": peers, "problem": "teacher", "steps": steps if method == "synchronous" else 2 * steps, "batch": 16,
        "compute": f"lognormal:{STEP_S}:{SIGMA}", "uplink_mbit": MBIT, "downlink_mbit": MBIT,
        "look_every": max(0.1, steps * STEP_S / 30), **MODES[method],
    }  # fmt: skip


def study(size: Size, run: Run) -> Findings:
    """E4b sweeps every method's learning rate; the last size has synchronous scaled by the rule, gossip as it is."""
    plan = PLANS[size]
    steps, seeds, most = plan["steps"], range(plan["seeds"]), plan["most"]
    scenarios: dict[str, Settings] = {
        f"{method}, {peers}": settings(method, peers, steps) for peers in plan["peers"] for method in MODES
    }
    arms = tuned(run, scenarios, plan["lrs"], range(plan["sweep"]), seeds)
    first = plan["peers"][0]
    base = arms[f"gossip-pull, {first}"].lr or 0.0
    scaled = min(4.0, math.sqrt(most / first)) * base
    ends = run_arms(
        run,
        {
            f"synchronous, {most}, scaled lr": {**settings("synchronous", most, steps), "lr": scaled},
            f"synchronous, {most}, lr of {first}": {**settings("synchronous", most, steps), "lr": base},
            f"gossip-pull, {most}, lr of {first}": {**settings("gossip-pull", most, steps), "lr": base},
        },
        seeds,
    )
    sooner = {
        peers: times_sooner(arms[f"synchronous, {peers}"], arms[f"gossip-pull, {peers}"]) for peers in plan["peers"]
    }
    lost = {peers: differences(arms[f"synchronous, {peers}"], arms[f"gossip-pull, {peers}"]) for peers in plan["peers"]}
    synchronous, _, gossip = ends.values()
    beyond = differences(synchronous, gossip, lambda result: validation(result))
    figures: dict[str, Estimate | NotRun] = {
        "sooner": min(sooner.values(), key=lambda each: each.mean),
        "lost": max(lost.values(), key=lambda each: each.mean),
        "large": beyond,
    }
    said = ", ".join(f"{sooner[peers].mean:.2f} times with {peers} nodes" for peers in plan["peers"])
    seen = (
        f"Here gossip-pull reached 95 % of the synchronous accuracy sooner by {said} (below 1: later); with {most} "
        f"nodes the synchronous run with a scaled learning rate ended {100 * beyond.mean:+.2f} points from gossip with "
        f"the unscaled one, each at the end of its own steps, which take unlike times."
    )
    peers_all = [float(peers) for peers in plan["peers"]]
    curves = [
        Curve(method, peers_all,
              [times_sooner(arms[f"synchronous, {peers}"], arms[f"{method}, {peers}"]).mean for peers in plan["peers"]])
        for method in MODES
    ]  # fmt: skip
    series = [
        course(arm)
        for arm in (*arms.values(), *ends.values())
        if arm.tag.split(", ")[1] in (str(plan["peers"][-1]), str(most))
    ]
    rows = [arm.row() for arm in (*arms.values(), *ends.values())]
    plots = [
        Plot("times sooner than synchronous to 95 % of its accuracy", "nodes", curves),
        Plot("validation accuracy, seed 0", "virtual s", series),
    ]
    notes = (
        f"The largest swarm has {most} nodes; 'scaled' is by the root of the growth, {scaled:.3g} against {base:.3g}.",
    )
    return Findings(seen, figures, plots, rows, notes)


EXPERIMENT = Experiment(
    "E4",
    "gossip beside synchronous training, by number of nodes",
    "Jin et al. 2016, arXiv:1611.04581",
    "The paper claimed that asynchronous training (gossip, elastic averaging) converges faster up to about 32 nodes, "
    "and that synchronous training scales better to about 100.",
    (
        Criterion(
            "sooner", "gossip-pull: times sooner, at the worse size up to 32, each with its best lr", least=SOONER_MIN
        ),
        Criterion("lost", "gossip-pull: final accuracy lost (share), at the worse size", most=WITHIN),
        Criterion(
            "large", "largest swarm: final accuracy of synchronous with scaled lr minus gossip's (share)", least=0.0
        ),
    ),
    swarms.measure,
    study,
    notes=(
        "Learning rates are swept for each method and size (E4b); the target is 95 % of what the synchronous run of "
        "the same seed reaches.",
        "Whether the paper averages before or after the gradient step is unknown; peerd's gossip-pull adds what it "
        "pulled between two steps. The step that hands it over may be any of the next.",
    ),
)
