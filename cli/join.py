"""`peerd join HOST:PORT`: have a running node join another's swarm."""

from __future__ import annotations

from typing import Annotated

import typer

from peerd.cli.output import Format, FormatOption, NameOption, echo, print_json
from peerd.local.local_socket import find_node, request


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="any member of the swarm")],
    name: NameOption = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Have the running node join the swarm of the member at HOST:PORT."""
    answer = request(find_node(name), "join", address=address)
    if format is Format.JSON:
        print_json(answer)
    else:
        echo(f"joined {answer['joined']}: {answer['members']} members known")
