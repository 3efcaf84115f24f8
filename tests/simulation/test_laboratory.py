"""Experiments: the same seed in any process, targets where they were crossed, settings that survive being written."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.simulation.laboratory import as_they_end, processes, run, run_all
from peerd.simulation.options import OF_A_MODE, Scenario, parse_modes, parse_seeds
from peerd.simulation.outcome import Outcome, Sample, Target, columns, parse_target, staleness_figures
from peerd.training.codecs import CODECS
from peerd.training.modes import MODES, heeds
from peerd.transport.errors import UserError

SMALL = Scenario(
    peers=3, problem="teacher:6-8-3:examples=300", steps=30, compute="fixed:0.05", faults="none",
    look_every=0.25, target="accuracy:0.5", lr=0.1, batch=8,
)  # fmt: skip


def look(at: float, sent: int, accuracy: float) -> Sample:
    return Sample(at, 1.0, 0.0, sent, 1, 1.0, 0.0, 0.0, 0.0, accuracy=accuracy, validation_loss=1 - accuracy)


# ---------------------------------------------------------------- runs


def test_models_too_large_to_be_exchanged_may_be_silent() -> None:
    grown = Scenario(peers=2, steps=30, compute="fixed:20", network="wan", mode="elastic:pairwise", lr=100.0)
    result = run(replace(grown, codec="sign_largest", faults="none")).result
    assert result["violations"] == []
    assert result["exchanges"] > 0, "they were not too large at first"


def test_a_centre_answers_over_what_was_its_trainers_link() -> None:
    """Two centres, as clogs heal: exchange 20 with the other one is of the trainer's model, not of its centre."""
    clogged = Scenario(peers=8, steps=150, mode="elastic", codec="sign_largest", seed=502035)
    assert run(replace(clogged, faults="swizzle-clog", fault_every=20.0)).result["violations"] == []


def test_runs_are_the_same_in_other_processes_and_in_their_order() -> None:
    scenarios = [
        replace(SMALL, seed=seed, mode=mode, every=every)
        for mode, every in (("gossip", 0), ("diloco", 5))
        for seed in (1, 2)
    ]
    told: list[int] = []
    there = run_all(scenarios, 2, lambda place, outcome: told.append(place))
    here = run_all(scenarios)
    assert sorted(told) == [0, 1, 2, 3]
    for one, other in zip(here, there, strict=True):
        assert columns(one.series) == columns(other.series)
        assert one.staleness == other.staleness
        assert {**one.result, "seconds": 0} == {**other.result, "seconds": 0}
    assert len({one.result["digest"] for one in here}) == 4


def test_an_outcome_is_ready_for_json_and_says_when_the_target_was_reached() -> None:
    outcome = run(SMALL)
    result = json.loads(json.dumps(outcome.result, allow_nan=False))
    assert result["target"] == "accuracy:0.5"
    assert result["seconds_to_target"] == outcome.time_to() == outcome.time_to("accuracy:0.5")
    assert result["bytes_to_target"] == outcome.bytes_to()
    series = result["series"]
    assert series["seconds"] == [one.at for one in outcome.series]
    assert np.allclose(np.diff([one.at for one in outcome.series])[:-1], 0.25)
    assert series["accuracy"][0] < series["accuracy"][-1]
    assert series["bytes_sent"] == sorted(series["bytes_sent"])
    narrow = run(replace(SMALL, steps=10, uplink_mbit=0.05))  # a message takes longer than it is between two looks
    assert 0.9 < max(one.busy for one in narrow.series) <= 1 + 1e-9
    assert outcome.time_to("accuracy:1") is outcome.bytes_to("accuracy:1") is None
    assert result["staleness"]["counts"]


def test_looking_changes_nothing_of_the_run() -> None:
    watched = run(SMALL).result
    alone = run(replace(SMALL, look_every=None, target=None)).result
    same = ("digest", "accuracy", "bytes_sent_total", "events")
    assert [watched[key] for key in same] == [alone[key] for key in same]
    assert "series" not in alone


def test_a_failure_elsewhere_is_the_callers() -> None:
    with pytest.raises(UserError, match="--batch: without effect on --problem consensus"):
        run_all([SMALL, replace(SMALL, problem="consensus")], 2)


def end_or_say_threads(place: int) -> str | None:
    return os._exit(1) if place < 0 else os.environ.get("OPENBLAS_NUM_THREADS")


def test_a_process_that_is_ended_is_one_line_and_each_has_one_thread() -> None:
    def use_two() -> None:
        with processes(2) as pool:
            for places in ([0, 1], [-1]):
                found.extend(as_they_end(pool, end_or_say_threads, places))

    before = os.environ.get("OPENBLAS_NUM_THREADS")
    found: list[tuple[int, str | None]] = []
    with pytest.raises(UserError, match="a process was ended"):
        use_two()
    assert sorted(found) == [(0, "1"), (1, "1")]
    assert os.environ.get("OPENBLAS_NUM_THREADS") == before


# ---------------------------------------------------------------- targets


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.integers(0, 1000), st.floats(0, 1)), min_size=1, max_size=8),
    st.floats(0.01, 1),
)
def test_a_target_is_reached_where_the_line_between_two_looks_crosses_it(
    steps: list[tuple[float, int, float]], value: float
) -> None:
    at, sent, series = 0.0, 0, []
    for seconds, size, accuracy in steps:
        at, sent = at + seconds, sent + size
        series.append(look(at, sent, accuracy))
    target = Target("accuracy", value)
    crossing = target.crossing(series)
    first = next((place for place, one in enumerate(series) if one.accuracy >= value), None)
    if first is None:
        assert crossing is None
    elif first == 0:
        assert crossing == (series[0].at, series[0].bytes_sent)
    else:
        assert crossing is not None
        before, after = series[first - 1 : first + 1]
        assert before.at <= crossing[0] <= after.at + 1e-9
        part = (crossing[0] - before.at) / (after.at - before.at)
        assert before.accuracy + part * (after.accuracy - before.accuracy) == pytest.approx(value, abs=1e-6)
        assert crossing[1] == pytest.approx(before.bytes_sent + part * (after.bytes_sent - before.bytes_sent), abs=1e-3)
    falls = Target("loss", 1 - value).crossing(series)
    assert (falls is None) == (crossing is None) or value == pytest.approx(max(one.accuracy for one in series))


def test_a_look_without_a_score_is_passed_over() -> None:
    series = [look(1, 10, 0.2), look(2, 20, math.nan), look(3, 30, 0.6)]
    assert Target("accuracy", 0.4).crossing(series) == (2.0, 20.0)
    assert columns(series)["accuracy"] == [0.2, None, 0.6]


def test_an_outcome_without_a_target_asks_for_one() -> None:
    with pytest.raises(UserError, match="name a target"):
        Outcome({}).time_to()


@pytest.mark.parametrize("text", ["", "accuracy", "accuracy:", "accuracy:x", "accuracy:2", "accuracy:nan", "speed:1"])
def test_what_is_no_target_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match="wanted accuracy:SHARE"):
        parse_target(text)


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 40), min_size=1))
def test_staleness_is_counted_as_it_was(counts: dict[int, int]) -> None:
    every = sorted(Counter(counts).elements())
    figures = staleness_figures(Counter(counts))
    assert figures["mean"] == pytest.approx(np.mean(every))
    assert figures["most"] == every[-1]
    assert sum(one <= figures["p99"] for one in every) >= 0.99 * len(every)
    assert sum(one < figures["p99"] for one in every) < 0.99 * len(every)
    assert staleness_figures(Counter()) == {}


# ---------------------------------------------------------------- what a mode is told

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "codec": st.sampled_from(sorted(CODECS)), "trigger": st.sampled_from(["always", "period:7", "change:0.1"]),
    "view": st.integers(1, 64), "every": st.integers(2, 10**6), "overlap": st.sampled_from(["blocking", "delayed"]),
    "topology": st.sampled_from(["ring", "tree:2"]), "servers": st.integers(1, 3), "min_peers": st.integers(1, 3),
    "server_optimizer": st.just("sgd"), "outer_lr": st.sampled_from(["auto", "0.5"]),
    "outer_momentum": st.sampled_from(["auto", "0"]),
    "exchange": st.just("weights"),  # gradients fit few of the others
    "robust": st.booleans(), "optimizer": st.sampled_from(["sgd", "nesterov"]), "lr": st.floats(1e-6, 1e3),
    "momentum": st.floats(0.01, 0.99), "weight_decay": st.floats(0, 0.99), "batch": st.integers(1, 10**6),
    "schedule": st.sampled_from(["constant", "cosine"]),
}  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["gossip", "diloco", "allreduce", "push-sum"]), st.fixed_dictionaries({}, optional=VALUES)
        ),
        min_size=1,
        max_size=3,
    )
)
def test_what_runs_are_called_says_their_settings(said: list[tuple[str, dict[str, Any]]]) -> None:
    heeded = [(mode, {key: value for key, value in told.items() if heeds(mode, key)}) for mode, told in said]
    scenarios = [replace(SMALL, target=None, mode=mode, lr=None, batch=None) for mode, _ in heeded]
    scenarios = [replace(one, **told) for one, (_, told) in zip(scenarios, heeded, strict=True)]
    again = parse_modes(",".join(one.label for one in scenarios))
    blank = replace(SMALL, target=None, lr=None, batch=None)
    assert [replace(blank, mode=mode, **told) for mode, told in again] == scenarios


def test_everything_a_mode_may_be_told_is_a_setting() -> None:
    assert OF_A_MODE.keys() == VALUES.keys()
    taken = {setting for mode in MODES.values() for setting in mode.TAKES}
    assert taken <= OF_A_MODE.keys()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gossip;codec", "'codec' is not KEY=VALUE"),
        ("gossip;speed=3", "'speed=3' is not KEY=VALUE with a KEY of codec, trigger"),
        ("gossip;view=x", "view=x: not a value of view"),
        ("gossip;robust=maybe", "robust=maybe: not a value of robust"),
    ],
)
def test_what_is_no_setting_of_a_mode_is_one_line(text: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_modes(text)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.integers(0, 1000), st.integers(0, 20))
def test_seeds_are_a_range_or_a_list(first: int, more: int) -> None:
    assert parse_seeds(f"{first}..{first + more}") == list(range(first, first + more + 1))
    assert parse_seeds(",".join(str(first + 2 * at) for at in range(more + 1))) == [
        first + 2 * at for at in range(more + 1)
    ]


@pytest.mark.parametrize("text", ["", "x", "3..1", "-1..2", "1,1", "1..", "0..99999999999999", "1,,2"])
def test_what_is_no_list_of_seeds_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"wanted FIRST\.\.LAST"):
        parse_seeds(text)
