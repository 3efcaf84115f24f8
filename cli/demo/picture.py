"""What did a run look like? Loss, accuracy, consensus distance and bytes against time, one line a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from peerd.cli.demo.run import Sample

mpl.use("agg")
from matplotlib import pyplot

NAMED_MAX = 10
"""Nodes: the names of more would hide the lines."""


def draw(path: Path, samples: Sequence[Sample], title: str) -> None:
    """Write the picture; the ending of `path` says which kind."""
    panels: list[tuple[str, Callable[[dict[str, Any]], float | None]]] = [
        ("training loss", lambda status: _trainer(status).get("loss")),
        ("test accuracy", lambda status: _trainer(status).get("metrics", {}).get("accuracy")),
        ("consensus distance / model norm", lambda status: status["consensus_distance"]),
        ("MB sent", lambda status: status["bytes_sent"] / 1e6),
    ]
    began = min((s.seconds for s in samples if _trainer(s.status).get("loss") is not None), default=0.0)
    nodes = sorted({sample.node for sample in samples}, key=lambda node: (len(node), node))
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    for axis, (name, value) in zip(axes.flat, panels, strict=True):
        for node in nodes:
            seen = [s for s in samples if s.node == node and s.seconds >= began]
            points = [(s.seconds - began, y) for s in seen if (y := value(s.status)) is not None]
            axis.plot([x for x, _ in points], [y for _, y in points], label=node, linewidth=1.2)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
    if len(nodes) <= NAMED_MAX:
        axes[0][0].legend(fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("seconds of training")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _trainer(status: dict[str, Any]) -> dict[str, Any]:
    return status["trainer"] or {}
