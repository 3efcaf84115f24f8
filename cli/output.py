"""How does a verb answer? For people, or with --format json one object for programs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from peerd.transport.errors import UserError
from peerd.transport.printable import printable


class Format(StrEnum):
    """What --format takes."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="text for people, json for programs")]
NameOption = Annotated[str | None, typer.Option("--name", help="which node of this machine (default: the only one)")]


def print_json(value: Any) -> None:
    """One line; NaN and infinity, which JSON does not know, become null."""
    typer.echo(json.dumps(finite(value)))


def echo(line: str, *, err: bool = False) -> None:
    """One line for people, whatever peers had a say in it. What stderr does not take is lost: it is not the answer."""
    with suppress(OSError) if err else nullcontext():
        typer.echo(printable(line), err=err)


def plain_table(columns: list[str], rows: list[list[str]]) -> Table:
    """Without lines."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # no markup: names are what peers say
    return table


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """A plain table, as wide as it needs to be when nobody watches."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(plain_table(columns, rows))


def progress_bar() -> Progress:
    """For who watches, on stderr; a task has a `note`."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip


def check_file(option: str, path: Path, *endings: str) -> None:
    """Before the work, whether what this option names can be written. Raises UserError."""
    if path.suffix not in endings:
        *others, last = endings
        named = f"{', '.join(others)} or {last}" if others else last
        raise UserError(f"{option} {path}: the name must end in {named}")
    folder = path.absolute().parent
    try:
        is_folder, parent_is, there = path.is_dir(), folder.is_dir(), path.exists()
    except OSError as error:  # a folder above it is closed to this user, or the name is too long
        raise UserError(f"{option} {path}: {error.strerror}; choose another place") from None
    if not parent_is:
        raise UserError(f"{option} {path}: no such folder: {folder}")
    if is_folder:
        raise UserError(f"{option} {path}: this is a folder")
    if not os.access(path if there else folder, os.W_OK):
        raise UserError(f"{option} {path}: you may not write there; choose another place")


def write_report(path: Path, text: str) -> None:
    """Raises UserError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--report {path}: {error.strerror}") from None


def size(count: float) -> str:
    """Bytes for people, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("the loop returns")


def counted(many: int, units: str) -> str:
    """As `1 exchange`, of `exchanges`."""
    return f"{many} {units if many != 1 else units[:-1]}"


def finite(value: Any) -> Any:
    """The same for JSON, which knows no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def mean_of(histogram: Mapping[int, int]) -> float:
    """Of values that were counted."""
    return sum(value * count for value, count in histogram.items()) / sum(histogram.values())
