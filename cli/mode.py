"""`peerd mode show` and `peerd mode set MODE`: how a live swarm combines models, and how that changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from peerd.cli.mode_options import with_mode_options
from peerd.cli.output import Format, FormatOption, NameOption, echo, print_json
from peerd.local.local_socket import find_node, request
from peerd.training.mode_settings import PLANNED, QUORUM
from peerd.transport.errors import UserError

LOOK_S = 0.1
TELL_EVERY_S = 2.0
PATIENCE_S = 120.0  # a member may finish an exchange of a minute first, and a death is known after 65 s in a WAN

mode = typer.Typer(
    help="Show or change how the swarm combines models, while it trains. A plan is a mode with its settings, as all "
    "members work in it: plan 0 is what they were started with, and each change has the next number.",
    no_args_is_help=True,
)


@mode.command()
def show(name: NameOption = None, format: FormatOption = Format.TEXT) -> None:
    """Show the mode in force, its settings, and who has not come to it yet."""
    answer = request(find_node(name), "mode")
    if format is Format.JSON:
        print_json(answer)
        return
    by = f", set by {answer['proposed_by']}" if answer["plan"] else ", as started"
    echo(f"plan {answer['plan']}: mode {answer['mode']}{by}")
    echo(", ".join(f"{key} {value}" for key, value in _worded(answer).items()))
    late = _late(answer, answer)
    echo(f"{len(answer['members']) - len(late)} of {_members(answer)}{_without(late)}")


@mode.command("set")
@with_mode_options(PLANNED, defaults=False)
def set_mode(
    *,
    mode: Annotated[
        str, typer.Argument(metavar="MODE", help="how models are combined from now on: what peerd start --mode takes")
    ],
    told: dict[str, Any],
    name: NameOption = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Have every member combine models in MODE from now on; training goes on, and newcomers come to it, too.

    Settings that you leave out keep their value in the mode that the nodes were started with; another takes defaults.
    A swarm keeps --exchange, --server-optimizer and --robust for its life. Ends when every living member has it.
    """
    from peerd.protocol.plan import text_of

    path, began = find_node(name), time.monotonic()
    before = request(path, "mode")
    plan = request(path, "mode_set", text=text_of(mode, told))
    answer = _wait(path, plan, began)
    seconds = time.monotonic() - began
    if format is Format.JSON:
        print_json({**answer, "mode_before": before["mode"], "settings_before": before["settings"], "seconds": seconds})
    else:
        was = f" (was {before['mode']})" if before["mode"] != answer["mode"] else ""
        echo(f"plan {answer['plan']}: mode {answer['mode']}{was}; {_members(answer)}, {seconds:.1f} s")
        echo(_changed(_worded(before), _worded(answer)))
        echo(f"in force on {', '.join(member['name'] for member in answer['members'])}")
        if answer["failed"]:
            echo(f"not {', '.join(answer['failed'])}: failed; who comes back comes to it")
        if answer["revoked"]:
            echo(f"not {', '.join(answer['revoked'])}: revoked, out for ever")


def _worded(answer: dict[str, Any]) -> dict[str, Any]:
    """Steps between rounds that a leader measures are no number, and others no promise."""
    settings, settle = answer["settings"], answer["settle_steps"]
    if settings.get("overlap") == QUORUM and settings["every"] == 0:
        return {**settings, "every": "as rounds cost"}
    if settle:
        every, after = settings["every"], "after a round has ended"
        return {**settings, "every": f"{every} (at least {settle} {after})" if every else f"{settle} {after}"}
    return dict(settings)


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Another mode has settings of its own, which are new."""
    changed = [f"{key} {value} (was {before[key]})" for key, value in now.items() if before.get(key, value) != value]
    new = [f"{key} {value}" for key, value in now.items() if key not in before]
    said = [f"{word}: {', '.join(some)}" for word, some in (("changed", changed), ("new", new)) if some]
    return "; ".join(said) or "no setting changed"


def _wait(path: Path, plan: dict[str, Any], began: float) -> dict[str, Any]:
    """Until every living member has come to the plan, telling now and then who has not. Raises UserError."""
    told = time.monotonic()
    while True:
        answer = request(path, "mode")
        if (answer["plan"], answer["author"]) > (plan["plan"], plan["author"]):
            raise UserError(f"plan {plan['plan']} lasted shortly: {answer['proposed_by']} set mode {answer['mode']}")
        late = _late(answer, plan)
        if not late:
            return answer
        if time.monotonic() - began > PATIENCE_S:
            raise UserError(f"plan {plan['plan']} is set, but not everywhere after {PATIENCE_S:.0f} s{_without(late)}")
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            has = f"{len(answer['members']) - len(late)} of {_members(answer)}"
            echo(f"plan {plan['plan']} is set, and in force on {has}{_without(late)}", err=True)
        time.sleep(LOOK_S)


def _members(answer: dict[str, Any]) -> str:
    count = len(answer["members"])
    return f"{count} member{'' if count == 1 else 's'}"


def _late(answer: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """Who works under another plan, be it a newer one that is not known here yet: two may be set at once."""
    ours = (plan["plan"], plan["author"])
    return [member["name"] for member in answer["members"] if (member["plan"], member["author"]) != ours]


def _without(late: list[str]) -> str:
    return f"; not yet {', '.join(late)}" if late else ""
