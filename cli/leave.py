"""`peerd leave`: end a running node in good order."""

from __future__ import annotations

import typer

from peerd.cli.output import Format, FormatOption, NameOption, print_json
from peerd.local.local_socket import LocalSocket, conversation, find_node

LOOK_EVERY_S = 1.0


def leave(name: NameOption = None, format: FormatOption = Format.TEXT) -> None:
    """Have the running node hand over what it has not yet sent, end its script and leave the swarm."""
    with conversation(find_node(name)) as daemon:
        leaving = daemon.ask("leave")["leaving"]
        _wait(daemon, leaving)
    if format is Format.JSON:
        print_json({"left": leaving})
    else:
        typer.echo(f"{leaving} has left")


def _wait(daemon: LocalSocket, leaving: str) -> None:
    """Until the daemon has ended: what it waits for has its deadline there, and is said here."""
    told = ""
    while not daemon.ends(LOOK_EVERY_S):
        try:
            doing = daemon.ask("leave")["waits_for"]
        except (EOFError, OSError):
            return
        if doing != told:
            typer.echo(f"{leaving} is leaving, and waits for {doing}", err=True)
            told = doing
