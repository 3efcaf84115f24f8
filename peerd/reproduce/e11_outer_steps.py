"""E11, DiLoCo and NoLoCo: many local steps for each outer one, beside an all-reduce after every step."""

from __future__ import annotations

from typing import Any

from peerd.reproduce import swarms
from peerd.reproduce.experiment import Cell, Criterion, Experiment, Findings, Plot, Result, Run, Size, points
from peerd.reproduce.statistics import Estimate, estimate
from peerd.reproduce.swarms import Arm, Settings, bytes_of, ratios, run_arms
from peerd.simulation.problems import Quadratic
from peerd.simulation.swarm import STOP_ASKED_EVERY_S, Swarm
from peerd.simulation.world import Violation, World
from peerd.training.mode_settings import ModeSettings
from peerd.transport.errors import UserError

PLANS: dict[Size, dict[str, Any]] = {
    Size.TINY: {"problem": "teacher", "steps": 12, "seeds": 1, "every": 6, "lr": 0.05},
    Size.QUICK: {"problem": "shakespeare", "steps": 100, "seeds": 1, "every": 25, "lr": None},
    Size.FULL: {"problem": "shakespeare", "steps": 400, "seeds": 5, "every": 50, "lr": None},
}
PEERS, STEP_S = 4, 0.1
KILL_STEPS, KILL_EVERY, PATIENCE_S = 60, 10, 300.0
WITHIN, FEWER_MIN, PAIR_WITHIN = 0.03, 40, 0.02


def measure(cell: Cell) -> Result:
    """A run that learns; or for how many rounds those who are left stand still when one of them is killed."""
    told = cell.settings
    if told.get("what") != "kill":
        return swarms.measure(cell)
    swarm = Swarm(
        World(cell.seed), PEERS, Quadratic(cell.seed), mode=told["mode"], compute=f"fixed:{STEP_S}",
        steps=told["steps"],
        told=ModeSettings(
            codec="float32", every=told["every"], overlap="blocking" if told["mode"] == "diloco" else "delayed",
            robust=False,
        ),
    )  # fmt: skip

    def done() -> bool:
        return all(trainer.steps >= told["steps"] for trainer in swarm.trainers)

    try:
        swarm.start_formed()
        swarm.run((told["steps"] / 2 + 0.5) * STEP_S)
        swarm.crash(PEERS - 1)
        swarm.run(PATIENCE_S, done)
    except Violation as violation:
        raise UserError(f"{cell.tag}, seed {cell.seed}: {violation}") from None
    stood_s = max(0.0, swarm.world.now - told["steps"] * STEP_S - STOP_ASKED_EVERY_S)
    return {"rounds": float(int(stood_s / (told["every"] * STEP_S))) if done() else float("inf"), "seconds": stood_s}


def settings(mode: str, plan: dict[str, Any], **more: Any) -> dict[str, Any]:
    """4 peers with the task's own optimizer and learning rate."""
    told = {
        "peers": PEERS, "problem": plan["problem"], "steps": plan["steps"], "mode": mode,
        "compute": f"fixed:{STEP_S}", **more,
    }  # fmt: skip
    return told if plan["lr"] is None else {**told, "lr": plan["lr"]}


def study(size: Size, run: Run) -> Findings:
    """By the loss of the averaged model."""
    plan = PLANS[size]
    every = plan["every"]
    scenarios: dict[str, Settings] = {
        "every step": settings("allreduce", plan, overlap="blocking"),
        f"DiLoCo, H {every}": settings("diloco", plan, every=every, overlap="blocking"),
        f"NoLoCo, H {every}": settings("noloco", plan, every=every),
    }
    arms = run_arms(run, scenarios, range(plan["seeds"]))
    synchronous, diloco, noloco = arms.values()
    kill = {"what": "kill", "steps": KILL_STEPS, "every": KILL_EVERY}
    modes = ("noloco", "diloco")
    cells = [
        Cell(f"{mode}, one killed", seed, {**kill, "mode": mode}) for mode in modes for seed in range(plan["seeds"])
    ]
    stalled = iter(run(cells))
    stalls = {mode: estimate([next(stalled)["rounds"] for _ in range(plan["seeds"])]) for mode in modes}
    figures = {
        "loss": _over(diloco, synchronous),
        "bytes": ratios(synchronous, diloco),
        "pairs": _over(noloco, diloco),
        "killed": stalls["noloco"],
    }
    seen = (
        f"After {plan['steps']} steps of {PEERS} peers the loss was {_loss(synchronous).mean:.3f} with an all-reduce "
        f"after each, {_loss(diloco).mean:.3f} with DiLoCo and {_loss(noloco).mean:.3f} with NoLoCo, for "
        f"{synchronous.mean(bytes_of).mean / 1e6:.1f}, {diloco.mean(bytes_of).mean / 1e6:.1f} and "
        f"{noloco.mean(bytes_of).mean / 1e6:.1f} MB a peer; when one was killed NoLoCo stood still for "
        f"{stalls['noloco'].mean:g} rounds, DiLoCo for {stalls['diloco'].mean:.2g}."
    )
    rows = [
        {"arm": arm.tag, "loss": _loss(arm).mean, "MB a peer": arm.bytes.mean / 1e6,
         "times fewer bytes": ratios(synchronous, arm).mean}
        for arm in arms.values()
    ]  # fmt: skip
    curves = [points(arm.tag, [arm.bytes.mean / 1e6], [_loss(arm)]) for arm in arms.values()]
    return Findings(seen, figures, [Plot("loss of the averaged model", "MB a peer", curves, log_across=True)], rows)


def _of(result: Result) -> float:
    value = result.get("loss")
    return float("inf") if value is None else float(value)


def _loss(arm: Arm) -> Estimate:
    return arm.mean(_of)


def _over(arm: Arm, other: Arm) -> Estimate:
    return estimate([_of(one) / _of(two) - 1 for one, two in zip(arm.results, other.results, strict=True)])


EXPERIMENT = Experiment(
    "E11",
    "many local steps for each exchange",
    "DiLoCo, arXiv:2311.08105; NoLoCo, arXiv:2506.10911",
    "DiLoCo claimed that workers may make dozens of steps between two averages and be as good with dozens of times "
    "fewer bytes, and NoLoCo that averaging in random pairs is enough.",
    (
        Criterion("loss", "DiLoCo: loss above that of an all-reduce after every step (relative)", most=WITHIN),
        Criterion("bytes", "DiLoCo: times fewer bytes", least=FEWER_MIN),
        Criterion("pairs", "NoLoCo: loss above DiLoCo's (relative)", most=PAIR_WITHIN),
        Criterion("killed", "NoLoCo: rounds that stall when a peer is killed", most=0),
    ),
    measure,
    study,
    notes=(
        "Character transformer, 354k parameters, Shakespeare's plays, AdamW at the task's learning rate for all (not "
        "swept: a run takes minutes); at equal tokens, not at convergence.",
        "Bytes are all that a peer sends: the flush at the end weighs as much as two outer steps.",
    ),
)
