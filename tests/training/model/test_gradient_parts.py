"""Of a gradient that comes in parts: what was said is there is there, and stays, or it is said to be void."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peerd.training.model import gradient_parts
from peerd.training.model.flat import FlatModel
from peerd.training.model.gradient_parts import GradientParts
from peerd.training.model.gradients import FlatGradients

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8)


class Model(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self.register_buffer("mean", torch.zeros(2))


class Trainer:
    """Backward passes by hand, and what a daemon hears of them: from where on, and whether that is anew."""

    def __init__(self, sizes: list[int], bucket: int) -> None:
        self.flat = FlatModel(Model(sizes))
        gradients = FlatGradients(self.flat)
        self.out = torch.full((gradients.total,), 1e9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_parts, "BUCKET_VALUES", bucket)
        self.bucket = bucket
        self.parts = GradientParts(self.flat, gradients, self.out)
        self.parameters = [piece.held for piece in gradients.parameters]
        self.held: tuple[int, torch.Tensor] | None = None  # what a daemon takes for there, and its values

    def begin(self) -> None:
        self.parts.begin()
        for parameter in self.parameters:
            parameter.grad = None

    def came(self, place: int, value: float) -> int | None:
        parameter = self.parameters[place]
        parameter.grad = torch.full_like(parameter, value) if parameter.grad is None else parameter.grad.add_(value)
        anew = self.parts.is_first
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_parts, "BUCKET_VALUES", self.bucket)
            first = self.parts.came(parameter)
        if first is not None:
            self.hear(first, anew=anew)
        return first

    def hear(self, first: int, *, anew: bool) -> None:
        there = self.out[first : self.flat.parameters].clone()
        if not anew:
            assert self.held is not None
            assert first < self.held[0]
            assert torch.equal(there[self.held[0] - first :], self.held[1])
        self.held = first, there

    def complete(self) -> None:
        for first in self.parts.rest():
            self.hear(first, anew=self.parts.is_first)
        anew = self.parts.complete()
        wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flags = [float(p.grad is not None) for p in self.parameters]
        assert torch.equal(self.out, torch.cat([*wanted, torch.zeros(2), torch.tensor(flags)]))
        if not anew:
            assert self.held is not None
            first, there = self.held
            assert torch.equal(self.out[first : self.flat.parameters], there)
        self.held = None


@given(
    sizes=SIZES,
    bucket=st.integers(1, 12),
    passes=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 7), st.integers(-5, 5)), max_size=12),  # in any order, or again
            st.booleans(),  # whether all come from the end on, first
            st.booleans(),  # whether the pass fails
        ),
        max_size=5,
    ),
)
@settings(deadline=None)
def test_what_is_said_to_be_there_is_there_and_stays(
    sizes: list[int], bucket: int, passes: list[tuple[list[tuple[int, int]], bool, bool]]
) -> None:
    trainer = Trainer(sizes, bucket)
    for comes, in_order, fails in passes:
        trainer.begin()
        ordered = [(place, 1) for place in reversed(range(len(sizes)))] if in_order else []
        for place, value in [*ordered, *comes]:
            trainer.came(place % len(sizes), float(value))
        if not fails:
            trainer.complete()


def test_from_the_second_pass_on_parts_are_said_of_in_the_order_of_the_pass() -> None:
    trainer = Trainer([4, 4, 4, 4], bucket=6)
    told = []
    for _ in range(2):
        trainer.begin()
        told.append([trainer.came(place, 1.0) for place in (3, 2, 1, 0)])
        trainer.complete()
    assert told == [[None] * 4, [None, 8, None, None]], "no part is all of it"


def test_who_had_no_gradient_is_not_waited_for_and_who_has_one_after_all_makes_it_void() -> None:
    trainer = Trainer([4, 4, 4], bucket=1)
    for _ in range(2):
        trainer.begin()
        told = [trainer.came(place, 1.0) for place in (2, 0)]
        trainer.complete()
    assert told == [4, None], "of the middle one nothing is expected"
    trainer.begin()
    assert trainer.came(2, 1.0) == 4
    assert trainer.came(1, 1.0) is None
    assert trainer.parts.complete()


def test_of_a_first_parameter_without_values_nothing_is_said_before_the_end() -> None:
    trainer = Trainer([0, 4, 4], bucket=1)
    for _ in range(2):
        trainer.begin()
        told = [trainer.came(place, 1.0) for place in (2, 1, 0)]
        trainer.complete()
    assert told == [4, None, None]


def test_where_each_pass_voids_what_was_said_nothing_is_said_any_more() -> None:
    trainer = Trainer([4, 4, 4], bucket=1)
    told = []
    for _ in range(6):
        trainer.begin()
        told.append(sum(trainer.came(place, 1.0) is not None for place in (2, 1, 2, 0)))
        trainer.complete()
    assert told == [0, 2, 2, 2, 0, 0]


class Event:
    """As CUDA's."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def test_copies_that_are_under_way_are_told_of_when_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer([4, 4, 4, 4], bucket=1)
    trainer.begin()
    for place in (3, 2, 1, 0):
        trainer.came(place, 1.0)
    trainer.complete()
    events: list[Event] = []

    def copied_on(parts: GradientParts, device: torch.device, pairs: Any) -> list[Event]:
        for part, gradient in pairs:
            part.copy_(gradient)
        events.append(Event())
        return [events[-1]]

    monkeypatch.setattr(GradientParts, "_copy_on", copied_on)
    trainer.begin()
    assert [trainer.came(place, 2.0) for place in (3, 2)] == [None, None]
    events[0].done = True
    assert trainer.came(1, 2.0) == 12
    assert trainer.came(0, 2.0) is None, "all of it is told of at the end"
    assert list(trainer.parts.rest()) == [8, 4]
    assert not trainer.parts.complete()
    assert math.isclose(float(trainer.out[:16].sum()), 32.0)
