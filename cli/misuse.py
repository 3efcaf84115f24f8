"""What is said of a mistake in what was typed? One line, and where the help is."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import typer

from peerd.trainer.say import say
from peerd.transport.errors import WrongSetting

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
    said = said.replace("Value error, ", "").replace("Input should be", "it must be")  # pydantic's, of some typers
    if (number := re.search(r"extra argument\S* \((\d+)\)$", said)) and PEERS in options:
        said += f". Did you mean {PEERS} {number[1]}?"
    say(continued(said, f"{path} -h lists what there is"))
    return typer.Exit(FAILED_CODE)


def refuse_repeats(command: Any) -> None:
    """Have a typer command, and those below it, refuse what is given twice and counts once: typer takes the last."""
    for below in getattr(command, "commands", {}).values():
        refuse_repeats(below)
    command.parse_args = partial(_parsed, command, command.parse_args)


def _parsed(command: Any, parse: Any, context: Any, words: list[str]) -> Any:
    _, _, order = command.make_parser(context).parse_args(list(words))
    given = Counter(order)  # each as often as it is typed
    for option in command.params:
        if given[option] > 1 and getattr(option, "is_flag", None) is False and not option.multiple:
            several = "put commas between several" if "with commas" in (option.help or "") else "give it once"
            raise WrongSetting(f"{'/'.join(option.opts)} is given twice, and takes one value: {several}", option.name)
    return parse(context, words)
