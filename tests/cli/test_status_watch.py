"""`peerd status --watch`: trends say what was seen, and a view ends as its node does."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from peerd.cli import watch
from peerd.cli.main import app
from peerd.cli.watch import LEVELS, POINTS_MAX, Trend, measures
from peerd.transport.errors import UserError

LINK = {"peer": "b", "exchanges": 3, "distance": 1.0, "gain": 0.5, "codec": "sign", "last_reason": "change"}


def answer(step: int, *, loss: float | None = 0.5, pid: int = 7, **rest: Any) -> dict[str, Any]:
    """The status of a node whose trainer is there."""
    return {
        "name": "a", "phase": "training", "mode": "gossip", "members": {"alive": 2}, "counts": {"exchanges": 3},
        "trainer": {"pid": pid, "step": step, "loss": loss, "metrics": {"accuracy": 0.25}}, "links": [LINK],
        "consensus_distance": 0.01, "bytes_sent": 1000 * step, "bytes_received": 0, "crash": "",
        "address_gone": "", "address_unreached": "", **rest,
    }  # fmt: skip


@given(st.lists(st.floats(-1e6, 1e6), max_size=500))
def test_a_trend_has_all_that_was_seen_in_few_points(values: list[float]) -> None:
    trend = Trend()
    for value in values:
        trend.add(value)
        trend.add(math.nan)
    points, each = trend.points, 1
    while len(values) >= each * POINTS_MAX:
        each *= 2
    wanted = [values[start : start + each] for start in range(0, len(values), each)]
    assert points == pytest.approx([sum(some) / len(some) for some in wanted], rel=1e-9, abs=1e-6)
    assert len(trend.drawn()) == len(points) <= POINTS_MAX
    if points and max(points) > min(points):
        drawn = trend.drawn()
        assert {drawn[points.index(min(points))], drawn[points.index(max(points))]} == {LEVELS[0], LEVELS[-1]}


@given(st.lists(st.floats(), min_size=1, max_size=500))
def test_a_trend_is_drawn_of_any_numbers(values: list[float]) -> None:
    """A loss that diverges goes through all that a float can be; 1e308 twice is more, and so is it from -1e308 on."""
    trend = Trend()
    for value in [*values, 1e308, 1e308, -1e308]:
        trend.add(value)
        assert len(trend.drawn()) == len(trend.points)


def test_what_is_measured_between_two_looks() -> None:
    first, second = answer(10), answer(40, loss=math.nan)
    found = measures(first, second, 2.0)
    assert {name: value for name, (value, _) in found.items() if name != "loss"} == {
        "steps a second": 15.0, "accuracy": 0.25, "consensus distance": 0.01, "sent a second": 15000.0,
        "received a second": 0.0,
    }  # fmt: skip
    assert found["loss"][1] == "nan"
    assert found["sent a second"][1] == "15.00 kB"
    assert list(measures(None, first, 1.0)) == ["loss", "accuracy", "consensus distance"]
    assert "steps a second" not in measures(first, answer(40, pid=8), 2.0), "another trainer's steps are no progress"
    assert list(measures(None, {**first, "trainer": None, "consensus_distance": None}, 1.0)) == []


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the node will answer; it ends after that."""
    answers: list[dict[str, Any]] = []

    def request(path: Path, verb: str) -> dict[str, Any]:
        if not answers:
            raise UserError("it went away")
        return answers.pop(0)

    monkeypatch.setattr(watch, "request", request)
    monkeypatch.setattr(watch, "running_nodes", list)
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("peerd.cli.status.find_node", lambda name: Path("a.sock"))
    return answers


def test_a_look_is_a_line_of_json_until_the_node_ends(looked_at: list[dict[str, Any]]) -> None:
    looked_at += [answer(1), answer(2, loss=math.nan)]
    ran = CliRunner().invoke(app, ["status", "--watch", "--format", "json"], catch_exceptions=False)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(line["trainer"]["step"], line["trainer"]["loss"]) for line in lines] == [(1, 0.5), (2, None)]
    assert ran.exit_code == 0


def test_a_view_has_trends_and_links_and_says_that_the_node_has_ended(
    looked_at: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(watch, "Console", lambda: Console(file=written, force_terminal=True, width=80))
    looked_at += [answer(step, loss=1 / step) for step in range(1, 60)]
    assert CliRunner().invoke(app, ["status", "--watch"], catch_exceptions=False).exit_code == 0
    last = written.getvalue().rsplit("a: training; mode: gossip; members: 2 alive", 1)[1]
    assert all(word in last for word in ("step 59; 3 exchanges", "PARTNER", "accuracy", "0.0169", "a has ended"))
    (loss,) = (line for line in last.splitlines() if line.startswith("loss"))
    drawn = "".join(character for character in loss if character in LEVELS)
    assert drawn.startswith(LEVELS[-1])
    assert drawn.endswith(LEVELS[0] * 5)


@pytest.mark.parametrize(("form", "said"), [("text", "needs a terminal"), ("prometheus", "leave it out")])
def test_who_cannot_be_shown_a_view_is_told(looked_at: list[dict[str, Any]], form: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(app, ["status", "--watch", "--format", form], catch_exceptions=False)


@pytest.mark.parametrize("runs", [True, False])
def test_a_node_that_answers_nobody_has_not_ended(
    looked_at: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, *, runs: bool
) -> None:
    monkeypatch.setattr(watch, "running_nodes", lambda: ["a"] if runs else [])
    seen: Iterator[dict[str, Any]] = watch.looks(Path("a.sock"))
    looked_at += [answer(1)]
    assert next(seen)["trainer"]["step"] == 1
    with pytest.raises(UserError if runs else StopIteration):
        next(seen)
