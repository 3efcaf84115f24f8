"""What peerd says in the terminal of a user's script: one line, marked as its own."""

from __future__ import annotations

import sys
from contextlib import suppress

from peerd.transport.printable import printable


def say(text: str) -> None:
    """Write one line to stderr. Where that cannot be (a closed pipe, a full disk, no stderr) it is lost, no more."""
    with suppress(OSError, ValueError, AttributeError):
        lines = "\n".join(map(printable, text.split("\n")))
        sys.stderr.write(f"peerd: {lines}\n")
        sys.stderr.flush()
