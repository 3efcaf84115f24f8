"""How does a daemon speak? One line an event: for people on a terminal, JSON elsewhere, the node's name on each."""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

from peerd.transport.printable import printable

LOGGER = logging.getLogger("peerd")
LINES_MAX = 10_000
WRITTEN_WITHIN_S = 1.0


def configure(name: str, run: str, style: str) -> None:
    """Log to stderr in `style`: human, json, or auto (human on a terminal)."""
    handler = _Stderr(sys.stderr)
    human = style == "human" or (style == "auto" and sys.stderr.isatty())
    handler.setFormatter(_Human(name) if human else _Json(name, run))
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


def written() -> None:
    """Wait until all lines are out, for WRITTEN_WITHIN_S at most: before this process ends, or says anything else."""
    for handler in LOGGER.handlers:
        handler.flush()


class _Stderr(logging.Handler):
    """Writes in a thread: a terminal that was stopped (Ctrl-S), or a pipe that nobody reads, holds up no daemon.

    A line that cannot be written (a closed pipe, a full disk) is lost, and so are those beyond LINES_MAX that wait; how
    many these were is said when there is room.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(LINES_MAX)
        self._lost = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lost and not self._lines.full():
            told = {
                "levelno": logging.WARNING,
                "levelname": "WARNING",
                "msg": f"{self._lost} lines of this log are lost",
            }
            self._lost = 0
            self._put(logging.makeLogRecord(told))
        self._put(record)

    def _put(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(f"{self.format(record)}\n")
        except queue.Full:
            self._lost += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, WRITTEN_WITHIN_S)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            with suppress(OSError, ValueError):  # of a stream that is closed
                _write_to(self._stream, line)
            self._lines.task_done()


def _write_to(stream: TextIO, line: str) -> None:
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        stream.write(line)
        stream.flush()
        return
    left = memoryview(line.encode(stream.encoding, "backslashreplace"))
    while left:  # past the stream, whose lock an interpreter that ends would wait for
        left = left[os.write(descriptor, left) :]


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
        self._fixed = {"node": name, "run": run} if run else {"node": name}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        text = {"time": time, "level": record.levelname.lower(), **self._fixed, "text": record.getMessage()}
        if record.exc_info:
            text["traceback"] = self.formatException(record.exc_info)
        return json.dumps(text)
