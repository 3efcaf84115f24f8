"""`peerd reproduce`: the experiments of peerd/reproduce, and what came of each."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID

from peerd.cli import Interrupted, interrupts_end_at_once
from peerd.cli.output import Format, FormatOption, check_file, echo, finite, print_json, progress_bar, write_report
from peerd.process.seldom import Seldom
from peerd.transport.errors import UserError

JOBS_MAX = 256
SAYS_LITTLE = {
    "quick": "few seeds and short trainings, so the verdicts say little; leave it out to try the claims as they are",
    "tiny": "next to no training, so the verdicts mean nothing",
}


def reproduce(
    experiments: Annotated[
        list[str] | None, typer.Argument(metavar="EXPERIMENT", help="E1, E2, ... or all; none: the list of them")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="seconds to two minutes each: the verdicts say little")
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="seconds each, for tests: figures without a meaning")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=JOBS_MAX, help="processes (default: one a core)")] = min(
        os.cpu_count() or 1, JOBS_MAX
    ),
    report: Annotated[Path, typer.Option(help="the page; a .json is written beside it")] = Path("reproduction.html"),
    cells: Annotated[
        Path | None, typer.Option(help="where finished cells are kept (default: the cache folder)")
    ] = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Try the claims of the papers that peerd is built on. Finished cells are kept: a run that was ended goes on."""
    with interrupts_end_at_once():
        from peerd.reproduce import EXPERIMENTS
        from peerd.reproduce.cells import CellStore, default_folder
        from peerd.reproduce.experiment import Size
        from peerd.reproduce.page import as_html, as_json, met, shown
        from peerd.reproduce.runs import Progress, run_experiment

    console = Console(soft_wrap=True, highlight=False)
    if not experiments and format is Format.JSON:
        print_json({name: experiment.title for name, experiment in EXPERIMENTS.items()})
        return
    if not experiments:
        for experiment in EXPERIMENTS.values():
            console.print(f"{experiment.name:<4}{experiment.title}", markup=False)
        return
    chosen = {} if "all" not in experiments else dict(EXPERIMENTS)
    for name in experiments:
        if name != "all" and name.upper() not in (known := {each.upper(): each for each in EXPERIMENTS}):
            raise UserError(f"{name}: not one of {', '.join(EXPERIMENTS)}, all")
        if name != "all":
            chosen[known[name.upper()]] = EXPERIMENTS[known[name.upper()]]
    if quick and tiny:
        raise UserError("--quick and --tiny: say one of them")
    check_file("--report", report, ".html")
    check_file("--report", report.with_suffix(".json"), ".json")
    size = Size.TINY if tiny else Size.QUICK if quick else Size.FULL
    store = CellStore(cells or default_folder())
    store.check()
    reports, seldom = [], Seldom()
    try:
        for experiment in chosen.values():
            with progress_bar() as bar:
                row = bar.add_task(f"{experiment.name} {experiment.title}", total=1, note="")

                def tell(now: Progress, bar: Bar = bar, row: TaskID = row) -> None:
                    left = "" if now.left_s is None else f", {_minutes(now.left_s)} left"
                    note = f"{now.done} of {now.of} cells{left}"
                    bar.update(row, completed=now.done, total=now.of, note=note)
                    if bar.disable and seldom.is_news(now.name, now=time.monotonic()):  # a file shows no bar
                        echo(f"{now.name}: {note}", err=True)

                reports.append(run_experiment(experiment, size, store, jobs, tell))
            if format is Format.TEXT:
                last = reports[-1]
                console.print(f"[bold]{last.experiment.name} {last.experiment.title}: {last.verdict}[/bold]")
                console.print(f"  {last.findings.seen}", markup=False)
                for each in last.judged:
                    console.print(f"  {met(each.met)}: {each.criterion.text}: {shown(each)}", markup=False)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: what is finished is kept, the same command goes on from there") from None
    said = as_json(reports)
    write_report(report, as_html(reports))
    import json

    write_report(report.with_suffix(".json"), json.dumps(finite(said), indent=1) + "\n")
    if format is Format.JSON:
        print_json(said)
    else:
        if size is not Size.FULL:
            console.print(f"--{size}: {SAYS_LITTLE[size]}", markup=False)
        console.print(f"{report} and {report.with_suffix('.json')} have the figures", markup=False)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
