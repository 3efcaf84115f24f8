"""Who is let in, who is put out, who is heard again? `peerd token`, `revoke`, `rotate` and `forgive`."""

from __future__ import annotations

from typing import Annotated

import typer

from peerd.cli.output import Format, FormatOption, NameOption, echo, print_json
from peerd.local.local_socket import find_node, request
from peerd.settings import is_loopback, parse_address


def token(
    name: NameOption = None,
    uses: Annotated[int, typer.Option(help="how many nodes it lets in")] = 1,
    expires: Annotated[str, typer.Option(metavar="TIME", help="how long: 30m, 24h, 7d")] = "24h",
    issuer: Annotated[bool, typer.Option("--issuer", help="whom it lets in may make tokens, too")] = False,
    format: FormatOption = Format.TEXT,
) -> None:
    """Print one line that lets a node in: peerd start train.py --bind ITS_ADDRESS --token LINE (or in PEERD_TOKEN).

    It is a secret until it is used. Whoever has it becomes a member.
    """
    answer = request(find_node(name), "token", uses=uses, expires=expires, issuer=issuer)
    if format is Format.JSON:
        print_json(answer)
        return
    echo(answer["token"])
    if is_loopback(parse_address(answer["address"], "address")[0]):
        only = f"this node listens on {answer['address']}, where no other machine reaches it"
        echo(f"peerd: {only}; there only another user's nodes need a token. --bind ADDRESS lets others in", err=True)


def revoke(
    node: Annotated[
        str, typer.Argument(metavar="NODE", help="a member's name, or a node's id: peerd members --format json")
    ],
    name: NameOption = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Put a node out of the swarm for ever: its connections end, its key is refused everywhere, and all keys change.

    Ask a node that issues certificates (peerd info names them). There is no way back: the machine may come again under
    another --name, with a new token. What the node knows of the model until now it keeps.
    """
    answer = request(find_node(name), "revoke", node=node)
    if format is Format.JSON:
        print_json(answer)
        return
    who = f"{answer['name']} ({answer['revoked']})" if answer["name"] else answer["revoked"]
    echo(f"{who} is out for ever; the others hear of it within seconds" if answer["new"] else f"{who} was out already")


def rotate(
    retire: Annotated[str, typer.Option(metavar="TIME", help="how long the old one stays in force: 7d, 90d")] = "90d",
    name: NameOption = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Put a new authority in the place of the swarm's, on the node that has it: peerd info shows which are in force.

    All members hear of it and get certificates of the new one by themselves. A node that is off for longer than the old
    one stays in force needs a new token; tokens that were made before and not used are of no use any more.
    """
    answer = request(find_node(name), "rotate", retire=retire)
    if format is Format.JSON:
        print_json(answer)
    else:
        echo("in force: " + ", ".join(answer["authorities"]))


def forgive(
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="its name, or its id: peerd members --format json")],
    name: NameOption = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Hold nothing against MEMBER any more: neither broken rules nor a model far from all others'.

    It speaks for one node alone; the others have their own experience of the member.
    """
    answer = request(find_node(name), "forgive", member=member)
    if format is Format.JSON:
        print_json(answer)
    else:
        echo(f"{answer['forgiven']} " + ("is heard again" if answer["was_refused"] else "was not refused"))
