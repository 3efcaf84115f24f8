"""Several models and optimizers are shared and saved as one; a wrapped model is saved as the plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_names import WRAPPERS, Model
from torch import nn

from peerd.trainer import checkpoint
from peerd.trainer.optimizers import as_one, forget
from peerd.training.model.flat import FlatModel
from peerd.training.model.together import one_model


def gan(seed: int) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """A step of each has been made, so both optimizers have a state."""
    torch.manual_seed(seed)
    g, d = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), nn.Linear(2, 1)
    optimizers = [torch.optim.Adam(g.parameters(), lr=0.1 * seed), torch.optim.SGD(d.parameters(), 0.2, momentum=0.9)]
    d(g(torch.randn(5, 3))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return [g, d], optimizers


def numbers(state: Any) -> Any:
    """All of a state, to be compared with ==."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    return {key: numbers(value) for key, value in state.items()} if isinstance(state, dict) else state


def states(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    found: list[Any] = [
        *(model.state_dict() for model in models),
        *(optimizer.state_dict()["state"] for optimizer in optimizers),
        *([group["lr"] for group in optimizer.param_groups] for optimizer in optimizers),
    ]
    return [numbers(state) for state in found]


def saved(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, signature: str) -> checkpoint.Generation:
    checkpoint.save(folder, checkpoint.capture(model, optimizer, 7, signature))
    found = checkpoint.newest(folder, signature, lambda line: pytest.fail(line))
    assert found is not None
    return found


def test_names_have_each_models_prefix() -> None:
    (g, d), _ = gan(1)
    assert FlatModel(one_model([g, d])).tensors[0] == "0.0.weight float32 2x3"
    named = FlatModel(one_model({"type": g, "d": d}), exclude=["d.*"])
    assert [piece.name for piece in named.pieces][:2] == ["type.0.weight", "type.0.bias"]
    assert not any(piece.name.startswith("d.") for piece in named.pieces)
    assert FlatModel(one_model([g])).signature == FlatModel(one_model({"0": g})).signature


def test_several_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    models, optimizers = gan(1)
    generation = saved(tmp_path, one_model(models), as_one(optimizers), "s")
    others, theirs = gan(2)
    assert states(others, theirs) != states(models, optimizers)
    assert checkpoint.restore(generation, one_model(others), as_one(theirs))
    assert states(others, theirs) == states(models, optimizers)


def test_the_state_of_other_optimizers_stays_behind(tmp_path: Path) -> None:
    models, optimizers = gan(1)
    generation = saved(tmp_path, one_model(models), as_one(optimizers), "s")
    others, theirs = gan(2)
    before = states(others, theirs)[2:]
    assert not checkpoint.restore(generation, one_model(others), as_one(theirs[::-1]))
    regrouped = torch.optim.SGD([{"params": [one]} for one in others[1].parameters()], 0.2, momentum=0.9)
    assert not checkpoint.restore(generation, one_model(others), as_one([theirs[0], regrouped]))
    assert states(others, theirs)[2:] == before


def test_several_optimizers_are_cleared_and_listed_as_one() -> None:
    _, optimizers = gan(1)
    one = as_one(optimizers)
    assert [group["lr"] for group in one.param_groups] == [0.1, 0.2]
    forget(one)
    assert not any(optimizer.state for optimizer in optimizers)


def test_one_of_each_is_itself() -> None:
    (g, _), (optimizer, _) = gan(1)
    assert one_model(g) is g
    assert as_one(optimizer) is optimizer
    assert as_one([optimizer]) is optimizer


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_checkpoint_of_a_wrapped_model_is_the_plain_ones(wrap: Any, tmp_path: Path) -> None:
    plain, wrapped = Model(), one_model(wrap(Model()))
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    generation = saved(tmp_path / "wrapped", wrapped, optimizer, "s")
    assert checkpoint.restore(generation, plain, optimizer)
    assert numbers(dict(plain.state_dict())) == numbers(dict(wrapped.state_dict()))
    with torch.no_grad():
        plain.head.weight.fill_(3)
    assert checkpoint.restore(saved(tmp_path / "plain", plain, optimizer, "s"), wrapped, optimizer)
    assert float(dict(wrapped.named_parameters())["head.weight"].detach().min()) == 3
    assert [name for name, _ in wrapped.named_buffers()] == [name for name, _ in plain.named_buffers()]
    generation.tensors["model.stranger"] = torch.zeros(1)
    with pytest.raises(checkpoint.Damaged, match="does not fit"):
        checkpoint.restore(generation, wrapped, optimizer)


@pytest.mark.parametrize(
    ("models", "line"),
    [
        ([], "there is no model"),
        ({"a.b": nn.Linear(1, 1)}, "'a.b'"),
        ({"": nn.Linear(1, 1)}, "''"),
        ([3], "a int"),
        (None, "^NoneType is no model: give a torch.nn.Module"),
        (nn.Linear, "^Linear is no model"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(models: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line) as refusal:
        one_model(models)
    assert "\n" not in str(refusal.value)
