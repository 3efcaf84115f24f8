"""Checkpoints: what comes back is what went in; a crash, a full disk or a flipped bit costs one generation at most."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import nn
from torch.ao.quantization import PerChannelMinMaxObserver

from peerd.local.generations import generations, step_of
from peerd.trainer import checkpoint
from peerd.trainer.checkpoint import (
    EXTRA_BYTES_MAX,
    Damaged,
    Generation,
    capture,
    newest,
    not_kept,
    put_later_aside,
    restore,
    save,
    too_long,
)
from peerd.trainer.kept import Kept
from peerd.trainer.optimizers import CAPTURABLE, Several, as_one

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "plain sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9)),
    "adam in two groups": lambda model: torch.optim.Adam(
        [{"params": [p], "lr": 0.1**index} for index, p in enumerate(model.parameters(), 1)], amsgrad=True
    ),
    "tensor lr": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False),
    "two as one": lambda model: as_one(
        [
            torch.optim.Adam(list(model.parameters())[:2], lr=0.01),
            torch.optim.SGD(list(model.parameters())[2:], lr=0.1, momentum=0.9),
        ]
    ),
}


class Net(nn.Module):
    """Mixed dtypes, tied weights, an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 1, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.tied(self.first(x))).bfloat16())
        return out


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        model(inputs).float().square().mean().backward()
        for part in optimizer.parts if isinstance(optimizer, Several) else [optimizer]:
            part.step()
            part.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return capture(model, optimizer, 0, "").tensors


def generation(step: int, value: float | None = None) -> Generation:
    """A small one that is recognised by its value."""
    tensors = {"model.weight": torch.full((2, 3), float(step) if value is None else value)}
    return Generation(step, "signature", tensors, {"class": "SGD", "param_groups": [], "state": {}})


def value_of(found: Generation | None) -> float:
    assert found is not None
    return float(found.tensors["model.weight"][0, 0])


def silent(text: str) -> None:
    raise AssertionError(f"refused: {text}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------------------------------------- round trips


def test_nothing_that_was_restored_holds_a_file_that_is_deleted_since(tmp_path: Path) -> None:
    """It took the disk one checkpoint more for the whole run, which no listing shows."""
    model, kept = Net(), {"held": torch.ones(3)}
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 0, 1)
    save(tmp_path, capture(model, optimizer, 1, "s", (), Kept({"kept": kept})))
    model, kept = Net(), {}
    optimizer = torch.optim.Adam(model.parameters())
    found = newest(tmp_path, "s", silent)
    assert found is not None
    assert restore(found, model, optimizer)
    Kept({"kept": kept}).restore(found.kept, found.tensors, 1)
    del found
    assert kept["held"].tolist() == [1, 1, 1]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_after_a_restart_is_bit_identical(make: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Net()
    optimizer = make(model)
    train(model, optimizer, 0, 5)
    folder = save(tmp_path, capture(model, optimizer, 5, "s"))
    bytes_before = (folder / "model.safetensors").read_bytes()
    train(model, optimizer, 5, 9)

    torch.manual_seed(2)
    again = Net()
    optimizer_again = make(again)
    found = newest(tmp_path, "s", silent)
    assert found is not None
    assert restore(found, again, optimizer_again)
    assert found.step == 5
    train(again, optimizer_again, 5, 9)

    expected, got = everything(model, optimizer), everything(again, optimizer_again)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert again.tied.weight is again.first.weight
    assert (folder / "model.safetensors").read_bytes() == bytes_before, "training writes into the mapped checkpoint"


def test_it_is_restored_into_the_tensors_that_are_there() -> None:
    """Of which a CUDA graph, captured before, has the addresses."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))

    def step() -> None:
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()

    step()
    generation = checkpoint.capture(model, optimizer, 1, "s")
    held = [optimizer.param_groups[0]["lr"], *(value for each in optimizer.state.values() for value in each.values())]
    expected = [value.clone() for value in held]
    step()
    assert checkpoint.restore(generation, model, optimizer)
    now = [optimizer.param_groups[0]["lr"], *(value for each in optimizer.state.values() for value in each.values())]
    assert all(one is other for one, other in zip(now, held, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(now, expected, strict=True))


def test_a_capture_is_a_copy() -> None:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, 0, 2)
    taken = capture(model, optimizer, 2, "s")
    before = {name: value.clone() for name, value in taken.tensors.items()}
    train(model, optimizer, 2, 4)
    assert all(torch.equal(before[name], taken.tensors[name]) for name in before)


class Odd(nn.Module):
    """Parameters that no file can be written of as they are: they share memory, or do not fill it, or not in order."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.arange(20, dtype=torch.float32)
        self.halves = nn.ParameterList([nn.Parameter(memory[:10]), nn.Parameter(memory[10:])])
        self.slice = nn.Parameter(torch.arange(9, dtype=torch.float32)[2:5])
        self.turned = nn.Parameter(torch.arange(6, dtype=torch.float32).reshape(2, 3).t())
        self.complex = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]).conj())
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("none", torch.empty(0, 3))
        self.plain = nn.Parameter(torch.full((4,), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_stands_is_written_without_a_copy_and_the_same(make: Callable[..., Any], tmp_path: Path) -> None:
    model = Net()
    optimizer = make(model)
    train(model, optimizer, 0, 3)
    copied, lent = capture(model, optimizer, 3, "s"), capture(model, optimizer, 3, "s", stands=True)
    files = [save(tmp_path / name, taken) / "model.safetensors" for name, taken in (("a", copied), ("b", lent))]
    assert files[0].read_bytes() == files[1].read_bytes()
    held = {value.data_ptr() for value in [*model.state_dict().values(), *states_of(optimizer)]}
    assert {name for name, value in lent.tensors.items() if value.data_ptr() not in held} == {"model.tied.weight"}
    assert all(value.data_ptr() not in held for value in copied.tensors.values())


def test_what_cannot_be_written_as_it_is_is_copied(tmp_path: Path) -> None:
    model = Odd()
    optimizer = torch.optim.SGD([model.plain], lr=0.1)
    lent = capture(model, optimizer, 3, "s", stands=True)
    save(tmp_path, lent)
    found = newest(tmp_path, "s", silent)
    assert found is not None
    state = model.state_dict()
    assert {name: value.tolist() for name, value in found.tensors.items()} == {
        f"model.{name}": value.tolist() for name, value in state.items()
    }
    same = {name for name, value in lent.tensors.items() if value.numel() and is_in(value, state)}
    assert same == {"model.plain"}


def states_of(optimizer: Any) -> list[torch.Tensor]:
    parts = optimizer.parts if isinstance(optimizer, Several) else [optimizer]
    entries = [entry for part in parts for state in part.state.values() for entry in state.values()]
    return [entry for entry in entries if isinstance(entry, torch.Tensor)]


def is_in(tensor: torch.Tensor, state: dict[str, torch.Tensor]) -> bool:
    memories = [value.untyped_storage().data_ptr() for value in state.values()]
    return tensor.untyped_storage().data_ptr() in memories


@pytest.mark.parametrize(("saved_by", "restored_into"), [("sgd", "adamw"), ("adamw", "sgd")])
def test_another_optimizer_starts_afresh(saved_by: str, restored_into: str, tmp_path: Path) -> None:
    model, again = Net(), Net()
    optimizer = OPTIMIZERS[saved_by](model)
    train(model, optimizer, 0, 3)
    save(tmp_path, capture(model, optimizer, 3, "s"))
    found = newest(tmp_path, "s", silent)
    other = OPTIMIZERS[restored_into](again)
    assert found is not None
    assert restore(found, again, other) is False
    assert torch.equal(again.last.weight, model.last.weight)
    train(again, other, 3, 4)


def test_another_grouping_of_parameters_starts_afresh() -> None:
    model, again = Net(), Net()
    taken = capture(model, torch.optim.Adam(model.parameters()), 0, "s")
    assert restore(taken, again, OPTIMIZERS["adam in two groups"](again)) is False


def test_state_goes_with_the_name_of_its_parameter_whatever_their_order(tmp_path: Path) -> None:
    def made(order: list[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        parameters = list(model.parameters())
        return model, torch.optim.AdamW([parameters[index] for index in order], lr=0.01)

    model, optimizer = made([0, 1, 2, 3])
    for _ in range(3):
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    save(tmp_path, capture(model, optimizer, 3, "s"))
    again, other = made([3, 0, 2, 1])
    found = newest(tmp_path, "s", print)
    assert found is not None
    assert restore(found, again, other)
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[mine][key], other.state[theirs][key])


@pytest.mark.parametrize(
    ("now", "whole"),
    [
        (["1", "0", "outside"], True),
        (["outside", "1", "0"], True),
        (["1", "2", "outside"], False),
        (["1", "0", "2"], False),
        (["0", "outside", "outside too"], False),
    ],
)
def test_no_parameter_gets_the_state_of_another_of_its_shape(now: list[str], whole: bool) -> None:
    """Where the optimizer had one that is not the model's, or has one that it had not, states went by their places."""
    before = ["0", "1", "outside"]

    def made(names: list[str]) -> tuple[nn.Module, dict[str, nn.Parameter], torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
        held = {name.removesuffix(".weight"): parameter for name, parameter in model.named_parameters()}
        held |= {name: nn.Parameter(torch.ones(3, 3)) for name in ("outside", "outside too")}
        return model, held, torch.optim.Adam([held[name] for name in names])

    model, held, optimizer = made(before)
    model(torch.randn(5, 3) @ held["outside"]).square().mean().backward()
    optimizer.step()
    again, now_held, other = made(now)
    assert restore(capture(model, optimizer, 1, "s"), again, other) is whole
    assert set(other.state) == ({now_held[name] for name in now} if whole else set())
    for name in now if whole else ():
        assert torch.equal(optimizer.state[held[name]]["exp_avg"], other.state[now_held[name]]["exp_avg"])


@pytest.mark.parametrize(("groups", "whole"), [([[3, 1], [2, 0]], True), ([[0, 1], [2, 3]], False)])
def test_what_a_group_is_told_goes_with_its_parameters(groups: list[list[int]], whole: bool) -> None:
    """Of matrices and biases, as people part them; where they are parted in another way nothing fits."""

    def made(order: list[list[int]], rates: list[float]) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        parameters = list(model.parameters())
        told = [{"params": [parameters[at] for at in group], "lr": lr} for group, lr in zip(order, rates, strict=True)]
        return model, torch.optim.Adam(told)

    model, optimizer = made([[0, 2], [1, 3]], [0.01, 0.02])
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    again, other = made(groups, [0.5, 0.5])
    assert restore(capture(model, optimizer, 1, "s"), again, other) == whole
    if whole:
        assert [group["lr"] for group in other.param_groups] == [0.02, 0.01]
        for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(optimizer.state[mine]["exp_avg"], other.state[theirs]["exp_avg"])


@pytest.mark.parametrize("several", [False, True])
def test_a_group_that_is_added_after_attach_takes_no_others_state_away(several: bool) -> None:
    """A layer that is unfrozen later: each restart began with all of the optimizer's state made anew."""

    def made(lr: float) -> tuple[nn.Sequential, torch.optim.Adam, torch.optim.SGD, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        head = torch.optim.Adam(model[2].parameters(), lr=lr)
        first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        return model, head, first, as_one([head, first]) if several else head

    model, head, first, optimizer = made(0.5)
    head.add_param_group({"params": model[1].parameters(), "lr": 0.25})
    for _ in range(3):
        model(torch.randn(5, 3)).square().mean().backward()
        head.step()
        first.step()
    head.param_groups[0]["lr"] = 0.01
    again, head_again, first_again, optimizer_again = made(0.5)
    told: list[str] = []
    assert restore(capture(model, optimizer, 3, "s"), again, optimizer_again, told.append)
    assert [group["lr"] for group in head_again.param_groups] == [0.01]
    for mine, theirs in zip(model[2].parameters(), again[2].parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(head.state[mine][key], head_again.state[theirs][key])
    for mine, theirs in zip(model[0].parameters(), again[0].parameters(), strict=True):
        for part, at in ((first, mine), (first_again, theirs)) if several else ():
            assert torch.equal(part.state[at]["momentum_buffer"], first.state[mine]["momentum_buffer"])
    without = "the optimizer has no 1.weight (nor 1 more that the checkpoint has) at peerd.attach"
    assert [line.partition(": ")[0] for line in told] == [without]
    head_again.add_param_group({"params": again[1].parameters()})
    again(torch.randn(5, 3)).square().mean().backward()
    head_again.step()


def test_settings_that_are_not_plain_are_the_scripts(tmp_path: Path) -> None:
    """The optimizer's whole state was left out for one, without a word."""
    model, again = Net(), Net()
    optimizer, other = OPTIMIZERS["adamw"](model), OPTIMIZERS["adamw"](again)
    train(model, optimizer, 0, 2)
    optimizer.param_groups[0] |= {"callback": print, "dtype": torch.float32, "lr": 0.007}
    other.param_groups[0] |= {"callback": max, "dtype": torch.float64}
    save(tmp_path, capture(model, optimizer, 2, "s"))
    found = newest(tmp_path, "s", silent)
    assert found is not None
    assert restore(found, again, other)
    assert (other.param_groups[0]["callback"], other.param_groups[0]["dtype"]) == (max, torch.float64)
    assert other.param_groups[0]["lr"] == 0.007
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        if mine in optimizer.state:
            assert torch.equal(optimizer.state[mine]["exp_avg"], other.state[theirs]["exp_avg"])


def test_an_optimizer_whose_state_is_not_plain_is_left_out(tmp_path: Path) -> None:
    model = Net()
    optimizer = OPTIMIZERS["sgd"](model)
    train(model, optimizer, 0, 1)
    optimizer.state[next(iter(optimizer.state))]["callback"] = print
    save(tmp_path, capture(model, optimizer, 1, "s"))
    found = newest(tmp_path, "s", silent)
    assert found is not None
    assert found.optimizer is None
    assert restore(found, model, optimizer) is False


def test_an_optimizer_whose_state_cannot_be_told_is_left_out() -> None:
    """As of torch's, where a parameter that has state was taken out of its group."""
    model = Net()
    optimizer = OPTIMIZERS["sgd"](model)
    train(model, optimizer, 0, 1)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(KeyError):
        optimizer.state_dict()
    found = capture(model, optimizer, 1, "s")
    assert found.optimizer is None
    assert restore(found, Net(), OPTIMIZERS["sgd"](Net())) is False


def test_a_checkpoint_of_before_is_loaded_with_its_frozen_parameters(tmp_path: Path) -> None:
    """It had them all, and no word of extra state."""
    model, again = Net(), Net()
    folder = save(tmp_path, capture(model, OPTIMIZERS["sgd"](model), 1, "s"))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"], manifest["extra"]
    (folder / "manifest.json").write_text(json.dumps({**manifest, "sha256": checkpoint._digest(manifest)}))
    again.first.requires_grad_(False)
    found = newest(tmp_path, "s", silent)
    assert found is not None
    assert restore(found, again, OPTIMIZERS["sgd"](again))
    assert torch.equal(again.first.weight, model.first.weight)
    assert torch.equal(again.norm.weight, model.norm.weight)


class Headed(nn.Module):
    def __init__(self, classes: int, *, counts: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, classes)
        if counts:
            self.register_buffer("seen", torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Headed(3), r"head.weight has shape \(2, 2\) in the checkpoint, \(3, 2\) in the model"),
        (Headed(2, counts=True), "it lacks seen"),
        (nn.ModuleDict({"body": nn.Linear(2, 2)}), "it has head.weight, which the model has not"),
    ],
)
def test_a_checkpoint_that_does_not_fit_leaves_the_model_as_it_is(other: nn.Module, why: str) -> None:
    model = Headed(2)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(Damaged, match=f"does not fit this model: {why}"):
        restore(capture(model, OPTIMIZERS["sgd"](model), 1, "s"), other, OPTIMIZERS["sgd"](other))
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


class Grows(nn.Module):
    """It has as many values as were ever loaded, or asked for."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(size))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        self.values = nn.Parameter(state_dict[f"{prefix}values"].clone())


def test_a_module_that_loads_in_its_own_way_does_so() -> None:
    model, again = nn.Sequential(Grows(3)), nn.Sequential(Grows(2))
    restore(capture(model, OPTIMIZERS["sgd"](model), 1, "s"), again, OPTIMIZERS["sgd"](again))
    assert again[0].values.shape == (3,)


class Counted(nn.Linear):
    """Its extra state is what it was made with, until another is set."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plain)
def test_plain_extra_state_comes_back_as_it_is(tmp_path: Path, extra: Any) -> None:
    model, again = nn.Sequential(Counted(extra)), nn.Sequential(Counted("nothing"))
    assert not_kept(model) == []
    save(tmp_path, capture(model, OPTIMIZERS["sgd"](model), 1, "s"))
    found = newest(tmp_path, "s", silent)
    assert found is not None
    assert restore(found, again, OPTIMIZERS["sgd"](again))
    assert repr(again[0].extra) == repr(extra)


@pytest.mark.parametrize("extra", [(1, 2), {1: 2}, object(), {1}, b"x", float("nan"), "x" * EXTRA_BYTES_MAX], ids=type)
def test_other_extra_state_is_left_out_and_told(tmp_path: Path, extra: Any) -> None:
    mine, own = Counted(extra), Counted("its own")
    model, again = nn.Sequential(mine), nn.Sequential(own)
    (line,) = not_kept(model)
    assert line.startswith(f"0._extra_state is no plain data ({type(extra).__name__}): ")
    save(tmp_path, capture(model, OPTIMIZERS["sgd"](model), 1, "s"))
    found = newest(tmp_path, "s", silent)
    assert found is not None
    assert restore(found, again, OPTIMIZERS["sgd"](again))
    assert own.extra == "its own"
    assert torch.equal(own.weight, mine.weight)


def test_a_frozen_parameter_that_was_left_out_stays_and_another_is_missed() -> None:
    model, again = Net(), Net()
    taken = capture(model, OPTIMIZERS["sgd"](model), 1, "s", left_out={"norm.weight"})
    assert "model.norm.weight" not in taken.tensors
    with pytest.raises(Damaged, match=r"does not fit this model: it lacks norm.weight"):
        restore(taken, again, OPTIMIZERS["sgd"](again))
    again.norm.weight.requires_grad_(False).fill_(7.0)
    restore(taken, again, OPTIMIZERS["sgd"](again))
    assert again.norm.weight.tolist() == [7.0] * 3
    assert torch.equal(again.first.weight, model.first.weight)


def test_a_model_that_does_not_fit_is_damaged() -> None:
    model = Net()
    taken = capture(model, OPTIMIZERS["sgd"](model), 0, "s")
    other = nn.Linear(2, 2)
    with pytest.raises(Damaged, match="does not fit this model"):
        restore(taken, other, torch.optim.SGD(other.parameters()))


# ------------------------------------------------------------------------------------------------------- generations


def test_two_generations_are_kept_and_the_newest_comes_back(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing", "signature", silent) is None
    for step in (1, 2, 99_999_999, 100_000_000):
        save(tmp_path, generation(step))
        assert step_found(tmp_path) == (step, [])
    assert names(tmp_path) == ["step-100000000", "step-99999999"]


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, generation(1))
    save(tmp_path, generation(2))
    save(tmp_path, generation(2, value=7))
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert value_of(newest(tmp_path, "signature", silent)) == 7


def test_leftovers_are_removed_and_strangers_left_alone(tmp_path: Path) -> None:
    save(tmp_path, generation(1))
    written = f"tmp-{os.getppid()}-6"  # its process lives, and has let go of its daemon
    for name in ("tmp-99999999-5", f"tmp-{os.getpid()}-5", "tmp-", written):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    (tmp_path / "step-notes.txt").write_text("mine")
    assert value_of(newest(tmp_path, "signature", silent)) == 1
    save(tmp_path, generation(2))
    save(tmp_path, generation(3))
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-notes.txt", written]


def test_a_run_that_starts_again_keeps_what_it_writes(tmp_path: Path) -> None:
    """Another model's later steps, or damaged ones, do not push out new generations with lower numbers."""
    for step in (1000, 2000):
        save(tmp_path, Generation(step, "another model", generation(step).tensors, None))
    said: list[str] = []
    for step in (1, 2, 3):
        save(tmp_path, generation(step))
        assert value_of(newest(tmp_path, "signature", said.append)) == step
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00001000", "step-00002000"]
    assert "for another model are not read: step-00002000 and 1 more; they go once" in said[0]


# ------------------------------------------------------------------------------------------------------------ damage


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """The folder, and the newer of its two generations."""
    model = nn.Linear(2, 2)
    optimizer = OPTIMIZERS["sgd"](model)
    train_once = torch.ones(1, 2)
    model(train_once).sum().backward()
    optimizer.step()
    save(tmp_path, capture(model, optimizer, 1, "signature"))
    return tmp_path, save(tmp_path, capture(model, optimizer, 2, "signature"))


def step_found(folder: Path, signature: str = "signature") -> tuple[int | None, list[str]]:
    said: list[str] = []
    found = newest(folder, signature, said.append)
    return (found.step if found else None), said


def test_a_flipped_bit_anywhere_is_refused(pair: tuple[Path, Path]) -> None:
    """In every byte of the manifest, every 7th of the tensors: refused with a line, or without effect (white space)."""
    folder, newer = pair
    whole = newest(folder, "signature", silent)
    assert whole is not None
    for name, stride in (("manifest.json", 1), ("model.safetensors", 7)):
        path = newer / name
        content = path.read_bytes()
        for position in range(0, len(content), stride):
            damaged = bytearray(content)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            said: list[str] = []
            found = newest(folder, "signature", said.append)
            assert found is not None
            if found.step == 2:
                assert found.optimizer == whole.optimizer
                assert found.tensors.keys() == whole.tensors.keys()
                assert name == "manifest.json"
            else:
                assert len(said) == 1
                assert f"checkpoint {newer} refused: " in said[0]
                assert "\n" not in said[0]
        path.write_bytes(content)


@settings(max_examples=50, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200)
    | st.text(alphabet='{}[]":,truefalsn0123456789.eE-', max_size=60).map(str.encode)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["step", "files", "sha256", "x"]), inner),
    ).map(lambda tree: json.dumps(tree).encode())
)
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_garbage_is_refused(pair: tuple[Path, Path], name: str, garbage: bytes) -> None:
    folder, newer = pair
    (newer / name).write_bytes(garbage)
    assert step_found(folder)[0] == 1


@pytest.mark.parametrize(
    "garbage", [b"[" * 200_000, b'{"a":' * 50_000, b"", b"null", b"1e999"], ids=lambda b: str(b[:8])
)
def test_hostile_manifests_are_refused(pair: tuple[Path, Path], garbage: bytes) -> None:
    folder, newer = pair
    (newer / "manifest.json").write_bytes(garbage)
    assert step_found(folder)[0] == 1


def test_every_truncation_and_every_missing_file_is_refused(pair: tuple[Path, Path]) -> None:
    folder, newer = pair
    for path in sorted(newer.iterdir()):
        content = path.read_bytes()
        for length in range(0, len(content), 11):
            path.write_bytes(content[:length])
            assert step_found(folder)[0] == 1, f"{path.name} cut to {length} bytes"
        path.unlink()
        step, said = step_found(folder)
        assert step == 1
        assert f"refused: {path.name}: No such file or directory;" in said[0]
        path.write_bytes(content)
    assert step_found(folder) == (2, [])


def test_a_manifest_that_is_no_json_is_said_to_be_none_and_so_is_the_end_of_the_list(pair: tuple[Path, Path]) -> None:
    folder, newer = pair
    for path in (newer, folder / "step-00000001"):
        (path / "manifest.json").write_text("{half")
    found, said = step_found(folder)
    assert found is None
    assert all("refused: manifest.json is not JSON: " in line for line in said)
    assert [line.rpartition("; ")[2] for line in said] == ["trying the one before it", "no older one is left"]


def test_nothing_is_left_when_all_are_damaged_or_of_another_model(pair: tuple[Path, Path]) -> None:
    folder, _ = pair
    step, said = step_found(folder, "another signature")
    assert step is None
    assert len(said) == 1
    assert "for another model are not read: step-00000002 and 1 more" in said[0]


def test_of_another_model_only_the_manifest_is_read(pair: tuple[Path, Path]) -> None:
    folder, newer = pair
    (newer / "model.safetensors").unlink()
    _, said = step_found(folder, "another signature")
    assert len(said) == 1
    assert "not read" in said[0]


def test_a_huge_manifest_is_not_read(pair: tuple[Path, Path]) -> None:
    folder, newer = pair
    with (newer / "manifest.json").open("wb") as file:
        file.truncate(checkpoint.MANIFEST_BYTES_MAX + 1)
    step, said = step_found(folder)
    assert step == 1
    assert "over" in said[0]


def test_tensors_that_are_no_safetensors_are_refused_even_with_a_right_hash(pair: tuple[Path, Path]) -> None:
    folder, newer = pair
    (newer / "model.safetensors").write_bytes(b"garbage")
    manifest = json.loads((newer / "manifest.json").read_text())
    del manifest["sha256"]
    entry = {"bytes": 7, "sha256": hashlib.sha256(b"garbage").hexdigest()}
    manifest["files"]["model.safetensors"] = entry
    (newer / "manifest.json").write_text(json.dumps({**manifest, "sha256": checkpoint._digest(manifest)}))
    step, said = step_found(folder)
    assert step == 1
    assert "Safetensor" in said[0]


# ---------------------------------------------------------------------------------------- crashes and full disks


WATCHED = ((os, "open"), (os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"))
WRITERS = ((checkpoint, "save_file"), (Path, "write_text"))


class Disk:
    """Stands between `save` and the operating system, and does `act` at call number `stop_at`.

    The calls that write a whole file count twice: before they begin, and with half of it written. What was written but
    not flushed is remembered, for a power cut takes it away.
    """

    def __init__(self, patch: pytest.MonkeyPatch, stop_at: int, act: Callable[[Disk, str], None]) -> None:
        self.calls = 0
        self.unflushed: set[int] = set()  # inodes
        self._stop_at = stop_at
        self._act = act
        for owner, name in WATCHED:
            patch.setattr(owner, name, self._watched(name, getattr(owner, name)))
        for kind, name in WRITERS:
            patch.setattr(kind, name, self._writer(name, getattr(kind, name)))

    def _count(self, name: str) -> None:
        self.calls += 1
        if self.calls == self._stop_at:
            self._act(self, name)

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._count(name)
            if name == "fsync":
                self.unflushed.discard(os.fstat(arguments[0]).st_ino)
            return real(*arguments, **options)

        return call

    def _writer(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._count(name)
            path = Path(arguments[1] if name == "save_file" else arguments[0])
            result = real(*arguments)
            self.unflushed |= {path.stat().st_ino, path.parent.stat().st_ino}
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            self._count(name)
            path.write_bytes(content)
            return result

        return call

    def cut_the_power(self, folder: Path) -> None:
        """Empty every file and every folder that was not flushed."""
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.stat().st_ino in self.unflushed:
                if path.is_dir():
                    shutil.rmtree(path)
                    path.mkdir()
                else:
                    path.write_bytes(b"")


def save_in_child(folder: Path, saved: Generation, stop_at: int, *, power_cut: bool) -> bool:
    """Save in a forked process that ends at call `stop_at`; returns whether it came through."""

    def crash(disk: Disk, _: str) -> None:
        if power_cut:
            disk._stop_at = -1
            disk.cut_the_power(folder)
        os._exit(9)

    child = os.fork()
    if child == 0:
        try:
            Disk(pytest.MonkeyPatch(), stop_at, crash)
            save(folder, saved)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9), f"the child failed in another way: {code}"
    return code == 0


def every_call() -> Iterator[int]:
    return iter(range(1, 1000))


@pytest.mark.cases(3)
@pytest.mark.parametrize("power_cut", [False, True], ids=["kill -9", "power cut"])
@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "the same step again"])
@pytest.mark.parametrize("before", [(1, 2), (2,)], ids=["two before", "one before"])
def test_a_crash_at_any_call_leaves_this_generation_or_the_one_before(
    tmp_path: Path, before: tuple[int, ...], step: int, power_cut: bool
) -> None:
    for stop_at in every_call():
        folder = tmp_path / str(stop_at)
        for earlier in before:
            save(folder, generation(earlier))
        came_through = save_in_child(folder, generation(step, value=50), stop_at, power_cut=power_cut)
        found = value_of(newest(folder, "signature", silent))
        assert found in (50, 2), f"stopped at call {stop_at}"
        assert not list(folder.glob("tmp-*")), "newest cleans up"
        save(folder, generation(4))
        assert value_of(newest(folder, "signature", silent)) == 4
        if came_through:
            assert found == 50
            assert stop_at > 15, "every call was watched"
            return
    raise AssertionError("it never came through")


def fails_to_save(folder: Path, saved: Generation, because: str) -> bool:
    try:
        save(folder, saved)
    except OSError as error:
        if because not in str(error):
            raise
        return True
    return False


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "the same step again"])
def test_an_error_of_the_disk_at_any_call_keeps_what_there_is(
    tmp_path: Path, number: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Disk, name: str) -> None:
        if name == "save_file":
            raise SafetensorError(f"I/O error: {os.strerror(number)}")
        raise OSError(number, os.strerror(number))

    for stop_at in every_call():
        folder = tmp_path / str(stop_at)
        for earlier in (1, 2):
            save(folder, generation(earlier))
        with monkeypatch.context() as patch:
            disk = Disk(patch, stop_at, fail)
            failed = fails_to_save(folder, generation(step, value=50), os.strerror(number))
        found = value_of(newest(folder, "signature", silent))
        assert found in (2, 50), f"failed at call {stop_at}"
        assert failed or found == 50
        save(folder, generation(4))
        assert value_of(newest(folder, "signature", silent)) == 4
        if disk.calls < stop_at:
            return
    raise AssertionError("it never came through")


def test_a_failed_save_leaves_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, generation(1))

    def no_flush(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_flush)
        with pytest.raises(OSError, match="Input/output error"):
            save(tmp_path, generation(2))
    assert names(tmp_path) == ["step-00000001"]


def test_a_manifest_that_nobody_would_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the names of all tensors, and a line of each one's state: as many as an attach may have are read."""
    save(tmp_path, generation(1))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "MANIFEST_BYTES_MAX", 100)
        with pytest.raises(OSError, match="more than 100"):
            save(tmp_path, generation(2))
    assert names(tmp_path) == ["step-00000001"]
    assert value_of(newest(tmp_path, "signature", silent)) == 1


WITH_STATES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = OPTIMIZERS | {
    kind.__name__: lambda model, kind=kind: kind(model.parameters(), lr=0.01)
    for kind in (*sorted(CAPTURABLE, key=str), torch.optim.Adagrad, torch.optim.Adafactor)
}


@pytest.mark.parametrize("of", WITH_STATES)
def test_files_that_would_be_too_long_are_told_before_there_is_a_state(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(Net() for _ in range(30)))
        return model, WITH_STATES[of](model)

    (model, optimizer), new = made(), made()
    for layer in model:  # type: ignore[attr-defined]
        layer(torch.ones(8, 3)).float().square().mean().backward()
    for part in getattr(optimizer, "parts", [optimizer]):
        part.step()
    folder = save(tmp_path, capture(model, optimizer, 1, "signature"))
    header = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    manifest = (folder / "manifest.json").stat().st_size
    assert too_long(*new) == ""
    for limit, size, what in (("HEADER", header, "model.safetensors"), ("MANIFEST", manifest, "manifest.json")):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, f"{limit}_BYTES_MAX", size - 1)
            assert too_long(*new).startswith(f"checkpoints may fail: {what} would tell of up to ")
            assert too_long(model, optimizer), "with its state"
            patch.setattr(checkpoint, f"{limit}_BYTES_MAX", 3 * size + checkpoint.REST_BYTES)
            assert too_long(*new) == ""


def test_a_full_disk_is_an_oserror(tmp_path: Path) -> None:
    """With the kernel's own refusal, inside the safetensors library."""
    save(tmp_path, generation(1))
    large = Generation(2, "signature", {"model.weight": torch.zeros(1 << 20)}, None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save(tmp_path, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["step-00000001"]
    assert value_of(newest(tmp_path, "signature", silent)) == 1


def test_an_observer_whose_range_has_grown_comes_back(tmp_path: Path) -> None:
    """It has no range before it has seen something: its tensors take the size of what is loaded."""
    model, again = (nn.Sequential(nn.Linear(2, 3), PerChannelMinMaxObserver()) for _ in range(2))
    model(torch.randn(4, 2))
    save(tmp_path, capture(model, OPTIMIZERS["sgd"](model), 1, "s"))
    found = newest(tmp_path, "s", silent)
    assert found is not None
    assert restore(found, again, OPTIMIZERS["sgd"](again))
    came, was = again.state_dict()["1.min_val"], model.state_dict()["1.min_val"]
    assert torch.equal(came, was)
    assert was.numel() == 4


def test_what_training_does_not_go_on_from_is_put_aside(tmp_path: Path) -> None:
    folder, model = tmp_path / "checkpoints", nn.Linear(2, 1)
    for last in (9, 12):
        for step in (3, 5, last):
            save(folder, capture(model, OPTIMIZERS["sgd"](model), step, "s"))
        aside = put_later_aside(folder, 5)
        assert aside == tmp_path / "checkpoints-passed"
        kept, passed = newest(folder, "s", silent), newest(aside, "s", silent)
        assert kept is not None
        assert passed is not None
        assert (kept.step, passed.step) == (5, last)
        assert len([*aside.iterdir()]) == 1, "that of the last time is gone"


def test_of_what_one_training_puts_aside_the_furthest_stays(tmp_path: Path) -> None:
    """A leader that lies orders a model of an earlier step again and again."""
    folder, model = tmp_path / "checkpoints", nn.Linear(2, 1)
    for last, again in ((40, False), (7, True), (8, True), (9, True)):
        save(folder, capture(model, OPTIMIZERS["sgd"](model), last, "s"))
        aside = put_later_aside(folder, 0, again=again)
    assert aside is not None
    assert [step_of(path) for path in generations(aside)] == [40, 9]
    assert not generations(folder)
