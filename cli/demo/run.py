"""How does a demo's run go? Every node is looked at until all have finished, and one may be killed on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from peerd.cli.demo.local_swarm import LocalSwarm
from peerd.training.plain_numbers import number, whole
from peerd.transport.errors import UserError

WATCH_EVERY_S = 0.25
STUCK_S = 300.0  # no node makes a step or changes its phase for this long: something is wrong

Statuses = dict[str, dict[str, Any]]  # by node


@dataclass
class Sample:
    """One look at one node."""

    seconds: float
    node: str
    status: dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """Which node gets a SIGKILL, and when."""

    node: str
    share: float  # of the run

    @classmethod
    def parse(cls, text: str, peers: int) -> Kill:
        """Read NODE@SHARE. Raises UserError."""
        index, _, share = text.partition("@")
        try:
            kill = cls(f"node-{whole(index)}", number(share))
        except ValueError:
            raise UserError(f"--kill {text}: wanted NODE@SHARE, for example 1@0.5") from None
        if not 0 <= whole(index) < peers:
            raise UserError(f"--kill {text}: the nodes are 0 to {peers - 1}")
        if not 0 < kill.share < 1 or peers < 2:
            raise UserError(f"--kill {text}: a share between 0 and 1 of a run of at least 2 nodes")
        return kill


@dataclass
class Watch:
    """Everything seen of a run, and the kill that was asked for."""

    kill: Kill | None = None
    killed_at_s: float | None = None
    samples: list[Sample] = field(default_factory=list)
    latest: Statuses = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)


def follow(swarm: LocalSwarm, watch: Watch) -> Iterator[Statuses]:
    """Yield what the living nodes say, each look noted in `watch`, until all have finished. Raises UserError."""
    moved_at = time.monotonic()
    last: Any = None
    for statuses in _looks(swarm, watch):
        watch.seconds = time.monotonic() - watch.began
        watch.samples += [Sample(watch.seconds, name, status) for name, status in statuses.items()]
        watch.latest.update(statuses)
        progress = {name: (steps_made(status), status["phase"]) for name, status in statuses.items()}
        if progress != last:
            last, moved_at = progress, time.monotonic()
        elif time.monotonic() - moved_at > STUCK_S:
            raise UserError(f"no node has made a step for {STUCK_S:.0f} s: {progress}")
        if watch.kill is not None and watch.killed_at_s is None and share(statuses) >= watch.kill.share:
            if any(not _through(status) for name, status in statuses.items() if name != watch.kill.node):
                swarm.kill(watch.kill.node)
                watch.killed_at_s = watch.seconds
            else:
                _fail(watch, f"{watch.kill.node} was not killed: the others were through already; take more --steps")
        yield statuses
        if statuses and finished(statuses) == len(statuses):
            return
    raise UserError("every node is gone: " + "; ".join(watch.failures))


def steps_made(status: dict[str, Any]) -> int:
    """How many steps a node has made."""
    return int(status["trainer"]["step"]) if status["trainer"] else 0


def finished(statuses: Statuses) -> int:
    """How many nodes are through."""
    return sum(status["phase"] == "finished" for status in statuses.values())


def share(statuses: Statuses) -> float:
    """How far the run is: the tasks say their share of steps as a metric, and a finished node is through."""
    return sum(_progress(status) for status in statuses.values()) / max(1, len(statuses))


def stalled_s(watch: Watch) -> float | None:
    """The longest that a survivor made no step after the kill, while it trained."""
    if watch.kill is None or watch.killed_at_s is None:
        return None
    longest = 0.0
    for name in watch.latest.keys() - {watch.kill.node}:
        seen = [s for s in watch.samples if s.node == name and s.seconds >= watch.killed_at_s]
        since, step = watch.killed_at_s, -1
        for sample in seen:
            if sample.status["phase"] != "training":
                break
            longest = max(longest, sample.seconds - since)
            if steps_made(sample.status) != step:
                since, step = sample.seconds, steps_made(sample.status)
    return round(longest, 2)


def _looks(swarm: LocalSwarm, watch: Watch) -> Iterator[Statuses]:
    """The status of every living node, again and again, until none is left."""
    while True:
        statuses = {}
        gone = swarm.ended()
        for name in swarm.names:
            if name in gone and watch.killed_at_s is not None and watch.kill is not None and name == watch.kill.node:
                continue
            if name in gone:
                _fail(watch, f"{name} ended with code {gone[name]}: {swarm.last_words(name)}")
                continue
            try:
                statuses[name] = swarm.status(name)
            except UserError:
                continue  # it is ending; the next look tells how
        if len(gone) == len(swarm.names):
            return
        yield statuses
        time.sleep(WATCH_EVERY_S)


def _fail(watch: Watch, text: str) -> None:
    if text not in watch.failures:
        watch.failures.append(text)


def _through(status: dict[str, Any]) -> bool:
    return status["phase"] in ("finishing", "finished")


def _progress(status: dict[str, Any]) -> float:
    if _through(status):
        return 1.0
    return float(status["trainer"]["metrics"].get("progress", 0.0)) if status["trainer"] else 0.0
