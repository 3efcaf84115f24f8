"""A model that changes after it was attached: what is replaced by its like is followed, the rest is told, once."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from peerd.training.model.flat import FlatModel


class Averaging(nn.Module):
    """Its forward pass replaces its buffer."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        out: torch.Tensor = self.layer(x - self.mean)
        return out


def test_a_buffer_that_forward_replaces_is_followed() -> None:
    model = Averaging()
    flat = FlatModel(model)
    flat.gather()
    model(torch.full((3, 2), 4.0))
    assert flat.gather()[-2:].tolist() == [2.0, 2.0]
    model(torch.full((3, 2), 4.0))
    flat.add(np.ones(flat.total, np.float32))
    assert model.mean.tolist() == [4.0, 4.0]
    flat.load(np.full(flat.total, 7, np.float32))
    assert model.mean.tolist() == [7.0, 7.0]
    assert flat.unshared() == []


@pytest.mark.parametrize(
    ("before", "after"), list(permutations([torch.float32, torch.bfloat16, torch.float16, torch.float64], 2))
)
def test_a_model_whose_type_is_changed_in_place_is_followed(before: torch.dtype, after: torch.dtype) -> None:
    model = nn.Linear(8, 8).to(before)
    flat = FlatModel(model)
    small = np.full(flat.total, 1e-4, np.float32)
    flat.gather()
    flat.add(small)
    model.to(after)
    weights = torch.cat([parameter.detach().float().reshape(-1) for parameter in model.parameters()])
    torch.testing.assert_close(flat.gather(), weights, rtol=0, atol=0)
    assert float(flat.change()) == 0
    flat.add(small)
    flat.add(small)
    torch.testing.assert_close(flat.gather(), weights + 2e-4, rtol=0, atol=1e-6)
    flat.restore()
    torch.testing.assert_close(flat.gather(), weights + 2e-4, rtol=0, atol=1e-6)


def test_a_layer_that_is_replaced_by_its_like_is_followed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    flat = FlatModel(model)
    flat.load(np.full(flat.total, 1.001, np.float32))
    model[1] = copy.deepcopy(model[1])
    model[0].weight = nn.Parameter(torch.full((2, 2), 5.0))
    assert flat.gather()[:4].tolist() == [5.0] * 4
    flat.add(np.ones(flat.total, np.float32))
    assert model[0].weight.tolist() == [[6.0, 6.0]] * 2
    assert flat.gather()[6:].tolist() == [2.0] * 6, "what the old tensor had left over went with it"
    assert flat.unshared() == []


def test_what_is_unfrozen_added_or_reshaped_is_told_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    flat = FlatModel(model)
    flat.gather()
    assert flat.unshared() == []
    model[0].requires_grad_(True)
    model[1] = nn.Linear(2, 3)
    model.append(nn.Linear(2, 2))
    flat.gather()
    assert flat.unshared() == [
        "not shared: 1.bias, 1.weight left the model, or changed shape or type, after peerd.attach",
        "not shared: 3.bias, 3.weight came into the model after peerd.attach",
        "not shared: 0.bias, 0.weight can be trained only since peerd.attach "
        "(freeze them after it, and they are shared)",
    ]
    flat.gather()
    assert flat.unshared() == []
    flat.add(np.ones(flat.total, np.float32))
    flat.restore()


@pytest.mark.parametrize("now", [torch.zeros(3, 2), torch.zeros(2, 2), torch.zeros(4, 3)], ids=str)
def test_other_data_in_the_same_tensor_is_told_and_the_rest_stays_shared(now: torch.Tensor) -> None:
    """As an embedding grows by rows."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(2, 3))
    flat = FlatModel(model)
    before = flat.gather().clone()
    model[1].weight.data = now.clone()
    line = "not shared: 1.weight left the model, or changed shape or type, after peerd.attach"
    assert float(flat.change()) == 0
    assert flat.unshared() == [line]
    flat.add(np.ones(flat.total, np.float32))
    assert torch.equal(model[1].weight.data, now)
    assert flat.gather().tolist() == (before + 1).tolist()
    flat.load(before.numpy().copy())
    model[1].weight.data = torch.ones(2, 3)
    assert flat.gather()[-6:].tolist() == [1.0] * 6, "it is as it was"
    assert flat.unshared() == []


@pytest.fixture
def two_ranks() -> Iterator[DeviceMesh]:
    """The first of two, where the other one is not."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def test_other_data_in_a_sharded_tensor_is_told_and_the_rest_stays_shared(two_ranks: DeviceMesh) -> None:
    def shard(rows: int) -> nn.Parameter:
        return nn.Parameter(DTensor.from_local(torch.ones(rows, 3), two_ranks, [Shard(0)], run_check=False))

    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 3))
    model[1].weight = shard(2)
    flat = FlatModel(model)
    before = flat.gather().clone()
    assert flat.total == 6 + 2 * 3
    torch.utils.swap_tensors(model[1].weight, shard(3))  # type: ignore[no-untyped-call]
    flat.shift(torch.ones(flat.total))
    assert flat.gather().tolist() == (before + 1).tolist()
    assert flat.unshared() == ["not shared: 1.weight left the model, or changed shape or type, after peerd.attach"]


def test_what_the_optimizer_steps_beside_the_model_is_told_once() -> None:
    """A layer in a plain list, say, or another model."""
    model = nn.Linear(2, 2)
    for beside in (
        [*model.parameters(), torch.zeros(1)],
        [model.weight, torch.zeros(2)],
        copy.deepcopy(model).parameters(),
    ):
        flat = FlatModel(model, torch.optim.SGD(beside))
        (line,) = flat.unshared()
        assert re.fullmatch(r"not shared: [12] of the tensors that the optimizer steps: the model lacks them", line)
        assert flat.unshared() == []
    assert FlatModel(model, torch.optim.SGD([model.weight])).unshared() == []
    low = nn.Linear(2, 2).bfloat16()
    masters = [parameter.detach().clone().float() for parameter in low.parameters()]
    assert FlatModel(low, torch.optim.SGD(masters)).unshared() == []


@pytest.mark.parametrize("frozen", [False, True])
def test_masters_of_what_is_private_or_frozen_are_not_told(frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16()
    model[0].requires_grad_(not frozen)
    masters = [parameter.detach().clone().float() for parameter in model[0].parameters()]
    beside: list[torch.Tensor] = [torch.ones(2), nn.LazyLinear(2).weight, torch.zeros(2, device="meta")]
    for others in ([], beside):
        optimizer = torch.optim.SGD([*masters, *model[1].parameters(), *others])
        flat = FlatModel(model, optimizer, () if frozen else ["0.*"])
        line = f"not shared: {len(others)} of the tensors that the optimizer steps: the model lacks them"
        assert flat.unshared() == ([line] if others else [])


def test_many_names_are_one_short_line() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    flat = FlatModel(model)
    model.extend([nn.Linear(2, 2) for _ in range(50)])
    flat.gather()
    (line,) = flat.unshared()
    assert line == "not shared: 1.bias, 1.weight, 10.bias and 97 more came into the model after peerd.attach"


class Subtracted(set[str]):
    """Counts how often another set is taken away from it."""

    times = 0

    def __sub__(self, other: AbstractSet[object]) -> set[str]:
        self.times += 1
        return super().__sub__(other)


def test_sets_of_all_names_are_made_once_a_look_and_not_for_each() -> None:
    """Of 70,000 tensors a look took 35 s."""
    flat = FlatModel(nn.Sequential(*(nn.Linear(2, 2) for _ in range(10))))
    flat._known = known = Subtracted(flat._known)
    flat.look_again()
    assert known.times == 1


def test_what_is_frozen_for_a_while_stays_shared() -> None:
    """As the discriminator is, while the generator learns."""
    model = nn.Linear(2, 2)
    flat = FlatModel(model)
    model.requires_grad_(False)
    flat.gather()
    flat.add(np.ones(flat.total, np.float32))
    model.requires_grad_(True)
    assert flat.gather().tolist() == [*model.weight.reshape(-1).tolist(), *model.bias.tolist()]
    assert flat.unshared() == []


def test_what_is_frozen_later_is_told_once_and_goes_on_with_the_swarm() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    flat = FlatModel(model)
    model[0].requires_grad_(False)
    before = flat.gather().clone()
    line = "still shared, though frozen after peerd.attach: 0.bias, 0.weight (the swarm goes on changing them)"
    assert flat.unshared() == [line]
    flat.add(np.ones(flat.total, np.float32))
    assert flat.gather()[:6].tolist() == (before[:6] + 1).tolist()
    model[0].requires_grad_(True)
    flat.gather()
    model[0].requires_grad_(False)
    flat.gather()
    assert flat.unshared() == []
    model[1].requires_grad_(False)
    flat.gather()
    assert len(flat.unshared()) == 1
