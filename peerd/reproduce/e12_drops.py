"""E12, SGP: which gossip keeps the swarm's mean where packets are lost and members come and go?"""

from __future__ import annotations

from typing import Any

from peerd.reproduce import swarms
from peerd.reproduce.experiment import Cell, Criterion, Curve, Experiment, Findings, Plot, Run, Size, points
from peerd.reproduce.statistics import Estimate, estimate
from peerd.reproduce.swarms import differences, tuned

PLANS: dict[Size, dict[str, Any]] = {
    Size.TINY: {"peers": 4, "steps": 16, "learn": 8, "seeds": 1, "sweep": 1, "lrs": [0.05]},
    Size.QUICK: {"peers": 16, "steps": 200, "learn": 120, "seeds": 2, "sweep": 1, "lrs": [0.05, 0.1]},
    Size.FULL: {"peers": 16, "steps": 300, "learn": 800, "seeds": 5, "sweep": 2, "lrs": [0.025, 0.05, 0.1]},
}
PAIRS = "pairs (AD-PSGD)"
MODES = {"push-sum": "push-sum", "pull": "gossip-pull", PAIRS: "gossip"}
LOSS, STEP_S = 0.2, 0.5
BIAS_MAX, VISIBLE_MIN, LOST_MAX = 1e-6, 1e-3, 0.01


def averaging(mode: str, plan: dict[str, Any], loss: float) -> dict[str, Any]:
    """Noisy quadratics in float64, one a peer, so that what exchanges move is seen to rounding."""
    return {
        "peers": plan["peers"], "problem": "consensus", "mode": mode, "codec": "float32", "trigger": "always",
        "steps": plan["steps"], "compute": f"fixed:{STEP_S}", "robust": False, "drop": loss,
    }  # fmt: skip


def _tag(label: str, loss: float) -> str:
    return f"{label}, {loss:.0%} lost"


def study(size: Size, run: Run) -> Findings:
    """The mean's bias under drops, then the accuracy with members that are killed and come back."""
    plan = PLANS[size]
    seeds, peers = range(plan["seeds"]), plan["peers"]
    arms = [(label, loss) for label in MODES for loss in (0.0, LOSS) if loss == 0 or label != PAIRS]
    cells = [
        Cell(_tag(label, loss), seed, averaging(MODES[label], plan, loss)) for label, loss in arms for seed in seeds
    ]
    results = iter(run(cells))
    bias = {arm: estimate([next(results)["mean_bias"] for _ in seeds]) for arm in arms}
    seconds = plan["learn"] * STEP_S
    churn = {"faults": "crash", "fault_every": seconds / max(1.0, 0.1 * peers)}
    learners = {
        f"{label}, {said}": {
            "peers": peers, "problem": "teacher", "mode": MODES[label], "codec": "float32", "trigger": "always",
            "steps": plan["learn"], "compute": f"fixed:{STEP_S}", "look_every": seconds / 10, **more,
        }
        for label in MODES
        for said, more in (("calm", {}), ("churn", churn))
    }  # fmt: skip
    learnt = tuned(run, learners, plan["lrs"], range(plan["sweep"]), seeds)
    lost = {label: differences(learnt[f"{label}, calm"], learnt[f"{label}, churn"]) for label in MODES}
    worst = max(lost.values(), key=lambda each: each.mean)
    seen = (
        f"With {LOSS:.0%} of the messages lost exchanges moved the mean of all models by "
        f"{bias['push-sum', LOSS].mean:.1e} of itself with push-sum and by {bias['pull', LOSS].mean:.1e} with pull; "
        f"with kills of one in ten of the {peers} members on average, at most {100 * worst.mean:.2f} points of "
        "accuracy were lost."
    )
    places = [float(place) for place in range(len(MODES))]
    across = ", ".join(f"{place}: {label}" for place, label in enumerate(MODES))
    plots = [
        Plot("the mean moved by (relative, at least 1e-17)", across, [_moved(bias, loss) for loss in (0.0, LOSS)],
             log_values=True),
        Plot("test accuracy", across,
             [points(said, places, [learnt[f"{label}, {said}"].accuracy for label in MODES], line=False)
              for said in ("calm", "churn")]),
    ]  # fmt: skip
    rows: list[dict[str, Any]] = [{"arm": _tag(*arm), "the mean moved by": each.mean} for arm, each in bias.items()]
    rows += [arm.row() for arm in learnt.values()]
    figures = {"push-sum": bias["push-sum", LOSS], "pull": bias["pull", LOSS], "churn": worst}
    return Findings(seen, figures, plots, rows)


def _moved(bias: dict[tuple[str, float], Estimate], loss: float) -> Curve:
    known = [(float(place), bias[label, loss].mean) for place, label in enumerate(MODES) if (label, loss) in bias]
    return Curve(f"{loss:.0%} lost", [place for place, _ in known], [max(1e-17, by) for _, by in known], line=False)


EXPERIMENT = Experiment(
    "E12",
    "the mean under losses and churn",
    "SGP, arXiv:1811.10792; AD-PSGD, arXiv:1710.06952",
    "SGP claimed that push-sum keeps the average of all models exact over one-way links that lose messages, where "
    "simply averaging with what one pulls does not.",
    (
        Criterion("push-sum", "push-sum: the mean's relative bias at 20 % loss", most=BIAS_MAX),
        Criterion("pull", "pull: its bias is visible", least=VISIBLE_MIN),
        Criterion("churn", "accuracy lost with kills of one in ten members (share, worst method)", most=LOST_MAX),
    ),
    swarms.measure,
    study,
    notes=(
        "The mean is push-sum's own, by weight, with what is on its way; of pull, the plain one.",
        "Messages are lost though their stream lives, and nobody is told. Paired exchanges need every message of a "
        "stream that lives, and peerd refuses to lose theirs: they stand here without loss.",
    ),
)
