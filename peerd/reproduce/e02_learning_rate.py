"""E2, Rudra: must the learning rate fall with the staleness?"""

from __future__ import annotations

from typing import Any

from peerd.reproduce import swarms
from peerd.reproduce.experiment import Criterion, Curve, Experiment, Findings, NotRun, Plot, Run, Size, points
from peerd.reproduce.statistics import Estimate
from peerd.reproduce.swarms import Settings, accuracy, course, differences, run_arms, tuned

PLANS: dict[Size, dict[str, Any]] = {
    Size.TINY: {"learners": 3, "steps": 6, "n": [4], "seeds": 1, "sweep": 1, "lrs": [0.05]},
    Size.QUICK: {"learners": 30, "steps": 60, "n": [15, 30], "seeds": 2, "sweep": 1, "lrs": [0.05, 0.1, 0.2]},
    Size.FULL: {
        "learners": 30, "steps": 300, "n": [15, 30], "seeds": 5, "sweep": 2, "lrs": [0.0125, 0.025, 0.05, 0.1, 0.2],
    },
}  # fmt: skip
ERROR_MIN, WITHIN = 0.8, 0.01
RATES = {"constant": "alpha0", "mean": "alpha0/n", "staleness": "alpha0/staleness"}


def settings(learners: int, steps: int, mode: str) -> dict[str, Any]:
    """Minibatches of 16, momentum .9 at the server, steps of a second that vary by a tenth.

    The rate falls towards the end, as the paper's does: at a constant one the last look of a run is worth 10 points.
    """
    return {
        "peers": learners, "problem": "teacher", "mode": mode, "steps": steps, "batch": 16,
        "exchange": "gradients", "server_optimizer": "sgd:momentum=0.9",
        "compute": "lognormal:1:0.1", "look_every": steps / 10, "robust": False, "schedule": "cosine",
    }  # fmt: skip


def study(size: Size, run: Run) -> Findings:
    """alpha0 is what hardsync does best with."""
    plan = PLANS[size]
    learners, steps, seeds = plan["learners"], plan["steps"], range(plan["seeds"])
    scenarios: dict[str, Settings] = {"hardsync": settings(learners, steps, "hardsync")}
    hard = tuned(run, scenarios, plan["lrs"], range(plan["sweep"]), seeds)["hardsync"]
    soft = {
        (n, rate): {**settings(learners, steps, f"softsync:{n}:{rate}"), "lr": hard.lr}
        for n in plan["n"]
        for rate in RATES
    }
    names = {key: f"softsync, n {key[0]}, {RATES[key[1]]}" for key in soft}
    found = run_arms(run, {names[key]: told for key, told in soft.items()}, seeds)
    arms = {key: found[names[key]] for key in soft}
    errors = {n: arms[n, "constant"].mean(_error) for n in plan["n"]}
    least = min(errors.values(), key=lambda each: each.mean)
    figures: dict[str, Estimate | NotRun] = {"plain": least}
    for rate in ("mean", "staleness"):
        figures[rate] = max((differences(hard, arms[n, rate]) for n in plan["n"]), key=lambda each: each.mean)
    said = "; ".join(
        f"n = {n}: " + ", ".join(f"{RATES[rate]} {arms[n, rate].mean(_error).mean:.1%}" for rate in RATES)
        for n in plan["n"]
    )
    seen = f"Test error here, where hardsync's was {hard.mean(_error).mean:.1%}: {said}."
    ns = [float(n) for n in plan["n"]]
    curves = [points(RATES[rate], ns, [arms[n, rate].mean(_error) for n in plan["n"]]) for rate in RATES]
    curves.append(Curve("hardsync", ns, [hard.mean(_error).mean] * len(ns)))
    series = [course(arm) for arm in (hard, *arms.values())]
    plots = [Plot("test error", "n", curves), Plot("validation accuracy, seed 0", "virtual s", series)]
    return Findings(seen, figures, plots, [arm.row() for arm in (hard, *arms.values())])


def _error(result: dict[str, Any]) -> float:
    return 1 - accuracy(result)


EXPERIMENT = Experiment(
    "E2",
    "the learning rate of stale gradients",
    "Rudra, arXiv:1509.04210 and 1511.05950",
    "Rudra claimed that with very stale gradients training fails at the usual learning rate, and is as accurate as "
    "synchronous training if the rate is divided by the staleness.",
    (
        Criterion("plain", "error with alpha0 at n >= 15 (the better n)", least=ERROR_MIN),
        Criterion("mean", "accuracy lost against hardsync with alpha0/n (share, worst n)", most=WITHIN),
        Criterion("staleness", "accuracy lost against hardsync with alpha0/staleness (share, worst n)", most=WITHIN),
    ),
    swarms.measure,
    study,
    notes=(
        "alpha0 is hardsync's best, by the validation examples. Workers push gradients, the server has the momentum, "
        "as in the paper.",
        "What bounds a hostile member's push is off: it would also bound one that diverges.",
    ),
)
