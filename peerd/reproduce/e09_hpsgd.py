"""E9, HPSGD: what does training through a synchronisation save, where communication is dearer than computing?"""

from __future__ import annotations

from typing import Any

from peerd.reproduce import swarms
from peerd.reproduce.experiment import Criterion, Experiment, Findings, Plot, Run, Size, points
from peerd.reproduce.swarms import STALE, Settings, course, differences, times_sooner, tuned

STEP_S = 0.1
TASK, PARAMETERS = "teacher:32-64-10", 2762
PLANS: dict[Size, dict[str, Any]] = {
    Size.TINY: {"peers": 2, "steps": 12, "ratios": [4], "seeds": 1, "sweep": 1, "lrs": [0.1]},
    Size.QUICK: {"peers": 4, "steps": 200, "ratios": [1, 4, 8, 16], "seeds": 2, "sweep": 1, "lrs": [0.05, 0.2, 0.5]},
    Size.FULL: {
        "peers": 8, "steps": 400, "ratios": [1, 4, 8, 16], "seeds": 5, "sweep": 1,
        "lrs": [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0],
    },
}  # fmt: skip
OVERLAPS = ("blocking", "hpsgd", "delayed")
SOONER_MIN, POINTS_MIN = 1.6, 0.05
MORE_STEPS_MAX = 3.0


def settings(overlap: str, ratio: float, peers: int, steps: int) -> dict[str, Any]:
    """An all-reduce of the model over such lines takes `ratio` steps, by the ring's formula. Who does not wait makes
    more steps in the same time, here up to MORE_STEPS_MAX times as many."""
    ring_bytes = 2 * (peers - 1) / peers * 4 * PARAMETERS
    mbit = ring_bytes / (ratio * STEP_S) / 125_000
    waits = overlap == "blocking"
    steps = steps if waits else round(steps * min(MORE_STEPS_MAX, 1 + ratio))
    spans_s = steps * STEP_S * (1 + (ratio if waits else 0))
    return {
        "peers": peers, "problem": TASK, "mode": "allreduce", "overlap": overlap, "topology": "ring", "steps": steps,
        "compute": f"fixed:{STEP_S}", "uplink_mbit": mbit, "downlink_mbit": mbit, "look_every": max(0.1, spans_s / 40),
        "momentum": 0.0, "robust": False,
    }  # fmt: skip


def study(size: Size, run: Run) -> Findings:
    """The time to 95 % of what blocking reaches in the end, by the validation examples."""
    plan = PLANS[size]
    arms = [(overlap, ratio) for ratio in plan["ratios"] for overlap in OVERLAPS]
    scenarios: dict[str, Settings] = {
        f"{overlap}, {ratio}": settings(overlap, ratio, plan["peers"], plan["steps"]) for overlap, ratio in arms
    }
    last = plan["ratios"][-1]
    stale = f"stale, no replica, {last}"
    scenarios[stale] = {**scenarios[f"hpsgd, {last}"], "mode": STALE}
    found = tuned(run, scenarios, plan["lrs"], range(plan["sweep"]), range(plan["seeds"]))
    lost = differences(found[f"hpsgd, {last}"], found[stale])
    sooner = {
        (overlap, ratio): times_sooner(found[f"blocking, {ratio}"], found[f"{overlap}, {ratio}"])
        for overlap, ratio in arms
    }
    least = min((sooner["hpsgd", ratio] for ratio in plan["ratios"]), key=lambda each: each.mean)
    ratios = [float(ratio) for ratio in plan["ratios"]]
    said = ", ".join(f"{sooner['hpsgd', ratio].mean:.2f} times at {ratio}" for ratio in plan["ratios"])
    delayed = ", ".join(f"{sooner['delayed', ratio].mean:.2f}" for ratio in plan["ratios"])
    seen = (
        f"It was sooner here by {said} times the cost of a step for an all-reduce; delayed averaging, which keeps "
        f"local progress, by {delayed}; without local progress, gradients as stale as at {last} ended "
        f"{100 * lost.mean:.2f} points lower."
    )
    curves = [points(overlap, ratios, [sooner[overlap, ratio] for ratio in plan["ratios"]]) for overlap in OVERLAPS]
    series = [course(found[tag]) for tag in (*(f"{overlap}, {last}" for overlap in OVERLAPS), stale)]
    plots = [
        Plot("times sooner than blocking to 95 % of its accuracy", "all-reduce / step", curves),
        Plot(f"validation accuracy, all-reduce / step {last}, seed 0", "virtual s", series),
    ]
    rows = [
        found[f"{overlap}, {ratio}"].row(**{"times sooner": sooner[overlap, ratio].mean}) for overlap, ratio in arms
    ] + [found[stale].row(**{"times sooner": times_sooner(found[f"blocking, {last}"], found[stale]).mean})]
    return Findings(seen, {"sooner": least, "replica": lost}, plots, rows)


EXPERIMENT = Experiment(
    "E9",
    "training through the synchronisation",
    "HPSGD, arXiv:2009.02701",
    "HPSGD claimed that workers which go on training during an all-reduce, and merge that progress one window later, "
    "learn sooner than workers which wait.",
    (
        Criterion("sooner", "times sooner than blocking to 95 % of its accuracy, at the worst ratio", least=SOONER_MIN),
        Criterion("replica", "points above stale updates without a replica, at 16 (share)", least=POINTS_MIN),
    ),
    swarms.measure,
    study,
    notes=(
        "Virtual time; an all-reduce of the model after each step when blocking. Plain SGD, as in "
        "the paper: with momentum a window overshoots, and what is added one window late then grows "
        "(training/modes/allreduce.py).",
        "The stale one is no mode of peerd's (peerd/reproduce/controls/stale.py).",
        "Sooner is when 95 % is first reached: with the dearest all-reduce hpsgd falls back from there, and ends below "
        "blocking, which makes its steps in up to seven times the time.",
    ),
)
