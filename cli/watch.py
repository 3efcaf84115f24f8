"""`peerd status --watch`: how a node's numbers go, for as long as somebody looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peerd.cli.output import size
from peerd.local.local_socket import request, running_nodes
from peerd.transport.errors import UserError
from peerd.transport.printable import printable

LOOK_EVERY_S = 1.0
POINTS_MAX = 40  # of a trend, that it fits a narrow terminal
LEVELS = "▁▂▃▄▅▆▇█"
VALUE_MAX = 1e300  # in a trend


class Trend:
    """One number over all looks, in at most POINTS_MAX means of as many looks each."""

    def __init__(self) -> None:
        self._points: list[float] = []
        self._looks_a_point = 1
        self._sum, self._count = 0.0, 0  # of the point that is not full yet

    def add(self, value: float) -> None:
        """One look's; what is not finite, or so large that sums are not, is in no mean."""
        if not abs(value) <= VALUE_MAX:
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._looks_a_point:
            return
        self._points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._points) == POINTS_MAX:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(first + second) / 2 for first, second in pairs]
            self._looks_a_point *= 2

    @property
    def points(self) -> list[float]:
        """The oldest first; the last may be of fewer looks than the others."""
        return [*self._points, self._sum / self._count] if self._count else list(self._points)

    def drawn(self) -> str:
        """A character a point, between the lowest and the highest."""
        points = self.points
        low, high = min(points, default=0.0), max(points, default=0.0)
        span = high - low or 1.0
        return "".join(LEVELS[round((point - low) / span * (len(LEVELS) - 1))] for point in points)


def looks(path: Path) -> Iterator[dict[str, Any]]:
    """The node's status, once a LOOK_EVERY_S until it has ended. Raises UserError where it does not answer."""
    while True:
        began = time.monotonic()
        try:
            yield request(path, "status")
        except UserError:
            if path.stem in running_nodes():
                raise
            return
        time.sleep(max(0.0, LOOK_EVERY_S - (time.monotonic() - began)))


def measures(before: dict[str, Any] | None, now: dict[str, Any], passed_s: float) -> dict[str, tuple[float, str]]:
    """What has a trend, by its name: how much it is, and the same for people."""
    found: dict[str, tuple[float, str]] = {}
    trainer, trainer_before = now["trainer"], before and before["trainer"]
    if trainer and trainer_before and trainer["pid"] == trainer_before["pid"]:
        rate = (trainer["step"] - trainer_before["step"]) / passed_s
        found["steps a second"] = rate, f"{rate:.3g}"
    if trainer and trainer["loss"] is not None:
        found["loss"] = trainer["loss"], f"{trainer['loss']:.4f}"
    for key, value in (trainer or {"metrics": {}})["metrics"].items():
        found[printable(key)] = value, f"{value:.4g}"
    if (distance := now["consensus_distance"]) is not None:
        found["consensus distance"] = distance, f"{distance:.2%}"
    if before:
        for word in ("sent", "received"):
            rate = (now[f"bytes_{word}"] - before[f"bytes_{word}"]) / passed_s
            found[f"{word} a second"] = rate, size(rate)
    return found


def show(path: Path, rest: Callable[[dict[str, Any]], RenderableType]) -> None:
    """Draw trends, and the `rest` of a status, until the node has ended or somebody presses Ctrl-C."""
    console = Console()
    if not console.is_terminal:
        raise UserError("--watch needs a terminal; with --format json it writes a line at each look, anywhere")
    trends: dict[str, Trend] = {}
    before, at = None, time.monotonic()
    with Live(console=console, auto_refresh=False) as live:
        for status in looks(path):
            passed_s, at = time.monotonic() - at, time.monotonic()
            found = measures(before, status, passed_s)
            for name, (value, _) in found.items():
                trends.setdefault(name, Trend()).add(value)
            live.update(_view(status, trends, found, rest), refresh=True)
            before = status
    console.print(f"{path.stem} has ended")


def _view(
    status: dict[str, Any],
    trends: dict[str, Trend],
    found: dict[str, tuple[float, str]],
    rest: Callable[[dict[str, Any]], RenderableType],
) -> RenderableType:
    grid = Table(box=None, show_header=False, pad_edge=False)
    for name in [*found, *(name for name in trends if name not in found)]:
        shown = found[name][1] if name in found else "-"
        grid.add_row(Text(name), Text(shown), Text(trends[name].drawn(), style="cyan"))
    view = Table.grid()
    view.add_row(rest(status))
    view.add_row(grid)
    return view
