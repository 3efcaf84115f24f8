"""How does a node's model become one that loads strictly? The exported file, with the rest from the state folder."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from peerd.local.export import replaced
from peerd.trainer import checkpoint
from peerd.trainer.rest import Incomplete, read
from peerd.transport.errors import UserError, cause


def write_complete(path: Path, shared: Path, checkpoints: Path, signature: str) -> tuple[int, list[str]]:
    """Write `path` from the exported file `shared`; how many tensors, and one line for each thing that is missing.

    Of `signature` the beginning is enough. Raises UserError.
    """
    try:
        rest = read(checkpoints, signature)
        generation = checkpoint.read_newest(checkpoints, rest.signature, lambda _: None)
        tensors = generation.tensors if generation is not None else {}
        kept = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        found = rest.complete(load_file(shared), kept)
    except Incomplete as error:
        raise UserError(
            f"the model cannot be complete: {error}; without --complete what nodes share is written"
        ) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {shared}: {cause(error)}") from None
    replaced(path, lambda temporary: save_file(found, temporary, metadata={"format": "pt"}))
    return len(found), [
        f"{name} is no tensor and not in the file: load it with strict=False" for name in rest.no_tensors
    ]
