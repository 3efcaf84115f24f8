"""E3, Rudra: does the error follow the product of learners and minibatch?"""

from __future__ import annotations

from typing import Any

from peerd.reproduce import swarms
from peerd.reproduce.experiment import Criterion, Experiment, Findings, Plot, Run, Size, points
from peerd.reproduce.statistics import estimate, spearman
from peerd.reproduce.swarms import accuracy, run_arms

PLANS: dict[Size, dict[str, Any]] = {
    Size.TINY: {"samples": 1600, "learners": [2, 4], "batches": [32, 64], "seeds": 1},
    Size.QUICK: {"samples": 20_000, "learners": [2, 4, 10, 30], "batches": [4, 16, 64, 128], "seeds": 2},
    Size.FULL: {"samples": 150_000, "learners": [2, 4, 10, 18, 30], "batches": [4, 8, 16, 32, 64, 128], "seeds": 5},
}
LR = 0.05
PRODUCT_MIN, RANK_MIN = 64, 0.85


def study(size: Size, run: Run) -> Findings:
    """All runs see as many samples, at one learning rate."""
    plan = PLANS[size]
    pairs = [(peers, batch) for peers in plan["learners"] for batch in plan["batches"] if peers * batch >= PRODUCT_MIN]
    arms = run_arms(
        run,
        {
            f"{peers} learners, minibatch {batch}": {
                "peers": peers, "problem": "teacher", "mode": "softsync:1", "batch": batch, "lr": LR,
                "exchange": "gradients", "server_optimizer": "sgd:momentum=0.9",
                "steps": max(1, plan["samples"] // (peers * batch)), "compute": "lognormal:1:0.1", "robust": False,
            }
            for peers, batch in pairs
        },
        range(plan["seeds"]),
    )  # fmt: skip
    products = [float(peers * batch) for peers, batch in pairs]
    by_seed = [
        spearman([1 - accuracy(arm.results[seed]) for arm in arms.values()], products) for seed in range(plan["seeds"])
    ]
    rank = estimate(by_seed)
    errors = {
        pair: arm.mean(lambda result: 1 - accuracy(result)) for pair, arm in zip(pairs, arms.values(), strict=True)
    }
    curves = []
    for peers in plan["learners"]:
        mine = [(batch, error) for (each, batch), error in errors.items() if each == peers]
        across = [float(peers * batch) for batch, _ in mine]
        curves.append(points(f"{peers} learners", across, [error for _, error in mine]))
    seen = (
        f"Over {len(pairs)} pairs of learners and minibatch that saw as many samples, the rank correlation of the test "
        f"error with their product was {rank.mean:.2f}."
    )
    rows = [arm.row(product=product) for arm, product in zip(arms.values(), products, strict=True)]
    plot = Plot("test error", "learners x minibatch", curves, log_across=True)
    return Findings(seen, {"rank": rank}, [plot], rows)


EXPERIMENT = Experiment(
    "E3",
    "learners times minibatch",
    "Rudra, arXiv:1509.04210",
    "Rudra claimed that the error depends on the number of learners and their minibatch through their product alone.",
    (Criterion("rank", "Spearman correlation of error and product, for products of 64 and more", least=RANK_MIN),),
    swarms.measure,
    study,
    notes=(
        "softsync:1 of peerd with gradients on the wire and momentum .9 at the server; one learning rate for all, "
        "since the rule is about runs of one rate.",
    ),
)
