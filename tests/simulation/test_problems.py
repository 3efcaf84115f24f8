"""What is trained, and how long a step takes: which settings are understood, and that a bad one is one line."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.simulation.options import Learning
from peerd.simulation.problems import SURROGATE_VALUES, BytesOnly, Compute, Problem, Quadratic, mean_and_distance
from peerd.simulation.task_problem import TaskProblem
from peerd.transport.errors import UserError

BAD = [
    "", "fixed", "fixed:", "fixed:x", "fixed:0", "fixed:-1", "fixed:inf", "fixed:nan", "fixed:1:2", "fixed:1e6",
    "lognormal", "lognormal:1", "lognormal:1:2:3", "lognormal:x:1", "lognormal:1:x", "lognormal:0:1", "lognormal:1:-1",
    "lognormal:1:4", "lognormal:1:nan", "lognormal:nan:1", "normal:1:1", "1", ":1",
]  # fmt: skip
BAD_TRACES = ["", "\n\n", "1\nx\n", "1\n0\n", "-1\n", "nan\n", "1\nnan\n", "inf\n", "1\n1e6\n", "1 2\n", b"\xff\n"]
PROBLEMS = {"quadratic": Quadratic(7), "bytes": BytesOnly(7, 10**9, steps=50)}

problems = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())


def refused(text: str) -> str:
    with pytest.raises(UserError) as raised:
        Compute(text)
    return str(raised.value)


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_compute_time_is_said_in_one_line(text: str) -> None:
    said = refused(text)
    assert said.startswith(f"--compute {text}: wanted fixed:SECONDS, lognormal:MEDIAN:SIGMA")
    assert "\n" not in said


@pytest.mark.parametrize("lines", BAD_TRACES)
def test_a_trace_holds_positive_seconds(tmp_path: Path, lines: str | bytes) -> None:
    path = tmp_path / "steps"
    path.write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    said = refused(f"trace:{path}")
    assert "trace:FILE with one number of seconds a line" in said
    assert "\n" not in said


def test_a_trace_that_is_too_long_is_refused_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.simulation.problems.TRACE_CHARACTERS", 6)
    (tmp_path / "steps").write_text("1\n2\n3\n")
    assert Compute(f"trace:{tmp_path}/steps").draw(random.Random(0)) in (1.0, 2.0, 3.0)
    (tmp_path / "steps").write_text("1\n2\n3\n4\n")
    assert "6 characters at most" in refused(f"trace:{tmp_path}/steps")


def test_a_trace_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    assert refused(f"trace:{tmp_path}/none").endswith("none: No such file or directory")
    assert refused(f"trace:{tmp_path}").endswith("Is a directory")


@given(
    st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=20).filter(lambda t: "trace" not in t)
)
def test_any_text_is_a_compute_time_or_a_user_error(text: str) -> None:
    try:
        compute = Compute(text)
    except UserError:
        return
    assert compute.draw(random.Random(0)) > 0


@given(st.floats(1e-4, 999_999.0), st.integers(0, 1000))
def test_a_fixed_time_is_always_the_same(seconds: float, seed: int) -> None:
    assert Compute(f"fixed:{seconds!r}").draw(random.Random(seed)) == seconds


def test_a_lognormal_time_has_its_median_and_spread() -> None:
    seed, rng = 11, random.Random(11)
    compute = Compute("lognormal:2:0.5")
    logs = [np.log(compute.draw(rng)) for _ in range(4000)]
    assert abs(statistics.median(logs) - np.log(2)) < 0.05, f"seed {seed}"
    assert abs(statistics.stdev(logs) - 0.5) < 0.03, f"seed {seed}"


def test_a_trace_is_drawn_from(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_text("0.5\n\n 2 \n8\n")
    rng = random.Random(1)
    assert {Compute(f"trace:{path}").draw(rng) for _ in range(100)} == {0.5, 2.0, 8.0}, "seed 1"


# ---------------------------------------------------------------- learners


@problems
def test_all_start_from_one_model_and_go_their_own_ways(problem: Problem) -> None:
    first, second, again = problem.learner(0), problem.learner(1), problem.learner(0)
    assert np.array_equal(first.values(), second.values())
    for number in range(3):
        for learner in (first, second, again):
            learner.step(number)
    assert np.array_equal(first.values(), again.values()), "the same rank is the same run"
    assert not np.array_equal(first.values(), second.values())


@problems
def test_the_change_is_of_own_steps_alone(problem: Problem) -> None:
    learner = problem.learner(0)
    base = learner.publish()
    assert learner.change() == 0.0
    learner.step(0)
    moved = float(np.linalg.norm(learner.values() - base))
    assert learner.change() == pytest.approx(moved, rel=1e-4)
    learner.add(np.full_like(base, 0.25))
    assert learner.change() == pytest.approx(moved, rel=1e-3)
    learner.load(base)
    assert learner.change() == 0.0
    assert np.array_equal(learner.values(), base)


@problems
def test_what_was_published_does_not_move(problem: Problem) -> None:
    learner = problem.learner(0)
    published = learner.publish()
    kept = published.copy()
    learner.step(0)
    learner.add(np.ones_like(kept))
    assert np.array_equal(published, kept)


def test_a_quadratic_is_learnt() -> None:
    problem = Quadratic(seed=3)
    learner = problem.learner(0)
    before = problem.score([learner.values()])["error"]
    for number in range(400):
        learner.step(number)
    assert problem.score([learner.values()])["error"] < before / 2, "seed 3"


def test_a_walk_becomes_shorter_towards_its_end() -> None:
    learner = BytesOnly(seed=3, parameters=10**9, steps=100).learner(0)
    moves = []
    for number in range(100):
        learner.publish()
        ratio = learner.step(number).lr_ratio
        moves.append((learner.change(), ratio))
    first = float(np.linalg.norm(BytesOnly(3, 10**9, 100).learner(0).values())) * 0.003
    assert moves[0][0] == pytest.approx(first, rel=0.1), "seed 3"
    assert moves[99][0] < moves[0][0] / 5, "seed 3"
    assert [ratio for _, ratio in moves] == sorted((ratio for _, ratio in moves), reverse=True)


def test_a_model_smaller_than_what_stands_for_it_is_refused() -> None:
    with pytest.raises(UserError, match=f"--parameters 10: at least {SURROGATE_VALUES}"):
        BytesOnly(0, 10, steps=1)
    assert BytesOnly(0, SURROGATE_VALUES, steps=1).size_scale == 1.0


def test_the_distance_is_relative_to_the_mean() -> None:
    mean, distance = mean_and_distance([np.array([1.0, 0.0]), np.array([3.0, 0.0])])
    assert mean.tolist() == [2.0, 0.0]
    assert distance == pytest.approx(0.5)
    assert mean_and_distance([np.zeros(3)])[1] == 0.0


def test_a_task_of_torch_trains_as_it_is_told() -> None:
    def group(**said: Any) -> dict[str, Any]:
        run = TaskProblem("digits", 2, 10, 0, "iid", Learning(**said)).learner(0)._run  # type: ignore[attr-defined]
        (found,) = run.optimizer.param_groups
        return {"batch": run._options.batch, "kind": type(run.optimizer).__name__, **found}

    told = group(lr=0.02, batch=7, momentum=0.5, weight_decay=0.01)
    assert [told[key] for key in ("batch", "kind", "lr", "momentum", "weight_decay")] == [7, "SGD", 0.02, 0.5, 0.01]
    assert group(optimizer="nesterov")["nesterov"] is True
    adamw = group(optimizer="adamw", lr=0.003)
    assert (adamw["kind"], adamw["lr"]) == ("AdamW", 0.003)
