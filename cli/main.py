"""`peerd`: the table of its verbs, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import sys

import typer

from peerd.cli.average import average
from peerd.cli.demo import demo
from peerd.cli.doctor import doctor
from peerd.cli.export import export
from peerd.cli.info import info
from peerd.cli.join import join
from peerd.cli.leave import leave
from peerd.cli.members import members
from peerd.cli.mode import mode
from peerd.cli.simulate import simulate
from peerd.cli.start import START_CONTEXT, start
from peerd.cli.status import status
from peerd.cli.version import version
from peerd.effects import UserError

app = typer.Typer(
    help="GPU nodes that train one model together over ordinary networks, with no master.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(context_settings=START_CONTEXT)(start)
for verb in (join, leave, members, status, info, export, average, doctor, demo, simulate, version):
    app.command()(verb)
app.add_typer(mode, name="mode")


def run() -> None:
    """The entry point."""
    try:
        app()
    except UserError as error:
        _fail(error)
    except BaseExceptionGroup as group:  # a daemon's tasks end together; the user's own mistake is among them
        mistakes = group.subgroup(UserError)
        if mistakes is None or group.split(UserError)[1] is not None:
            raise
        _fail(_first(mistakes))
    except BrokenPipeError:
        sys.exit(1)


def _fail(error: BaseException) -> None:
    sys.stderr.write(f"peerd: {error}\n")
    sys.exit(1)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


if __name__ == "__main__":
    run()
