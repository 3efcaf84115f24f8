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


def test_of_slices_of_one_table_the_longest_is_shared() -> None:
    table = torch.arange(6.0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].register_buffer("some", table[:4])
    model[1].register_buffer("same", table[:])
    model[1].register_buffer("all", table.view(2, 3))
    flat = FlatModel(model)
    assert [piece.name for piece in flat.pieces if piece.is_buffer] == ["1.same", "2.running_mean", "2.running_var"]
    before = flat.gather().clone()
    flat.shift(torch.ones(flat.total))
    assert table.tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(flat.gather(), before + 1)
    model[1].register_buffer("more", torch.zeros(9)[3:])
    model[0].register_buffer("end", table[2:])
    assert FlatModel(model).total == flat.total + 6


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
