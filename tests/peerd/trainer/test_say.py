"""What peerd says: it reaches who reads it, and ends nothing where nobody can."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import TextIO

import pytest

from peerd.process import logs
from peerd.trainer.say import say


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def _closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [_Full, _closed, lambda: None])
def test_no_word_is_an_error(monkeypatch: pytest.MonkeyPatch, stderr: Callable[[], TextIO | None]) -> None:
    monkeypatch.setattr(sys, "stderr", stderr())
    say("resumed")
    say("and again")


def test_a_log_that_cannot_be_written_has_no_traceback_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Filling(io.StringIO):
        full = True

        def flush(self) -> None:
            if self.full:
                self.full = False
                raise OSError(28, "No space left on device")

    stream = Filling()
    monkeypatch.setattr(sys, "stderr", stream)
    logs.configure("n", "", "json")
    logs.LOGGER.info("one")
    logs.LOGGER.info("two")
    logs.written()
    assert "Traceback" not in stream.getvalue()
    assert '"text": "two"' in stream.getvalue()
    logs.LOGGER.log(logging.INFO, "%d", "a mistake of ours is still shown")
    assert "Traceback" in stream.getvalue()


@pytest.mark.parametrize("style", ["human", "json"])
def test_a_bug_is_told_with_its_traceback_and_obeys_no_terminal(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logs.configure("n", "", style)
    try:
        raise OverflowError("\x1b[2J")
    except OverflowError as error:
        logs.LOGGER.error("a bug", exc_info=error)
    logs.written()
    assert "test_say.py" in stream.getvalue()
    assert "OverflowError" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("run", ["", "r7"])
def test_a_run_is_named_in_each_line_where_there_is_one(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    logs.configure("n", run, "json")
    logs.LOGGER.info("one")
    logs.written()
    line = json.loads(stream.getvalue())
    del line["time"]
    assert line == {"level": "info", "node": "n", **({"run": run} if run else {}), "text": "one"}


def test_a_log_that_nobody_reads_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(logs, "WRITTEN_WITHIN_S", 0.05)
    monkeypatch.setattr(logs, "LINES_MAX", 100)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        logs.configure("n", "", "human")
        for number in range(3000):  # 65,536 bytes fill the pipe
            logs.LOGGER.info("%d %s", number, "x" * 100)
        logs.written()
        said, more = b"", 0
        while f" {number} ".encode() not in said:
            said += os.read(reading, 1 << 16)
            logs.LOGGER.info("%d ", number)
            more += 1
        os.close(reading)
    lines = [int(line.split()[2]) for line in said.splitlines() if line.endswith(b"x")]
    assert lines == sorted(lines)
    assert lines[: logs.LINES_MAX] == list(range(logs.LINES_MAX))
    lost = sum(map(int, re.findall(r"warning: (\d+) lines of this log are lost", said.decode())))
    assert 3000 <= len(lines) + lost <= 3000 + more
