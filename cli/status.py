"""`peerd status`: what a node is doing."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from peerd.cli.misuse import FAILED_CODE
from peerd.cli.output import NameOption, counted, echo, mean_of, plain_table, print_json, print_table, size
from peerd.local.local_socket import find_node, request, running_nodes, socket_path
from peerd.transport.errors import UserError
from peerd.transport.printable import printable

BARS = 12  # of a histogram
LOOKS_MAX = 3  # whether one of all nodes has answered


class StatusFormat(StrEnum):
    """What --format takes here."""

    TEXT = "text"
    JSON = "json"
    PROMETHEUS = "prometheus"


def status(
    name: NameOption = None,
    format: Annotated[StatusFormat, typer.Option("--format", help="text, json, or prometheus")] = StatusFormat.TEXT,
    watch: Annotated[
        bool, typer.Option("--watch", help="once a second, with trends, until the node ends (json: a line each)")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="a line for each node of this user on this machine")] = False,
) -> None:
    """Show a node's training, links, traffic, and why its trigger decided what it did.

    \b
    consensus distance  of models from the swarm's mean, relative to their norm,
                        as the last exchanges found it, before they lessened it
    PARTNER (this)      the node itself, where it holds the centre of elastic
    EXCHANGES, ROUNDS   with that partner since this mode began
    DISTANCE            of the two models at their last exchange, absolute
                        (of gradients: of this node's from their mean)
    GAIN                the share of it that a correction takes away: at most 0.5,
                        or all, 1, where the other end serves the parameters
    CODEC               of the next exchange with that partner; once this node's
                        run has ended int4, whatever --codec says
    LAST REASON         why this node last began an exchange: the model's change,
                        silence for a minute, period, always, or its finishing;
                        with parameter servers, how many of the model's shards
                        that partner serves: "1 of its shards"
    STALENESS, PUSHES   where this node serves parameters: how many of its steps
                        old a worker's push was when it came; how many were so
    models sent whole   to newcomers and new partners; all else is differences
    event loop late     by how much the daemon (not the training) was behind

    Trigger decisions are those reasons, counted, and what was not sent:

    \b
    quiet               a copy came, not for an exchange, and by an upper bound
                        the model has not moved enough since the last one
    bound_only          an upper bound had, the exact change then had not
    no_idle_link        there is no partner, or each is in an exchange already
    light               push-sum: the node has given away nearly all its weight
    """
    if every:
        if name is not None or watch or format is StatusFormat.PROMETHEUS:
            raise UserError("--all: not with --name, --watch or --format prometheus, which are of one node")
        _print_all(format)
        return
    path = find_node(name)
    if watch:
        _watch(path, format)
        return
    answer = request(path, "status")
    if format is StatusFormat.JSON:
        print_json(answer)
    elif format is StatusFormat.PROMETHEUS:
        from peerd.daemon.metrics import exposition

        typer.echo(exposition(answer), nl=False)
    else:
        _print_text(answer)


def _print_all(format: StatusFormat) -> None:
    answers: list[dict[str, Any]] = []
    if not (names := running_nodes()):
        find_node(None)  # says that there is none
    for name in names:
        try:
            answers.append(request(socket_path(name), "status", _in_time()))
        except UserError as error:  # it starts, ends, or is stopped
            answers.append({"name": name, "error": str(error)})
    if format is StatusFormat.JSON:
        print_json(answers)
    else:
        print_table(["NAME", "PHASE", "STEP", "LOSS", "MODE", "MEMBERS", "SENT"], list(map(_row, answers)))
        for answer in answers:
            if "error" in answer:
                echo(f"{answer['name']}: {answer['error']}", err=True)
    if all("error" in answer for answer in answers):
        raise typer.Exit(FAILED_CODE)


def _in_time() -> Callable[[], None]:
    """One node that hangs, as on a disk that does, must not hide all others."""
    looks = count(1)

    def look() -> None:
        if next(looks) == LOOKS_MAX:
            raise UserError("the node does not answer")

    return look


def _row(answer: dict[str, Any]) -> list[str]:
    if "error" in answer:
        return [answer["name"], "no answer", *["-"] * 5]
    trainer = answer["trainer"]
    step = "-" if trainer is None else str(trainer["step"])
    loss = "-" if trainer is None or trainer["loss"] is None else f"{trainer['loss']:.4f}"
    return [
        answer["name"], answer["phase"], step, loss, answer["mode"], _members(answer), size(answer["bytes_sent"])
    ]  # fmt: skip


def _watch(path: Path, format: StatusFormat) -> None:
    from peerd.cli.watch import looks, show

    try:
        if format is StatusFormat.TEXT:
            show(path, _view)
            return
        if format is StatusFormat.PROMETHEUS:
            raise UserError("--watch: not with --format prometheus, whose reader comes again by itself; leave it out")
        for answer in looks(path):
            print_json(answer)
    except KeyboardInterrupt:  # as a view ends
        pass


def _view(answer: dict[str, Any]) -> RenderableType:
    lines = [Text(printable(_headline(answer)))]
    if answer["crash"]:
        lines.append(Text(printable(answer["crash"])))
    lines += [Text(printable(line)) for line in _out_of_reach(answer)]
    if trainer := answer["trainer"]:
        lines.append(Text(f"step {trainer['step']}; {_counted(answer)}"))
    return Group(*lines, *([plain_table(*_links(answer))] if answer["links"] else []))


def _print_text(answer: dict[str, Any]) -> None:
    echo(_headline(answer))
    if answer["crash"]:
        echo(f"{answer['crash']}; the log says why")
    if trainer := answer["trainer"]:
        metrics = "".join(f", {key} {value:.4g}" for key, value in trainer["metrics"].items())
        loss = "" if trainer["loss"] is None else f", loss {trainer['loss']:.4f}"
        ago = trainer["last_step_s_ago"]
        stepped = "" if ago is None or trainer["phase"] != "training" else f"; last step {_seconds(ago)} ago"
        alone = answer["no_partner_s"]
        distance = answer["consensus_distance"]
        measured = f"not measured yet: no {_unit(answer)[:-1]}" if distance is None else f"{distance:.2%}"
        echo(f"step {trainer['step']}{loss}{metrics}{stepped}")
        if why := trainer["checkpoint_failed"]:
            echo(f"no checkpoint written {why}")
        echo(f"consensus distance {measured}" if alone is None else f"no partner for {_seconds(alone)}")
    if seeds := answer["joining"]:
        echo(f"no member found yet through {', '.join(seeds)}; the log says why")
    if answer["no_steps"]:
        echo(f"no steps from {', '.join(answer['no_steps'])}: the script hangs, or has died")
    if answer["same_batches"]:
        echo(f"same batches as {', '.join(answer['same_batches'])}: together they learn what one learns; see the log")
    for peer, seconds in answer["refused"].items():
        echo(f"{peer} is refused for {_seconds(seconds)}; peerd forgive ends it")
    sent, received = size(answer["bytes_sent"]), size(answer["bytes_received"])
    whole = answer["snapshots"]
    echo(f"sent {sent}, received {received}; {whole} model{'s' * (whole != 1)} sent whole")
    if rate := answer["budget_bytes_s"]:
        echo(f"budget {8 * rate / 1e6:g} Mbit/s; sends waited {_seconds(answer['budget_waited_s'])} for it, together")
    for line in _out_of_reach(answer):
        echo(line)
    if (lost := answer["relay_lost_s"]) is not None:
        echo(f"nobody can dial this node: no relay for {_seconds(lost)}; the log says why")
    if relayed := answer["relayed_bytes"]:
        echo(f"relay of {', '.join(answer['relayed_for']) or 'nobody now'}; {size(relayed)} passed on")
    if answer["trainer"] or answer["links"]:  # else the mode waits for a model, and nothing says yet what it counts
        echo(f"{_counted(answer)} since this mode began")
    if cut := answer["counts"].get("exchanges_cut", 0):
        why = "a crash, or too many absent partners, may have taken a part of the models' mean"
        echo(f"{cut} exchange{'s' * (cut != 1)} cut: {why}")
    echo(f"event loop late by {answer['loop_latency_p99_s'] * 1e3:.1f} ms (p99)")
    if answer["links"]:
        print_table(*_links(answer))
    if staleness := {int(steps): count for steps, count in answer["staleness"].items()}:
        pushes, most = sum(staleness.values()), max(staleness)
        echo(
            f"served {pushes} push{'es' * (pushes != 1)}; staleness {mean_of(staleness):.2f} on average, {most} at most"
        )
        print_table(["STALENESS", "PUSHES", "SHARE"], _histogram(staleness))
    decisions = {key[8:]: value for key, value in answer["counts"].items() if key.startswith("trigger_")}
    if decisions:
        echo("trigger decisions: " + ", ".join(f"{key} {value}" for key, value in decisions.items()))


def _headline(answer: dict[str, Any]) -> str:
    return f"{answer['name']}: {answer['phase']}; mode: {answer['mode']}; members: {_members(answer)}"


def _members(answer: dict[str, Any]) -> str:
    return ", ".join(f"{count} {state}" for state, count in answer["members"].items() if count)


def _out_of_reach(answer: dict[str, Any]) -> list[str]:
    """Why others cannot reach the node at its address, where they cannot."""
    from peerd.process.own_address import cure_of, cure_of_astray

    if answer["address_gone"]:
        return [cure_of(answer["address_gone"])]
    return [cure_of_astray(answer["address_unreached"])] if answer["address_unreached"] else []


def _unit(answer: dict[str, Any]) -> str:
    return "rounds" if "rounds" in answer["counts"] else "exchanges"  # of a mode that has rounds a link counts those


def _counted(answer: dict[str, Any]) -> str:
    unit = _unit(answer)
    return counted(answer["counts"].get(unit, 0), unit)


def _links(answer: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The columns, and a row each."""
    unit = _unit(answer)
    columns = ["PARTNER", unit.upper(), "DISTANCE", "GAIN", "CODEC", "LAST REASON"]
    rows = [
        [link["peer"] + " (this)" * (link["peer"] == answer["name"]),
         str(link["exchanges"]), f"{link['distance']:.3g}" if link["exchanges"] else "-",
         f"{link['gain']:.2f}", link["codec"] or "-",
         link["last_reason"] or "-"]
        for link in answer["links"]
    ]  # fmt: skip
    shown = len(columns) - (unit == "rounds")  # all take part in a round, for no reason of this node's
    return columns[:shown], [row[:shown] for row in rows]


def _histogram(staleness: dict[int, int]) -> list[list[str]]:
    """At most BARS rows, of as many values of staleness each; none of those that no push had."""
    width, pushes = 1 + max(staleness) // BARS, sum(staleness.values())
    rows = []
    for low in range(0, max(staleness) + 1, width):
        if count := sum(staleness.get(age, 0) for age in range(low, low + width)):
            ages = f"{low}" if width == 1 else f"{low} to {low + width - 1}"
            rows.append([ages, str(count), f"{count / pushes:.1%}"])
    return rows


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
