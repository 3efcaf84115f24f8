"""The options of modes on a command line, made from the table that is `ModeSettings`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Annotated, Any

import typer

from peerd.training.mode_settings import OPTIONS

MODE = "The mode"
"""Of what --help shows together."""


def with_mode_options(
    names: Collection[str] = OPTIONS, *, defaults: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options in place of its parameter `told`, which gets those that the user gave, by name.

    `defaults`: what is not given has the table's default, and help says it.
    """
    made = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                type(option.default) | None,
                typer.Option(
                    rich_help_panel=MODE,
                    help=option.metadata["help"] + (f" (default: {_shown(option.default)})" if defaults else ""),
                ),
            ],
        )
        for name, option in OPTIONS.items()
        if name in names
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            told = {option.name: given.pop(option.name) for option in made}
            command(**given, told={name: value for name, value in told.items() if value is not None})

        signature = inspect.signature(command, eval_str=True)
        own = list(signature.parameters.values())
        place = next(index for index, one in enumerate(own) if one.name == "told")
        run.__signature__ = signature.replace(parameters=[*own[:place], *made, *own[place + 1 :]])  # type: ignore[attr-defined]
        run.__annotations__ = {}  # the signature has them
        return run

    return decorate


def _shown(default: Any) -> str:
    return str(default) if not isinstance(default, bool) else "yes" if default else "no"
