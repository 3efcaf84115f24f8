"""How good was the swarm when, and what had it sent by then? From weights in files, after the run.

The swarm's model at a moment is the mean of the newest weights of all workers that live; what a worker sent is counted
at its network interface.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from peerd.simulation.outcome import Target
from peerd.training.tasks import TASKS

LOOKS = 40  # moments at which the swarm's model is tried


@dataclass(frozen=True, slots=True)
class Look:
    """The swarm at a moment."""

    seconds: float
    bytes_sent: float  # by a worker, on average
    accuracy: float


Times = Mapping[int, Sequence[float]]
"""When each worker wrote its weights, in order."""
Sent = Sequence[tuple[float, Sequence[int]]]
"""Moments, in order, and what the interface of each worker had sent by then."""


def newest(times: Times, at: float, ended: Mapping[int, float]) -> dict[int, float]:
    """Which weights of which worker count at a moment; `ended`: when workers were killed."""
    found = {rank: bisect_right(when, at) for rank, when in times.items() if at < ended.get(rank, float("inf"))}
    return {rank: times[rank][index - 1] for rank, index in found.items() if index}


def bytes_at(sent: Sent, at: float) -> float:
    """What a worker had sent by then since the first count, on average; between two counts on a straight line."""
    if not sent:
        return 0.0
    moments = [when for when, _ in sent]
    totals = [sum(counts) / len(counts) for _, counts in sent]
    return float(np.interp(at, moments, totals)) - totals[0]


def moments(times: Times, count: int = LOOKS, joins: Collection[int] = ()) -> list[float]:
    """From when all have begun, but those who join later, to the end, evenly; the last is the end."""
    if not times or not all(times.values()):
        return []
    first = max(when[0] for rank, when in times.items() if rank not in joins)
    last = max(when[-1] for when in times.values())
    return list(np.linspace(first, last, count)) if last > first else [last]


def looks(folder: Path, task: str, sent: Sent, ended: Mapping[int, float], joins: Collection[int]) -> list[Look]:
    """What came of a run that wrote to this folder."""
    times: dict[int, list[float]] = {}
    for path in folder.glob("*.npy"):
        rank, when = path.stem.split(".", 1)
        times.setdefault(int(rank), []).append(float(when))
    for each in times.values():
        each.sort()
    model, _ = TASKS[task].build()
    found = []
    for at in moments(times, joins=joins):
        weights = [np.load(folder / f"{rank}.{when:.4f}.npy") for rank, when in newest(times, at, ended).items()]
        mean = torch.from_numpy(np.mean(weights, axis=0, dtype=np.float64).astype(np.float32))
        torch.nn.utils.vector_to_parameters(mean, model.parameters())
        found.append(Look(at, bytes_at(sent, at), TASKS[task].evaluate(model)["accuracy"]))
    return [Look(look.seconds - found[0].seconds, look.bytes_sent, look.accuracy) for look in found]


def reached(found: Sequence[Look], accuracy: float) -> tuple[float, float] | None:
    """Seconds and bytes of a worker until the swarm's model was first that good; None: never."""
    return Target("accuracy", accuracy).crossed((look.accuracy, look.seconds, look.bytes_sent) for look in found)
