"""The teacher's task: gradients are the slopes of the loss, steps are gradients applied, splits share nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.simulation.options import Learning
from peerd.simulation.perceptron import Examples, Gradient, initial, score, tensors
from peerd.simulation.teacher import Teacher
from peerd.transport.errors import UserError

TEXT = "teacher:6-8-3:examples=600"

sizes = st.lists(st.integers(1, 6), min_size=2, max_size=4).map(lambda inner: (*inner, 3))


def teacher(seed: int = 0, peers: int = 2, shard: str = "iid", text: str = TEXT, **learning: object) -> Teacher:
    return Teacher(text, peers, 100, seed, shard, Learning(**learning))  # type: ignore[arg-type]


@given(sizes, st.integers(0, 10**6), st.integers(1, 5))
def test_the_gradient_is_the_slope_of_the_loss(sizes: tuple[int, ...], seed: int, samples: int) -> None:
    rng = np.random.default_rng(seed)
    flat = initial(sizes, rng).astype(np.float64)
    flat += 0.1 * rng.standard_normal(len(flat))
    batch = Examples(rng.standard_normal((samples, sizes[0])), rng.integers(0, sizes[-1], samples))
    found = np.empty_like(flat)
    loss = Gradient(sizes, flat, found)(batch)
    assert loss == pytest.approx(score(sizes, flat, batch)["loss"], rel=1e-9)
    reach = 1e-6
    for at in rng.choice(len(flat), min(20, len(flat)), replace=False):
        kept = flat[at]
        above, below = (_loss(sizes, flat, batch, at, kept + side * reach) for side in (1, -1))
        flat[at] = kept
        slopes = (above - loss) / reach, (loss - below) / reach  # which differ at a corner of a relu
        assert min(slopes) - 1e-4 <= found[at] <= max(slopes) + 1e-4


def _loss(sizes: tuple[int, ...], flat: np.ndarray, batch: Examples, at: int, value: float) -> float:
    flat[at] = value
    return score(sizes, flat, batch)["loss"]


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adamw"])
def test_a_step_is_a_gradient_applied(optimizer: str) -> None:
    problem = teacher(optimizer=optimizer, schedule="cosine")
    whole, halves = problem.learner(1), problem.learner(1)
    for number in range(5):
        moved = whole.step(number)
        assert halves.descend(number, halves.gradient(number).copy()) == moved
        assert np.array_equal(whole.values(), halves.values())


def test_a_gradient_is_of_the_model_as_it_is() -> None:
    problem = teacher()
    learner, other = problem.learner(0), problem.learner(0)
    before = learner.gradient(3).copy()
    assert np.array_equal(other.gradient(3), before)
    other.add(np.full_like(other.values(), 0.1))
    assert not np.array_equal(other.gradient(3), before)


def test_it_is_learnt_by_one_and_by_the_average() -> None:
    problem = teacher(text="teacher:8-16-4:examples=2000:hidden=4:noise=0.1", lr=0.05)
    learners = [problem.learner(rank) for rank in range(2)]
    before = problem.score([learner.values() for learner in learners])
    assert before["accuracy"] == before["accuracy_worst"] < 0.6
    for number in range(300):
        for learner in learners:
            learner.step(number)
    after = problem.score([learner.values() for learner in learners])
    assert after["accuracy_worst"] > 0.7
    assert after["loss_mean"] < before["loss_mean"]
    assert problem.look(learners[0].values())["accuracy"] > 0.7


def test_a_seed_is_a_task_and_the_noise_bounds_what_can_be_learnt() -> None:
    one, again, other = teacher(1), teacher(1), teacher(2)
    assert np.array_equal(one.train.inputs, again.train.inputs)
    assert np.array_equal(one.learner(0).values(), again.learner(1).values()), "all start from one model"
    assert not np.array_equal(one.learner(0).values(), other.learner(0).values())
    assert [len(part.labels) for part in (one.train, one.validation, one.test)] == [600, 2000, 10_000]
    inputs = np.concatenate([one.train.inputs, one.validation.inputs, one.test.inputs])
    assert len(np.unique(inputs, axis=0)) == len(inputs), "no example is in two parts"
    clean, noisy = teacher(1, text=f"{TEXT}:noise=0"), teacher(1, text=f"{TEXT}:noise=0.5")
    assert np.array_equal(clean.train.inputs, noisy.train.inputs)
    assert (clean.train.labels == noisy.train.labels).mean() == pytest.approx(0.5 + 0.5 / 3, abs=0.1)


@settings(max_examples=10)
@given(st.integers(0, 100), st.sampled_from(["iid", "sorted", "dirichlet:0.3"]))
def test_every_example_is_one_nodes(seed: int, shard: str) -> None:
    problem = teacher(seed, 4, shard)
    mine = [problem.learner(rank)._mine for rank in range(4)]  # type: ignore[attr-defined]
    assert sorted(np.concatenate(mine)) == list(range(600))
    if shard == "sorted":
        labels = [problem.train.labels[part] for part in mine]
        assert all(len(np.unique(part)) <= 3 for part in labels)
        assert labels[0].max() <= labels[-1].min()


def test_the_layout_has_every_tensor() -> None:
    assert tensors((6, 8, 3)) == (48, 56, 80, 83)
    assert teacher().learner(0).layout.tensors == (48, 56, 80, 83)


@pytest.mark.parametrize(
    "text",
    ["teacher:", "teacher:5", "teacher:5-4", "teacher:5-4-1", "teacher:5-0-3", "teacher:5-x-3", "teacher:speed=3",
     "teacher:noise=2", "teacher:noise=nan", "teacher:examples=0", "teacher:hidden=0", "teacher:9-9999-3"],
)  # fmt: skip
def test_what_is_no_teacher_is_one_line(text: str) -> None:
    with pytest.raises(UserError) as refused:
        teacher(text=text)
    assert str(refused.value).startswith(f"--problem {text}: wanted teacher[:SIZES]")
    assert "\n" not in str(refused.value)
