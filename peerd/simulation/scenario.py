"""What is simulated, for how long, and what came of it: one scenario from its settings to its result."""

from __future__ import annotations

import gc
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from peerd.membership.timing import LAN, WAN
from peerd.simulation.faults import calm_after_s, inject_faults, parse_faults
from peerd.simulation.network import PROFILES, Topology, read_topology, uniform
from peerd.simulation.problems import BytesOnly, Problem, Quadratic, mean_and_distance
from peerd.simulation.swarm import Swarm
from peerd.simulation.world import Violation, World
from peerd.training.codecs import CODECS
from peerd.training.modes import AUTO, check_given, check_options, class_of, exchanges
from peerd.training.modes.own_mode import as_told
from peerd.training.tasks import TASKS
from peerd.training.trigger import parse_trigger
from peerd.transport.errors import UserError
from peerd.transport.messages import State

PROBLEMS = ("members", "consensus", "bytes", *TASKS)
CONVERGE_S = 120.0  # after the last fault has ended: then all must agree
ASK_EVERY_S = 2.0
SAMPLES = 200  # looks at a run
CHECK_EVERY_S = 10.0  # at all links and models: a tenth of a run's cost if done at every look
VIEWS = 8  # nodes whose membership a look counts
DISTANCES = 100  # nodes whose models a look compares


@dataclass(frozen=True, slots=True)
class Scenario:
    """The settings; every name is an option of `peerd simulate`."""

    peers: int = 16
    seed: int = 0
    minutes: float | None = None
    problem: str = "consensus"
    steps: int | None = None
    parameters: int = 125_000_000
    compute: str = "fixed:2"
    network: str = "lan"
    uplink_mbit: float | None = None
    downlink_mbit: float | None = None
    mode: str = "gossip"
    codec: str = AUTO
    trigger: str = "change:0.05"
    view: int = 3
    every: int = 1
    overlap: str = "delayed"
    topology: str = "auto"
    servers: int = 1
    min_peers: int = 1
    shard: str = "iid"
    faults: str = "crash"
    fault_every: float = 60.0
    join_over: float | None = None

    def __post_init__(self) -> None:
        """Check what options say together. Raises UserError."""
        check_options(self.mode, self.overlap, self.topology)
        for option, wanted in (("--servers", self.servers), ("--min-peers", self.min_peers)):
            if wanted > self.peers:
                raise UserError(f"{option} {wanted}: the swarm has {self.peers} peers")
        if self.join_over is not None and self.minutes is not None and self.join_over > 60 * self.minutes:
            raise UserError(f"--join-over {self.join_over:g}: the run ends after {60 * self.minutes:g} s")
        check_given(self.mode, [setting.name for setting in fields(self) if self._says(setting)])

    def command(self) -> str:
        """The command line that runs this again."""
        words = ["peerd", "simulate"]
        for setting in fields(self):
            if self._says(setting) or setting.name == "seed":
                value = as_told(self.mode) if setting.name == "mode" else str(getattr(self, setting.name))
                words += ["--" + setting.name.replace("_", "-"), value]
        return shlex.join(words)

    def _says(self, setting: Field[Any]) -> bool:
        return bool(getattr(self, setting.name) != setting.default)


@dataclass(frozen=True, slots=True)
class Sample:
    """The swarm at one moment."""

    at: float
    loss: float
    distance: float
    bytes_sent: int
    up: int
    alive: float  # in the mean view of a few nodes
    suspect: float
    failed: float
    busy: float  # share of the uplinks' time since the last look


@dataclass(slots=True)
class Outcome:
    """What a run leaves."""

    result: dict[str, Any]
    looks: list[Sample] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)


Progress = Callable[[float, Sample], None]
"""Told how much of the run is done, and the last look."""


class _Run:
    def __init__(self, scenario: Scenario, trace: TextIO | None) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, trace)
        self.faults = parse_faults(scenario.faults)
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
            codec=class_of(scenario.mode).CODEC if scenario.codec == AUTO else scenario.codec,
            trigger=scenario.trigger,
            view=scenario.view,
            compute=scenario.compute,
            steps=steps,
            every=scenario.every,
            overlap=scenario.overlap,
            topology_of_rounds=scenario.topology,
            servers=scenario.servers,
            min_peers=scenario.min_peers,
            replay=scenario.command,
        )
        self.looks: list[Sample] = []
        self.measured: dict[str, Any] = {}
        self._busy = 0.0

    def go(self, progress: Progress) -> list[str]:
        """Run to the end; returns the violations."""
        scenario, swarm, world = self.scenario, self.swarm, self.world
        every_s = min(10.0, self.ends_s / SAMPLES)
        check_at_s = 0.0
        try:
            if scenario.join_over is None:
                swarm.start_formed()
            else:
                swarm.start_all(scenario.join_over)
            inject_faults(swarm, self.faults, scenario.fault_every, lambda: bool(self.measured))
            while world.now < self.ends_s and not self._trained():
                swarm.run(min(every_s, self.ends_s - world.now), self._trained)
                if world.now >= check_at_s:
                    swarm.look_at_links()
                    check_at_s = world.now + CHECK_EVERY_S
                self.looks.append(self._look())
                progress(self._share(), self.looks[-1])
            self.measured = self._measure()
            self._agree()
        except Violation as violation:
            self.measured = self.measured or self._measure()
            return [str(violation)]
        return []

    def _measure(self) -> dict[str, Any]:
        """The figures of the run itself, before what its faults began has come to an end."""
        swarm = self.swarm
        counts, detections, models = swarm.counts(), swarm.detections_s, swarm.models()
        steps = [trainee.steps for trainee in swarm.trainees] or [0]
        figures: dict[str, Any] = {
            "virtual_seconds": round(self.world.now, 3),
            "ended_by": "steps" if self._trained() else "minutes" if self.world.now >= self.ends_s else "violation",
            "steps": int(np.median(steps)),  # of a node
            "steps_least": min(steps),
            "steps_most": max(steps),
            "exchanges": exchanges(self.scenario.mode, counts["exchanges"]),
            "rounds": max((node.counts["rounds"] for node in swarm.nodes.values()), default=0),
            "snapshots": counts["snapshots"],
            "bytes_sent_total": swarm.bytes_sent,
            "probes": counts["probes"],
            "crashes": swarm.crashed,
            "crashes_detected": len(detections),
            "detection_median_s": float(np.median(detections)) if detections else None,
            "detection_p99_s": float(np.percentile(detections, 99)) if detections else None,
        }
        if trained_s := sum(trainee.trained_s for trainee in swarm.trainees):
            figures["computing_share"] = sum(trainee.computed_s for trainee in swarm.trainees) / trained_s
        if models and self.problem is not None:
            figures["consensus_distance"] = mean_and_distance(models)[1]
            figures |= self.problem.score(models)
        return figures

    def _trained(self) -> bool:
        return self.problem is not None and self.swarm.finished()

    def _share(self) -> float:
        steps = self.scenario.steps
        done = [trainee.steps for trainee in self.swarm.trainees] or [0]
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
        trainees = list(swarm.trainees)
        losses = [trainee.loss for trainee in trainees if not math.isnan(trainee.loss)]
        models = [trainee.values() for trainee in trainees[:DISTANCES] if trainee.mode is not None]
        counted = Counter(member.state for node in nodes[:VIEWS] for member in node.membership.members.values())
        views = max(1, min(VIEWS, len(nodes)))
        busy_s = sum(pipe.busy_s for pipe in swarm.network.up)
        elapsed_s = self.world.now - (self.looks[-1].at if self.looks else 0.0)
        busy, self._busy = (busy_s - self._busy) / max(1e-9, elapsed_s * swarm.peers), busy_s
        return Sample(
            self.world.now,
            sum(losses) / len(losses) if losses else math.nan,
            mean_and_distance(models)[1] if models else 0.0,
            swarm.bytes_sent,
            len(nodes),
            counted[State.ALIVE] / views,
            counted[State.SUSPECT] / views,
            counted[State.FAILED] / views,
            busy,
        )


def simulate(scenario: Scenario, trace: TextIO | None = None, progress: Progress = lambda share, look: None) -> Outcome:
    """Run it. Raises UserError for settings that make no sense; a violation is in the result."""
    began = time.perf_counter()
    with _rare_collections():
        run = _Run(scenario, trace)
        if trace is not None and trace.seekable():
            trace.truncate(0)  # not before: an older one outlives settings that make no sense
        violations = run.go(progress)
        run.world.end(len(violations))
    result = {
        "peers": scenario.peers,
        "problem": scenario.problem,
        "mode": scenario.mode,
        "seed": scenario.seed,
        **run.measured,
        "false_deaths": run.swarm.checkers.false_deaths,
        "violations": violations,
        "events": run.world.events,
        "digest": run.world.digest,
        "seconds": round(time.perf_counter() - began, 3),
        "replay": scenario.command(),
    }
    return Outcome(result, run.looks, run.swarm.staleness())


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
    if scenario.codec not in (AUTO, *CODECS):
        raise UserError(f"--codec {scenario.codec}: not one of {', '.join(CODECS)}")
    parse_trigger(scenario.trigger)
    if scenario.shard != "iid" and scenario.problem not in TASKS:
        raise UserError(f"--shard {scenario.shard}: only a task has samples, --problem {', '.join(TASKS)}")
    match scenario.problem:
        case "members":
            return None
        case "consensus":
            return Quadratic(scenario.seed)
        case "bytes":
            if scenario.steps is None:
                raise UserError("--problem bytes: say how many --steps the run has")
            return BytesOnly(scenario.seed, scenario.parameters, scenario.steps)
        case task if task in TASKS:
            if scenario.steps is None:
                raise UserError(f"--problem {task}: say how many --steps the run has")
            from peerd.simulation.task_problem import TaskProblem

            return TaskProblem(task, scenario.peers, scenario.steps, scenario.seed, scenario.shard)
    raise UserError(f"--problem {scenario.problem}: not one of {', '.join(PROBLEMS)}")


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
