"""What a peer says reaches a terminal as text."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.cli.output import echo, print_table
from peerd.process.logs import _Human
from peerd.transport.printable import printable

HOSTILE = "[/x] \x1b[31m\r\x07[bold]\u202e[link=http://a]\x9b"


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left_and_plain_text_stays(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert not text.isprintable() or printable(text) == text


def test_a_table_shows_markup_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["NAME"], [[HOSTILE], ["n\nm"]])
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.rstrip() for row in rows] == [printable(HOSTILE), r"n\nm"]


def test_a_line_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    echo(f"a\n{HOSTILE}")
    assert capsys.readouterr().out == f"a\\n{printable(HOSTILE)}\n"


def test_a_log_line_is_one_line() -> None:
    record = logging.LogRecord("peerd", logging.WARNING, "", 0, "%s", (f"a\n{HOSTILE}",), None)
    assert _Human("n").format(record).endswith(f"warning: a\\n{printable(HOSTILE)}")
