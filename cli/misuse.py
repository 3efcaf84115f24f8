"""What is said of a mistake in what was typed? One line, and where the help is."""

from __future__ import annotations

import re
from typing import Any

import typer

from peerd.trainer.say import say

UsageError: Any = typer.BadParameter.__base__  # some versions of typer have a click of their own
PEERS = "--peers"
FAILED_CODE = 1  # of a mistake that typer found, too, where it would say 2: nobody who types it knows which one did


def continued(said: str, more: str) -> str:
    """One line of two; a question ends by itself."""
    return f"{said}{'' if said.endswith('?') else ';'} {more}"


def misused(error: Any, typed: str) -> Exception:
    """What to raise in place of a UsageError; `typed`: which command was, where the error does not know."""
    said, path = error.format_message().rstrip("."), error.ctx.command_path if error.ctx is not None else typed
    if not said or "\n" in said:  # the help, of who typed no verb
        error.exit_code = FAILED_CODE
        own: Exception = error
        return own
    options = [option for known in error.ctx.command.params for option in known.opts] if error.ctx is not None else []
    if (number := re.search(r"extra argument\S* \((\d+)\)$", said)) and PEERS in options:
        said += f". Did you mean {PEERS} {number[1]}?"
    say(continued(said, f"{path} -h lists what there is"))
    return typer.Exit(FAILED_CODE)
