"""`peerd simulate`: a whole swarm in this process, on virtual time, from one seed."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peerd.cli import Interrupted, interrupts_end_at_once
from peerd.cli.mode_options import with_mode_options
from peerd.cli.output import Format, FormatOption, check_file, print_json, progress_bar, size, write_report
from peerd.protocol.trainer import VALUES_MAX
from peerd.simulation.byzantine import ATTACKS
from peerd.simulation.faults import FAULTS
from peerd.simulation.laboratory import run_all
from peerd.simulation.options import LOOK_MIN_S, OPTIMIZERS, SCHEDULES, parse_modes, parse_seeds
from peerd.simulation.scenario import PROBLEMS, Outcome, Sample, Scenario
from peerd.simulation.scenario import simulate as run_scenario
from peerd.training.mode_settings import WEIGHTS
from peerd.training.modes import heeds, in_one_form
from peerd.training.modes.own_mode import adopted
from peerd.training.tasks import TASKS
from peerd.transport.errors import UserError


@with_mode_options()
def simulate(
    *,
    peers: Annotated[int, typer.Option(min=2, max=4096, help="nodes")] = 16,
    seed: Annotated[int, typer.Option("--seed", "--replay", min=0, help="the same run again, bit for bit")] = 0,
    seeds: Annotated[str | None, typer.Option(help="several, as 0..4 or 0,3,7: a run each")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, max=1e6, help="virtual; default: until the steps are done")
    ] = None,
    problem: Annotated[
        str, typer.Option("--problem", "--task", help=f"one of {', '.join(PROBLEMS)}; a teacher may have sizes")
    ] = "consensus",
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps of each node")] = None,
    parameters: Annotated[int, typer.Option(max=VALUES_MAX, help="of the model, for --problem bytes")] = 125_000_000,
    compute: Annotated[str, typer.Option(help="a step, in s: fixed:S, trace:FILE, lognormal:MED:SIG")] = "fixed:2",
    network: Annotated[str, typer.Option(help="lan, wan, home or a .toml file with sites")] = "lan",
    uplink_mbit: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="of each node, instead of the network's")
    ] = None,
    downlink_mbit: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="of each node, instead of the network's")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="several with commas to compare, a run each; options of one as in 'diloco;every=9'")
    ] = "gossip",
    told: dict[str, Any],
    shard: Annotated[str, typer.Option(help="of a task: iid, sorted or dirichlet:A")] = "iid",
    faults: Annotated[str, typer.Option(help=f"none, all, or some with commas: {', '.join(FAULTS)}")] = "crash",
    fault_every: Annotated[float, typer.Option(min=0.1, max=1e6, help="seconds between faults, on average")] = 60.0,
    drop: Annotated[
        float,
        typer.Option(min=0.0, max=0.99, help="share of the messages that are lost, of a mode that can do with it"),
    ] = 0.0,
    join_over: Annotated[
        float | None,
        typer.Option(min=0.0, max=1e6, help="seconds in which the nodes join; default: they did long ago"),
    ] = None,
    byzantine: Annotated[
        str, typer.Option(help=f"members that lie about their model: {', '.join(ATTACKS)}, with :COUNT or :SHARE%")
    ] = "none",
    slow_node: Annotated[
        float, typer.Option(min=0.01, max=1000, help="how many times as long the first node's steps take")
    ] = 1.0,
    ends_together: Annotated[
        bool, typer.Option("--ends-together", help="who is slower than most ends with them, as by swarm.steps")
    ] = False,
    optimizer: Annotated[str | None, typer.Option(help=f"of each node: {', '.join(OPTIMIZERS)}")] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate; default: the problem's")] = None,
    momentum: Annotated[float | None, typer.Option(help="of SGD")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="of the optimizer, per step")] = None,
    batch: Annotated[int | None, typer.Option(min=1, max=10**6, help="samples a step")] = None,
    schedule: Annotated[
        str | None, typer.Option(help=f"of the learning rate, for --problem teacher: {', '.join(SCHEDULES)}")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="accuracy:0.85 or loss:2.2 of the averaged model: after how long, and what bytes?"),
    ] = None,
    look_every: Annotated[
        float | None,
        typer.Option(min=LOOK_MIN_S, help="virtual seconds between looks at accuracy and loss; they enter the JSON"),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="processes that runs are shared among")] = 1,
    trace: Annotated[Path | None, typer.Option(help="write every event to this file, a line of JSON each")] = None,
    report: Annotated[Path | None, typer.Option(help="write plots to this .html file")] = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Run a swarm of PEERS simulated nodes with the production code and watch every invariant."""
    modes = [(adopted(one), said) for one, said in parse_modes(mode)]
    exchange = told.get("exchange", WEIGHTS)
    of_some = {  # the others each mode refuses
        key for key in told if any(heeds(one, key, said.get("exchange", exchange)) for one, said in modes)
    }
    general = {
        "peers": peers, "minutes": minutes, "problem": problem, "steps": steps, "parameters": parameters,
        "compute": compute, "network": network, "uplink_mbit": uplink_mbit, "downlink_mbit": downlink_mbit,
        "shard": shard, "faults": faults, "fault_every": fault_every, "join_over": join_over, "byzantine": byzantine,
        "slow_node": slow_node, "ends_together": ends_together, "optimizer": optimizer, "lr": lr, "momentum": momentum,
        "weight_decay": weight_decay, "batch": batch, "schedule": schedule, "target": target, "look_every": look_every,
        "drop": drop,
    }  # fmt: skip
    heeded = [
        {k: v for k, v in told.items() if k not in of_some or heeds(one, k, said.get("exchange", exchange))}
        for one, said in modes
    ]
    scenarios = [
        Scenario(**{**general, **own, **said, "mode": one, "seed": number})
        for (one, said), own in zip(modes, heeded, strict=True)
        for number in ([seed] if seeds is None else parse_seeds(seeds))
    ]
    commands = [replace(one, mode=in_one_form(one.mode)).command() for one in scenarios]
    if twice := [one for number, one in enumerate(scenarios) if commands[number] in commands[:number]]:
        raise UserError(f"--mode {mode}: {twice[0].mode} is given twice, and both would be the same run")
    if report is not None:
        check_file("--report", report, ".html")
    if report is not None and trace is not None and report.absolute() == trace.absolute():
        raise UserError(f"--trace and --report name the same file: {report}")
    if trace is not None and len(scenarios) > 1:
        raise UserError(f"--trace {trace}: it holds one run, --mode and --seeds name {len(scenarios)}")
    if workers > 1 and len(scenarios) == 1:
        raise UserError(f"--workers {workers}: without effect on one run; --mode and --seeds can name several")
    if seeds is not None and seed != 0:
        raise UserError(f"--seed {seed} and --seeds {seeds}: say one of them")
    if problem in TASKS:
        with interrupts_end_at_once():
            import peerd.simulation.task_problem  # noqa: F401 - it imports torch
    try:
        runs = (
            _run_all(scenarios, workers)
            if min(workers, len(scenarios)) > 1
            else [(one, _run(one, trace)) for one in scenarios]
        )
    except KeyboardInterrupt:
        raise Interrupted("interrupted: no result; a trace holds what was simulated until then") from None
    except MemoryError as error:
        cure = "take fewer --peers or a smaller --problem, or simulate its --parameters by --problem bytes"
        raise UserError(f"not enough memory for this swarm{f' ({error})' if str(error) else ''}; {cure}") from None
    unwritten: UserError | None = None
    if report is not None:
        from peerd.simulation.report import as_html

        try:
            write_report(report, as_html(runs))
        except UserError as error:  # what was simulated is told in any case
            report, unwritten = None, error
    results = [outcome.result for _, outcome in runs]
    if format is Format.JSON:
        print_json(results[0] if len(results) == 1 else {"runs": results})
    else:
        _print_summary(Console(), results, report)
    if unwritten is not None:
        raise unwritten
    if any(result["violations"] for result in results):
        sys.exit(1)


def _run_all(scenarios: list[Scenario], workers: int) -> list[tuple[Scenario, Outcome]]:
    with progress_bar() as bar:
        row = bar.add_task(f"{len(scenarios)} runs, {workers} at a time", total=len(scenarios), note="")

        def progress(place: int, outcome: Outcome) -> None:
            bar.update(row, advance=1, note=f"{scenarios[place].label}, seed {scenarios[place].seed}")

        return list(zip(scenarios, run_all(scenarios, workers, progress), strict=True))


def _run(scenario: Scenario, trace: Path | None) -> Outcome:
    with _written(trace) as lines, progress_bar() as bar:
        row = bar.add_task(f"{scenario.peers} peers, {scenario.label}, seed {scenario.seed}", total=1.0, note="")

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
        if error.filename not in (None, str(path)):  # of the run, as of a mode of the user's own
            raise
        raise UserError(f"--trace {path}: {error.strerror}") from None


def _print_summary(console: Console, results: list[dict[str, Any]], report: Path | None) -> None:
    columns = {result["run"]: _summary(result) for result in results}
    if len(columns) < len(results):  # several seeds
        columns = {run: _over_seeds([one for one in results if one["run"] == run]) for run in columns}
    if len(columns) > 1:  # narrower; whether two runs are the same is for programs to ask
        for column in columns.values():
            column.pop("digest", None)
            column |= {name: text.replace(" (", "\n(") for name, text in column.items()}
    names = list({name: None for column in columns.values() for name in column})
    headings = _headings(columns)
    for runs in _tables(names, columns, headings, console.width):
        table = Table(box=None, show_header=len(columns) > 1, header_style="bold", pad_edge=False)
        table.add_column("", style="bold", no_wrap=True)
        for run in runs:
            table.add_column(Text(headings[run]), overflow="fold")
        for name in names:
            table.add_row(name, *(Text(columns[run].get(name, "-")) for run in runs))
        console.print(table, highlight=False)
        console.print()
    _print_line(console, "bold", "replay", "")
    for run in columns:
        _print_line(console, "", "", _command([one for one in results if one["run"] == run], console.width))
    if report:
        _print_line(console, "bold", "report", str(report))
    for result in results:
        for violation in result["violations"]:
            _print_line(console, "red", "violation", violation)


def _print_line(console: Console, style: str, name: str, text: str) -> None:
    """As it is: a terminal may wrap it, and who copies it gets one line."""
    console.print(Text.assemble((name, style), "  " if name and text else "", text), soft_wrap=True)


def _headings(runs: Iterable[str]) -> dict[str, str]:
    """Of each run what tells it from the others."""
    said = {run: run.split(";") for run in runs}
    by_all = set.intersection(*(set(options) for _, *options in said.values()))
    return {
        run: "\n".join([mode, *(one for one in options if one not in by_all)]) for run, (mode, *options) in said.items()
    }


def _tables(
    names: list[str], columns: dict[str, dict[str, str]], headings: dict[str, str], width: int
) -> Iterator[list[str]]:
    """The runs, as many at a time as stand beside each other with no cell wrapped."""
    first = left = max(map(len, names), default=0)
    runs: list[str] = []
    for run, column in columns.items():
        needs = 2 + max(map(len, [*headings[run].split("\n"), *"\n".join(column.values()).split("\n")]))
        if runs and left + needs > width:
            yield runs
            runs, left = [], first
        runs.append(run)
        left += needs
    yield runs


def _command(results: list[dict[str, Any]], width: int) -> str:
    """What runs these again, which differ by their seeds alone; lines that end in a backslash are one to the shell."""
    words = shlex.split(results[0]["replay"])
    if len(results) > 1:
        at = words.index("--seed")
        words[at : at + 2] = ["--seeds", ",".join(str(result["seed"]) for result in results)]
    lines = [""]
    for option in re.split(r" (?=--)", shlex.join(words)):
        if lines[-1] and len(lines[-1]) + len(option) + 3 > width:
            lines[-1] += " \\"
            lines.append(" ")
        lines[-1] += f" {option}" if lines[-1] else option
    return "\n".join(lines)


def _percent(share: float) -> str:
    """Of what a lie may make of any size."""
    return f"{share:.3%}" if share < 100 else f"{100 * share:.3g}%"


def _over_seeds(results: list[dict[str, Any]]) -> dict[str, str]:
    """Of one run with several seeds: the median of each figure, and the least and the most."""
    figures: dict[str, tuple[str, Callable[[float], str]]] = {
        "virtual_seconds": ("virtual time", lambda seconds: f"{seconds:,.1f} s"),
        "steps": ("steps of a node", lambda steps: f"{steps:,.0f}"),
        "bytes_sent_total": ("traffic", size),
        "consensus_distance": ("from the mean", _percent),
        "accuracy": ("accuracy", "{:.2%}".format),
        "accuracy_worst": ("worst node's", "{:.2%}".format),
        "error": ("from the optimum", _percent),
        "seconds_to_target": (f"to {results[0].get('target')}", lambda seconds: f"{seconds:,.1f} s"),
        "bytes_to_target": ("bytes to it", size),
    }
    rows = {"seeds": f"{len(results)}", **_faults(results[0])}
    for key, (name, written) in figures.items():
        known = [result[key] for result in results if result.get(key) is not None]
        values = sorted(value for value in known if math.isfinite(value))
        if values:
            rows[name] = f"{written(median(values))} ({written(values[0])} to {written(values[-1])})"
        if "target" in key and "target" in results[0] and len(values) < len(results):
            rows[name] = f"{rows.get(name, '')} reached by {len(values)} of {len(results)}".strip()
    return rows


def _faults(result: dict[str, Any]) -> dict[str, str]:
    """Who gives no --faults has some."""
    return {} if result["faults"] == "none" else {"faults": f"{result['faults']} (see --faults)"}


def _summary(result: dict[str, Any]) -> dict[str, str]:
    units = ["exchanges", "rounds"] if "settings" in result else []  # without a mode there are none
    counted = [unit for unit in units if result[unit]] or units  # a mode has one of them, or neither yet
    rows = {
        "virtual time": f"{result['virtual_seconds']:,.1f} s",
        "simulated in": f"{result['seconds']:.1f} s",
        "steps of a node": f"{result['steps']:,} ({result['steps_least']:,} to {result['steps_most']:,})",
        **{unit: f"{result[unit]:,}" for unit in counted},
        "traffic": size(result["bytes_sent_total"]),
        "of each node": size(result["bytes_sent_total"] / result["peers"]),
    }
    if codec := result.get("settings", {}).get("codec"):
        said = parse_modes(result["run"])[0][1].get("codec", codec)
        rows["codec"] = codec if codec == said else f"{codec}, not {said}"
    if "computing_share" in result:
        rows["computing"] = f"{result['computing_share']:.1%} of the time"
    if math.isfinite(result.get("consensus_distance", math.nan)):
        rows["from the mean"] = _percent(result["consensus_distance"])
    if "liars" in result:
        which = f"node{'s' * (len(result['liars']) != 1)} {', '.join(map(str, result['liars']))}"
        rows["liars"] = f"{which}; all models below are the others'"
    if "accuracy" in result:
        rows["accuracy"] = f"{result['accuracy']:.2%}, averaged model"
        rows["worst node's"] = f"{result['accuracy_worst']:.2%}"
    if result.get("diverged"):
        rows["diverged"] = "models are no numbers any more, or too large for any"
    if result["ended_by"] == "standstill":
        rows["stood still"] = "liars held the others up: no step for long"
    if result["dropped"]:
        rows["lost"] = f"{result['dropped']:,} messages"
    if "mean_bias" in result:
        rows["mean moved"] = f"{result['mean_bias']:.2g} of its norm"
    if "staleness" in result:
        rows["staleness"] = f"{result['staleness']['mean']:.2f} steps, p99 {result['staleness']['p99']}"
    if math.isfinite(result.get("error", math.nan)):
        rows["from the optimum"] = _percent(result["error"])
    if "clean_distance" in result:
        rows["without lies"] = f"{_percent(result['clean_distance'])} away" + "".join(
            f", {name} {_percent(result[key])}" for name in ("accuracy", "error") if (key := f"clean_{name}") in result
        )
    if "target" in result:
        reached = result["seconds_to_target"] is not None
        rows[f"to {result['target']}"] = (
            f"{result['seconds_to_target']:,.1f} s, {size(result['bytes_to_target'])}" if reached else "not reached"
        )
    rows["membership"] = f"{result['probes']:,} probes"
    rows |= _faults(result)
    rows["false deaths"] = f"{result['false_deaths']}"
    if result["crashes"]:
        rows["crashes"] = f"{result['crashes']} ({result['crashes_detected']} known to nearly all)"
    if result["detection_median_s"] is not None:
        rows["known after"] = f"{result['detection_median_s']:.1f} s (median)"
        rows["at most"] = f"{result['detection_p99_s']:.1f} s (p99)"
    return rows | {"digest": result["digest"]}
