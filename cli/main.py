"""`peerd`: the table of its verbs, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import errno
import importlib
import inspect
import io
import os
import sys
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from peerd.cli import INTERRUPTED_CODE, Interrupted, interrupts_end_at_once
from peerd.cli.misuse import FAILED_CODE, UsageError, misused, refuse_repeats
from peerd.cli.number_options import take_plain_numbers
from peerd.trainer.say import say
from peerd.transport.errors import UserError

VERBS = {
    "start": "start", "join": "join", "leave": "leave", "members": "members", "forgive": "admittance",
    "status": "status", "info": "info", "export": "export", "average": "average", "token": "admittance",
    "revoke": "admittance", "rotate": "admittance", "doctor": "doctor", "demo": "demo", "simulate": "simulate",
    "reproduce": "reproduce", "version": "version", "mode": "mode",
}  # fmt: skip
"""In which module of this package each is: a node that starts need not import the demo."""

NO_DESCRIPTORS = f"{os.strerror(errno.EMFILE)}; let it open more files (ulimit -n)"
TABLE = "\b\n"  # click's mark of a paragraph that keeps its lines; typer would show it as an empty one


class Verbs(TyperGroup):
    """All verbs: an interrupt of any of them, and what none takes, is one line, where typer says more or none."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All of them, in the order in which help shows them."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One of them, imported now; None: there is none of this name."""
        if cmd_name in VERBS and cmd_name not in self.commands:
            with interrupts_end_at_once():
                module = importlib.import_module(f"peerd.cli.{VERBS[cmd_name]}")
            verb = getattr(module, cmd_name)
            verbs = typer.Typer()
            if isinstance(verb, typer.Typer):
                verbs.add_typer(verb, name=cmd_name)
            else:
                verbs.command(cls=getattr(module, "COMMAND", None), context_settings=getattr(module, "CONTEXT", None))(
                    verb
                )
            self.commands[cmd_name] = typer.main.get_group(verbs).commands[cmd_name]
            take_plain_numbers(self.commands[cmd_name])
            refuse_repeats(self.commands[cmd_name])
            _unwrap_help(self.commands[cmd_name])
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Which one was typed; typer itself looks for near ones among those that were imported."""
        typed = args[0]
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            if near := get_close_matches(typed, VERBS, 1):
                error.message = f"No such command {typed!r}. Did you mean {near[0]!r}?"
            raise

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        """Understand what was typed."""
        with interrupts_end_at_once():
            try:
                return super().make_context(*arguments, **named)
            except UsageError as error:
                raise misused(error, "peerd") from None

    def invoke(self, ctx: Any) -> Any:
        """Run the one that was typed."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise misused(error, f"{ctx.command_path} {ctx.invoked_subcommand or ''}".rstrip()) from None
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(INTERRUPTED_CODE) from None


def _unwrap_help(command: Any) -> None:
    """Leave it to the terminal where lines of a paragraph end, but in a table, which begins with \\b."""
    for below in getattr(command, "commands", {}).values():
        _unwrap_help(below)
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(
        one.removeprefix(TABLE) if one.startswith(TABLE) else one.replace("\n", " ") for one in paragraphs
    )


app = typer.Typer(
    cls=Verbs,
    help="GPU nodes that train one model together over ordinary networks, with no master.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        from peerd.cli.version import version

        version()
        raise typer.Exit


@app.callback()
def _before_a_verb(
    asked: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="what peerd version says")
    ] = False,
) -> None:
    pass


command: Any = typer.main.get_command(app)


def run() -> None:
    """Run the verb that was typed."""
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):  # rich draws what no ASCII terminal has, and a path may be no UTF-8
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        command(prog_name="peerd")
    except Interrupted as error:
        say(str(error))
        sys.exit(INTERRUPTED_CODE)
    except UserError as error:
        _fail(error)
    except BaseExceptionGroup as group:  # a daemon's tasks end together; the user's own mistake is among them
        if group.split(KeyboardInterrupt)[1] is None:
            say("interrupted")
            sys.exit(INTERRUPTED_CODE)
        mistakes = group.subgroup(UserError)
        if group.split(_lacks_descriptors)[1] is None:
            _fail(NO_DESCRIPTORS)
        if mistakes is None or group.split(UserError)[1] is not None:
            raise
        _fail(_first(mistakes))
    except BrokenPipeError:
        sys.exit(FAILED_CODE)
    except OSError as error:
        if error.errno == errno.ENOENT and _is_nowhere():
            _fail("the folder that you are in is gone: go to another one (cd)")
        if _lacks_descriptors(error):
            _fail(NO_DESCRIPTORS)
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still holds of it
        _fail(f"cannot write the answer: {error.strerror}")
    except Exception as error:
        from peerd.daemon.cures import told_of_own

        if (told := told_of_own(error)) is None:
            raise
        _fail(told)


def _lacks_descriptors(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EMFILE


def _is_nowhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _open_what_is_closed() -> None:
    """Of the standard streams: what opens next, a socket or the model's memory, would have its number.

    Libraries write there, the script's, too, which inherits them.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    if sys.stderr is None or sys.stdout is None:
        sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115


def _fail(error: BaseException | str) -> None:
    say(str(error))
    sys.exit(FAILED_CODE)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


if __name__ == "__main__":
    run()
