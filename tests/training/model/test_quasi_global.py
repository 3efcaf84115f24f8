"""Quasi-global momentum against the paper's lines, written down anew."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD

from peerd.trainer.optimizers import as_one
from peerd.training.model.quasi_global import RATE_MIN, QuasiGlobalMomentum

Doubles = npt.NDArray[np.float64]
COUNT = 5


def mixing(nodes: int, rng: np.random.Generator) -> Doubles:
    """A doubly stochastic matrix: some pairs take a part of their difference each."""
    whole = np.eye(nodes)
    for _ in range(2):
        a, b = rng.choice(nodes, 2, replace=False)
        apart = np.zeros(nodes)
        apart[a], apart[b] = 1, -1
        whole = whole @ (np.eye(nodes) - rng.uniform(0, 0.5) * np.outer(apart, apart))
    return whole


def by_the_paper(
    start: Doubles, gradients: Doubles, mixes: list[Doubles], rates: list[float], beta: float, decay: float
) -> Doubles:
    """Shapes (nodes, values), (steps, nodes, values); the models after the last step. With what is not the paper's."""
    x, m_hat = start.copy(), np.zeros_like(start)
    uncorrected = np.zeros(len(start))
    for step, (gradient, mix, lr) in enumerate(zip(gradients, mixes, rates, strict=True)):
        m = beta * m_hat + gradient + decay * x
        corrections = mix @ (x - lr * m) - (x - lr * m)
        x = x - lr * m + corrections
        m_hat = beta * m_hat + (1 - beta) * m
        following = rates[min(step + 1, len(rates) - 1)]
        for node, correction in enumerate(corrections):
            uncorrected[node] += 1
            if correction.any():
                rate = max(lr, RATE_MIN * max(rates[: step + 2]))
                share = min(1.0, max(1.0, 1 / (3 * (1 - beta))) / uncorrected[node])
                m_hat[node] -= share * (1 - beta) * correction / rate
                uncorrected[node] = 0
        m_hat *= min(1, lr / following)
    return x


@given(
    seed=st.integers(0, 2**32 - 1), nodes=st.integers(2, 4), steps=st.integers(1, 12),
    beta=st.sampled_from([0.5, 0.9, 0.99]), decay=st.sampled_from([0.0, 0.1]),
)  # fmt: skip
def test_the_steps_are_those_of_the_paper(seed: int, nodes: int, steps: int, beta: float, decay: float) -> None:
    rng = np.random.default_rng(seed)
    start = rng.standard_normal((nodes, COUNT))
    gradients = rng.standard_normal((steps, nodes, COUNT))
    mixes = [mixing(nodes, rng) for _ in range(steps)]
    rates = rng.uniform(0.01, 0.5, steps).tolist()
    models = [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in start]
    optimizers = [SGD([model], lr=1.0, momentum=beta, weight_decay=decay) for model in models]
    for optimizer in optimizers:
        QuasiGlobalMomentum(optimizer)
    for gradient, mix, lr in zip(gradients, mixes, rates, strict=True):
        for model, optimizer, row in zip(models, optimizers, gradient, strict=True):
            model.grad = torch.from_numpy(row.copy())
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        together = mix @ np.stack([model.detach().numpy() for model in models])
        for model, row in zip(models, together, strict=True):
            model.data.copy_(torch.from_numpy(row))
    found = np.stack([model.detach().numpy() for model in models])
    np.testing.assert_allclose(found, by_the_paper(start, gradients, mixes, rates, beta, decay), rtol=1e-9, atol=1e-9)


def stepped(model: torch.nn.Parameter, optimizer: SGD, gradient: float | None = 1.0) -> float:
    model.grad = None if gradient is None else torch.full_like(model, gradient)
    optimizer.step()
    return float(model.detach()[0])


def one(lr: float = 1.0) -> tuple[torch.nn.Parameter, SGD]:
    model = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    return model, SGD([model], lr=lr, momentum=0.5)


def test_what_others_have_taken_back_does_not_come_again() -> None:
    (model, optimizer), (plain, own) = one(), one()
    QuasiGlobalMomentum(optimizer)
    for _ in range(20):
        stepped(model, optimizer)
        stepped(plain, own)
        model.data.zero_()  # the exchange undoes the step
        plain.data.zero_()
    assert stepped(model, optimizer) == -1.0, "a step by the gradient alone"
    assert stepped(plain, own) < -1.99, "twice as much: with what its own momentum holds"


@pytest.mark.parametrize("stays", [False, True])
def test_a_cleared_state_begins_anew(stays: bool) -> None:
    """On a GPU it `stays` where it is, zeroed."""
    model, optimizer = one()
    QuasiGlobalMomentum(optimizer)
    stepped(model, optimizer)
    model.data.fill_(100.0)  # a return to an older copy
    if stays:
        optimizer.state[model]["momentum_buffer"] = optimizer.state[model]["momentum_buffer"].zero_().detach()
    else:
        optimizer.state.clear()
    assert stepped(model, optimizer) == 99.0
    assert stepped(model, optimizer) == 97.5 + 0.25, "m_hat is half of what the one step was"


def test_a_step_at_rate_zero_tells_nothing_of_the_way() -> None:
    model, optimizer = one(lr=0.0)
    QuasiGlobalMomentum(optimizer)
    assert stepped(model, optimizer) == 0.0
    optimizer.param_groups[0]["lr"] = 1.0
    assert stepped(model, optimizer) == -1.0, "a step by the gradient alone"


def test_what_was_corrected_at_a_tiny_rate_is_not_repeated_as_many_times_as_large() -> None:
    model, optimizer = one(lr=1e-5)
    QuasiGlobalMomentum(optimizer)
    stepped(model, optimizer, 0.0)
    model.data.add_(1e-3)
    optimizer.param_groups[0]["lr"] = 0.1  # a warm restart
    for _ in range(100):
        stepped(model, optimizer, 0.0)
    assert 0 < float(model.detach()[0]) < 3e-3


def test_rates_that_rise_again_and_again_repeat_nothing() -> None:
    """Cosine with warm restarts, whose last rates are tiny; others correct each twentieth step."""
    rng = np.random.default_rng(0)
    model, optimizer = one(lr=0.1)
    QuasiGlobalMomentum(optimizer)
    largest = 0.0
    for step in range(2000):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * (step % 200) / 200)) + 1e-7
        largest = max(largest, abs(stepped(model, optimizer, float(rng.standard_normal() + model.detach()[0]))))
        if step % 20 == 0:
            model.data.mul_(0.5).add_(rng.standard_normal() / 10)
    assert largest < 5


@pytest.mark.one_run_in(3)
@settings(max_examples=25)
@given(st.integers(1, 100), st.sampled_from([0.5, 0.9]), st.integers(0, 2**32 - 1))
def test_nodes_that_seldom_exchange_do_not_fly_apart(every: int, beta: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
    optimizers = [SGD([model], lr=0.05, momentum=beta) for model in models]
    for optimizer in optimizers:
        QuasiGlobalMomentum(optimizer)
    for step in range(1, 801):
        for model, optimizer, pulls in zip(models, optimizers, (1.0, -1.0), strict=True):
            stepped(model, optimizer, float(pulls + 0.1 * model.detach()[0] + rng.standard_normal()))
        if step % every == 0:
            mean = (models[0].detach() + models[1].detach()) / 2
            for model in models:
                model.data.copy_(mean)
    assert all(abs(float(model.detach()[0])) < 20 for model in models)


def test_a_parameter_that_others_move_while_it_has_no_gradient_goes_on_softly() -> None:
    model, optimizer = one(lr=0.1)
    QuasiGlobalMomentum(optimizer)
    stepped(model, optimizer, 0.0)
    for _ in range(50):
        model.data.add_(0.1)
        stepped(model, optimizer, None)
    before = float(model.detach()[0])
    for _ in range(100):
        stepped(model, optimizer, 0.0)
    assert abs(float(model.detach()[0]) - before) < before


def test_a_loaded_state_is_gone_on_from() -> None:
    model, optimizer = one()
    QuasiGlobalMomentum(optimizer)
    stepped(model, optimizer)
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = torch.tensor([100.0], dtype=torch.float64)
    optimizer.load_state_dict(state)
    assert stepped(model, optimizer) == -52.0


def test_sparse_gradients_keep_torchs_momentum() -> None:
    found = []
    for quasi_global in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(4, 2, sparse=True)
        optimizer = SGD(table.parameters(), lr=0.1, momentum=0.9)
        if quasi_global:
            QuasiGlobalMomentum(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
        found.append(table.weight.detach().clone())
    assert torch.equal(*found)


def test_parameters_that_are_gone_are_forgotten() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
    momentum = QuasiGlobalMomentum(optimizer)
    for _ in range(3):
        model = torch.nn.Parameter(torch.zeros(1))
        optimizer.param_groups[0]["params"] = [model]
        optimizer.state.clear()
        stepped(model, optimizer)
    gc.collect()
    assert len(momentum._kept) == 1


def test_a_resumed_run_goes_on_with_the_momentum_that_was_kept() -> None:
    model, optimizer = one()
    QuasiGlobalMomentum(optimizer)
    for _ in range(5):
        stepped(model, optimizer)
    other, resumed = one()
    other.data.copy_(model.data)
    resumed.load_state_dict(optimizer.state_dict())
    QuasiGlobalMomentum(resumed)
    assert stepped(other, resumed) == pytest.approx(stepped(model, optimizer), abs=0.5)


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"maximize": True}, {"foreach": True}])
def test_a_closure_is_as_good_as_a_gradient_before(options: dict[str, bool]) -> None:
    found = []
    for has_closure in (False, True):
        model = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer = SGD([model], lr=0.1, momentum=0.5, **options)
        QuasiGlobalMomentum(optimizer)

        def closure(model: torch.nn.Parameter = model, optimizer: SGD = optimizer) -> float:
            optimizer.zero_grad()
            loss = (model - 1).square().sum()
            (model.grad,) = torch.autograd.grad(loss, model)
            return float(loss.detach())

        for _ in range(5):
            if has_closure:
                optimizer.step(closure)
                optimizer.zero_grad()
            else:
                closure()
                optimizer.step()
            model.data.mul_(0.9)
        found.append(model.detach().clone())
    assert torch.equal(*found)


def test_several_optimizers_and_groups() -> None:
    models = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(3)]
    groups: list[dict[str, Any]] = [{"params": [models[0]]}, {"params": [models[1]], "momentum": 0.9, "lr": 0.5}]
    parts = [SGD(groups, lr=1.0, momentum=0.5), SGD([models[2]], lr=1.0, momentum=0.5)]
    QuasiGlobalMomentum(as_one([[parts[0]], parts[1]]))
    for _ in range(2):
        for model in models:
            model.grad = torch.ones_like(model)
        for part in parts:
            part.step()
    first, second, third = (float(model.detach()[0]) for model in models)
    assert first == third == -2.25
    assert second == pytest.approx(-0.5 - 0.5 * 1.09)


def test_a_parameter_without_a_gradient_waits() -> None:
    model, optimizer = one()
    QuasiGlobalMomentum(optimizer)
    stepped(model, optimizer)
    for _ in range(3):
        assert stepped(model, optimizer, None) == -1.0
    assert stepped(model, optimizer) == -2.25


def test_once_removed_the_momentum_is_torchs() -> None:
    (model, optimizer), (plain, own) = one(), one()
    QuasiGlobalMomentum(optimizer).remove()
    for _ in range(3):
        assert stepped(model, optimizer) == stepped(plain, own)


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        (lambda p: torch.optim.Adam([p]), "needs torch.optim.SGD, not Adam: leave it out"),
        (lambda p: SGD([p], lr=1.0), "a momentum above 0"),
        (lambda p: SGD([p], lr=1.0, momentum=0.9, dampening=0.1), "dampening 0, in every group"),
        (lambda p: SGD([p.to(torch.bfloat16)], lr=1.0, momentum=0.9), "one of these is bfloat16"),
    ],
)
def test_another_optimizer_is_refused(optimizer: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        QuasiGlobalMomentum(optimizer(torch.zeros(1)))
