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

    A note harms nothing. What fails is shown with its cure, and the exit code is 1.
    """
    flags = {
        "bind": bind, "join": tuple(join) if join else None, "token": token,
        "insecure_plaintext": insecure_plaintext, "transport": transport,
        "rdma_subnets": tuple(rdma_subnet) if rdma_subnet else None, "rdma_allow_fallback": rdma_allow_fallback,
    }  # fmt: skip
    with interrupts_end_at_once():  # it imports torch, and leaves nothing behind
        from peerd.doctor import check, examine
        from peerd.settings import load

        findings = examine(load(flags, os.environ, config))
    if format is Format.JSON:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            echo(f"{finding.state:<5} {finding.check:<9} {finding.found}")
            if finding.cure:
                echo(f"{'':<16}cure: {finding.cure}")
    check(findings)
