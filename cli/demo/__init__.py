"""`peerd demo`: a whole swarm on this machine, watched live and summed up against every-step gossip."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from peerd.carriers import CARRIERS
from peerd.cli import interrupts_end_at_once
from peerd.cli.demo.figures import print_summary, show_live, sum_up
from peerd.cli.demo.local_swarm import LocalSwarm
from peerd.cli.demo.run import Kill, Watch, follow
from peerd.cli.mode_options import with_mode_options
from peerd.cli.output import Format, FormatOption, check_file, print_json
from peerd.process.ending import kill_cleans_up
from peerd.settings import load
from peerd.training.modes import check_peers
from peerd.training.modes.own_mode import as_told
from peerd.training.tasks import TASKS, data_partition
from peerd.transport.errors import UserError

PACE_S = 0.01  # least time of a step: many trainers on few cores keep level, as nodes with a GPU each would


@with_mode_options()
def demo(
    *,
    task: Annotated[str, typer.Option("--task", "--problem", help=f"one of {', '.join(TASKS)}")] = "digits",
    peers: Annotated[int, typer.Option(min=1, max=64, help="nodes, each with a daemon and a trainer")] = 4,
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps of each node (default: the task's)")] = None,
    shard: Annotated[str, typer.Option(help="iid, sorted or dirichlet:A")] = "iid",
    mode: Annotated[str, typer.Option(help="how models are combined: what peerd start --mode takes")] = "gossip",
    told: dict[str, Any],
    transport: Annotated[
        str | None, typer.Option(help=f"how models travel between machines: {', '.join(CARRIERS)}")
    ] = None,
    rdma_allow_fallback: Annotated[
        bool | None, typer.Option("--rdma-allow-fallback", help="without RDMA take whatever UCX has, for tests")
    ] = None,
    kill: Annotated[
        str | None, typer.Option(metavar="NODE@SHARE", help="SIGKILL a node in mid-run: 1@0.5 is node-1, halfway")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the first weights and of the split")] = 0,
    picture: Annotated[Path, typer.Option(help="where the plots go")] = Path("peerd-demo.png"),
    format: FormatOption = Format.TEXT,
) -> None:
    """Train a task on PEERS real daemons on this machine and compare the traffic with every-step gossip."""
    if task not in TASKS:
        raise UserError(f"task {task!r} is not one of {', '.join(TASKS)}")
    command = [task, "--shard", shard, "--seed", str(seed), "--pace", str(PACE_S)]
    if steps is not None:
        command += ["--steps", str(steps)]
    given = {"mode": mode, **told, "transport": transport, "rdma_allow_fallback": rdma_allow_fallback}
    # refused here, as is what lacks data: a node would take seconds to start, only to refuse it in its log
    data_partition.parse(shard)
    settings = load(given, {}, None)
    check_peers(settings, peers)
    given["mode"] = as_told(settings.mode)
    check_file("--picture", picture, ".png", ".svg", ".pdf")
    victim = Kill.parse(kill, peers) if kill is not None else None
    if victim is not None and settings.min_peers == peers:
        raise UserError(f"--min-peers {peers}: after --kill {kill} there are {peers - 1}, who would wait for ever")
    if not TASKS[task].brings_data:
        with interrupts_end_at_once():
            TASKS[task].prepare([*command[1:], "--rank", "0", "--peers", str(peers)])
    console = Console(stderr=format is Format.JSON)
    options = {
        "--wait-for": str(peers),
        **dict(_flag(key, value) for key, value in given.items() if value is not None),
    }
    with kill_cleans_up(), LocalSwarm(peers, options, command) as swarm:
        watch = Watch(victim)
        show_live(console, f"{task} on {peers} nodes", settings.mode, follow(swarm, watch))
        with interrupts_end_at_once(swarm.end_at_once):  # on a busy machine these take longer than the training
            import torch  # noqa: F401  # for `sum_up`

            from peerd.cli.demo.picture import draw
        result = sum_up(swarm, watch, task, seed, settings.mode)
    drawn: Path | None = picture
    try:
        draw(picture, watch.samples, f"{task}, {peers} nodes, {shard}")
    except OSError as error:  # what was measured is told in any case
        drawn = None
        watch.failures.append(f"--picture {picture}: {error.strerror or error}")
    if format is Format.JSON:
        print_json({**result, "picture": str(drawn) if drawn else None})
    else:
        print_summary(console, result, drawn)
    if watch.failures:
        sys.exit(1)


def _flag(key: str, value: Any) -> tuple[str, str]:
    option = key.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{option}" if value else f"--no-{option}"), ""
    return f"--{option}", str(value)
