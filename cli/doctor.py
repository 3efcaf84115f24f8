"""`peerd doctor`: would a node run well here, and if not, what mends it?"""

from __future__ import annotations

import os
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from peerd.carriers import CARRIERS
from peerd.cli import interrupts_end_at_once
from peerd.cli.output import Format, FormatOption, echo, print_json

INDENT = 16  # of what was found, behind its state and the name of its check
WIDTH = 80
OF_A_NEW_ONE = ("bind", "advertise", "relay", "relay_ports", "token")  # not asked of one that runs


def doctor(
    name: Annotated[
        str | None,
        typer.Option(help="of which node: one that runs here (default: the only one), or a new one"),
    ] = None,
    bind: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="as for peerd start")] = None,
    advertise: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="as for peerd start")] = None,
    relay: Annotated[list[str] | None, typer.Option(metavar="HOST:PORT", help="as for peerd start")] = None,
    relay_ports: Annotated[str | None, typer.Option(metavar="FIRST-LAST", help="as for peerd start")] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="a peer to reach and to measure the line from: 2 s, 256 MiB at most"),
    ] = None,
    token: Annotated[str | None, typer.Option(help="as for peerd start")] = None,
    insecure_plaintext: Annotated[bool | None, typer.Option("--insecure-plaintext", help="as for peerd start")] = None,
    transport: Annotated[str | None, typer.Option(help=f"{', '.join(CARRIERS)}: what must work")] = None,
    rdma_subnet: Annotated[list[str] | None, typer.Option(metavar="CIDR", help="as for peerd start")] = None,
    rdma_allow_fallback: Annotated[
        bool | None, typer.Option("--rdma-allow-fallback", help="as for peerd start")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="a TOML file, as for peerd start")] = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Check this machine: software, GPU, ports, addresses, network, clock, who may join, peers, UCX and RDMA.

    A node that runs here is looked at by its own settings, but for those that are given; of several say which one with
    --name. A note harms nothing. What fails is shown with its cure, and the exit code is 1.
    """
    flags = {
        "name": name, "bind": bind, "advertise": advertise, "relay": tuple(relay) if relay else None,
        "relay_ports": relay_ports, "join": tuple(join) if join else None, "token": token,
        "insecure_plaintext": insecure_plaintext, "transport": transport,
        "rdma_subnets": tuple(rdma_subnet) if rdma_subnet else None, "rdma_allow_fallback": rdma_allow_fallback,
    }  # fmt: skip
    with interrupts_end_at_once():  # it imports torch, and leaves nothing behind
        from peerd.doctor import check, examine, namesakes, settings_of_running, which_node
        from peerd.settings import load

        told = {key: value for key, value in flags.items() if value is not None}
        if token is not None:
            told["token"] = load({"token": token}, {}, None).token  # it may be @FILE
        is_new = config is not None or not told.keys().isdisjoint(OF_A_NEW_ONE)
        whose = name or os.environ.get("PEERD_NAME")
        running = settings_of_running(whose, told, only=not is_new)
        unnamed = which_node() if whose is None and not is_new else ()
        called_alike = namesakes(running.name) if running else ()
        findings = [*unnamed, *called_alike, *examine(running or load(flags, os.environ, config))]
    if format is Format.JSON:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            _print(f"{finding.state:<5} {finding.check:<9} ", finding.found)
            if finding.cure:
                _print(" " * INDENT, f"cure: {finding.cure}")
    check(findings)


def _print(begins: str, text: str) -> None:
    """In lines of the width of a narrow terminal, which would begin the next one at its edge."""
    lines = textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)
    for before, line in zip([begins, *[" " * INDENT] * len(lines)], lines, strict=False):
        echo(before + line)
