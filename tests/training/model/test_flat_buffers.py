"""Which buffers are the model's, that they stay the bits that they are, and that a variance stays one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao.quantization import MinMaxObserver

from peerd.training.model import pieces
from peerd.training.model.flat import FlatModel

PRINTED = settings(deadline=None, print_blob=True)
TABLE = 1.0 / 10_000 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)


class Rotary(nn.Module):
    """Tables that nobody trains, in three types, one of which torch does not save; and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("inv_freq", torch.cat([TABLE.float(), torch.tensor([-0.0, 1e-42])]))
        self.register_buffer("wide", TABLE.clone())
        self.register_buffer("low", torch.cat([TABLE, torch.tensor([-0.0])]).bfloat16())
        self.register_buffer("cache", torch.randn(4), persistent=False)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def tables(model: Rotary) -> list[bytes]:
    return [bits(model.get_buffer(name)) for name in ("inv_freq", "wide", "low", "cache")]


def test_a_buffer_that_torch_does_not_save_is_not_part_of_the_model() -> None:
    flat = FlatModel(Rotary())
    assert [piece.name for piece in flat.pieces if piece.is_buffer] == ["inv_freq", "wide", "low"]
    assert not any(line.startswith("cache ") for line in flat.tensors)


@PRINTED
@given(st.lists(st.sampled_from(["add", "load", "restore", "put"]), min_size=1, max_size=6), st.integers(0, 99))
def test_a_table_that_nobody_changes_stays_the_bits_that_it_is(acts: list[str], seed: int) -> None:
    model = Rotary()
    flat = FlatModel(model)
    before, rng = tables(model), np.random.default_rng(seed)
    start = flat.gather().numpy().copy()
    for act in acts:
        moved = start.copy()
        moved[: flat.parameters] += rng.standard_normal(flat.parameters).astype(np.float32)
        if act == "add":
            flat.add(moved - start)
        elif act == "load":
            flat.load(moved)
        elif act == "restore":
            flat.restore()
        else:
            flat.pass_on(lambda _: None, flat.device)
    assert tables(model) == before


def test_a_float64_parameter_keeps_the_bits_that_float32_does_not_hold() -> None:
    model = nn.Linear(3, 2, dtype=torch.float64)
    flat = FlatModel(model)
    before = bits(model.weight)
    flat.load(flat.gather().numpy().copy())
    flat.add(np.zeros(flat.total, np.float32))
    assert bits(model.weight) == before


@PRINTED
@given(
    st.lists(st.floats(2.0**-20, 2.0**20, width=32), min_size=4, max_size=4),
    st.lists(st.lists(st.floats(-(2.0**21), 2.0**21, width=32), min_size=4, max_size=4), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_no_correction_makes_a_variance_negative(
    start: list[float], corrections: list[list[float]], dtype: torch.dtype
) -> None:
    model = nn.BatchNorm1d(4, dtype=dtype)
    assert model.running_var is not None
    model.running_var.copy_(torch.tensor(start))
    flat = FlatModel(model)
    flat.gather()
    (where,) = flat.variances
    for correction in corrections:
        whole = np.zeros(flat.total, np.float32)
        whole[slice(*where)] = correction
        expected = np.maximum(model.running_var.numpy() + np.array(correction), 0.1 * model.running_var.numpy())
        flat.add(whole)
        np.testing.assert_allclose(model.running_var.numpy(), expected, rtol=1e-6)
        assert float(flat.gather()[slice(*where)].min()) > 0
    flat.restore()
    assert float(model.running_var.min()) > 0


class Table(nn.Module):
    """Means and variances that are slices of one table, by rows or by columns; what else is in it may be negative."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("table", torch.arange(12.0).view((3, 4) if dimension == 0 else (4, 3)) + 1)
        parts = self.get_buffer("table").unbind(dimension)
        for name, part in zip(("running_mean", "running_var", "moving_var"), parts, strict=True):
            self.register_buffer(name, part)


@pytest.mark.parametrize("dimension", [0, 1])
def test_a_variance_that_is_a_slice_of_a_table_stays_one(dimension: int) -> None:
    model = Table(dimension)
    flat = FlatModel(model)
    flat.gather()
    assert sum(stop - start for start, stop in flat.variances) == 2 * 8, "in the table, and by themselves"
    before = {name: value.clone() for name, value in model.named_buffers()}
    flat.add(np.full(flat.total, -100, np.float32))
    assert torch.equal(model.get_buffer("running_mean"), before["running_mean"] - 100)
    for name in ("running_var", "moving_var"):
        torch.testing.assert_close(model.get_buffer(name), 0.1 * before[name])
    now = flat.gather().clone()
    flat.restore()
    assert torch.equal(flat.gather(), now)


def test_where_no_buffer_is_a_slice_of_another_none_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look takes 10 bytes a value of the buffer, and as many looks at names as there are buffers, each."""
    monkeypatch.delattr(pieces, "runs_within")
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    assert FlatModel(model).variances == [(15, 18), (21, 24)]
    model.register_buffer("mean", model[0].get_buffer("running_mean"))
    assert sum(stop - start for start, stop in FlatModel(model).variances) == 6, "a slice of one, but no variance"


def test_what_takes_the_bytes_of_a_buffer_for_another_type_is_refused() -> None:
    model = nn.BatchNorm1d(4)
    assert model.running_mean is not None
    model.register_buffer("halves", model.running_mean.view(torch.float16))
    with pytest.raises(ValueError, match=r"are two tensors in one memory: .* clone\(\) one of them"):
        FlatModel(model)


def test_means_and_logarithms_may_be_negative() -> None:
    model = nn.BatchNorm1d(2)
    model.register_buffer("log_var", torch.ones(2))
    flat = FlatModel(model)
    flat.gather()
    flat.add(np.full(flat.total, -3, np.float32))
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [-3, -3]
    assert model.get_buffer("log_var").tolist() == [-2, -2]


@pytest.mark.parametrize("value", [1e300, -1e39])
def test_what_float32_does_not_hold_is_named(value: float) -> None:
    wide = nn.Linear(2, 2, dtype=torch.float64)
    flat = FlatModel(nn.Sequential(nn.Linear(2, 2), wide))
    assert flat.beyond_float32() is None
    with torch.no_grad():
        wide.weight[0, 1] = value
    assert flat.beyond_float32() == "1.weight"


def test_what_is_not_finite_at_all_is_not_beyond_float32() -> None:
    model = nn.Linear(2, 2, dtype=torch.float64)
    flat = FlatModel(model)
    with torch.no_grad():
        model.weight[0, 0], model.weight[0, 1] = float("nan"), float("inf")
    assert flat.beyond_float32() is None


def test_a_float8_buffer_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scales", torch.ones(3).to(torch.float8_e4m3fn))
    flat = FlatModel(model)
    assert [piece.name for piece in flat.pieces if piece.is_buffer] == []
    flat.shift(torch.ones(flat.total))
    assert math.isfinite(flat.change())


def test_what_an_observer_has_seen_changes_nothing_of_what_is_shared() -> None:
    signatures = []
    for batches in (0, 1):
        model = nn.Sequential(nn.Linear(2, 2), MinMaxObserver())  # its range begins at its ends' infinities
        for _ in range(batches):
            model(torch.ones(3, 2))
        signatures.append(FlatModel(model).signature)
    assert signatures[0] == signatures[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_a_later_pass_through_a_graph_has_the_right_gradient_or_none(dtype: torch.dtype, training: bool) -> None:
    """In training BatchNorm makes statistics of its own batch, and elsewhere it divides by those that it holds."""
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.BatchNorm1d(2)).to(dtype).train(training)
    flat = FlatModel(model)
    loss = model(torch.randn(4, 2, dtype=dtype)).square().sum()
    loss.backward(retain_graph=True)
    assert layer.weight.grad is not None
    first = layer.weight.grad.clone()
    values = flat.gather()
    values[-4:] += 1
    flat.put_buffers(values)
    assert torch.equal(flat.gather(), values)
    layer.weight.grad.zero_()
    if not training:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return
    loss.backward()
    assert torch.equal(layer.weight.grad, first)
