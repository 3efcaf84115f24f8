"""Which numbers do options take? Plain ones: typer would take 1_0 for ten, too, and says of others what Python says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

from peerd.training.plain_numbers import number, whole
from peerd.transport.errors import WrongSetting

_READ: dict[Any, Callable[[str], Any]] = {int: whole, float: number}


def take_plain_numbers(command: Any) -> None:
    """Have the options of a typer command, and of those below it, say in one line what is no plain number."""
    for below in getattr(command, "commands", {}).values():
        take_plain_numbers(below)
    parameters = inspect.signature(command.callback, eval_str=True).parameters if command.callback else {}
    for option in command.params:
        if (read := _read_by(parameters.get(option.name))) is not None:
            option.process_value = _plain(option.process_value, read, option)


def _read_by(parameter: inspect.Parameter | None) -> Callable[[str], Any] | None:
    """By what the text of an `Annotated[KIND, ...]` or `Annotated[KIND | None, ...]` is read; None: it is no number."""
    kind = get_args(parameter.annotation)[0] if parameter is not None and get_args(parameter.annotation) else None
    return next((_READ[one] for one in (kind, *get_args(kind)) if one in _READ), None)


def _plain(process: Callable[[Any, Any], Any], read: Callable[[str], Any], option: Any) -> Callable[[Any, Any], Any]:
    def processed(context: Any, value: Any) -> Any:
        try:
            value = read(value) if isinstance(value, str) else value
        except ValueError as error:
            raise WrongSetting(f"{option.opts[0]}: {error}", option.name) from None
        return process(context, value)

    return processed
