"""A rollback puts back what is trained on this node alone, as it was when the model was last published."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from peerd.training.model.flat import FlatModel


def made() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.BatchNorm1d(2), "base": nn.Linear(2, 2)})
    model["base"].requires_grad_(False)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    return model


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def spoil(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.detach().fill_(math.nan)


@pytest.mark.parametrize("replaced", [False, True])
def test_private_tensors_go_back_with_the_model(replaced: bool) -> None:
    model = made()
    flat = FlatModel(model, torch.optim.SGD(model.parameters(), lr=0.1), ["head.*", "base.*", "mask"])
    model.get_parameter("head.weight").data.fill_(3.0)
    flat.keep()
    before = state(model)
    if replaced:
        model.load_state_dict(before, assign=True)
    assert flat.change().isfinite(), "a mask's infinities are its own"
    spoil(*(tensor for tensor in model["head"].state_dict().values() if tensor.is_floating_point()))
    assert not flat.change().isfinite()
    spoil(model.get_parameter("body.weight"))
    flat.restore()
    assert flat.change().isfinite()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_the_optimizer_steps_beside_the_model_goes_back_too() -> None:
    model, temperature = nn.Linear(2, 2), nn.Parameter(torch.tensor(0.5))
    flat = FlatModel(model, torch.optim.SGD([*model.parameters(), temperature], lr=0.1))
    flat.keep()
    spoil(temperature, model.weight)
    flat.restore()
    assert temperature == 0.5


def test_what_takes_the_place_of_another_beside_the_model_does_not_get_its_values() -> None:
    one, other = (nn.Parameter(torch.tensor(value)) for value in (1.0, 2.0))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), one, other], lr=0.1)
    flat = FlatModel(model, optimizer)
    flat.keep()
    group = optimizer.param_groups[0]
    group["params"] = [parameter for parameter in group["params"] if parameter is not one]
    flat.restore()
    assert [one.item(), other.item()] == [1.0, 2.0]


def test_a_private_buffer_may_be_infinite_at_any_time() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(3))
    model.register_buffer("scale", torch.ones(1).expand(8))
    flat = FlatModel(model, torch.optim.SGD(model.parameters(), lr=0.1), ["mask", "scale"])
    flat.keep()
    model.get_buffer("mask").fill_(-math.inf)
    assert flat.change() == 0
    model.get_buffer("mask").fill_(math.nan)
    assert not flat.change().isfinite()
    flat.restore()
    assert torch.equal(model.get_buffer("mask"), torch.zeros(3))


def test_masters_of_private_parameters_go_back_with_them() -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 3)}).bfloat16()
    masters = [parameter.detach().float() for parameter in model.parameters()]
    flat = FlatModel(model, torch.optim.SGD(masters, lr=0.1), ["head.*"])
    flat.keep()
    before = [master.clone() for master in masters]
    spoil(*masters, *model.parameters())
    flat.restore()
    assert all(map(torch.equal, masters, before))
    assert flat.change().isfinite()


@pytest.mark.parametrize("exclude", [(), ("base.*",)])
def test_nothing_is_kept_where_nothing_is_trained_alone(exclude: Any) -> None:
    model = made()
    flat = FlatModel(model, torch.optim.SGD(model.parameters(), lr=0.1), exclude)
    flat.keep()
    assert not flat.private.tensors
    assert not flat.private._copies
