"""How does a verb answer? For people, or with --format json one object for programs."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peerd.transport.printable import printable


class Format(StrEnum):
    """What --format takes."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="text for people, json for programs")]
NameOption = Annotated[str | None, typer.Option("--name", help="which node of this machine (default: the only one)")]


def print_json(value: Any) -> None:
    """One line; NaN and infinity, which JSON does not know, become null."""
    typer.echo(json.dumps(_finite(value)))


def echo(line: str, *, err: bool = False) -> None:
    """One line for people, whatever peers had a say in it."""
    typer.echo(printable(line), err=err)


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """A plain table, as wide as it needs to be when nobody watches."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # no markup: names are what peers say
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(table)


def size(count: float) -> str:
    """Bytes for people, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("the loop returns")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
