"""Corrections of a bfloat16 model reach the float32 copies that its optimizer steps, or the script is told at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flat_values import values_of
from torch import nn

from peerd.trainer.optimizers import as_one
from peerd.training.model.flat import FlatModel


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)).bfloat16()


def copies(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone().float().requires_grad_() for parameter in model.parameters()]


def step(model: nn.Module, masters: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    for master, parameter in zip(masters, model.parameters(), strict=True):
        master.grad = torch.ones_like(master)
        del parameter
    optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)


def test_a_correction_survives_the_next_step() -> None:
    model = build()
    masters = copies(model)
    optimizer = torch.optim.SGD(masters, lr=0.001)
    flat = FlatModel(model, optimizer)
    before = flat.gather().clone()
    flat.add(np.full(flat.total, 0.01, np.float32))
    step(model, masters, optimizer)
    np.testing.assert_allclose(values_of(flat), before + 0.009, rtol=1e-5, atol=1e-7)
    assert float(flat.change()) == pytest.approx(0.001 * flat.total**0.5, rel=1e-3), "below what bfloat16 shows"
    flat.load(np.full(flat.total, 1.001, np.float32))
    assert all(bool(torch.eq(master, float(np.float32(1.001))).all()) for master in masters)
    assert all(bool((parameter == 1.0).all()) for parameter in model.parameters())
    flat.restore()
    assert float(flat.change()) == 0


def test_groups_in_another_order_are_told_apart_by_their_values() -> None:
    model = build()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    masters = copies(model)
    decayed = [master for master in masters if master.ndim > 1]
    others = [master for master in masters if master.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": decayed, "weight_decay": 0.1}]
    flat = FlatModel(model, torch.optim.AdamW(groups))
    flat.gather()
    flat.add(np.arange(flat.total, dtype=np.float32))
    for piece, master in zip(flat.pieces, masters, strict=True):
        assert piece.master is master
        number = masters.index(master) if master is masters[0] else int(master.min()) - piece.start
        assert master.reshape(-1).tolist() == [number + value for value in range(piece.start, piece.stop)]


def norms() -> nn.Sequential:
    """All weights are 1 and all biases 0."""
    return nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3), nn.LayerNorm(3)).bfloat16()


def test_masters_of_equal_parameters_are_told_apart_by_the_models_order() -> None:
    for groups in ([range(6)], [range(0, 6, 2), range(1, 6, 2)]):  # as one, or without decay for biases
        model = norms()
        masters = copies(model)
        flat = FlatModel(model, torch.optim.AdamW([{"params": [masters[i] for i in group]} for group in groups]))
        assert all(piece.master is master for piece, master in zip(flat.pieces, masters, strict=True))


@pytest.mark.parametrize(
    "groups",
    [[[4, 5], [2, 3], [0, 1]], [[5, 4, 3, 2, 1, 0]], [[0, 1, 2, 3], [4, 5]]],
    ids=["by layer, the last first", "backwards", "by layer"],
)
def test_masters_of_equal_parameters_in_another_order_are_refused_before_a_step(groups: list[list[int]]) -> None:
    model = norms()
    masters = copies(model)
    optimizer = torch.optim.SGD([{"params": [masters[i] for i in group]} for group in groups], lr=0.5)
    with pytest.raises(ValueError, match=r"\.weight and \d\.weight .*: make one optimizer step") as refusal:
        FlatModel(model, optimizer)
    assert "\n" not in str(refusal.value)
    with torch.no_grad():  # as the script makes its first step
        for number, (master, parameter) in enumerate(zip(masters, model.parameters(), strict=True)):
            parameter.copy_(master.add_(10 * number))
    flat = FlatModel(model, optimizer)
    assert all(piece.master is master for piece, master in zip(flat.pieces, masters, strict=True))


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("moved_on", [False, True])
def test_masters_of_what_is_frozen_or_private_are_not_taken_for_those_of_what_is_shared(
    private: bool, moved_on: bool
) -> None:
    model = norms()
    if not private:
        model[0].requires_grad_(False)
    masters = copies(model)
    if moved_on:
        for number, master in enumerate(masters):
            master.detach().add_(1 + number)
    flat = FlatModel(model, torch.optim.SGD(masters), ["0.*"] if private else ())
    assert [piece.master is masters[2 + place] for place, piece in enumerate(flat.pieces)] == [True] * 4
    if not private:  # or only what is trained has one
        flat = FlatModel(model, torch.optim.SGD(masters[2:]))
        assert [piece.master is masters[2 + place] for place, piece in enumerate(flat.pieces)] == [True] * 4


def test_of_more_copies_than_parameters_none_is_chosen() -> None:
    """As of another model's layer, which the same optimizer steps."""
    model = nn.Sequential(nn.LayerNorm(3)).bfloat16()
    optimizer = torch.optim.SGD([*copies(model), torch.ones(3)])
    with pytest.raises(
        ValueError, match=r"^of 0\.weight the optimizer's groups do not show which .* is whose: make one"
    ):
        FlatModel(model, optimizer)


def test_float64_masters_of_a_float32_model() -> None:
    model = build().float()
    masters = [parameter.detach().clone().double() for parameter in model.parameters()]
    flat = FlatModel(model, torch.optim.SGD(masters))
    assert all(piece.master is master for piece, master in zip(flat.pieces, masters, strict=True))
    flat.gather()
    flat.add(np.ones(flat.total, np.float32))
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.float())


def test_masters_that_moved_on_are_told_apart_by_their_shapes() -> None:
    model = build()
    masters = [master.detach() * 2 + 1 for master in copies(model)]
    flat = FlatModel(model, torch.optim.SGD(masters))
    assert all(piece.master is master for piece, master in zip(flat.pieces, masters, strict=True))


def test_masters_of_some_parameters_only() -> None:
    """Norms are kept in float32, and stepped themselves."""
    model = build()
    model[1].float()
    low = [parameter for parameter in model.parameters() if parameter.dtype == torch.bfloat16]
    masters = [parameter.detach().clone().float() for parameter in low]
    flat = FlatModel(model, torch.optim.SGD([*model[1].parameters(), *masters]))
    assert [piece.name for piece in flat.pieces if piece.master is not None] == [
        "0.weight", "0.bias", "2.weight", "2.bias",
    ]  # fmt: skip


def test_masters_that_cannot_be_told_apart_are_refused_in_one_line() -> None:
    model = build()
    one = torch.cat([master.reshape(-1) for master in copies(model)]).detach()
    with pytest.raises(ValueError, match=r"steps 1 tensors that are not the model's, and not 0\.weight") as refusal:
        FlatModel(model, torch.optim.SGD([one]))
    assert "\n" not in str(refusal.value)


def test_other_tensors_of_an_optimizer_are_nobodys_masters() -> None:
    model = build()
    temperature = torch.zeros(3)
    flat = FlatModel(model, torch.optim.SGD([*model.parameters(), temperature]))
    assert not any(piece.master is not None for piece in flat.pieces)
    whole = nn.Linear(3, 3)
    assert FlatModel(whole, torch.optim.SGD([torch.zeros(3, 3), torch.zeros(3)])).pieces[0].master is None
    assert FlatModel(build(), torch.optim.SGD([nn.Parameter(torch.zeros(2).bfloat16())])).pieces[0].master is None


def test_a_float32_parameter_that_nobody_steps_here_has_no_master() -> None:
    """Though a float64 tensor beside the model is wide enough for one, as a learned temperature is."""
    temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))
    whole = build().float()
    flat = FlatModel(whole, torch.optim.SGD([*whole[0].parameters(), temperature]))
    assert not any(piece.master is not None for piece in flat.pieces)
    assert len(flat.unshared()) == 1, "the temperature"
    mixed = build()
    mixed[0].float()
    masters = [parameter.detach().clone().float() for parameter in (*mixed[1].parameters(), *mixed[2].parameters())]
    flat = FlatModel(mixed, torch.optim.SGD([*masters, temperature]))
    found = [piece.master for piece in flat.pieces if piece.held.dtype == torch.bfloat16]
    assert all(one is master for one, master in zip(found, masters, strict=True))
    assert not any(piece.master is not None for piece in flat.pieces if piece.held.dtype == torch.float32)
    with pytest.raises(ValueError, match=r"steps 4 tensors that are not the model's, and not 1\.weight"):
        FlatModel(mixed, torch.optim.SGD([*masters[:3], temperature]))


def test_float64_masters_of_some_float32_parameters_only() -> None:
    model = build().float()
    masters = [parameter.detach().clone().double() for parameter in model[0].parameters()]
    flat = FlatModel(model, torch.optim.SGD(masters))
    assert all(piece.master is master for piece, master in zip(flat.pieces, masters, strict=False))
    assert not any(piece.master is not None for piece in flat.pieces[2:])


def test_what_is_loaded_from_elsewhere_is_the_masters_too() -> None:
    """A checkpoint has the model alone: without this the swarm would get the masters of the script's first model."""
    model = build()
    masters = copies(model)
    flat = FlatModel(model, torch.optim.SGD(masters, lr=0.001))
    model.load_state_dict({name: torch.full_like(tensor, 7.0) for name, tensor in model.state_dict().items()})
    flat.loaded()
    assert all(bool((master == 7.0).all()) for master in masters)
    assert bool((flat.gather() == 7.0).all())


class Fused(torch.optim.Optimizer):
    """As apex's and TransformerEngine's with `master_weights`."""

    def __init__(self, parameters: Any, name: str = "master_param") -> None:
        super().__init__(parameters, {"lr": 0.001})
        self.name = name

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state[self.name] = parameter.detach().float().clone()
                state[self.name].sub_(group["lr"])
                parameter.copy_(state[self.name])


@pytest.mark.parametrize("several", [False, True])
def test_a_correction_reaches_the_masters_that_an_optimizer_keeps_in_its_state(several: bool) -> None:
    model = build()
    parameters = list(model.parameters())
    parts = [Fused(parameters[:3]), Fused(parameters[3:])] if several else [Fused(parameters)]
    flat = FlatModel(model, as_one(parts))
    flat.gather()
    for _ in range(2):  # after the second its state is another one
        for part in parts:
            part.step()
        before = flat.gather().clone()
        flat.add(np.full(flat.total, 0.01, np.float32))
        for part in parts:
            part.step()
        np.testing.assert_allclose(values_of(flat), before + 0.009, rtol=1e-5, atol=1e-7)
        for part in parts:
            part.state.clear()
        values_of(flat)
        assert not any(piece.master is not None for piece in flat.pieces)


def test_masters_are_found_in_a_state_that_was_restored() -> None:
    """`load_state_dict` puts another object in its place."""
    trained, model = build(), build()
    saved = Fused(trained.parameters())
    saved.step()
    optimizer = Fused(model.parameters())
    flat = FlatModel(model, optimizer)
    model.load_state_dict(trained.state_dict())
    optimizer.load_state_dict(saved.state_dict())
    for now, then in zip(model.parameters(), trained.parameters(), strict=True):  # torch makes them bfloat16
        optimizer.state[now]["master_param"] = saved.state[then]["master_param"].clone()
    flat.loaded()
    before = flat.gather().clone()
    flat.add(np.full(flat.total, 0.01, np.float32))
    optimizer.step()
    np.testing.assert_allclose(values_of(flat), before + 0.009, rtol=1e-5, atol=1e-7)


def test_a_model_that_went_back_without_its_masters_is_published_as_it_is() -> None:
    """A session that goes back clears the optimizer's state, and its masters with it."""
    model = build()
    optimizer = Fused(list(model.parameters()))
    flat = FlatModel(model, optimizer)
    optimizer.step()
    published = flat.gather().clone()
    assert all(piece.master is not None for piece in flat.pieces)
    with torch.no_grad():
        for piece in flat.pieces:
            piece.tensor.fill_(float("nan"))
            piece.source.fill_(float("nan"))
    flat.restore()
    optimizer.state.clear()
    correction = np.full(flat.total, 1e-4, np.float32)
    flat.add(correction)
    torch.testing.assert_close(flat.gather(), published + 1e-4, rtol=2**-8, atol=1e-6)
    assert float(flat.change()) == 0


def test_moments_are_no_masters() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    flat = FlatModel(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"].float()
    flat.gather()
    assert not any(piece.master is not None for piece in flat.pieces)
