"""Whose is an option that stands after the script: peerd start's, or the script's? What it has it takes."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from typer.core import TyperCommand

from peerd.cli.misuse import UsageError, continued
from peerd.trainer.say import say
from peerd.transport.errors import UserError, WrongSetting

NEIGHBOURS = ("--join", "--token", "--bind", "--advertise", "--relay", "--name")  # without them it would train alone
OURS_ALONE = ("join", "advertise", "relay", "relay_ports", "rdma_subnets", "rdma_allow_fallback", "insecure_plaintext")
NEAR = 0.85  # of two words, as difflib measures it: --nme and --name have 0.91


class ScriptStarter(TyperCommand):
    """Of a mistake in an option of ours that stands after the script it says, too, whose else that may be."""

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        """Understand what was typed."""
        with self._telling_whose():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: Any) -> Any:
        """Run the node."""
        with self._telling_whose():
            return super().invoke(ctx)

    @contextmanager
    def _telling_whose(self) -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            wrong = getattr(error, "option_name", None) or getattr(getattr(error, "param", None), "name", None)
            said = error.format_message().rstrip(".")
            if wrong and (told := self._hinted(said, wrong)) != said:
                raise UserError(told) from None
            raise
        except WrongSetting as error:
            raise UserError(self._hinted(str(error), error.key)) from None

    def _hinted(self, said: str, wrong: str) -> str:
        """What is said of `wrong`, an option or a setting, and more where it may be meant for the script."""
        script, after = self._script(sys.argv[2:])
        for known in self.params:
            options = _spellings(known)
            if known.name in OURS_ALONE:  # no training script has these
                continue
            if wrong in (known.name, *options) and (typed := [option for option in after if option in options]):
                return continued(said, f"{typed[0]} is peerd start's: if it was meant for {script}, put it after a --")
        return said

    def _script(self, words: list[str]) -> tuple[str, list[str]]:
        """The first of the words that is no option and no value of one of ours, and the options from it to a --."""
        take_values = [
            option for known in self.params if not getattr(known, "is_flag", False) for option in _spellings(known)
        ]
        rest = takewhile("--".__ne__, words)
        for word in rest:
            if not word.startswith("-"):
                return word, [each.partition("=")[0] for each in rest]
            if word in take_values:  # not --OPTION=VALUE
                next(rest, None)
        return "", []


def options_of(command: Any) -> list[str]:
    """All that a typer command takes, as they are typed."""
    return [option for known in command.params for option in _spellings(known)]


def _spellings(known: Any) -> tuple[str, ...]:
    return (*known.opts, *known.secondary_opts)


def _scripts_own(command: list[str]) -> list[str]:
    """The options that went to the script because peerd start has none such; what is after a -- is meant so."""
    given = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv
    return [word.partition("=")[0] for word in command[1:] if word.startswith("--") and word in given]


def refuse_slips(command: list[str]) -> None:
    """A line that scrolls by is too little where the node would train alone for days."""
    for option in _scripts_own(command):
        if near := [known for known in NEIGHBOURS if option in _slips(known)]:
            raise UserError(
                f"{option} is no option of peerd start, which has {near[0]}; if it is one of {command[0]}, put it "
                "after a --"
            )


def _slips(known: str) -> set[str]:
    """Two letters swapped, or one within the word missing or doubled: scripts have --delay, --kind, --bin, --names."""
    swapped = {known[:at] + known[at + 1] + known[at] + known[at + 2 :] for at in range(2, len(known) - 1)}
    missing = {known[:at] + known[at + 1 :] for at in range(3, len(known) - 1)}
    doubled = {known[:at] + known[at] + known[at:] for at in range(2, len(known))}
    return swapped | missing | doubled


def tell_near_misses(command: list[str], ours: list[str]) -> None:
    """An option that peerd start does not know is the script's; one that a slip of the finger made looks like ours."""
    for option in _scripts_own(command):
        swapped = [known for known in ours if sorted(known) == sorted(option)]
        near = swapped or difflib.get_close_matches(option, ours, 1, NEAR)
        if near and not option.startswith(near[0]):
            say(f"{option} goes to {command[0]}; peerd start has {near[0]}")
