"""`peerd demo`: a whole swarm on this machine, watched live and summed up against every-step gossip."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from peerd.cli.local_swarm import LocalSwarm
from peerd.cli.output import Format, FormatOption, print_json, size
from peerd.effects import UserError
from peerd.settings import load
from peerd.training.modes import exchanges
from peerd.training.tasks import TASKS, shards

WATCH_EVERY_S = 0.25
PACE_S = 0.01  # least time of a step: many trainers on few cores keep level, as nodes with a GPU each would
STUCK_S = 300.0  # no node makes a step or changes its phase for this long: something is wrong

ENDING = (signal.SIGTERM, signal.SIGHUP)


@dataclass
class Sample:
    """One look at one node."""

    seconds: float
    node: str
    status: dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """Which node gets a SIGKILL, and when."""

    node: str
    share: float  # of the run

    @classmethod
    def parse(cls, text: str, peers: int) -> Kill:
        """Read NODE@SHARE. Raises UserError."""
        index, _, share = text.partition("@")
        try:
            kill = cls(f"node-{int(index)}", float(share))
        except ValueError:
            raise UserError(f"--kill {text}: wanted NODE@SHARE, for example 1@0.5") from None
        if not 0 <= int(index) < peers:
            raise UserError(f"--kill {text}: the nodes are 0 to {peers - 1}")
        if not 0 < kill.share < 1 or peers < 2:
            raise UserError(f"--kill {text}: a share between 0 and 1 of a run of at least 2 nodes")
        return kill


@dataclass
class Watch:
    """Everything seen of a run."""

    kill: Kill | None = None
    killed_at_s: float | None = None
    samples: list[Sample] = field(default_factory=list)
    latest: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def demo(
    task: Annotated[str, typer.Option(help=f"one of {', '.join(TASKS)}")] = "digits",
    peers: Annotated[int, typer.Option(min=1, max=64)] = 4,
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps of each node (default: the task's)")] = None,
    shard: Annotated[str, typer.Option(help="iid, sorted or dirichlet:A")] = "iid",
    mode: Annotated[str, typer.Option()] = "gossip",
    codec: Annotated[str | None, typer.Option()] = None,
    trigger: Annotated[str | None, typer.Option(help="change:0.05, period:10, always")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="steps between rounds, of a mode that has rounds")] = None,
    overlap: Annotated[str | None, typer.Option(help="training during a round: blocking, delayed, hpsgd")] = None,
    topology: Annotated[
        str | None, typer.Option(help="of an all-reduce: auto, ring, tree:K, halving; of servers: adv:K")
    ] = None,
    servers: Annotated[int | None, typer.Option(min=1, help="members that serve the parameters, each a part")] = None,
    transport: Annotated[str | None, typer.Option(help="what bulk travels over between hosts: tcp, rdma, auto")] = None,
    rdma_allow_fallback: Annotated[
        bool | None, typer.Option("--rdma-allow-fallback", help="without RDMA take whatever UCX has, for tests")
    ] = None,
    kill: Annotated[
        str | None, typer.Option(metavar="NODE@SHARE", help="SIGKILL a node in mid-run: 1@0.5 is node-1, halfway")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    picture: Annotated[Path, typer.Option(help="where the plots go")] = Path("peerd-demo.png"),
    format: FormatOption = Format.TEXT,
) -> None:
    """Train a task on PEERS real daemons on this machine and compare the traffic with every-step gossip."""
    if task not in TASKS:
        raise UserError(f"task {task!r} is not one of {', '.join(TASKS)}")
    command = [task, "--shard", shard, "--seed", str(seed), "--pace", str(PACE_S)]
    if steps is not None:
        command += ["--steps", str(steps)]
    given: dict[str, Any] = {"mode": mode, "codec": codec, "trigger": trigger}
    given |= {"every": every, "overlap": overlap, "topology": topology, "servers": servers}
    given |= {"transport": transport, "rdma_allow_fallback": rdma_allow_fallback}
    # refused here: a node would take seconds to start, only to refuse it in its log
    shards.parse(shard)
    settings = load(given, {}, None)
    _check_picture(picture)
    victim = Kill.parse(kill, peers) if kill is not None else None
    console = Console(stderr=format is Format.JSON)
    options = {
        "--wait-for": str(peers),
        **{f"--{key.replace('_', '-')}": "" if value is True else str(value) for key, value in given.items() if value},
    }
    _clean_up_on_signals()
    with LocalSwarm(peers, options, command) as swarm:
        watch = _watch(swarm, console, f"{task} on {peers} nodes", victim)
        result = _sum_up(swarm, watch, task, seed, settings.mode)
    from peerd.cli.picture import draw

    draw(picture, watch.samples, f"{task}, {peers} nodes, {shard}")
    if format is Format.JSON:
        print_json({**result, "picture": str(picture)})
    else:
        _print_summary(console, result, picture)
    if watch.failures:
        sys.exit(1)


def _check_picture(picture: Path) -> None:
    if picture.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--picture {picture}: the name must end in .png, .svg or .pdf")
    if not picture.absolute().parent.is_dir():
        raise UserError(f"--picture {picture}: no such folder: {picture.absolute().parent}")


def _clean_up_on_signals() -> None:
    """Let `kill` and a closed terminal end the demo as Ctrl-C does: nodes stopped, folder removed, exit not 0."""

    def end(number: int, _: object) -> None:
        for known in ENDING:
            signal.signal(known, signal.SIG_IGN)  # once is enough: a second one would cut the cleaning up short
        raise SystemExit(128 + number)

    for known in ENDING:
        if signal.getsignal(known) is signal.SIG_DFL:  # nohup ignores SIGHUP on purpose
            signal.signal(known, end)


# -------------------------------------------------------------------- watching


def _watch(swarm: LocalSwarm, console: Console, title: str, kill: Kill | None) -> Watch:
    watch = Watch(kill)
    bar = Progress(TextColumn(title), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    row = bar.add_task(title, total=1.0, note="starting")
    began = moved_at = time.monotonic()
    last: Any = None
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        for statuses in _looks(swarm, watch):
            watch.seconds = time.monotonic() - began
            watch.samples += [Sample(watch.seconds, name, status) for name, status in statuses.items()]
            watch.latest.update(statuses)
            progress = {name: (_step(status), status["phase"]) for name, status in statuses.items()}
            if progress != last:
                last, moved_at = progress, time.monotonic()
            elif time.monotonic() - moved_at > STUCK_S:
                raise UserError(f"no node has made a step for {STUCK_S:.0f} s: {progress}")
            if kill is not None and watch.killed_at_s is None and _share(statuses) >= kill.share:
                swarm.kill(kill.node)
                watch.killed_at_s = watch.seconds
            finished = sum(status["phase"] == "finished" for status in statuses.values())
            bar.update(row, completed=_share(statuses), note=f"{finished} of {len(statuses)} finished")
            live.update(Group(bar, _table(watch.latest)))
            if statuses and finished == len(statuses):
                return watch
    raise UserError("every node is gone: " + "; ".join(watch.failures))


def _looks(swarm: LocalSwarm, watch: Watch) -> Iterator[dict[str, dict[str, Any]]]:
    """The status of every living node, again and again, until none is left."""
    while True:
        statuses = {}
        gone = swarm.ended()
        for name in swarm.names:
            if name in gone and watch.killed_at_s is not None and watch.kill is not None and name == watch.kill.node:
                continue
            if name in gone:
                _fail(watch, f"{name} ended with code {gone[name]}: {swarm.last_words(name)}")
                continue
            try:
                statuses[name] = swarm.status(name)
            except UserError:
                continue  # it is ending; the next look tells how
        if len(gone) == len(swarm.names):
            return
        yield statuses
        time.sleep(WATCH_EVERY_S)


def _fail(watch: Watch, text: str) -> None:
    if text not in watch.failures:
        watch.failures.append(text)


def _step(status: dict[str, Any]) -> int:
    return int(status["trainer"]["step"]) if status["trainer"] else 0


def _share(statuses: dict[str, dict[str, Any]]) -> float:
    """How far the run is: the tasks say their share of steps as a metric, and a finished node is through."""
    return sum(_progress(status) for status in statuses.values()) / max(1, len(statuses))


def _progress(status: dict[str, Any]) -> float:
    if status["phase"] in ("finishing", "finished"):
        return 1.0
    return float(status["trainer"]["metrics"].get("progress", 0.0)) if status["trainer"] else 0.0


def _table(latest: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("node", "phase", "step", "loss", "accuracy", "distance", "sent", "received", "exchanges", "reason"):
        table.add_column(column, justify="left" if column in ("node", "phase", "reason") else "right")
    for name, status in latest.items():
        trainer = status["trainer"] or {"step": 0, "loss": None, "metrics": {}}
        loss, accuracy = trainer["loss"], trainer["metrics"].get("accuracy")
        busiest = max(status["links"], key=lambda link: link["exchanges"], default={"last_reason": ""})
        table.add_row(
            name,
            status["phase"],
            str(trainer["step"]),
            "-" if loss is None else f"{loss:.4f}",
            "-" if accuracy is None else f"{accuracy:.2%}",
            f"{status['consensus_distance']:.2%}",
            size(status["bytes_sent"]),
            size(status["bytes_received"]),
            str(status["exchanges"]),
            busiest["last_reason"] or "-",
        )
    return table


# -------------------------------------------------------------------- the summary


def _sum_up(swarm: LocalSwarm, watch: Watch, task: str, seed: int, mode: str) -> dict[str, Any]:
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
    own_steps = [status["trainer"]["step"] - status["trainer"]["first_step"] for status in final.values()]
    sent = sum(status["bytes_sent"] for status in {**watch.latest, **final}.values())
    every_step = sum(steps * 4 * status["values"] for steps, status in zip(own_steps, final.values(), strict=True))
    restarts = {name: status["trainer_restarts"] for name, status in final.items() if status["trainer_restarts"]}
    watch.failures += [
        f"{name}: the trainer died and was started again {count} times" for name, count in restarts.items()
    ]
    accuracies = [score["accuracy"] for score in scores]
    return {
        "peers": len(swarm.names),
        "task": task,
        "steps": max(status["trainer"]["step"] for status in final.values()),
        "accuracy_mean": sum(accuracies) / len(accuracies),
        "accuracy_worst": min(accuracies),
        "accuracy_averaged_model": of_average["accuracy"],
        "loss_mean": sum(score["loss"] for score in scores) / len(scores),
        "bytes_sent_total": sent,
        "bytes_every_step_fp32": every_step,
        "bytes_saved_fraction": 1 - sent / every_step if every_step else 0.0,
        "exchanges": exchanges(mode, sum(status["exchanges"] for status in final.values())),
        "snapshots": sum(status["snapshots"] for status in final.values()),
        "carriers": sorted(set().union(*carriers.values())),
        "consensus_distance": (sum(squares) / len(squares)) ** 0.5 / norm,
        "seconds": watch.seconds,
        "loop_latency_p99_s": max(status["loop_latency_p99_s"] for status in final.values()),
        "killed": watch.kill.node if watch.kill is not None and watch.killed_at_s is not None else None,
        "stalled_s": _stalled_s(watch),
        "failures": watch.failures,
    }


def _stalled_s(watch: Watch) -> float | None:
    """The longest that a survivor made no step after the kill, while it trained."""
    if watch.kill is None or watch.killed_at_s is None:
        return None
    longest = 0.0
    for name in watch.latest.keys() - {watch.kill.node}:
        seen = [s for s in watch.samples if s.node == name and s.seconds >= watch.killed_at_s]
        since, step = watch.killed_at_s, -1
        for sample in seen:
            if sample.status["phase"] != "training":
                break
            longest = max(longest, sample.seconds - since)
            if _step(sample.status) != step:
                since, step = sample.seconds, _step(sample.status)
    return round(longest, 2)


def _evaluate(task: str, seed: int, weights: dict[str, Any]) -> dict[str, float]:
    model, _ = TASKS[task].build(seed)
    model.load_state_dict(weights, strict=False)  # frozen tensors and integer buffers stay as built
    return TASKS[task].evaluate(model)


def _print_summary(console: Console, result: dict[str, Any], picture: Path) -> None:
    console.print(
        f"[bold]{result['task']}[/bold]: {result['peers']} nodes, {result['steps']} steps, {result['seconds']:.1f} s\n"
        f"accuracy   {result['accuracy_averaged_model']:.2%} averaged model, {result['accuracy_mean']:.2%} mean, "
        f"{result['accuracy_worst']:.2%} worst node\n"
        f"traffic    {size(result['bytes_sent_total'])} sent in {result['exchanges']} exchanges and "
        f"{result['snapshots']} snapshots\n"
        f"           every-step fp32 gossip would send {size(result['bytes_every_step_fp32'])}: "
        f"{result['bytes_saved_fraction']:.1%} saved\n"
        f"carrier    {', '.join(result['carriers']) or 'none'}, of large chunks\n"
        f"consensus  nodes are {result['consensus_distance']:.3%} from their mean\n"
        f"picture    {picture}"
    )
    if result["killed"] is not None:
        console.print(f"killed     {result['killed']}; the others stood still for {result['stalled_s']:.1f} s at most")
    for failure in result["failures"]:
        console.print(f"[red]failure[/red]    {failure}")
