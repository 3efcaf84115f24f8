"""Make benchmarks/REPRODUCTION.md and its figures from what `peerd reproduce` wrote.

What the page has of other experiments, and notes, it keeps.

peerd reproduce all --quick && python benchmarks/reproduction.py reproduction.json [MORE.json ...] --machine "2 cores"
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

from peerd.reproduce import EXPERIMENTS
from peerd.reproduce.experiment import Curve, Plot
from peerd.reproduce.page import drawn, met, rows_of, seeds_of

HERE = Path(__file__).parent


def curve(said: dict[str, Any]) -> Curve:
    across, values, low, high = (
        [math.nan if value is None else float(value) for value in said[name]]
        for name in ("across", "values", "low", "high")
    )
    return Curve(said["label"], across, values, low, high, said["line"])


def plots_of(experiment: dict[str, Any]) -> list[Plot]:
    return [
        Plot(
            plot["title"],
            plot["across"],
            [curve(each) for each in plot["curves"]],
            plot["log_across"],
            plot["log_values"],
        )
        for plot in experiment["plots"]
    ]


def section(experiment: dict[str, Any], figures: Path) -> str:
    name = experiment["name"]
    lines = [f"## {name} {experiment['title']}: {experiment['verdict']}", ""]
    lines += [f"{experiment['claim']} {experiment['seen']}", ""]
    if experiment["plots"]:
        (figures / f"{name}.svg").write_text(drawn(plots_of(experiment)), encoding="utf-8")
        lines += [f"![{name}]({figures.name}/{name}.svg)", ""]
    lines += ["| criterion, fixed before the run | mean [95 % interval] | |", "|---|---|---|"]
    lines += [f"| {each['text']} | {each['shown']} | {met(each['met'])} |" for each in experiment["criteria"]]
    columns, rows = rows_of(experiment["rows"])
    if rows:
        lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", *(f"- {note}" for note in experiment["notes"])]
    lines += [
        f"- `{experiment['command']}`, {experiment['date']}, {seeds_of(experiment['seeds'])}; {experiment['paper']}",
        "",
    ]
    return "\n".join(lines)


def kept(page: Path) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """The sections and the rows of the table by experiment, and the notes, of a page that there is."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    head, *rest = re.split(r"^(?=## E)", text, flags=re.MULTILINE)
    sections = {one.split()[1]: one.rstrip() + "\n" for one in rest}
    rows = {row.split()[1]: row for row in head.splitlines() if row.startswith("| E")}
    return sections, rows, [line[2:] for line in head.splitlines() if line.startswith("- ")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--machine", required=True, help="on what it ran, and what else ran there")
    parser.add_argument(
        "--note",
        action="append",
        default=[],
        help="what a reader must know, in place of the notes that there are; may be given again",
    )
    parser.add_argument("--out", type=Path, default=HERE / "REPRODUCTION.md")
    options = parser.parse_args()
    found = [each for path in options.results for each in json.loads(path.read_text())["experiments"]]
    by_name = {each["name"]: each for each in found}
    figures = options.out.parent / "reproduction"
    figures.mkdir(exist_ok=True)
    sections, rows, notes = kept(options.out)
    lines = [
        "# What the papers claimed, and what peerd saw",
        "",
        f"Made by `benchmarks/reproduction.py` from what `peerd reproduce` wrote, on {options.machine}. `--quick` runs "
        "have few seeds and short trainings: their verdicts are of that size. Criteria stand in `peerd/reproduce/`, "
        "written before the runs; a claim that did not reproduce is printed as it is.",
        "",
        "| | experiment | verdict | run |",
        "|---|---|---|---|",
    ]
    for name, experiment in EXPERIMENTS.items():
        ran = by_name.get(name)
        row = f"| {name} | {experiment.title} | "
        row += f"{ran['verdict']} | `{ran['command']}` |" if ran else "NOT RUN | not yet |"
        lines.append(row if ran else rows.get(name, row))
    lines += ["", *(f"- {note}" for note in options.note or notes), ""]
    sections |= {name: section(ran, figures) for name, ran in by_name.items()}
    lines += [sections[name] for name in EXPERIMENTS if name in sections]
    options.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
