"""What does a demo show? A table while it runs, and at the end what the models are worth and what they cost."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from peerd.cli.demo.local_swarm import LocalSwarm
from peerd.cli.demo.run import Statuses, Watch, finished, share, stalled_s, steps_made
from peerd.cli.output import counted, size
from peerd.training.modes import exchanges, heeds
from peerd.training.tasks import TASKS
from peerd.transport.printable import printable

COLUMNS = ("node", "phase", "step", "loss", "accuracy", "distance", "sent")


def show_live(console: Console, title: str, mode: str, looks: Iterable[Statuses]) -> None:
    """Draw the table anew after each look, until there are no more."""
    bar = Progress(TextColumn(title), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    row = bar.add_task(title, total=1.0, note="starting")
    latest: Statuses = {}
    with Live(console=console, refresh_per_second=4, transient=not console.is_terminal) as live:
        for statuses in looks:
            latest.update(statuses)
            note = f"{finished(statuses)} of {len(statuses)} finished"
            bar.update(row, completed=share(statuses), note=note)
            live.update(Group(bar, table(latest, counted_in(mode))))


def counted_in(mode: str) -> str:
    """What a mode's work is counted in."""
    return "rounds" if heeds(mode, "min_peers") else "exchanges"


def table(latest: Statuses, unit: str) -> Table:
    """One row a node, as each was seen last; within 80 columns."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in (*COLUMNS, unit):
        table.add_column(column, justify="left" if column in ("node", "phase") else "right", no_wrap=True)
    for name, status in latest.items():
        trainer = status["trainer"] or {"loss": None, "metrics": {}}
        loss, accuracy = trainer["loss"], trainer["metrics"].get("accuracy")
        table.add_row(
            name,
            status["phase"],
            str(steps_made(status)),
            "-" if loss is None else f"{loss:.4f}",
            "-" if accuracy is None else f"{accuracy:.2%}",
            "-" if status["consensus_distance"] is None else f"{status['consensus_distance']:.2%}",
            size(status["bytes_sent"]),
            str(status["counts"].get(unit, 0)),
        )
    return table


def sum_up(swarm: LocalSwarm, watch: Watch, task: str, seed: int, mode: str) -> dict[str, Any]:
    """What came of the run, the nodes of which still hold their models."""
    import torch
    from safetensors.torch import load_file

    nodes = [name for name in swarm.names if name not in swarm.ended()]
    carriers = {sample.node: sample.status["carriers"] for sample in watch.samples if sample.status["carriers"]}
    models = [load_file(swarm.export(name)) for name in nodes]
    average = {key: torch.stack([model[key] for model in models]).mean(0) for key in models[0]}
    scores = [_evaluate(task, seed, model) for model in models]
    of_average = _evaluate(task, seed, average)
    squares = [sum(float(((m[key] - average[key]) ** 2).sum()) for key in average) for m in models]
    norm = sum(float((value**2).sum()) for value in average.values()) ** 0.5
    final = {name: swarm.status(name) for name in nodes}
    of_all = {**watch.latest, **final}.values()  # of one that was killed, what it said last
    sent = sum(status["bytes_sent"] for status in of_all)
    trained = [(status["trainer"], status["values"]) for status in of_all if status["trainer"] is not None]
    every_step = sum((trainer["step"] - trainer["first_step"]) * 4 * values for trainer, values in trained)
    restarts = {name: status["trainer_restarts"] for name, status in final.items() if status["trainer_restarts"]}
    watch.failures += [
        f"{name}: the trainer died and was started again {count} times" for name, count in restarts.items()
    ]
    accuracies = [score["accuracy"] for score in scores]
    return {
        "peers": len(swarm.names),
        "task": task,
        "mode": mode,
        "steps": max(status["trainer"]["step"] for status in final.values()),
        "accuracy_mean": sum(accuracies) / len(accuracies),
        "accuracy_worst": min(accuracies),
        "accuracy_averaged_model": of_average["accuracy"],
        "loss_mean": sum(score["loss"] for score in scores) / len(scores),
        "bytes_sent_total": sent,
        "bytes_every_step_fp32": every_step,
        "bytes_saved_fraction": 1 - sent / every_step if every_step else 0.0,
        "exchanges": exchanges(mode, sum(status["exchanges"] for status in of_all)),
        "rounds": max(status["counts"].get("rounds", 0) for status in final.values()),
        "snapshots": sum(status["snapshots"] for status in of_all),
        "carriers": sorted(set().union(*carriers.values())),
        "consensus_distance": (sum(squares) / len(squares)) ** 0.5 / norm,
        "seconds": watch.seconds,
        "loop_latency_p99_s": max(status["loop_latency_p99_s"] for status in final.values()),
        "killed": watch.kill.node if watch.kill is not None and watch.killed_at_s is not None else None,
        "stalled_s": stalled_s(watch),
        "failures": watch.failures,
    }


def print_summary(console: Console, result: dict[str, Any], picture: Path | None) -> None:
    """For people."""
    unit = counted_in(result["mode"])
    shm = " (shm: memory that nodes of one machine share)" if "shm" in result["carriers"] else ""
    console.print(
        f"[bold]{result['task']}[/bold]: {result['peers']} nodes, {result['steps']} steps, {result['seconds']:.1f} s\n"
        f"accuracy   {result['accuracy_averaged_model']:.2%} averaged model, {result['accuracy_mean']:.2%} mean, "
        f"{result['accuracy_worst']:.2%} worst node\n"
        f"traffic    {size(result['bytes_sent_total'])} sent in {counted(result[unit], unit)} and "
        f"{counted(result['snapshots'], 'models')} sent whole\n"
        f"           every-step fp32 gossip would send {size(result['bytes_every_step_fp32'])}: {_saved(result)}\n"
        f"went over  {', '.join(result['carriers']) or 'nothing'}{shm}\n"
        f"consensus  nodes are {result['consensus_distance']:.3%} from their mean"
    )
    if picture is not None:
        console.print(f"picture    {picture}")
    if result["killed"] is not None:
        console.print(f"killed     {result['killed']}; the others stood still for {result['stalled_s']:.1f} s at most")
    for failure in result["failures"]:
        console.print(f"[red]failure[/red]    {escape(printable(failure))}")


def _saved(result: dict[str, Any]) -> str:
    """Less than nothing where a server answers each step with its weights, or few steps follow whole models."""
    saved = result["bytes_saved_fraction"]
    more = result["bytes_sent_total"] - result["bytes_every_step_fp32"]
    return f"{saved:.1%} saved" if saved >= 0 else f"{size(more)} more were sent"


def _evaluate(task: str, seed: int, weights: dict[str, Any]) -> dict[str, float]:
    model, _ = TASKS[task].build(seed)
    model.load_state_dict(weights, strict=False)  # frozen tensors and integer buffers stay as built
    return TASKS[task].evaluate(model)
