"""Which samples are whose? One data set split over `peers` ranks: every sample once, no rank empty.

    iid             drawn at random, ranks as equal as they can be
    sorted          in the order of their labels: each rank sees only its few classes, the hardest case
    dirichlet:A     each class is dealt out by shares drawn from Dirichlet(A): small A is skewed, large A is nearly iid

Nothing is exchanged between ranks: each computes the whole split from the same seed and takes its part.
The Dirichlet split follows Hsu, Qi and Brown 2019 (arXiv:1909.06335).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peerd.training.plain_numbers import number
from peerd.transport.errors import UserError

Indices = npt.NDArray[np.int64]
Labels = npt.NDArray[np.integer[Any]]

ALPHA_MIN = 1e-3  # below it a float64 draw rounds to one rank a class anyway
ALPHA_MAX = 1e6  # above it the shares are equal to three digits


@dataclass(frozen=True, slots=True)
class Split:
    """A parsed --shard: one of KINDS, and the concentration where that kind has one."""

    kind: str
    alpha: float = 0.0


def parse(text: str) -> Split:
    """Read `iid`, `sorted` or `dirichlet:A`."""
    kind, colon, argument = text.partition(":")
    if kind not in KINDS:
        raise UserError(f"unknown shard {text!r}: choose iid, sorted or dirichlet:A, for example dirichlet:0.3")
    if kind != "dirichlet":
        if colon:
            raise UserError(f"shard {kind!r} takes no argument, got {text!r}")
        return Split(kind)
    try:
        alpha = number(argument)
    except ValueError:
        raise UserError(f"shard 'dirichlet' needs a number, for example dirichlet:0.3, got {text!r}") from None
    if not ALPHA_MIN <= alpha <= ALPHA_MAX:  # refuses NaN too
        raise UserError(f"dirichlet's number must lie between {ALPHA_MIN:g} and {ALPHA_MAX:g}, got {text!r}")
    return Split(kind, alpha)


def of_rank(split: Split, labels: Labels, rank: int, peers: int, seed: int) -> Indices:
    """The indices of the samples that `rank` trains on, in ascending order."""
    if peers < 1 or not 0 <= rank < peers:
        raise UserError(f"rank {rank} does not exist among {peers} peers: ranks count from 0 to peers - 1")
    if len(labels) < peers:
        raise UserError(f"{len(labels)} samples cannot be split over {peers} peers")
    parts = KINDS[split.kind](split, labels, peers, np.random.default_rng(seed))
    return np.sort(parts[rank])


def batches(samples: Indices, size: int, rank: int, seed: int, first_step: int = 0) -> Iterator[Indices]:
    """Endless batches; an epoch reshuffles. Step n's batch depends on n alone: a resumed run sees what it had not."""
    size = min(size, len(samples))
    steps_per_epoch = len(samples) // size  # the odd samples of an epoch wait for the next shuffle
    epoch, step = divmod(first_step, steps_per_epoch)
    for current in itertools.count(epoch):
        order = np.random.default_rng([seed, rank, current]).permutation(samples)
        for start in range(step * size, steps_per_epoch * size, size):
            yield order[start : start + size]
        step = 0


def _iid(_: Split, labels: Labels, peers: int, random: np.random.Generator) -> list[Indices]:
    return np.array_split(random.permutation(len(labels)), peers)


def _sorted(_: Split, labels: Labels, peers: int, random: np.random.Generator) -> list[Indices]:
    return np.array_split(np.argsort(labels, kind="stable"), peers)


def _dirichlet(split: Split, labels: Labels, peers: int, random: np.random.Generator) -> list[Indices]:
    dealt: list[list[Indices]] = [[] for _ in range(peers)]
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        shares = random.dirichlet(np.full(peers, split.alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for own, part in zip(dealt, np.split(members, cuts), strict=True):
            own.append(part)
    return _fill_empty([np.concatenate(own) for own in dealt])


def _fill_empty(parts: list[Indices]) -> list[Indices]:
    """Give each empty rank one sample of the fullest: a trainer with no data could take no step at all."""
    for rank, part in enumerate(parts):
        if len(part) == 0:
            fullest = max(range(len(parts)), key=lambda other: len(parts[other]))
            parts[rank], parts[fullest] = parts[fullest][:1], parts[fullest][1:]
    return parts


KINDS: dict[str, Callable[[Split, Labels, int, np.random.Generator], list[Indices]]] = {
    "iid": _iid,
    "sorted": _sorted,
    "dirichlet": _dirichlet,
}
