"""One run, from its settings to its outcome: the swarm is made, time passes, looks are taken, figures come out."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from peerd.membership.timing import LAN, WAN
from peerd.simulation.faults import calm_after_s, inject_faults, parse_faults
from peerd.simulation.network import PROFILES, Topology, read_topology, uniform
from peerd.simulation.options import OF_TRAINING, Scenario
from peerd.simulation.outcome import Outcome, Sample, columns, staleness_figures
from peerd.simulation.problems import BytesOnly, Problem, Quadratic, is_of_use, mean_and_distance
from peerd.simulation.swarm import STOP_ASKED_EVERY_S, Swarm
from peerd.simulation.teacher import NAME as TEACHER
from peerd.simulation.teacher import Teacher
from peerd.simulation.world import Violation, World
from peerd.training.effects import Vector
from peerd.training.modes import class_of, exchanges, shown_settings
from peerd.training.tasks import TASKS
from peerd.transport.errors import UserError
from peerd.transport.messages import State

__all__ = ["PROBLEMS", "Outcome", "Progress", "Sample", "Scenario", "simulate"]

PROBLEMS = ("members", "consensus", "bytes", TEACHER, *TASKS)
CONVERGE_S = 120.0  # after the last fault has ended: then all must agree
ASK_EVERY_S = 2.0
SAMPLES = 200  # looks at a run of so many minutes
SCORED_SAMPLES = 100  # at a run with a target, where nobody says how often
CHECK_EVERY_S = 10.0  # at all links and models: a tenth of a run's cost if done at every look
VIEWS = 8  # nodes whose membership a look counts
STANDS_S, STANDS_SHARE = 3600.0, 10.0  # without a step: then, beside liars, a run has come to a stand
DISTANCES = 100  # nodes whose models a look compares

Progress = Callable[[float, Sample], None]
"""Told how much of the run is done, and the last look."""


class _Run:
    def __init__(self, scenario: Scenario, trace: TextIO | None) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, trace)
        self.faults = parse_faults(scenario.faults)
        if not self.faults:
            scenario.refuse(["fault_every"], "with --faults none")
        steps = scenario.steps
        self.ends_s = scenario.minutes * 60 if scenario.minutes is not None else math.inf
        self.problem = _problem(scenario)
        topology = _topology(scenario)
        if scenario.minutes is None and (steps is None or self.problem is None):
            raise UserError("say how long: --minutes M, or --steps N for a run that trains; what comes first ends it")
        self.swarm = Swarm(
            self.world,
            scenario.peers,
            self.problem,
            topology=topology,
            timing=WAN if topology.latency_s > 0.03 else LAN,
            mode=scenario.mode,
            told=scenario,
            compute=scenario.compute,
            steps=steps,
            byzantine=scenario.byzantine,
            slow_node=scenario.slow_node,
            ends_together=scenario.ends_together,
            drop=scenario.drop,
            replay=scenario.command,
        )
        self.series: list[Sample] = []
        self.measured: dict[str, Any] = {}
        self.mean: Vector | None = None  # of the honest members' models, at the end
        self._busy = 0.0
        self._made, self._made_at = 0, 0.0  # steps of honest members, and when that was looked at and had grown
        self._stands = False

    def go(self, progress: Progress) -> list[str]:
        """Run to the end; returns the violations."""
        scenario, swarm, world = self.scenario, self.swarm, self.world
        every_s = self._looks_every_s()
        check_at_s = 0.0
        try:
            if scenario.join_over is None:
                swarm.start_formed()
            else:
                swarm.start_all(scenario.join_over)
            inject_faults(swarm, self.faults, scenario.fault_every, lambda: bool(self.measured))
            if scenario.scores:
                self.series.append(self._look())
            while world.now < self.ends_s and not self._trained() and not self._stands:
                swarm.run(min(every_s, self.ends_s - world.now), self._trained)
                if world.now >= check_at_s:
                    swarm.look_at_links()
                    check_at_s = world.now + CHECK_EVERY_S
                self.series.append(self._look())
                self._note_steps()
                progress(self._share(), self.series[-1])
            self.measured = self._measure()
            self._agree()
        except Violation as violation:
            self.measured = self.measured or self._measure()
            return [str(violation)]
        return []

    def _note_steps(self) -> None:
        """Some modes have a member that all wait for; where it lies, nobody's run comes to an end."""
        made, now = sum(trainer.steps for trainer in self.swarm.trainers if trainer.lie is None), self.world.now
        if made != self._made or self.scenario.byzantine == "none":
            self._made, self._made_at = made, now
        self._stands = now - self._made_at > max(STANDS_S, STANDS_SHARE * self._made_at)

    def _looks_every_s(self) -> float:
        scenario = self.scenario
        if scenario.look_every is not None:
            return scenario.look_every
        every_s = min(10.0, self.ends_s / SAMPLES)
        if scenario.target is not None and scenario.steps is not None:
            computing_s = scenario.steps * self.swarm.settings.compute.median_s
            every_s = min(every_s, max(STOP_ASKED_EVERY_S, computing_s / SCORED_SAMPLES))
        return every_s

    def _measure(self) -> dict[str, Any]:
        """The figures of the run itself, before what its faults began has come to an end."""
        swarm = self.swarm
        counts, detections, models = swarm.counts(), swarm.detections_s, swarm.honest_models()
        steps = [trainer.steps for trainer in swarm.trainers] or [0]
        figures: dict[str, Any] = {
            "virtual_seconds": round(self.world.now, 3),
            "ended_by": self._ended_by(),
            "steps": int(np.median(steps)),  # of a node
            "steps_least": min(steps),
            "steps_most": max(steps),
            "exchanges": exchanges(self.scenario.mode, counts["exchanges"]),
            "rounds": max((node.counts["rounds"] for node in swarm.nodes.values()), default=0),
            "snapshots": counts["snapshots"],
            "dropped": swarm.network.dropped,
            "graylisted": counts["graylisted"],
            "bytes_sent_total": swarm.bytes_sent,
            "probes": counts["probes"],
            "crashes": swarm.crashed,
            "crashes_detected": len(detections),
            "detection_median_s": float(np.median(detections)) if detections else None,
            "detection_p99_s": float(np.percentile(detections, 99)) if detections else None,
        }
        if trained_s := sum(trainer.trained_s for trainer in swarm.trainers):
            figures["computing_share"] = sum(trainer.computed_s for trainer in swarm.trainers) / trained_s
        if models and self.problem is not None:
            mean, figures["consensus_distance"] = mean_and_distance(models)
            figures |= self.problem.score(models)
            figures["diverged"] = not (all(map(is_of_use, models)) and math.isfinite(figures.get("loss", 0.0)))
            self.mean = mean
            if class_of(self.scenario.mode).KEEPS_LINKS:
                figures["mean_bias"] = swarm.mean_bias()
        return figures

    def _ended_by(self) -> str:
        if self._trained():
            return "steps"
        if self.world.now >= self.ends_s:
            return "minutes"
        return "standstill" if self._stands else "violation"

    def _trained(self) -> bool:
        return self.problem is not None and self.swarm.finished()

    def _share(self) -> float:
        steps = self.scenario.steps
        done = [trainer.steps for trainer in self.swarm.trainers] or [0]
        by_steps = sum(done) / len(done) / steps if steps and self.problem is not None else 0.0
        return max(by_steps, self.world.now / self.ends_s if self.ends_s < math.inf else 0.0)

    def _agree(self) -> None:
        """Let what the faults began come to its end; then all members must agree about each other."""
        patience_s = CONVERGE_S + (calm_after_s() if self.faults else 0.0)
        ends_s = self.world.now + patience_s
        while not (self.swarm.whole() and self.swarm.agreed()):
            if self.world.now >= ends_s:
                if self.swarm.checkers.too_slow:
                    break
                self.swarm.checkers.fail(f"the members still disagree {patience_s:.0f} s after the last fault began")
            self.swarm.run(ASK_EVERY_S)
        self.swarm.look_at_links()

    def _look(self) -> Sample:
        swarm = self.swarm
        nodes = list(swarm.nodes.values())
        trainers = list(swarm.trainers)
        losses = [trainer.loss for trainer in trainers if trainer.lie is None and not math.isnan(trainer.loss)]
        models = swarm.honest_models(None if self.scenario.scores else DISTANCES)
        scores: dict[str, float] = {}
        if self.scenario.scores and models and self.problem is not None:
            scores = self.problem.look(np.mean(models, axis=0, dtype=np.float64))
        counted = Counter(member.state for node in nodes[:VIEWS] for member in node.membership.members.values())
        views = max(1, min(VIEWS, len(nodes)))
        busy_s = sum(pipe.used_s(self.world.now) for pipe in swarm.network.up)
        elapsed_s = self.world.now - (self.series[-1].at if self.series else 0.0)
        busy, self._busy = (busy_s - self._busy) / max(1e-9, elapsed_s * swarm.peers), busy_s
        return Sample(
            self.world.now,
            sum(losses) / len(losses) if losses else math.nan,
            mean_and_distance(models[:DISTANCES])[1] if models else 0.0,
            swarm.bytes_sent,
            len(nodes),
            counted[State.ALIVE] / views,
            counted[State.SUSPECT] / views,
            counted[State.FAILED] / views,
            busy,
            sum(trainer.steps for trainer in trainers) / max(1, len(trainers)),
            scores.get("accuracy", math.nan),
            scores.get("loss", math.nan),
        )


def simulate(scenario: Scenario, trace: TextIO | None = None, progress: Progress = lambda share, look: None) -> Outcome:
    """Run it. Raises UserError for settings that make no sense; a violation is in the result."""
    began = time.perf_counter()
    with _rare_collections(), np.errstate(over="ignore", invalid="ignore"):  # a run that diverges says so in the end
        run = _Run(scenario, trace)
        if trace is not None and trace.seekable():
            trace.truncate(0)  # not before: an older one outlives settings that make no sense
        violations = run.go(progress)
        run.world.end(len(violations))
        against = _against_honest(scenario, run) if scenario.byzantine != "none" else {}
    result = {
        "peers": scenario.peers,
        "problem": scenario.problem,
        "faults": scenario.faults,
        "mode": scenario.mode,
        "run": scenario.label,
        **({"settings": shown_settings(scenario.mode, scenario)} if run.problem is not None else {}),
        "seed": scenario.seed,
        **run.measured,
        **against,
        "false_deaths": run.swarm.checkers.false_deaths,
        "violations": violations,
        "events": run.world.events,
        "digest": run.world.digest,
        "seconds": round(time.perf_counter() - began, 3),
        "replay": scenario.command(),
    }
    outcome = Outcome(result, run.series, run.swarm.staleness(), scenario.wanted())
    if staleness := staleness_figures(outcome.staleness):
        result["staleness"] = staleness
    if outcome.target is not None:
        result |= {
            "target": scenario.target,
            "seconds_to_target": outcome.time_to(),
            "bytes_to_target": outcome.bytes_to(),
        }
    if scenario.scores:
        result["series"] = columns(run.series)
    return outcome


def _against_honest(scenario: Scenario, run: _Run) -> dict[str, Any]:
    """How far the lies have taken the honest members from where the same run without lies takes all."""
    if run.mean is None:
        return {}
    liars = {"liars": sorted(run.swarm.liars)}
    honest = _honest(replace(scenario, byzantine="none"))
    if honest.mean is None:  # other crashes may leave nobody with a model
        return liars
    apart = float(np.linalg.norm(run.mean - honest.mean) / max(1e-30, float(np.linalg.norm(honest.mean))))
    scores = ("accuracy", "accuracy_worst", "error")
    clean = {f"clean_{name}": honest.measured[name] for name in scores if name in honest.measured}
    return {**liars, "clean_distance": apart, **clean}


@lru_cache(maxsize=4)
def _honest(scenario: Scenario) -> _Run:
    """The run in which nobody lies: one for all attacks that are compared with it."""
    run = _Run(scenario, None)
    run.go(lambda share, look: None)
    return run


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A big swarm is a million objects that live on, next to no cycles: looking for those took 8 % of the time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _problem(scenario: Scenario) -> Problem | None:
    name, learning = scenario.problem.partition(":")[0], scenario.learning
    if name not in PROBLEMS or (name != scenario.problem and name != TEACHER):
        raise UserError(f"--problem {scenario.problem}: not one of {', '.join(PROBLEMS)}")
    if scenario.shard != "iid" and name not in (TEACHER, *TASKS):
        raise UserError(f"--shard {scenario.shard}: only a task has samples, --problem {', '.join((TEACHER, *TASKS))}")
    if scenario.scores and name in ("members", "bytes"):
        raise UserError(f"--target and --look-every: --problem {name} has no accuracy, nor a loss")
    if name != "bytes":
        scenario.refuse(["parameters"], f"on --problem {name}, whose model has its own; --problem bytes takes it")
    if scenario.steps is None and name in ("bytes", *TASKS):
        raise UserError(f"--problem {name}: say how many --steps the run has")
    match name:
        case "members":
            scenario.refuse(OF_TRAINING, f"on --problem {name}, where nobody trains")
            return None
        case "consensus":
            learning.only(name, "lr")
            return Quadratic(scenario.seed) if learning.lr is None else Quadratic(scenario.seed, lr=learning.lr)
        case "bytes":
            learning.only(name)
            assert scenario.steps is not None, "asked above"
            return BytesOnly(scenario.seed, scenario.parameters, scenario.steps)
        case "teacher":
            return Teacher(
                scenario.problem, scenario.peers, scenario.steps, scenario.seed, scenario.shard, learning,
                shares_optimizer=scenario.shares_optimizer,
            )  # fmt: skip
        case task:
            learning.only(name, "optimizer", "lr", "momentum", "weight_decay", "batch")
            from peerd.simulation.task_problem import TaskProblem

            return TaskProblem(
                task, scenario.peers, scenario.steps, scenario.seed, scenario.shard, learning,
                shares_optimizer=scenario.shares_optimizer,
            )  # fmt: skip


def _topology(scenario: Scenario) -> Topology:
    if scenario.network in PROFILES:
        profile = PROFILES[scenario.network]
        if scenario.uplink_mbit is not None:
            profile = replace(profile, uplink_mbit=scenario.uplink_mbit)
        if scenario.downlink_mbit is not None:
            profile = replace(profile, downlink_mbit=scenario.downlink_mbit)
        return uniform(profile, scenario.peers)
    if not scenario.network.endswith(".toml"):
        raise UserError(f"--network {scenario.network}: not one of {', '.join(PROFILES)}, nor a .toml file")
    if scenario.uplink_mbit is not None or scenario.downlink_mbit is not None:
        raise UserError(f"--uplink-mbit and --downlink-mbit: {scenario.network} says them for each site")
    topology = read_topology(Path(scenario.network))
    if len(topology.profiles) != scenario.peers:
        raise UserError(f"{scenario.network} places {len(topology.profiles)} peers, --peers says {scenario.peers}")
    return topology
