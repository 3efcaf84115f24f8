"""Models that give and take their state in ways of their own: they are saved, resumed and exported as any other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from peerd.local.export import write_safetensors
from peerd.trainer.checkpoint import Damaged, capture, newest, restore, save
from peerd.trainer.complete import write_complete
from peerd.trainer.rest import Rest
from peerd.trainer.states import require_state
from peerd.training.model.flat import FlatModel
from peerd.training.model.together import one_model


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.again = self.norm


class Asks(Plain):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {f"net.{name}": value for name, value in super().state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict({name.removeprefix("net."): value for name, value in state_dict.items()})


class Silent(Plain):
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict, strict)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for parameter in model.parameters():
        parameter.data.add_(torch.rand_like(parameter))
    return optimizer


@pytest.mark.parametrize("kind", [Plain, Asks, Silent])
def test_it_is_resumed_and_exported(tmp_path: Path, kind: type[Plain]) -> None:
    model, again = kind(), kind()
    optimizer = trained(model)
    require_state(model)
    save(tmp_path, capture(model, optimizer, 1, "s", {"base.weight", "base.bias"}))
    found = newest(tmp_path, "s", pytest.fail)
    assert found is not None
    assert restore(found, again, trained(again))
    assert torch.equal(again.norm.weight, model.norm.weight)

    flat = FlatModel(model)
    write_safetensors(tmp_path / "shared.safetensors", flat.gather().numpy(), flat.tensors)
    Rest(model, flat.pieces, flat.signature).write(tmp_path)
    whole = tmp_path / "whole.safetensors"
    count, missing = write_complete(whole, tmp_path / "shared.safetensors", tmp_path, flat.signature[:16])
    expected = model.state_dict()
    assert (count, missing) == (len(expected), [])
    assert all(torch.equal(value, expected[name]) for name, value in load_file(whole).items())


def test_a_state_that_it_cannot_take_is_a_checkpoint_that_does_not_fit() -> None:
    class Picky(Plain):
        def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
            raise KeyError("mine")

    model = Picky()
    optimizer = trained(model)
    with pytest.raises(Damaged, match="does not fit this model: 'mine'"):
        restore(capture(model, optimizer, 1, "s"), model, optimizer)


def test_where_there_is_no_state_it_is_told() -> None:
    with pytest.raises(ValueError, match=r"state_dict fails \(.*unexpected.*\): let it take what torch's takes"):
        require_state(one_model([Asks(), Plain()]))

    class Odd(Plain):
        def state_dict(self, *_: Any, **__: Any) -> Any:
            return [1]

    with pytest.raises(ValueError, match="state_dict gives a list: let it give tensors by name"):
        require_state(Odd())
