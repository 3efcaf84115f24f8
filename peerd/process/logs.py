"""How does a daemon speak? One line an event: for people on a terminal, JSON elsewhere, the node's name on each."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from peerd.transport.printable import printable

LOGGER = logging.getLogger("peerd")


def configure(name: str, run: str, style: str) -> None:
    """Log to stderr in `style`: human, json, or auto (human on a terminal)."""
    handler = _Stderr(sys.stderr)
    human = style == "human" or (style == "auto" and sys.stderr.isatty())
    handler.setFormatter(_Human(name) if human else _Json(name, run))
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


class _Stderr(logging.StreamHandler[TextIO]):
    """A line that cannot be written (a closed pipe, a full disk) is lost, and leaves no traceback either."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _Human(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        said = f"{datetime.fromtimestamp(record.created):%H:%M:%S} {self._name}  {level}{record.getMessage()}"
        lines = [said, *self.formatException(record.exc_info).splitlines()] if record.exc_info else [said]
        return "\n".join(map(printable, lines))


class _Json(logging.Formatter):
    def __init__(self, name: str, run: str) -> None:
        super().__init__()
        self._fixed = {"node": name, "run": run}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        text = {"time": time, "level": record.levelname.lower(), **self._fixed, "text": record.getMessage()}
        if record.exc_info:
            text["traceback"] = self.formatException(record.exc_info)
        return json.dumps(text)
