"""E5b: is the adaptive trigger better than a fixed period that sends as many bytes?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peerd.reproduce import swarms
from peerd.reproduce.e05_trigger import gossip
from peerd.reproduce.experiment import Criterion, Experiment, Findings, NotRun, Plot, Run, Size, points
from peerd.reproduce.swarms import Arm, accuracy, differences, ratios, run_arms, tuned

PLANS: dict[Size, dict[str, Any]] = {
    Size.TINY: {"steps": 8, "seeds": 1, "sweep": 1, "lrs": [0.1], "shards": ["iid"], "periods": [2, 8]},
    Size.QUICK: {
        "steps": 200, "seeds": 3, "sweep": 1, "lrs": [0.05, 0.1], "shards": ["iid", "sorted", "dirichlet:0.3"],
        "periods": [2, 3, 4, 6, 8, 12, 16, 24],
    },
    Size.FULL: {
        "steps": 1000, "seeds": 5, "sweep": 2, "lrs": [0.025, 0.05, 0.1], "shards": ["iid", "sorted", "dirichlet:0.3"],
        "periods": [2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48],
    },
}  # fmt: skip
THRESHOLD = 0.2
KEYS = {"iid": "iid", "sorted": "sorted", "dirichlet:0.3": "dirichlet"}
PROBE_SEED = 0  # the period of equal bytes is chosen by this seed's bytes


def study(size: Size, run: Run) -> Findings:
    """For each split of the data: the trigger, then the period whose bytes are nearest to its own."""
    plan = PLANS[size]
    steps, seeds = plan["steps"], range(plan["seeds"])
    names = {shard: f"change:{THRESHOLD:g}, {shard}" for shard in plan["shards"]}
    adaptive = tuned(
        run,
        {names[shard]: gossip(steps, f"change:{THRESHOLD:g}", shard=shard) for shard in plan["shards"]},
        plan["lrs"], range(plan["sweep"]), seeds,
    )  # fmt: skip
    probes = run_arms(
        run, {str(period): {**gossip(steps, f"period:{period}"), "lr": plan["lrs"][0]} for period in plan["periods"]},
        [PROBE_SEED],
    )  # fmt: skip
    periods = {shard: _nearest(plan["periods"], probes, adaptive[name]) for shard, name in names.items()}
    fixed = tuned(
        run,
        {f"period:{each}, {shard}": gossip(steps, f"period:{each}", shard=shard) for shard, each in periods.items()},
        plan["lrs"], range(plan["sweep"]), seeds,
    )  # fmt: skip
    pairs = {shard: (adaptive[names[shard]], fixed[f"period:{period}, {shard}"]) for shard, period in periods.items()}
    gains = {shard: differences(*pair) for shard, pair in pairs.items()}
    worst = {shard: differences(*pair, _worst) for shard, pair in pairs.items()}
    rows = [arm.row(**{"worst peer": arm.mean(_worst).mean}) for pair in pairs.values() for arm in pair]
    for shard, pair in pairs.items():
        rows[2 * list(pairs).index(shard)]["bytes / fixed's"] = ratios(*pair).mean
    places = [float(place) for place in range(len(pairs))]
    across = ", ".join(f"{place}: {shard}" for place, shard in enumerate(pairs))
    plots = [
        Plot("points gained by the trigger (share)", across,
             [points("averaged model", places, list(gains.values()), line=False),
              points("worst peer", places, list(worst.values()), line=False)]),
        Plot("bytes of the trigger / of the period", across,
             [points("", places, [ratios(*pair) for pair in pairs.values()], line=False)]),
    ]  # fmt: skip
    said = ", ".join(
        f"{100 * gain.mean:+.2f} points on {shard} data [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]"
        for shard, gain in gains.items()
    )
    seen = f"At about equal bytes the trigger's averaged model stood against the fixed period's: {said}."
    figures = {key: gains.get(shard, NotRun("not at this size")) for shard, key in KEYS.items()}
    return Findings(seen, figures, plots, rows)


def _nearest(periods: Sequence[int], probes: dict[str, Arm], arm: Arm) -> int:
    """The period whose bytes are nearest to the arm's."""
    return min(periods, key=lambda period: abs(probes[str(period)].bytes.mean / arm.bytes.mean - 1))


def _worst(result: dict[str, Any]) -> float:
    value = result.get("accuracy_worst")
    return accuracy(result) if value is None else float(value)


EXPERIMENT = Experiment(
    "E5b",
    "the trigger beside a fixed period, at equal bytes",
    "the honest control for Ho, Wu, Liu 2018, doi 10.1109/CCGRID.2018.00043",
    "That exchanging by change saves bytes does not say that it beats simply exchanging less often: a fixed "
    "period saves as many.",
    tuple(
        Criterion(
            KEYS[shard], f"{shard} data: accuracy of the trigger minus the fixed period's (share): above 0?", least=0.0
        )
        for shard in KEYS
    ),
    swarms.measure,
    study,
    notes=("The period is the one of a list whose bytes, on iid data and one seed, are nearest to the trigger's.",),
)
