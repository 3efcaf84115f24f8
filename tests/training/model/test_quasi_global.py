"""Quasi-global momentum against the paper's lines, written down anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD

from peerd.trainer.optimizers import as_one
from peerd.training.model.quasi_global import QuasiGlobalMomentum

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
    """Shapes (nodes, values), (steps, nodes, values); the models after the last step. A rate that rises divides."""
    x, m_hat = start.copy(), np.zeros_like(start)
    for gradient, mix, lr, following in zip(gradients, mixes, rates, [*rates[1:], 0.0], strict=True):
        m = beta * m_hat + gradient + decay * x
        stepped = x - lr * m
        after = mix @ stepped
        m_hat = beta * m_hat + (1 - beta) * ((x - stepped) / lr + (stepped - after) / max(lr, following))
        x = after
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


def test_a_cleared_state_begins_anew() -> None:
    model, optimizer = one()
    QuasiGlobalMomentum(optimizer)
    stepped(model, optimizer)
    model.data.fill_(100.0)  # a return to an older copy
    optimizer.state.clear()
    assert stepped(model, optimizer) == 99.0
    assert stepped(model, optimizer) == 97.5 + 0.25, "m_hat is half of what the one step was"


def test_a_step_at_rate_zero_tells_nothing_of_the_way() -> None:
    model, optimizer = one(lr=0.0)
    QuasiGlobalMomentum(optimizer)
    assert stepped(model, optimizer) == 0.0
    optimizer.param_groups[0]["lr"] = 1.0
    assert stepped(model, optimizer) == -1.25, "its gradient counts all the same"


def test_what_was_corrected_at_a_tiny_rate_is_not_repeated_as_many_times_as_large() -> None:
    model, optimizer = one(lr=1e-5)
    QuasiGlobalMomentum(optimizer)
    stepped(model, optimizer, 0.0)
    model.data.add_(1e-3)
    optimizer.param_groups[0]["lr"] = 0.1  # a warm restart
    for _ in range(100):
        stepped(model, optimizer, 0.0)
    assert 0 < float(model.detach()[0]) < 3e-3


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
