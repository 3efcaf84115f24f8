"""`peerd version`."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

from peerd import __version__
from peerd.cli.output import Format, FormatOption, print_json


def version(format: FormatOption = Format.TEXT) -> None:
    """Show the versions of peerd, Python and torch."""
    found = {"peerd": __version__, "python": platform.python_version(), "torch": metadata.version("torch")}
    if format is Format.JSON:
        print_json(found)
    else:
        typer.echo("  ".join(f"{key} {value}" for key, value in found.items()))
