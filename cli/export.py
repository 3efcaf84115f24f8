"""`peerd export model.safetensors`: the model as it stands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from peerd.cli.output import Format, FormatOption, NameOption, print_json, size
from peerd.local.export import check_folder
from peerd.local.local_socket import find_node, request
from peerd.trainer.say import say
from peerd.transport.errors import UserError

COMPLETE_HELP = "with frozen tensors, integer buffers and both names of tied ones, so that strict loading works"


def export(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="a .safetensors file to write")],
    name: NameOption = None,
    complete: Annotated[bool, typer.Option("--complete", help=COMPLETE_HELP)] = False,
    force: Annotated[bool, typer.Option("--force", help="in place of a file that is there")] = False,
    format: FormatOption = Format.TEXT,
) -> None:
    """Write the model that the node holds now: trainable parameters and float buffers, by name."""
    if path.suffix != ".safetensors":
        raise UserError(f"export {path}: the file is written as safetensors; end its name in .safetensors")
    if os.path.isfile(path) and not force:
        raise UserError(f"export {path}: there is such a file already; --force puts this one in its place")
    node = find_node(name)
    answer = _complete(node, path.absolute()) if complete else request(node, "export", path=str(path.absolute()))
    if format is Format.JSON:
        print_json(answer)
    else:
        typer.echo(f"{path}: {answer['tensors']} tensors of step {answer['step']}, {size(answer['bytes'])}")


def _complete(node: Path, path: Path) -> dict[str, Any]:
    """What is shared comes from the daemon, the rest from the node's state folder."""
    from peerd.trainer.complete import write_complete

    check_folder(path)
    checkpoints = Path(request(node, "info")["state_dir"]) / "checkpoints"
    shared = path.with_name(f".{path.name}.{os.getpid()}.shared.safetensors")
    try:
        # before it is asked who it is: one that leaves without a model is no member any more, and says so here
        answer = request(node, "export", path=str(shared))
        (me,) = (row for row in request(node, "members")["members"] if row["self"])
        tensors, untold = write_complete(path, shared, checkpoints, str(me["model"]))
    finally:
        shared.unlink(missing_ok=True)
    for line in untold:
        say(line)
    return {**answer, "path": str(path), "bytes": path.stat().st_size, "tensors": tensors}
