"""`peerd doctor`: would a node run well here, and if not, what mends it?"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from peerd.carriers import CARRIERS
from peerd.cli import interrupts_end_at_once
from peerd.cli.output import Format, FormatOption, echo, print_json


def doctor(
    name: Annotated[
        str | None,
        typer.Option(help="of which node: one that runs here (default: the only one), or a new one"),
    ] = None,
    bind: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="as for peerd start")] = None,
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

    A node that runs here is looked at by its own settings, but for those that are given. A note harms nothing. What
    fails is shown with its cure, and the exit code is 1.
    """
    flags = {
        "name": name, "bind": bind, "join": tuple(join) if join else None, "token": token,
        "insecure_plaintext": insecure_plaintext, "transport": transport,
        "rdma_subnets": tuple(rdma_subnet) if rdma_subnet else None, "rdma_allow_fallback": rdma_allow_fallback,
    }  # fmt: skip
    with interrupts_end_at_once():  # it imports torch, and leaves nothing behind
        from peerd.doctor import check, examine, settings_of_running
        from peerd.settings import load

        told = {key: value for key, value in flags.items() if value is not None}
        is_new = bind is not None or token is not None or config is not None
        running = settings_of_running(name or os.environ.get("PEERD_NAME"), told, only=not is_new)
        findings = examine(running or load(flags, os.environ, config))
    if format is Format.JSON:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            echo(f"{finding.state:<5} {finding.check:<9} {finding.found}")
            if finding.cure:
                echo(f"{'':<16}cure: {finding.cure}")
    check(findings)
