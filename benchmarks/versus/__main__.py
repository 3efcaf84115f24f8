"""peerd beside what people use, as real processes on lines of a known rate: seconds and bytes to a target.

    python -m benchmarks.versus --quick                                         some minutes
    python -m benchmarks.versus --mbit 10 --shard iid --seeds 0..2 --tune    one cell of the big table
    python -m benchmarks.versus --disturb kill                                  none, slow, thin, kill or join

Each worker is in a network namespace of its own behind a line of so many Mbit/s, both ways (root, ip and tc). Every
row makes the same steps on the same shards, each step takes at least --pace, and the weights that workers write on the
way are judged afterwards: the accuracy of the mean of all living workers' newest. Bytes are counted at the interfaces.
`--tune` tries each row with the same learning rates and takes the one that was best with the first seed. Targets
stand in TARGETS. Finished cells are kept, so that a run that was ended goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from benchmarks.versus.cell import DISTURBANCES, Cell, run
from benchmarks.versus.rivals import OURS, RIVALS
from peerd.process.ending import kill_cleans_up
from peerd.reproduce.cells import sources
from peerd.reproduce.experiment import Curve, Plot
from peerd.reproduce.page import drawn
from peerd.reproduce.sockets.lines import can_make_namespaces
from peerd.training.plain_numbers import number, whole
from peerd.training.tasks import TASKS, data_partition
from peerd.transport.errors import UserError

TARGETS = {
    "digits": {"iid": 0.95, "dirichlet": 0.9, "sorted": 0.85},
    "fashion-mnist": {"iid": 0.86, "dirichlet": 0.85, "sorted": 0.8},
    "shakespeare": {"iid": 0.36, "dirichlet": 0.36, "sorted": 0.36},
}
"""Accuracy on the test samples, by task and kind of shard. Digits that are iid need hardly any exchange."""
RATES = {"digits": ["0.05", "0.1", "0.2", "0.4"], "fashion-mnist": ["0.025", "0.05", "0.1", "0.2"],
         "shakespeare": ["0.003", "0.006", "0.012", "0.024"]}  # fmt: skip
"""Learning rates that --tune tries."""
QUICK = ("DDP", "DDP, PowerSGD 4", "local SGD 32", "DiLoCo 32", *OURS)

Result = dict[str, Any]


class Kept:
    """Finished cells, a line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._found: dict[str, Result] = dict(json.loads(line) for line in lines)

    def result(self, cell: Cell, target: float) -> Result:
        """Of a cell; it is run unless it was, by this code."""
        key = f"{cell.key()} {target:g} {code()}"
        if key not in self._found:
            self._found[key] = run(cell, target)
            with self._path.open("a") as file:
                file.write(json.dumps([key, self._found[key]]) + "\n")
        return self._found[key]


def code(folder: Path = Path(__file__).parent) -> str:
    """A digest of what a run comes of: peerd's sources, and the files here but this one, which shows what came."""
    digest = hashlib.sha256(sources().encode())
    for path in sorted(folder.glob("*.py")):
        if path.name != Path(__file__).name:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def best(results: Sequence[Result]) -> str:
    """The learning rate of the run that was soonest at the target, or else came furthest."""

    def rank(result: Result) -> tuple[bool, float]:
        if result["seconds"] is not None:
            return True, -result["seconds"]
        return False, result["accuracy"] or 0.0

    return str(max(results, key=rank)["lr"])


def middle(values: Sequence[float | None], scale: float = 1.0, digits: int = 1) -> str:
    """Median and range; with the runs that have none named."""
    there = [value * scale for value in values if value is not None]
    if not there:
        return "never"
    missing = f", never in {len(values) - len(there)}" if len(there) < len(values) else ""
    span = f" ({min(there):.{digits}f}-{max(there):.{digits}f})" if len(there) > 1 else ""
    return f"{statistics.median(there):.{digits}f}{span}{missing}"


def row_of(name: str, results: Sequence[Result]) -> list[str]:
    """Of the table."""
    said = [result["ended"] for result in results if result["ended"] != "well"]
    return [
        name, results[0]["lr"] or "task's",
        middle([result["seconds"] for result in results]),
        middle([result["bytes"] for result in results], 1e-6, 2),
        middle([result["accuracy"] for result in results], 1.0, 3),
        middle([result["bytes_in_all"] for result in results], 1e-6, 2),
        said[0] if said else "",
    ]  # fmt: skip


COLUMNS = ("row", "lr", "s to target", "MB a worker to target", "accuracy at the end", "MB a worker in all", "")


def plots(found: dict[str, list[Result]]) -> list[Plot]:
    """Accuracy over seconds and over bytes, of the first seed."""
    curves = []
    for index, scale in ((0, 1.0), (1, 1e-6)):
        curves.append(
            [
                Curve(name, [look[index] * scale for look in each[0]["looks"]], [look[2] for look in each[0]["looks"]])
                for name, each in found.items()
            ]
        )
    return [Plot("accuracy", "seconds", curves[0]), Plot("accuracy", "MB a worker", curves[1])]


def span(text: str) -> list[int]:
    """`0..2` or `1`."""
    first, _, last = text.partition("..")
    seeds = list(range(whole(first), whole(last or first) + 1))
    if not seeds or seeds[0] < 0:
        raise argparse.ArgumentTypeError(f"{text}: wanted FIRST..LAST or one seed, none below 0")
    return seeds


def within(least: float, most: float) -> Callable[[str], float]:
    """What an option takes."""

    def read(text: str) -> float:
        value = number(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: wanted {least:g} to {most:g}")
        return value

    return read


def in_a_folder(text: str) -> Path:
    """A file that can be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: this is a folder")
    if not os.access(path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: no folder to write to: {path.absolute().parent}")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the usual rows, one seed")
    parser.add_argument("--rows", help=f"names, with ; between them, of: {'; '.join([*RIVALS, *OURS])}")
    parser.add_argument("--task", choices=list(TARGETS), default="digits")
    parser.add_argument("--shard", default="sorted", help="iid, sorted or dirichlet:A")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pace", type=within(0, 10), default=0.02, help="seconds that a step takes at least")
    parser.add_argument("--mbit", type=within(0, 1e5), default=10.0, help="of each line; 0: loopback, no bytes counted")
    parser.add_argument("--disturb", choices=DISTURBANCES, default="none")
    parser.add_argument("--seeds", type=span, default=[0], help="0..2")
    parser.add_argument("--tune", action="store_true", help="the learning rate of each row")
    parser.add_argument("--target", type=within(0, 1), help="accuracy; the task's own")
    parser.add_argument(
        "--cells", type=in_a_folder, default=Path("versus-cells.jsonl"), help="where finished runs are kept"
    )
    parser.add_argument("--plot", type=in_a_folder, help="an SVG")
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    options = parser.parse_args()
    rows = options.rows.split(";") if options.rows else list(QUICK) if options.quick else [*RIVALS, *OURS]
    if unknown := [name for name in rows if name not in (RIVALS | OURS)]:
        parser.error(f"--rows: {unknown[0]!r} is not one of {'; '.join([*RIVALS, *OURS])}")
    if options.task not in TASKS or options.steps < 2 or options.peers < 2:
        parser.error("wanted at least 2 steps and 2 peers")
    try:
        kind = data_partition.parse(options.shard).kind
    except UserError as error:
        parser.error(f"--shard: {error}")
    if options.mbit and not can_make_namespaces():
        parser.error("--mbit: needs root, ip and tc, and a kernel that gives namespaces; --mbit 0 runs over loopback")
    target = options.target or TARGETS[options.task][kind]
    kept = Kept(options.cells)
    plain = Cell(rows[0], 0, options.task, options.shard, options.peers, options.steps, options.pace, options.mbit,
                 options.disturb)  # fmt: skip
    found: dict[str, list[Result]] = {}
    console = Console(stderr=True)
    with kill_cleans_up(), Progress(console=console, transient=True) as progress:
        rates = RATES[options.task] if options.tune else []
        bar = progress.add_task("", total=len(rows) * (len(rates) + len(options.seeds)))

        def one(name: str, seed: int, lr: str) -> Result:
            progress.update(bar, description=f"{name}, seed {seed}{f', lr {lr}' if lr else ''}")
            result = kept.result(replace(plain, row=name, seed=seed, lr=lr), target)
            progress.advance(bar)
            return result

        for name in rows:
            tried = [one(name, options.seeds[0], rate) for rate in rates]
            lr = best(tried) if tried else ""
            found[name] = [one(name, seed, lr) for seed in options.seeds]
    if options.plot:
        options.plot.write_text(drawn(plots(found)), encoding="utf-8")
    show(options.format, f"{options.task} {options.shard} to {target:g}, {options.mbit:g} Mbit/s", found)


def show(how: str, title: str, found: dict[str, list[Result]]) -> None:
    table = [row_of(name, results) for name, results in found.items()]
    if how == "json":
        json.dump(found, sys.stdout)
        sys.stdout.write("\n")
    elif how == "markdown":
        lines = [COLUMNS, ["---"] * len(COLUMNS), *table]
        sys.stdout.writelines(f"| {' | '.join(line)} |\n" for line in lines)
    else:
        shown = Table(*COLUMNS, title=title)
        for line in table:
            shown.add_row(*map(escape, line))  # what a rival said as it ended is in it
        Console().print(shown)


if __name__ == "__main__":
    main()
