"""`peerd leave`: end a running node in good order."""

from __future__ import annotations

import typer

from peerd.cli.output import Format, FormatOption, NameOption, print_json
from peerd.local.local_socket import conversation, find_node
from peerd.transport.errors import UserError

PATIENCE_S = 60.0  # hand-over, the script's end, the word spread; each has its own deadline in the daemon


def leave(name: NameOption = None, format: FormatOption = Format.TEXT) -> None:
    """Have the running node hand over what it has not yet sent, end its script and leave the swarm."""
    with conversation(find_node(name)) as daemon:
        leaving = daemon.ask("leave")["leaving"]
        if not daemon.ends(PATIENCE_S):
            raise UserError(f"{leaving} is still leaving after {PATIENCE_S:.0f} s; its log says why")
    if format is Format.JSON:
        print_json({"left": leaving})
    else:
        typer.echo(f"{leaving} has left")
