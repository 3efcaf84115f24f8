"""A model as one flat vector: what it holds, what identifies it, and that no correction is rounded away."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peerd.training.kernels import library
from peerd.training.model.flat import FlatModel
from peerd.training.model.optimizer_state import OptimizerState

PRINTED = settings(deadline=None, print_blob=True)
BF16_ULP_AT_ONE = 2.0**-7


class Mixed(nn.Module):
    """Three dtypes, a tied and a frozen parameter, float and integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.low = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.high = nn.Linear(4, 2, dtype=torch.float64)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.arange(6.0), requires_grad=False)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def vector(flat: FlatModel, seed: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(flat.total)).astype(np.float32)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_what_a_script_makes_its_tensors_of_changes_nothing(default: torch.dtype) -> None:
    """With carries of bfloat16 the kernel wrote 4 bytes a value into 2, and the process died."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 60, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    torch.set_default_dtype(default)
    torch.set_default_device("meta")
    try:
        flat = FlatModel(model, optimizer)
        flat.keep()
        before = flat.gather()
        flat.add(np.full(flat.total, 1e-3, np.float32))
        after = flat.gather()
        passed: list[torch.dtype] = []
        flat.pass_on(lambda values: passed.append(values.dtype), torch.device("cpu"))
        finite = flat.nonfinite_rest()
        rates = OptimizerState(optimizer, flat.pieces).tensors()["optimizer.lr"]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert before.dtype == after.dtype == finite.dtype == torch.float32
    np.testing.assert_allclose(after.numpy(), (before + 1e-3).numpy(), rtol=1e-6, atol=1e-9)
    assert set(passed) == {torch.float32}
    assert rates.double().sum().item() == 3e-4


# ---------------------------------------------------------------------------------------------------- what it holds


def test_order_is_trainable_parameters_then_float_buffers_each_once() -> None:
    flat = FlatModel(Mixed())
    assert [piece.name for piece in flat.pieces] == [
        "first.weight", "first.bias", "low.weight", "low.bias", "high.weight", "high.bias",
        "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
    ]  # fmt: skip
    assert flat.parameters == 12 + 4 + 16 + 4 + 8 + 2 + 8
    assert flat.total == flat.parameters + 8
    assert [(piece.start, piece.stop) for piece in flat.pieces][-1][1] == flat.total


def test_tensors_describe_what_travels_and_what_must_agree() -> None:
    tensors = FlatModel(Mixed()).tensors
    assert "low.weight bfloat16 4x4" in tensors
    assert "norm.running_var float32 4 buffer" in tensors
    assert any(line.startswith("frozen float32 6 frozen ") for line in tensors)
    assert not any("num_batches_tracked" in line for line in tensors)


def test_integer_buffers_and_frozen_parameters_are_left_alone() -> None:
    model = Mixed()
    model.norm.get_buffer("num_batches_tracked").fill_(5)
    flat = FlatModel(model)
    flat.gather()
    flat.add(vector(flat, 1))
    flat.load(vector(flat, 2))
    flat.restore()
    assert int(model.norm.get_buffer("num_batches_tracked")) == 5
    assert torch.equal(model.frozen, torch.arange(6.0))


def test_batch_norm_statistics_are_averaged() -> None:
    model = Mixed()
    flat = FlatModel(model)
    flat.gather()
    flat.add(np.ones(flat.total, np.float32))
    assert torch.equal(model.norm.get_buffer("running_mean"), torch.ones(4))
    assert torch.equal(model.norm.get_buffer("running_var"), torch.full((4,), 2.0))


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        FlatModel(model)


def test_complex_parameters_are_refused() -> None:
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="phase is complex64"):
        FlatModel(model)


def test_a_scalar_parameter_is_one_value() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    flat = FlatModel(model)
    assert flat.tensors == ["scale float32 scalar"]
    assert flat.gather().tolist() == [2.0]


# ------------------------------------------------------------------------------------------------------- signature


def signature(**changes: Any) -> str:
    """Of a model with one trainable and one frozen tensor, and these changes."""
    model = nn.Module()
    dtype = changes.get("dtype", torch.float32)
    weight = nn.Parameter(torch.zeros(changes.get("shape", (2, 3)), dtype=dtype))
    model.register_parameter(str(changes.get("name", "weight")), weight)
    frozen = torch.tensor(changes.get("frozen", [1.0, 2.0, 3.0]))
    model.base = nn.Parameter(frozen, requires_grad=bool(changes.get("thawed", False)))
    model.register_buffer("mean", torch.zeros(2, dtype=changes.get("buffer", torch.float32)))
    return FlatModel(model).signature


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"shape": (3, 2)},
        {"shape": (6,)},
        {"dtype": torch.float64},
        {"buffer": torch.float64},
        {"buffer": torch.int64},
        {"thawed": True},
        {"frozen": [1.0, 2.0, 4.0]},
        {"frozen": [2.0, 1.0, 3.0]},
        {"frozen": [-1.0, 2.0, 3.0]},
    ],
    ids=str,
)
def test_the_signature_tells_models_apart(changes: dict[str, object]) -> None:
    assert signature(**changes) != signature()


def test_the_signature_does_not_see_trainable_values() -> None:
    assert FlatModel(Mixed()).signature == FlatModel(Mixed()).signature


@PRINTED
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_the_signature_tells_any_two_frozen_tensors_apart(values: list[float], rng: random.Random) -> None:
    shuffled = list(values)
    rng.shuffle(shuffled)
    same_bits = np.array(values, np.float32).tobytes() == np.array(shuffled, np.float32).tobytes()
    assert (signature(frozen=values) == signature(frozen=shuffled)) == same_bits


# ---------------------------------------------------------------------------------------------------------- moving


@PRINTED
@given(st.integers(0, 1000), st.floats(1e-3, 10))
def test_change_is_the_norm_of_the_difference_over_the_parameters(seed: int, scale: float) -> None:
    model = Mixed()
    flat = FlatModel(model)
    before = flat.gather().numpy().copy()
    with torch.no_grad():
        for index, tensor in enumerate(model.state_dict(keep_vars=True).values()):
            if tensor.is_floating_point() and (tensor.requires_grad or index % 2):
                tensor.add_(scale * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed + index)))
    change = float(flat.change())
    after = flat.gather().numpy().copy()
    moved = (after.astype(np.float64) - before)[: flat.parameters]
    assert change == pytest.approx(float(np.linalg.norm(moved)), rel=1e-5)
    assert float(flat.change()) == 0


def test_change_of_a_model_that_is_not_finite_is_not_finite() -> None:
    model = Mixed()
    flat = FlatModel(model)
    flat.gather()
    with torch.no_grad():
        model.low.weight[0, 0] = float("nan")
    assert not np.isfinite(float(flat.change()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_buffer_that_is_spoilt_counts_and_is_restored(bad: float) -> None:
    model = Mixed()
    flat = FlatModel(model)
    flat.gather()
    model.norm.get_buffer("running_var")[1] = 1e38  # many of them would overflow a sum
    assert float(flat.change()) == 0
    model.norm.get_buffer("running_mean")[2] = bad
    assert not np.isfinite(float(flat.change()))
    flat.restore()
    assert torch.equal(model.norm.get_buffer("running_mean"), torch.zeros(4))
    assert float(flat.change()) == 0


def test_a_buffer_that_is_infinite_on_purpose_is_left_alone() -> None:
    model = Mixed()
    without = FlatModel(model).total
    model.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    model.register_buffer("nothing", torch.empty(0))
    flat = FlatModel(model)
    assert flat.total == without
    assert torch.isfinite(flat.gather()).all(), "or nothing of this model would ever be sent"
    assert float(flat.change()) == 0
    flat.add(vector(flat, 1))
    assert model.get_buffer("mask")[0, 1] == float("-inf")


@PRINTED
@given(st.integers(0, 1000), st.integers(1, 5))
def test_corrections_are_added_and_are_not_the_trainers_change(seed: int, count: int) -> None:
    flat = FlatModel(Mixed())
    before = flat.gather().numpy().copy()
    corrections = [vector(flat, seed + index, 0.01) for index in range(count)]
    for correction in corrections:
        flat.add(correction)
    # 44 values of the size of one: what float32 rounds off, low precision or not
    assert float(flat.change()) < 1e-5
    np.testing.assert_allclose(flat.gather().numpy(), before + np.sum(corrections, axis=0), atol=1e-6)


def test_small_corrections_of_a_bfloat16_weight_add_up() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    flat = FlatModel(model)
    flat.gather()
    small, expected = np.array([1e-4], np.float32), np.ones(1, np.float32)
    for _ in range(1000):
        flat.add(small)  # a 78th of what bfloat16 resolves at 1.0
        expected += small
    assert abs(float(model.weight.detach()) - 1.1) <= BF16_ULP_AT_ONE
    assert float(flat.gather()) == expected, "as of a weight in float32"


@PRINTED
@given(st.integers(0, 1000))
def test_load_gives_the_model_these_values(seed: int) -> None:
    model = Mixed()
    flat = FlatModel(model)
    flat.gather()
    values = vector(flat, seed)
    flat.load(values)
    assert float(flat.change()) == 0
    assert flat.gather().numpy().tobytes() == values.tobytes(), "what bfloat16 cannot hold is in its carry"
    assert torch.equal(model.first.weight.detach().reshape(-1), torch.from_numpy(values[:12]))
    assert model.tied.weight is model.first.weight


def test_restore_goes_back_to_the_last_published_copy_and_its_corrections() -> None:
    model = Mixed()
    flat = FlatModel(model)
    published = flat.gather().numpy().copy()
    correction = vector(flat, 3, 0.1)
    flat.add(correction)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    flat.restore()
    assert all(torch.isfinite(value).all() for name, value in weights_of(model).items() if name != "frozen")
    assert float(flat.change()) == 0
    np.testing.assert_array_equal(flat.gather().numpy(), published + correction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [True, False])
def test_restore_goes_back_from_a_bad_batch_though_corrections_come_after_it(
    dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a session, which takes corrections before it looks."""
    if not compiled:
        monkeypatch.setattr(library, "LIBRARY", None)
    model = nn.Linear(8, 4, bias=False, dtype=dtype)
    flat = FlatModel(model)
    correction = vector(flat, 3, 1e-3)
    published = flat.gather().clone()
    flat.add(correction)
    with torch.no_grad():
        model.weight[0] = float("nan")
        model.weight[1, 0] = float("inf")
    flat.add(correction)
    assert not torch.isfinite(flat.change())
    flat.restore()
    assert float(flat.change()) == 0
    flat.add(correction)
    expected = published + 3 * torch.from_numpy(correction)
    torch.testing.assert_close(flat.gather(), expected, rtol=0, atol=1e-3 if dtype == torch.float16 else 1e-6)


def test_an_optimizer_keeps_working_on_the_same_tensors() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    flat = FlatModel(model)
    flat.load(np.array([1, 2, 3], np.float32))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert flat.gather().tolist() == [0.5, 1.5, 2.5]
