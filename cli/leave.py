"""`peerd leave`: end a running node in good order."""

from __future__ import annotations

import time

import typer

from peerd.cli.output import Format, FormatOption, NameOption, print_json
from peerd.effects import UserError
from peerd.local_socket import find_node, request

PATIENCE_S = 60.0  # hand-over, the script's end, the word spread; each has its own deadline in the daemon


def leave(name: NameOption = None, format: FormatOption = Format.TEXT) -> None:
    """Have the running node hand over what it has not yet sent, end its script and leave the swarm."""
    path = find_node(name)
    answer = request(path, "leave")
    deadline = time.monotonic() + PATIENCE_S
    while path.exists():
        if time.monotonic() > deadline:
            raise UserError(f"{answer['leaving']} is still leaving after {PATIENCE_S:.0f} s; its log says why")
        time.sleep(0.05)
    if format is Format.JSON:
        print_json({"left": answer["leaving"]})
    else:
        typer.echo(f"{answer['leaving']} has left")
