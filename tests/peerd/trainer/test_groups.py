"""After a restart: what a schedule has done goes on, and what a person has changed in the script is not undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from peerd.trainer import groups
from peerd.trainer.checkpoint import capture, newest, restore, save
from peerd.trainer.optimizers import as_one

Script = Callable[[nn.Module], Any]


class Run:
    """A node's script, started again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step = 0
        self.said: list[str] = []

    def start(self, script: Script, then: Callable[[Any], object] = lambda _: None) -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        return self.attach(model, script(model), then)

    def attach(self, model: nn.Module, optimizer: Any, then: Callable[[Any], object] = lambda _: None) -> Any:
        """`then` is what training does; its end is saved."""
        groups.remember(optimizer)
        self.said.clear()
        if (found := newest(self._folder, "s", self.said.append)) is not None:
            assert restore(found, model, optimizer, self.said.append)
        then(optimizer)
        self._step += 1
        save(self._folder, capture(model, optimizer, self._step, "s"))
        return optimizer


def sgd(**options: Any) -> Script:
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def halve(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] / 2


def settings(optimizer: Any, *keys: str) -> list[Any]:
    return [optimizer.param_groups[0][key] for key in keys]


def test_a_rate_that_training_lowered_goes_on_after_any_number_of_restarts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for lr in (0.05, 0.025, 0.0125):
        assert settings(run.start(sgd(), halve), "lr") == [lr]
        assert run.said == []


def test_what_was_changed_in_the_script_is_kept_and_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start(sgd(), halve)
    optimizer = run.start(sgd(lr=0.001, weight_decay=0.5))
    assert settings(optimizer, "lr", "weight_decay", "momentum") == [0.001, 0.5, 0.9]
    assert run.said == [
        "the optimizer has lr 0.001 of the script, in place of the checkpoint's 0.05; weight_decay 0.5 of the script, "
        "in place of the checkpoint's 0"
    ]
    assert settings(run.start(sgd(lr=0.001, weight_decay=0.5), halve), "lr") == [0.0005]
    assert run.said == []
    assert settings(run.start(sgd(lr=0.001, weight_decay=0.5)), "lr") == [0.0005], "that is its own now"


def test_a_pair_of_numbers_is_the_same_as_a_list(tmp_path: Path) -> None:
    run = Run(tmp_path)
    script = lambda model: torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))  # noqa: E731
    run.start(script)
    run.start(script)
    assert run.said == []
    optimizer = run.start(lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), foreach=False))
    assert run.said == [
        "the optimizer has lr 0.5 of the script, in place of the checkpoint's 0.001; betas (0.9, 0.999) of the script, "
        "in place of the checkpoint's (0.8, 0.9); foreach False of the script, in place of the checkpoint's None"
    ]
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


def cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=100)


def test_a_schedule_that_is_new_in_the_script_finds_its_own_notes(tmp_path: Path) -> None:
    run, schedules = Run(tmp_path), []

    def script(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = sgd()(model)
        schedules.append(cycle(optimizer))
        return optimizer

    def train(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.step()
            schedules[-1].step()

    run.start(sgd())
    for _ in range(3):
        assert settings(run.start(script, train), "initial_lr", "max_lr") == [0.0004, 0.01]


def test_a_schedule_that_is_made_after_attach_begins_at_the_scripts_new_rate(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def train(optimizer: torch.optim.Optimizer) -> None:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)

    assert settings(run.start(sgd(), train), "lr", "initial_lr") == [0.05, 0.1]
    assert settings(run.start(sgd(), train), "lr", "initial_lr") == [0.05, 0.1]
    assert settings(run.start(sgd(lr=0.02), train), "lr", "initial_lr") == [0.01, 0.02]


def test_a_checkpoint_of_before_gives_all_that_it_has(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    taken = capture(model, sgd(lr=0.25)(model), 1, "s")  # of an optimizer that nobody was told of
    assert taken.optimizer is not None
    for manifest in (taken.optimizer, {key: value for key, value in taken.optimizer.items() if key != "made"}):
        optimizer = sgd(lr=0.5)(model)
        cycle(optimizer)
        groups.remember(optimizer)
        old = type(taken)(1, "s", taken.tensors, manifest)
        assert restore(old, model, optimizer, pytest.fail)
        assert settings(optimizer, "lr", "max_lr") == [0.25, 0.01]


def test_each_group_goes_by_what_was_made_of_it(tmp_path: Path) -> None:
    """In another order, and of optimizers that act as one."""

    def script(rates: list[float], order: list[int]) -> Script:
        def made(model: nn.Module) -> Any:
            told = [(model.get_parameter("0.weight"), rates[0]), (model.get_parameter("1.weight"), rates[1])]
            return as_one([torch.optim.SGD([told[at][0]], lr=told[at][1]) for at in order])

        return made

    run = Run(tmp_path)
    run.start(script([0.1, 0.2], [0, 1]), halve)
    optimizer = run.start(script([0.1, 0.3], [1, 0]))
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.05]
    assert run.said == ["the optimizer has lr 0.3 of the script, in place of the checkpoint's 0.1"]


def test_an_optimizer_that_attaches_again_has_what_it_has(tmp_path: Path) -> None:
    """As in a notebook, where a rate may be set to what it was at first; its restart is as any other."""
    run = Run(tmp_path)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = run.attach(model, sgd()(model), halve)
    groups.let_go(optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    run.attach(model, optimizer)
    assert run.said == ["the optimizer has lr 0.1 of the script, in place of the checkpoint's 0.05"]
    run.attach(model, optimizer, halve)
    assert settings(run.start(sgd()), "lr") == [0.05]


def test_a_line_is_no_list_of_everything(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def script(lr: float) -> Script:
        return lambda model: torch.optim.SGD(
            [{"params": [p], "lr": lr * number} for number, p in enumerate(model.parameters(), 1)]
        )

    run.start(script(1.0))
    run.start(script(2.0))
    (line,) = run.said
    assert line.endswith("lr 6.0 of the script, in place of the checkpoint's 3.0; 1 more")


def test_a_rate_of_numpys_is_kept_with_the_state(tmp_path: Path) -> None:
    """JSON knows numpy's float64 alone, and the whole optimizer was left out for one that it does not know."""
    run = Run(tmp_path)
    run.start(sgd(lr=np.float32(0.1)), halve)
    assert settings(run.start(sgd(lr=np.float32(0.1))), "lr") == [pytest.approx(0.05)]
    assert not run.said


@pytest.mark.parametrize("again", [0.1, 0.1 * 3 / 3, torch.tensor(0.1), np.float32(0.1)])
def test_a_rate_of_fewer_digits_is_the_same_one(tmp_path: Path, again: Any) -> None:
    run = Run(tmp_path)
    run.start(sgd(), halve)
    assert settings(run.start(sgd(lr=again)), "lr") == [pytest.approx(0.05)]
    assert not run.said


def test_a_rate_that_the_script_loads_with_a_state_of_its_own_is_not_of_its_making(tmp_path: Path) -> None:
    """It loads the best of its own checkpoints before it attaches; ours is later, and wins."""
    best = {"rate": 0.1}

    def loaded(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.param_groups[0]["lr"] = best["rate"]
        return optimizer

    run = Run(tmp_path)
    run.start(sgd(), halve)
    best["rate"] = 0.07
    assert settings(run.start(loaded), "lr") == [0.05]


class Slim:
    """An optimizer of its own class, to which nothing can point weakly."""

    __slots__ = ("load_state_dict", "param_groups", "state_dict")

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups = inner.param_groups
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict


def test_an_optimizer_with_slots_takes_what_was_kept(tmp_path: Path) -> None:
    """`attach` ended in a TypeError."""
    run = Run(tmp_path)
    inner: list[torch.optim.Optimizer] = []

    def script(model: nn.Module) -> Slim:
        inner.append(sgd()(model))
        return Slim(inner[-1])

    run.start(script, halve)
    groups.let_go(run.start(script))
    assert settings(inner[-1], "lr") == [0.05]
