"""Would codecs that know tensors send the differences of a link better than those that do not? What gossip has to send.

    python benchmarks/tensor_codecs.py digits|fashion-mnist|shakespeare [--steps 200] [--shard dirichlet:0.3]

A simulated run by gossip is listened to, and each difference that an exchange began with is encoded once more in every
way: by the codecs there are, by low rank as PowerGossip does it (Vogels et al. 2020, arXiv:2008.01425: a power step,
which starts from the last one's result; factors in bfloat16, vectors in int8), and with one magnitude, or one choice of
the largest, for each row, column or tensor. A markdown table of medians: bytes a value, and the share of a difference's
energy that gets through, which is what error feedback contracts by. The last rows are reckoned, not encoded.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from peerd.simulation.scenario import Scenario, simulate
from peerd.training.codecs import CODECS, vector
from peerd.training.codecs.vector import Layout
from peerd.training.effects import Vector
from peerd.training.pairs.reference import ExchangeHalf, PairedReference
from peerd.training.tasks import TASKS
from peerd.transport.messages import Delta

Matrix = npt.NDArray[np.float64]
Shape = tuple[int, ...]
Way = Callable[[Vector], tuple[float, float]]
"""What a difference becomes: bytes a value, and the share of its energy that gets through."""
LINKS, EXCHANGES_MIN = 4, 10
INT8_BYTES, BIT_BYTES, MAGNITUDE_BYTES, BFLOAT16_BYTES = 0.95, 0.125, 2, 2
STEP_S = {"digits": 0.02, "fashion-mnist": 0.02, "shakespeare": 0.1}
LARGEST = 0.03


def differences(task: str, steps: int, shard: str) -> list[list[Vector]]:
    """Of some links, in order, shape (parameters,)."""
    heard: dict[int, list[Vector]] = defaultdict(list)
    begin = PairedReference.begin

    def listening(self: PairedReference, values: Vector, half: ExchangeHalf) -> Delta:
        assert isinstance(self.mine, np.ndarray), "models this small are kept as they are"
        heard[self.link].append((values - self.mine)[: self.layout.parameters].astype(np.float32))
        return begin(self, values, half)

    told: dict[str, Any] = {"problem": task, "steps": steps, "shard": shard, "compute": f"fixed:{STEP_S[task]}"}
    with patch.object(PairedReference, "begin", listening):
        simulate(Scenario(peers=4, faults="none", uplink_mbit=10.0, downlink_mbit=10.0, **told))
    return [of_link for of_link in heard.values() if len(of_link) >= EXCHANGES_MIN][:LINKS]


def tensors(values: Vector, shapes: list[Shape]) -> Iterator[tuple[Shape, Vector]]:
    """Each with its shape."""
    start = 0
    for shape in shapes:
        yield shape, values[start : start + math.prod(shape)]
        start += math.prod(shape)


def rows(values: Vector, shapes: list[Shape], *, across: bool = False) -> Iterator[Vector]:
    """Of each matrix, or its columns; a vector is one row."""
    for shape, part in tensors(values, shapes):
        matrix = part.reshape(shape[0], -1) if len(shape) > 1 else part[None]
        yield from matrix.T if across and len(shape) > 1 else matrix


def by_codec(name: str, layout: Layout) -> Way:
    """As it travels."""

    def way(values: Vector) -> tuple[float, float]:
        chunks, contraction = vector.encode(name, layout, values)
        return sum(map(len, chunks)) / len(values), contraction.delta

    return way


def by_low_rank(rank: int, shapes: list[Shape]) -> Way:
    """A matrix M becomes P (M^T P)^T, P an orthonormal basis of M Q, Q the last M^T P."""
    last: dict[int, Matrix] = {}
    rng = np.random.default_rng(0)

    def way(values: Vector) -> tuple[float, float]:
        size = lost = 0.0
        for number, (shape, part) in enumerate(tensors(values, shapes)):
            matrix = part.astype(np.float64).reshape(shape[0], -1)
            if len(shape) == 1 or min(matrix.shape) <= 2 * rank:
                size += INT8_BYTES * part.size
                continue
            start = last.get(number, rng.normal(size=(matrix.shape[1], rank)))
            basis, _ = np.linalg.qr(matrix @ np.linalg.qr(start)[0])
            last[number] = matrix.T @ basis
            lost += float(((matrix - basis @ last[number].T) ** 2).sum())
            size += BFLOAT16_BYTES * rank * sum(matrix.shape)
        return size / len(values), 1 - lost / float((values.astype(np.float64) ** 2).sum())

    return way


def by_one_bit(groups: Callable[[Vector], Iterator[Vector]]) -> Way:
    """Signs, and the mean magnitude of each group."""

    def way(values: Vector) -> tuple[float, float]:
        lost, count = 0.0, 0
        for group in groups(values):
            magnitude = np.abs(group)
            lost, count = lost + float(((magnitude - magnitude.mean()) ** 2).sum()), count + 1
        size = BIT_BYTES + MAGNITUDE_BYTES * count / len(values)
        return size, 1 - lost / float((values.astype(np.float64) ** 2).sum())

    return way


def by_largest(groups: Callable[[Vector], Iterator[Vector]]) -> Way:
    """The largest of each group as they are; their bytes are those of top_k_3."""

    def way(values: Vector) -> tuple[float, float]:
        kept = 0.0
        for group in groups(values):
            energies = np.sort(group.astype(np.float64) ** 2)
            kept += float(energies[-max(1, round(LARGEST * len(energies))) :].sum())
        return math.nan, kept / float((values.astype(np.float64) ** 2).sum())

    return way


def ways(shapes: list[Shape]) -> dict[str, Callable[[], Way]]:
    """Each made anew for a link: some remember what they sent last."""
    layout = Layout(*2 * (sum(map(math.prod, shapes)),))
    groups: dict[str, Callable[[Vector], Iterator[Vector]]] = {
        "256 values": lambda values: iter(np.split(values, range(256, len(values), 256))),
        "row": lambda values: rows(values, shapes),
        "column": lambda values: rows(values, shapes, across=True),
        "tensor": lambda values: (part for _, part in tensors(values, shapes)),
        "model": lambda values: iter([values]),
    }
    lossy = [name for name in CODECS if name not in ("float32", "bfloat16", "int8")]
    return {
        **{f"`{name}`": partial(by_codec, name, layout) for name in lossy},
        **{f"rank {rank}": partial(by_low_rank, rank, shapes) for rank in (1, 2, 4, 8, 16)},
        **{f"a bit, by {name}": partial(by_one_bit, of) for name, of in groups.items()},
        **{f"largest 3 % of each {name}": partial(by_largest, of) for name, of in groups.items()},
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=STEP_S)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shard", default="dirichlet:0.3")
    options = parser.parse_args()
    shapes = [tuple(weights.shape) for weights in TASKS[options.task].build()[0].parameters()]
    links = differences(options.task, options.steps, options.shard)
    print("| | bytes a value | share through |\n|---|---|---|")
    for name, make in ways(shapes).items():
        found = [way(values) for way, of_link in ((make(), link) for link in links) for values in of_link]
        size, through = (median(column) for column in zip(*found, strict=True))
        print(f"| {name} | {'' if math.isnan(size) else f'{size:.4f}'} | {through:.3f} |", flush=True)


if __name__ == "__main__":
    main()
