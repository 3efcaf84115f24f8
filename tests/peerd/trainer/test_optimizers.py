"""Whatever people call their optimizer: one that peerd can ask, or one line that says what to give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.trainer.optimizers import CAPTURABLE, Several, as_one, forget, kind, learning_rates, load


def parameters(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((2,), float(index))) for index in range(count)]


class Wrapper:
    def __init__(self, inner: Any) -> None:
        self.optimizer = inner


class Duck:
    """As some libraries have it: the interface without the class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups = inner.param_groups
        self.state_dict = inner.state_dict
        self.load_state_dict = inner.load_state_dict


def test_the_optimizer_is_found_in_what_wraps_it() -> None:
    one = torch.optim.Adam(parameters(1))
    assert as_one(one) is one
    assert as_one([one]) is one
    assert as_one(Wrapper(Wrapper(one))) is one
    assert as_one(torch.optim.lr_scheduler.StepLR(one, 1)) is one
    duck = as_one(Duck(one))
    assert duck.param_groups == one.param_groups
    forget(duck)
    assert kind(as_one([one, Wrapper(torch.optim.SGD(parameters(1)))])) == "Adam+SGD"


class LightningOptimizer:
    """An optimizer of torch's by its class, as Lightning makes one; what it loads stays in it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.__dict__ = {**inner.__dict__, "optimizer": inner}
        self.__class__ = type(f"Lightning{type(inner).__name__}", (type(self), type(inner)), {})


def test_a_wrapper_that_is_an_optimizer_itself_and_keeps_nothing_is_looked_through() -> None:
    one = torch.optim.Adam(parameters(1))
    wrapped = LightningOptimizer(one)
    assert isinstance(wrapped, torch.optim.Optimizer)
    assert as_one(wrapped) is one
    assert as_one([wrapped, Wrapper(wrapped)]).parts == [one, one]  # type: ignore[attr-defined]

    class Lookahead(torch.optim.Adam):
        """One that has a state beside what is within it."""

        optimizer = one

    outer = Lookahead(parameters(1))
    assert as_one(outer) is outer


def test_what_is_none_is_told() -> None:
    endless = Wrapper(None)
    endless.optimizer = endless
    for given_, why in (
        (None, "NoneType is no optimizer: give the one that updates the model"),
        (torch.nn.Linear(1, 1), "Linear is no optimizer: "),
        ([torch.optim.SGD(parameters(1)), 3], "int is no optimizer: "),
        (endless, "Wrapper is no optimizer: "),
        ([], "the list of optimizers is empty: "),
    ):
        with pytest.raises(ValueError, match=why):
            as_one(given_)


@given(st.lists(st.one_of(st.none(), st.floats(), st.text(max_size=2), st.just(torch.ones(2))), min_size=1, max_size=4))
def test_learning_rates_are_those_that_there_are(rates: list[Any]) -> None:
    optimizer = torch.optim.SGD(parameters(1))
    optimizer.param_groups = [{"lr": rate} for rate in rates] + [{}, {"lr": torch.tensor(0.25)}]
    expected = [rate for rate in rates if isinstance(rate, float) and 0 <= rate < float("inf")]
    assert learning_rates(optimizer) == [*expected, 0.25]
    assert learning_rates(optimizer, "initial_lr") == []


@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=2), min_size=1, max_size=3), st.integers(0, 2))
def test_several_are_restored_as_they_were(shape: list[list[int]], trained: int) -> None:
    def make() -> tuple[Several, list[torch.nn.Parameter]]:
        held: list[torch.nn.Parameter] = []
        parts: list[torch.optim.Optimizer] = []
        for number, sizes in enumerate(shape):
            groups = [{"params": parameters(size), "lr": 0.1 / (1 + at)} for at, size in enumerate(sizes)]
            held += [parameter for group in groups for parameter in group["params"]]  # type: ignore[attr-defined]
            parts.append((torch.optim.Adam, torch.optim.SGD)[number % 2](groups, lr=0.1))
        return Several(parts), held

    def train(several: Several, held: list[torch.nn.Parameter], steps: int) -> None:
        for _ in range(steps):
            for index, parameter in enumerate(held):
                parameter.grad = torch.full((2,), 1.0 + index)
            for part in several.parts:
                part.step()

    one, held = make()
    train(one, held, trained)
    other, others = make()
    with torch.no_grad():
        for mine, theirs in zip(others, held, strict=True):
            mine.copy_(theirs)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    train(one, held, 2)
    train(other, others, 2)
    assert all(torch.equal(a, b) for a, b in zip(held, others, strict=True))
    assert any(part.state for part in one.parts)
    forget(Several([one]))  # type: ignore[list-item]
    assert not any(part.state for part in one.parts)
    longer = one.state_dict()
    longer["param_groups"].append({"params": [99]})
    with pytest.raises(ValueError, match="other parameter groups"):
        other.load_state_dict(longer)


def grads(held: list[torch.nn.Parameter], value: float) -> None:
    for parameter in held:
        parameter.grad = torch.full((2,), value)


@pytest.mark.parametrize("kind_of", sorted(CAPTURABLE, key=str))
def test_a_state_that_a_cuda_graph_may_have_is_forgotten_where_it_is(kind_of: Any) -> None:
    """Its replays go on with that memory, which would be others' by then."""
    one, other = parameters(2)
    several = as_one([kind_of([one], capturable=True), kind_of([other])])
    for part in several.parts:  # type: ignore[attr-defined]
        for parameter in part.param_groups[0]["params"]:
            part.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.full((2,), torch.nan)}
    graphed, plain = (dict(part.state) for part in several.parts)  # type: ignore[attr-defined]
    addresses = [value.data_ptr() for value in graphed[one].values()]
    forget(several)
    assert [dict(part.state) for part in several.parts] == [graphed, {}]  # type: ignore[attr-defined]
    assert [value.tolist() for value in graphed[one].values()] == [0.0, [0.0, 0.0]]
    assert [value.data_ptr() for value in graphed[one].values()] == addresses
    assert plain[other]["step"] == 3.0


@pytest.mark.parametrize("kind_of", sorted(CAPTURABLE, key=str))
def test_where_it_is_forgotten_it_is_as_the_first_step_finds_it(kind_of: Any) -> None:
    """But for what says that it may be in a graph, which torch has on no processor."""
    ends: list[list[torch.Tensor]] = []
    for may_be in (True, False):
        held = parameters(3)
        optimizer = kind_of(held, lr=0.1)
        for value in (1.0, -2.0, torch.nan):
            grads(held, value)
            optimizer.step()
        with torch.no_grad():
            for number, parameter in enumerate(held):
                parameter.fill_(float(number))
        optimizer.param_groups[0] |= {"capturable": may_be, "lr": 0.05}
        forget(optimizer)
        assert bool(optimizer.state) == may_be
        ends.append([])
        optimizer.param_groups[0]["capturable"] = False
        for value in (1.0, -2.0):
            grads(held, value)
            optimizer.step()
            states = [optimizer.state[parameter] for parameter in held]
            now = [state[key].reshape(-1) for state in states for key in sorted(state)]
            ends[-1] += [torch.cat([parameter.detach(), *now]) for parameter in held]
    assert all(map(torch.equal, *ends))


def test_what_is_loaded_goes_where_it_was() -> None:
    """A script that makes a CUDA graph before it attaches would step with memory that is others' by then."""
    held = parameters(2)
    rate = torch.tensor(0.5)
    parts = [torch.optim.Adam(held[:1], lr=rate), torch.optim.SGD(held[1:], lr=0.1, momentum=0.9)]
    several = as_one(parts)
    grads(held, 1.0)
    for part in parts:
        part.step()
    whole = copy.deepcopy(several.state_dict())
    whole["param_groups"][0]["lr"] = torch.tensor(0.25)
    rate.fill_(7.0)
    states = [part.state[parameter] for part, parameter in zip(parts, held, strict=True)]
    tensors = [rate, *(value for state in states for value in state.values())]
    expected = [0.25, *(value.tolist() for value in tensors[1:])]
    grads(held, 3.0)
    for part in parts:
        part.step()
    load(several, whole)
    states = [part.state[parameter] for part, parameter in zip(parts, held, strict=True)]
    now = [parts[0].param_groups[0]["lr"], *(value for state in states for value in state.values())]
    assert [value.tolist() for value in now] == expected
    assert all(a is b for a, b in zip(now, tensors, strict=True))
    for part in parts:
        part.state.clear()
    load(several, whole)
    assert parts[1].state[held[1]]["momentum_buffer"].tolist() == expected[-1]
