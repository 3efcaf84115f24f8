"""`peerd average`: one exact average of all models, in the middle of a run."""

from __future__ import annotations

import typer

from peerd.cli.output import Format, FormatOption, NameOption, print_json, size
from peerd.local_socket import find_node, request


def average(name: NameOption = None, format: FormatOption = Format.TEXT) -> None:
    """Make every member's model the exact mean of all, to the bit; then train on in the mode that was.

    Every trainer stops at its next step until all members hold the mean, in float32 whatever the mode's codec, and
    trains on from there. A node that trains no more takes part, too, and keeps the mean.
    """
    answer = request(find_node(name), "average")
    if format is Format.JSON:
        print_json(answer)
        return
    sent, received = size(answer["bytes_sent"]), size(answer["bytes_received"])
    typer.echo(
        f"averaged {len(answer['members'])} members in {answer['seconds']:.1f} s: {', '.join(answer['members'])}"
    )
    if answer["not_in_it"]:
        typer.echo(f"not in it: {', '.join(answer['not_in_it'])}")
    typer.echo(f"this node was {answer['distance']:.3%} from the mean; it sent {sent}, received {received}")
    typer.echo(f"plan {answer['plan']}: mode {answer['mode']} again")
