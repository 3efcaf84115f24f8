"""The server's optimizer makes torch's steps, and knows a state that no gradients make."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.training.parameter_server.optimizer import AdamW, Optimizer, Sgd, parse_optimizer
from peerd.transport.errors import UserError

SIZE = 5
shares = st.sampled_from([0.0, 0.5, 0.9, 0.99])
decays = st.sampled_from([0.0, 1e-4, 0.1])
optimizers: st.SearchStrategy[Optimizer] = st.one_of(
    st.builds(Sgd, momentum=shares, weight_decay=decays),
    st.builds(Sgd, momentum=st.sampled_from([0.5, 0.9]), weight_decay=decays, nesterov=st.just(True)),
    st.builds(AdamW, beta1=shares, beta2=st.sampled_from([0.99, 0.999]), weight_decay=decays),
)
values = st.lists(st.floats(-8, 8, width=32), min_size=SIZE, max_size=SIZE)
steps = st.lists(st.tuples(values, st.sampled_from([0.0, 1e-3, 0.1])), min_size=1, max_size=12)


def torchs(optimizer: Optimizer, parameter: torch.Tensor) -> torch.optim.Optimizer:
    if isinstance(optimizer, Sgd):
        return torch.optim.SGD(
            [parameter], lr=1.0, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay,
            nesterov=optimizer.nesterov,
        )  # fmt: skip
    betas = (optimizer.beta1, optimizer.beta2)
    return torch.optim.AdamW([parameter], lr=1.0, betas=betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay)


@settings(deadline=None)
@given(optimizer=optimizers, start=values, steps=steps, dtype=st.sampled_from(["float32", "float64"]))
def test_its_steps_are_torchs(
    optimizer: Optimizer, start: list[float], steps: list[tuple[list[float], float]], dtype: str
) -> None:
    weights, state = np.array(start, dtype), np.zeros((optimizer.rows, SIZE), dtype)
    parameter = torch.nn.Parameter(torch.tensor(start, dtype=getattr(torch, dtype)))
    reference: Any = torchs(optimizer, parameter)
    for number, (gradient, rate) in enumerate(steps, start=1):
        reference.param_groups[0]["lr"] = rate
        parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
        reference.step()
        optimizer.step(weights, np.array(gradient, dtype), state, rate, number)
        assert optimizer.is_possible(state)
    close = 1e-12 if dtype == "float64" else 1e-6
    np.testing.assert_allclose(weights, parameter.detach().numpy(), rtol=10 * close, atol=10 * close)


@given(mean=st.floats(1e-6, 1e6), share=st.floats(0, 0.5))
def test_a_mean_that_its_squares_do_not_allow_is_impossible(mean: float, share: float) -> None:
    """Else one lie about the state is a step of any length."""
    optimizer = AdamW()
    most = 0.1 / math.sqrt(0.001 * (1 - 0.81 / 0.999))
    assert not optimizer.is_possible(np.array([[mean], [share * (mean / most) ** 2]]))
    assert optimizer.is_possible(np.array([[-mean], [(mean / most) ** 2]]))


@pytest.mark.parametrize("state", [[[0.0], [-1.0]], [[np.nan], [1.0]], [[0.0], [np.inf]]])
def test_what_is_no_mean_square_is_impossible(state: list[list[float]]) -> None:
    assert not AdamW().is_possible(np.array(state))


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("sgd", Sgd()),
        ("sgd:momentum=0.9,nesterov=true,weight_decay=1e-4", Sgd(0.9, 1e-4, True)),
        ("adamw", AdamW()),
        ("adamw:beta2=0.95,weight_decay=0", AdamW(beta2=0.95, weight_decay=0.0)),
    ],
)
def test_parse(text: str, optimizer: Optimizer) -> None:
    assert parse_optimizer(text) == optimizer


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "'' is not one of sgd, adamw"),
        ("adam", "'adam' is not one of"),
        ("sgd:lr=1", "sgd has no 'lr'; it has momentum, weight_decay, nesterov"),
        ("sgd:momentum=x", "momentum=x is not a number"),
        ("sgd:momentum=1", "momentum=1 must be at least 0 and below 1"),
        ("sgd:momentum=nan", "momentum=nan is not a number"),
        ("sgd:nesterov=true", "nesterov needs a momentum"),
        ("sgd:nesterov=1", "neither true nor false"),
        ("adamw:weight_decay=-1", "weight_decay=-1 must be at least 0"),
        ("adamw:eps=inf", "eps=inf is not a number"),
        ("adamw:eps=0", "eps=0 makes no number"),
        ("adamw:beta1=0.99,beta2=0.9", "square of beta1"),
    ],
)
def test_parse_says_what_is_wrong(text: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        parse_optimizer(text)
