"""`peerd export model.safetensors`: the model as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peerd.cli.output import Format, FormatOption, NameOption, print_json, size
from peerd.effects import UserError
from peerd.local_socket import find_node, request


def export(
    path: Annotated[Path, typer.Argument(help="a .safetensors file to write")],
    name: NameOption = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Write the model that the node holds now: trainable parameters and float buffers, by name."""
    if path.suffix != ".safetensors":
        raise UserError(f"export {path}: the file is written as safetensors; end its name in .safetensors")
    answer = request(find_node(name), "export", path=str(path.absolute()))
    if format is Format.JSON:
        print_json(answer)
    else:
        typer.echo(f"{path}: {answer['tensors']} tensors of step {answer['step']}, {size(answer['bytes'])}")
