"""What peerd says: it reaches who reads it, and ends nothing where nobody can."""

from __future__ import annotations

import io
import logging
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
    assert "test_say.py" in stream.getvalue()
    assert "OverflowError" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
