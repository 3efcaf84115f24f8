"""`peerd leave`: end a running node in good order."""

from __future__ import annotations

import typer

from peerd.cli.output import Format, FormatOption, NameOption, echo, print_json
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
    """Until the daemon has ended; what it waits for is said."""
    told = ""

    def tell(text: str) -> None:
        nonlocal told
        if text != told:
            echo(f"{leaving} {text}", err=True)
            told = text

    while not daemon.ends(LOOK_EVERY_S):
        try:
            answer = daemon.ask("leave", meanwhile=lambda: tell("is leaving, and does not answer now"))
        except (EOFError, OSError):
            return
        tell(f"is leaving, and waits for {answer.get('waits_for', 'its end')}")  # of another version
