"""What was said a moment ago is not said again, however many things there are to say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.process import seldom
from peerd.process.seldom import SAID_EVERY_S, Seldom


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, SAID_EVERY_S)), max_size=60))
def test_each_is_said_once_a_while(said: list[tuple[str, float]]) -> None:
    lines, last, now = Seldom(), dict[str, float](), 0.0
    for about, pause_s in said:
        now += pause_s
        assert lines.is_news(about, "left", now=now) == (now - last.get(about, -SAID_EVERY_S) >= SAID_EVERY_S)
        if now - last.get(about, -SAID_EVERY_S) >= SAID_EVERY_S:
            last[about] = now


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seldom, "REMEMBERED_MAX", 5)
    lines = Seldom()
    for number in range(100):
        assert lines.is_news(str(number), now=0.0)
        assert len(lines._said_at) <= 5
