"""Tensors that lie in one memory are refused, those that only lie side by side are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from peerd.training.model.apart import overlapping
from peerd.training.model.flat import FlatModel


def test_parameters_tied_by_their_data_are_refused_in_one_line() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(
        ValueError, match=r"^0\.weight and 1\.weight are two tensors in one memory: make them"
    ) as refusal:
        FlatModel(model)
    assert "\n" not in str(refusal.value)
    model[1].weight = model[0].weight
    assert [piece.name for piece in FlatModel(model).pieces] == ["0.weight", "0.bias", "1.bias"]


def test_a_buffer_that_is_a_view_of_a_parameter_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("row", model.weight.data[1])
    with pytest.raises(ValueError, match=r"^weight and row are two"):
        FlatModel(model)
    assert FlatModel(model, exclude=["row"]).total == 12


def with_tables(*tables: torch.Tensor) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    for name, table in zip(("0.some", "1.same", "1.all"), tables, strict=True):
        model.get_submodule(name[0]).register_buffer(name[2:], table)
    return model


def slices(table: torch.Tensor) -> list[torch.Tensor]:
    return [table[:4], table[:], table.view(2, 3)]


def test_buffers_in_one_memory_are_the_same_model_as_those_apart() -> None:
    apart = with_tables(*(one.clone() for one in slices(torch.arange(6.0))))
    table = torch.arange(6.0)
    model = with_tables(*slices(table))
    flat, other = FlatModel(model), FlatModel(apart)
    assert (flat.tensors, flat.signature, flat.total) == (other.tensors, other.signature, other.total)
    assert flat.total == 24 + 4 + 6 + 6 + 6 + 6
    before = flat.gather().clone()
    assert torch.equal(before[-22:], other.gather()[-22:])
    flat.shift(torch.ones(flat.total))
    assert table.tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(flat.gather(), before + 1)
    flat.put_buffers(before)
    assert table.tolist() == [0, 1, 2, 3, 4, 5]


def test_buffers_that_are_parted_or_joined_later_are_moved_once() -> None:
    table = torch.arange(6.0)
    model = with_tables(*slices(table))
    flat = FlatModel(model)
    before = flat.gather().clone()
    model._apply(torch.clone)  # type: ignore[no-untyped-call]
    flat.shift(torch.ones(flat.total))
    assert torch.equal(flat.gather(), before + 1)
    assert table.tolist() == [0, 1, 2, 3, 4, 5]
    model[0].some = model.get_buffer("1.same")[:4]
    before = flat.gather().clone()
    flat.shift(torch.ones(flat.total))
    assert torch.equal(flat.gather(), before + 1)


def test_buffers_that_lie_side_by_side_are_all_written() -> None:
    table = torch.zeros(9)
    model = with_tables(table[:3], table[3:5], torch.zeros(9)[3:])
    flat = FlatModel(model)
    before = flat.gather().clone()
    flat.shift(torch.ones(flat.total))
    assert torch.equal(flat.gather(), before + 1)
    assert table.tolist() == [1] * 5 + [0] * 4


@pytest.mark.parametrize(
    ("views", "found"),
    [
        (lambda flat: {"a": flat[:6].view(2, 3), "b": flat[6:], "empty": flat[3:3]}, None),
        (lambda flat: {"a": flat.view(3, 4)[:, :2], "b": flat.view(3, 4)[:, 2:]}, None),
        (lambda flat: {"a": flat[::2], "b": flat[1::2], "c": flat[10:].clone()}, None),
        (lambda flat: {"a": flat.view(3, 4)[:, :2], "b": flat.view(3, 4)[:, 2:], "c": flat[6:8]}, ("b", "c")),
        (lambda flat: {"a": flat[:1], "b": flat[2:], "c": flat.view(torch.float64)[5:]}, ("b", "c")),
        (lambda flat: {"a": flat[5], "b": flat.view(3, 4).t()}, ("a", "b")),
    ],
)
def test_views_of_one_storage(views: object, found: tuple[str, str] | None) -> None:
    assert callable(views)
    twice = overlapping(views(torch.zeros(12)))
    assert (None if twice is None else tuple(sorted(twice))) == found
