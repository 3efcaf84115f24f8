"""What the experiments over the simulator share: a cell that is a scenario, learning rates that are swept, rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from peerd.reproduce.controls import forgetful, stale, unpacked
from peerd.reproduce.experiment import Cell, Curve, Result, Run
from peerd.reproduce.statistics import Estimate, estimate
from peerd.simulation.laboratory import run as simulated
from peerd.simulation.options import Scenario
from peerd.simulation.outcome import Target
from peerd.training.modes.own_mode import adopted
from peerd.transport.errors import UserError

Settings = Mapping[str, Any]
"""Of a `Scenario`, without its seed."""

FORGETFUL, STALE, UNPACKED = "forgetful", "stale", "unpacked"
CONTROLS = {
    FORGETFUL: f"{forgetful.__file__}:Forgetful", STALE: f"{stale.__file__}:Stale",
    UNPACKED: f"{unpacked.__file__}:Unpacked",
}  # fmt: skip
"""Words of cells for controls that are no modes of peerd: where their files are, is no setting."""

KEPT = (
    "accuracy", "accuracy_mean", "accuracy_worst", "loss", "error", "bytes_sent_total", "virtual_seconds", "steps",
    "exchanges", "rounds", "consensus_distance", "computing_share", "staleness", "series", "peers", "mean_bias",
)  # fmt: skip


def measure(cell: Cell) -> Result:
    """Run the scenario with the cell's seed. Raises UserError, for a broken invariant too."""
    settings = dict(cell.settings)
    if settings["mode"] in CONTROLS:
        settings["mode"] = adopted(CONTROLS[settings["mode"]])
    with np.errstate(over="ignore", invalid="ignore"):  # some arms are there to diverge
        outcome = simulated(Scenario(**{"faults": "none", **settings, "seed": cell.seed}))
    if violations := outcome.result["violations"]:
        raise UserError(f"{cell.tag}, seed {cell.seed}: {violations[0]}")
    result = {name: outcome.result[name] for name in KEPT if name in outcome.result}
    for name, value in result.items():
        if isinstance(value, float) and not math.isfinite(value):
            result[name] = None
    return result


@dataclass(frozen=True, slots=True)
class Arm:
    """A method with its learning rate, and what every seed came to."""

    tag: str
    lr: float | None
    results: Sequence[Result]

    def mean(self, figure: Callable[[Result], float]) -> Estimate:
        """Over the seeds."""
        return estimate([figure(result) for result in self.results])

    @property
    def accuracy(self) -> Estimate:
        """Of the averaged model on the test examples."""
        return self.mean(accuracy)

    @property
    def bytes(self) -> Estimate:
        """Sent by a peer, on all its lines, membership and all."""
        return self.mean(bytes_of)

    def row(self, **more: Any) -> dict[str, Any]:
        """Of the table."""
        between = self.accuracy
        return {
            "arm": self.tag,
            "lr": "task's" if self.lr is None else self.lr,
            "test accuracy": f"{between.mean:.4f} [{between.low:.4f}, {between.high:.4f}]",
            "MB a peer": self.bytes.mean / 1e6,
            "virtual s": self.mean(lambda result: float(result["virtual_seconds"])).mean,
            **more,
        }


def accuracy(result: Result) -> float:
    """On the test examples; a model that is no number is right as often as chance, and counts as never."""
    value = result.get("accuracy")
    return 0.0 if value is None else float(value)


def bytes_of(result: Result) -> float:
    """Of a peer."""
    return float(result["bytes_sent_total"]) / int(result["peers"])


def validation(result: Result) -> float:
    """The accuracy at the last look, on the validation examples."""
    looks = [value for value in result["series"]["accuracy"] if value is not None]
    return float(looks[-1]) if looks else 0.0


def time_to(result: Result, accuracy: float) -> float:
    """Virtual seconds until the averaged model reached it on the validation examples, between two looks on a straight
    line; infinity: never."""
    series = result["series"]
    looks = zip(series["accuracy"], series["seconds"], series["bytes_sent"], strict=True)
    crossed = Target("accuracy", accuracy).crossed(looks)
    return math.inf if crossed is None else crossed[0]


def times_sooner(slow: Arm, fast: Arm) -> Estimate:
    """How many times sooner `fast` has 95 % of what `slow` has in the end, seed by seed; 0: never."""
    times = []
    for one, other in zip(slow.results, fast.results, strict=True):
        goal = 0.95 * validation(one)
        took = time_to(other, goal)
        times.append(time_to(one, goal) / took if 0 < took < math.inf else 0.0)
    return estimate(times)


def course(arm: Arm) -> Curve:
    """The accuracy on the validation examples over virtual seconds, of the first seed."""
    series = arm.results[0]["series"]
    looks = [(at, value) for at, value in zip(series["seconds"], series["accuracy"], strict=True) if value is not None]
    return Curve(arm.tag, [at for at, _ in looks], [value for _, value in looks])


def differences(first: Arm, second: Arm, figure: Callable[[Result], float] = accuracy) -> Estimate:
    """Of the two, seed by seed: they share the task and the start."""
    pairs = zip(first.results, second.results, strict=True)
    return estimate([figure(one) - figure(other) for one, other in pairs])


def ratios(first: Arm, second: Arm, figure: Callable[[Result], float] = bytes_of) -> Estimate:
    """The first over the second, seed by seed."""
    pairs = zip(first.results, second.results, strict=True)
    return estimate([figure(one) / figure(other) for one, other in pairs])


def run_arms(run: Run, arms: Mapping[str, Settings], seeds: Sequence[int]) -> dict[str, Arm]:
    """Each with every seed, all at once; an arm's `lr` is as it says."""
    cells = [Cell(tag, seed, settings) for tag, settings in arms.items() for seed in seeds]
    results = iter(run(cells))
    return {tag: Arm(tag, settings.get("lr"), [next(results) for _ in seeds]) for tag, settings in arms.items()}


def tuned(
    run: Run, arms: Mapping[str, Settings], lrs: Sequence[float], sweep_seeds: Sequence[int], seeds: Sequence[int]
) -> dict[str, Arm]:
    """Each with the learning rate that does best on the validation examples over `sweep_seeds`, then with all seeds."""
    swept = {(tag, lr): {**settings, "lr": lr} for tag, settings in arms.items() for lr in lrs}
    cells = [Cell(tag, seed, settings) for (tag, _), settings in swept.items() for seed in sweep_seeds]
    results = iter(run(cells))
    scores = {key: sum(validation(next(results)) for _ in sweep_seeds) for key in swept}
    best = {tag: max(lrs, key=lambda lr, tag=tag: scores[tag, lr]) for tag in arms}  # type: ignore[misc]
    return run_arms(run, {tag: {**settings, "lr": best[tag]} for tag, settings in arms.items()}, seeds)
