"""`peerd simulate`: a whole swarm in this process, on virtual time, from one seed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from peerd.cli import interrupts_end_at_once
from peerd.cli.output import Format, FormatOption, print_json, size
from peerd.simulation.scenario import PROBLEMS, Outcome, Sample, Scenario
from peerd.simulation.scenario import simulate as run_scenario
from peerd.training.modes import heeds
from peerd.training.modes.own_mode import adopted
from peerd.training.tasks import TASKS
from peerd.transport.errors import UserError


def simulate(
    peers: Annotated[int, typer.Option(min=2, max=4096)] = 16,
    seed: Annotated[int, typer.Option("--seed", "--replay", min=0, help="the same run again, bit for bit")] = 0,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, max=1e6, help="virtual; default: until the steps are done")
    ] = None,
    problem: Annotated[str, typer.Option(help=f"one of {', '.join(PROBLEMS)}")] = "consensus",
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps of each node")] = None,
    parameters: Annotated[int, typer.Option(max=10**13, help="of the model, for --problem bytes")] = 125_000_000,
    compute: Annotated[str, typer.Option(help="a step, in s: fixed:S, lognormal:MEDIAN:SIGMA, trace:FILE")] = "fixed:2",
    network: Annotated[str, typer.Option(help="lan, wan, home or a .toml file with sites")] = "lan",
    uplink_mbit: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="of each node, instead of the network's")
    ] = None,
    downlink_mbit: Annotated[float | None, typer.Option(min=0.001, max=1e6)] = None,
    mode: Annotated[str, typer.Option(help="several to compare, as gossip,allreduce,async: a run each")] = "gossip",
    codec: Annotated[str, typer.Option(help="how deltas are compressed; auto: the mode's own")] = "auto",
    trigger: Annotated[str, typer.Option(help="change:0.05, period:10, always")] = "change:0.05",
    view: Annotated[int, typer.Option(min=1, max=64, help="partners of a node")] = 3,
    every: Annotated[int, typer.Option(min=1, max=10**6, help="steps between rounds, of a mode that has rounds")] = 1,
    overlap: Annotated[str, typer.Option(help="of a round and the training: blocking, delayed, hpsgd")] = "delayed",
    topology: Annotated[
        str, typer.Option(help="of an all-reduce: auto, ring, tree:K, halving; of servers: adv:K")
    ] = "auto",
    servers: Annotated[int, typer.Option(min=1, max=4096, help="nodes that serve the parameters, each a part")] = 1,
    min_peers: Annotated[int, typer.Option(min=1, max=4096, help="a round of fewer members waits")] = 1,
    shard: Annotated[str, typer.Option(help="of a task: iid, sorted or dirichlet:A")] = "iid",
    faults: Annotated[str, typer.Option(help="none, all, or a list: crash,pause,partition,...")] = "crash",
    fault_every: Annotated[float, typer.Option(min=0.1, max=1e6, help="seconds between faults, on average")] = 60.0,
    join_over: Annotated[
        float | None,
        typer.Option(min=0.0, max=1e6, help="seconds in which the nodes join; default: they did long ago"),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="write every event to this file, a line of JSON each")] = None,
    report: Annotated[Path | None, typer.Option(help="write plots to this .html file")] = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Run a swarm of PEERS simulated nodes with the production code and watch every invariant."""
    modes = [adopted(one) for one in mode.split(",")]
    settings: dict[str, Any] = {
        "codec": codec, "trigger": trigger, "view": view, "every": every, "overlap": overlap, "topology": topology,
        "servers": servers, "min_peers": min_peers,
    }  # fmt: skip
    of_some = {key for key in settings if any(heeds(one, key) for one in modes)}  # the others are refused by each mode
    scenarios = [
        Scenario(
            peers, seed, minutes, problem, steps, parameters, compute, network, uplink_mbit, downlink_mbit, one,
            shard=shard, faults=faults, fault_every=fault_every, join_over=join_over,
            **{key: value for key, value in settings.items() if key not in of_some or heeds(one, key)},
        )
        for one in modes
    ]  # fmt: skip
    if report is not None and report.suffix != ".html":
        raise UserError(f"--report {report}: the name must end in .html")
    if report is not None and not report.absolute().parent.is_dir():
        raise UserError(f"--report {report}: no such folder: {report.absolute().parent}")
    if report is not None and trace is not None and report.absolute() == trace.absolute():
        raise UserError(f"--trace and --report name the same file: {report}")
    if trace is not None and len(scenarios) > 1:
        raise UserError(f"--trace {trace}: it holds one run, --mode names {len(scenarios)}")
    if problem in TASKS:
        with interrupts_end_at_once():
            import peerd.simulation.task_problem  # noqa: F401 - it imports torch
    try:
        runs = [(scenario, _run(scenario, trace)) for scenario in scenarios]
    except KeyboardInterrupt:
        raise UserError("interrupted: no result; a trace holds what was simulated until then") from None
    if report is not None:
        from peerd.simulation.report import write_report

        _write(report, write_report(runs))
    results = [outcome.result for _, outcome in runs]
    if format is Format.JSON:
        print_json(results[0] if len(results) == 1 else {"runs": results})
    else:
        _print_summary(Console(), results, report)
    if any(result["violations"] for result in results):
        sys.exit(1)


def _run(scenario: Scenario, trace: Path | None) -> Outcome:
    with _written(trace) as lines, Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    ) as bar:  # fmt: skip
        row = bar.add_task(f"{scenario.peers} peers, {scenario.mode}, seed {scenario.seed}", total=1.0, note="")

        def progress(share: float, look: Sample) -> None:
            note = f"{look.at:,.0f} s, {look.up} up, {size(look.bytes_sent)}, distance {look.distance:.2%}"
            bar.update(row, completed=share, note=note)

        return run_scenario(scenario, lines, progress)


@contextmanager
def _written(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--report {path}: {error.strerror}") from None


def _print_summary(console: Console, results: list[dict[str, Any]], report: Path | None) -> None:
    columns = [_summary(result) for result in results]
    table = Table(box=None, show_header=len(results) > 1, header_style="bold", pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    for result in results:
        table.add_column(result["mode"], overflow="fold")
    for name in {name: None for column in columns for name in column}:
        table.add_row(name, *(column.get(name, "-") for column in columns))
    console.print(table, highlight=False)
    said = [("replay", result["replay"]) for result in results] + ([("report", str(report))] if report else [])
    for name, text in said:
        console.print(f"[bold]{name}[/bold]  {text}", highlight=False, soft_wrap=True)
    for result in results:
        for violation in result["violations"]:
            console.print(f"[red]violation[/red]  {violation}", highlight=False, soft_wrap=True)


def _summary(result: dict[str, Any]) -> dict[str, str]:
    rows = {
        "virtual time": f"{result['virtual_seconds']:,.1f} s",
        "simulated in": f"{result['seconds']:.1f} s",
        "steps of a node": f"{result['steps']:,} ({result['steps_least']:,} to {result['steps_most']:,})",
        "exchanges": f"{result['exchanges']:,}",
        "rounds": f"{result['rounds']:,}",
        "traffic": size(result["bytes_sent_total"]),
        "of each node": size(result["bytes_sent_total"] / result["peers"]),
    }
    if "computing_share" in result:
        rows["computing"] = f"{result['computing_share']:.1%} of the trainers' time"
    if "consensus_distance" in result:
        rows["from the mean"] = f"{result['consensus_distance']:.3%}"
    if "accuracy" in result:
        rows["accuracy"] = f"{result['accuracy']:.2%} of the averaged model"
        rows["worst node's"] = f"{result['accuracy_worst']:.2%}"
    if "error" in result:
        rows["from the optimum"] = f"{result['error']:.3%}"
    rows["membership"] = f"{result['probes']:,} probes"
    rows["false deaths"] = f"{result['false_deaths']}"
    if result["crashes"]:
        rows["crashes"] = f"{result['crashes']} ({result['crashes_detected']} known to 99 %)"
    if result["detection_median_s"] is not None:
        rows["known after"] = f"{result['detection_median_s']:.1f} s (median)"
        rows["at most"] = f"{result['detection_p99_s']:.1f} s (p99)"
    return rows | {"digest": result["digest"]}
