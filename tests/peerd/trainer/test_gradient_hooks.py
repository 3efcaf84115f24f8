"""Before a trainer's optimizer steps: when gradients are exchanged, in what vector, and what else must be shared."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from flat_values import values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peerd.trainer.gradient_hooks import GradientHooks
from peerd.trainer.optimizers import as_one
from peerd.training.codecs.vector import Layout
from peerd.training.model.flat import FlatModel
from peerd.training.model.gradients import FlatGradients
from peerd.training.model.optimizer_state import OptimizerState

NO_PARTS = (lambda: None, lambda parameter: None)


def normed(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def backward(model: nn.Module, seed: int = 0) -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()


class Counting:
    """An exchange that only counts."""

    def __init__(self, *, finite: bool = True) -> None:
        self.count = 0
        self.finite = finite

    def __call__(self) -> bool:
        self.count += 1
        return self.finite


def hooked(exchange: Counting, optimizers: int = 1) -> tuple[nn.Module, list[torch.optim.Optimizer], GradientHooks]:
    model = normed()
    parts: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(optimizers)]
    return model, parts, GradientHooks(FlatModel(model), as_one(parts), exchange, *NO_PARTS)


def test_hooks_whose_making_is_interrupted_are_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that catches Ctrl-C trains on with the same model."""
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follow = GradientHooks._follow

    def is_interrupted(hooks: GradientHooks) -> None:
        follow(hooks)
        raise KeyboardInterrupt

    monkeypatch.setattr(GradientHooks, "_follow", is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        GradientHooks(FlatModel(model), optimizer, exchange := Counting(), *NO_PARTS)
    backward(model)
    optimizer.step()
    assert exchange.count == 0
    assert not optimizer._optimizer_step_pre_hooks


def test_each_backward_pass_is_exchanged_once_at_its_end() -> None:
    model, (optimizer,), hooks = hooked(exchange := Counting())
    for count in (1, 2, 3):
        backward(model)
        assert exchange.count == count
    with hooks.no_sync():
        backward(model)
    assert exchange.count == 3
    optimizer.step()
    assert exchange.count == 3, "its gradients are the swarm's"
    hooks.remove()
    backward(model)
    optimizer.step()
    assert exchange.count == 3


def test_a_pass_that_fails_keeps_no_later_one_from_its_exchange() -> None:
    model, _, _ = hooked(exchange := Counting())
    first = model.get_parameter("0.weight")
    failing = first.register_hook(lambda _: (_ for _ in ()).throw(KeyError("mine")))  # type: ignore[no-untyped-call]
    with pytest.raises(KeyError, match="mine"):
        backward(model)
    failing.remove()
    backward(model)
    assert exchange.count == 1


def test_gradients_that_no_backward_pass_made_are_exchanged_as_the_optimizer_steps() -> None:
    model, (one, other), _ = hooked(exchange := Counting(), optimizers=2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    backward(model)
    one.step()
    other.step()
    assert exchange.count == 1
    one.step()
    assert exchange.count == 2


@pytest.mark.parametrize("before", [False, True])
def test_an_optimizer_that_steps_within_the_backward_pass_ends_the_script(before: bool) -> None:
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hook(_: torch.Tensor) -> None:
        optimizer.step()

    def step_within() -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    if before:
        step_within()
    GradientHooks(FlatModel(model), optimizer, exchange := Counting(), *NO_PARTS)
    if not before:
        step_within()
    weights = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(SystemExit, match="steps within the backward pass, by a gradient that was not exchanged"):
        backward(model)
    assert exchange.count == 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


def test_what_steps_within_the_backward_pass_by_nothing_that_is_due_is_let_be() -> None:
    """A private head, and all by a callback at the end of the pass that comes after the exchange."""
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    body, head = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model.values())
    order: list[str] = []
    optimizer = as_one([body, head])
    flat = FlatModel(model, optimizer, ["head.*"])
    GradientHooks(flat, optimizer, lambda: order.append("exchanged") or True, *NO_PARTS)  # type: ignore[func-returns-value]
    body.register_step_post_hook(lambda *_: order.append("body"))
    head.register_step_post_hook(lambda *_: order.append("head"))
    engine = torch.autograd.Variable._execution_engine
    for parameter in model["head"].parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: head.step())  # type: ignore[no-untyped-call]
    model.get_parameter("body.weight").register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda _: engine.queue_callback(body.step)
    )
    model["head"](model["body"](torch.ones(1, 2))).sum().backward()
    assert order == ["head", "head", "exchanged", "body"]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("finite", [False, True])
def test_a_closures_gradients_are_exchanged_once_and_stepped_by_only_where_they_are_finite(
    named: bool, finite: bool
) -> None:
    model, (optimizer,), _ = hooked(exchange := Counting(finite=finite))
    before = [parameter.clone() for parameter in model.parameters()]

    def closure() -> float:
        optimizer.zero_grad()
        backward(model)
        return 1.5

    for count in (1, 2, 3):
        loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
        assert loss == 1.5
        assert exchange.count == count
    assert finite != all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_what_is_not_finite_moves_no_parameter() -> None:
    model, (optimizer,), _ = hooked(Counting(finite=False))
    before = [parameter.clone() for parameter in model.parameters()]
    backward(model)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_layer_that_is_replaced_by_its_like_is_followed() -> None:
    model = normed()
    flat = FlatModel(model)
    gradients = FlatGradients(flat)
    hooks = GradientHooks(flat, torch.optim.SGD(model.parameters(), lr=0.1), exchange := Counting(), *NO_PARTS)
    backward(model)
    expected, found = torch.zeros(gradients.total), torch.zeros(gradients.total)
    gradients.gather(expected)
    model.load_state_dict(normed().state_dict())
    model[2] = copy.deepcopy(model[2])
    model.zero_grad()
    backward(model)
    gradients.gather(found)
    assert torch.equal(found, expected)
    gradients.scatter(2 * found)
    (piece,) = (piece for piece in flat.pieces if piece.name == "2.weight")
    gradient = model.get_parameter("2.weight").grad
    assert gradient is not None
    assert torch.equal(gradient.reshape(-1), 2 * expected[piece.start : piece.stop])
    for index in (0, 1):
        model[index] = copy.deepcopy(model[index])
    backward(model)
    assert exchange.count == 3
    hooks.after_step()
    for index in (0, 1, 2):
        model[index] = copy.deepcopy(model[index])
    backward(model)
    assert exchange.count == 3, "no parameter is left that it knows"
    hooks.after_step()
    backward(model)
    assert exchange.count == 4


def test_what_was_replaced_is_let_go() -> None:
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = GradientHooks(FlatModel(model), optimizer, exchange := Counting(), *NO_PARTS)
    for count in (1, 2, 3):
        gone = weakref.ref(model.get_parameter("2.weight"))
        model[2] = copy.deepcopy(model[2])
        optimizer.param_groups[0]["params"] = list(model.parameters())
        backward(model)
        gc.collect()
        assert gone() is None
        assert exchange.count == count
    hooks.remove()
    backward(model)
    assert exchange.count == 3


def test_a_replaced_layer_that_is_used_elsewhere_does_not_pass_for_the_new_one() -> None:
    model = normed()
    flat = FlatModel(model)
    hooks = GradientHooks(flat, torch.optim.SGD(model.parameters(), lr=0.1), exchange := Counting(), *NO_PARTS)
    old = model[2]
    model[2] = copy.deepcopy(old)
    flat.change()
    (model(torch.ones(8, 3)).mean() + old(torch.ones(8, 4)).mean()).backward()
    assert exchange.count == 1
    model[2](torch.ones(8, 4)).mean().backward()
    assert exchange.count == 2, "it is known now"
    old(torch.ones(8, 4)).mean().backward()
    assert exchange.count == 2, "it is none of the model's"
    hooks.remove()


def test_the_vector_has_gradients_buffers_and_flags() -> None:
    model = normed()
    model.get_parameter("2.bias").requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    flat = FlatModel(model, optimizer)
    flat.share_states(OptimizerState(optimizer, flat.pieces).tensors)
    gradients = FlatGradients(flat)
    ends = tuple(piece.stop for piece in flat.pieces)
    layout = Layout(flat.parameters, flat.total, tuple(flat.variances), ends, flat.states).gradients
    assert (layout.parameters, layout.total) == (flat.parameters, gradients.total)
    out = torch.full((gradients.total,), torch.nan)
    gradients.gather(out)
    flags = [0.0] * 5
    assert out[-5:].tolist() == flags
    assert not out[: flat.parameters].any()
    backward(model)
    gradients.gather(out)
    assert out[-5:].tolist() == [1.0] * 5
    assert out[flat.parameters : -5].tolist() == [
        *model.get_buffer("1.running_mean"),
        *model.get_buffer("1.running_var"),
    ]
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.get_parameter("0.weight").grad = torch.ones_like(model.get_parameter("0.weight"))
    out[flat.parameters : flat.parameters + 4] = 7.0
    out[-5] = 0.0
    gradients.scatter(out)
    assert model.get_parameter("0.weight").grad is None, "nobody's counts, its own neither"
    for name in list(wanted)[1:]:
        assert torch.equal(model.get_parameter(name).grad, wanted[name])  # type: ignore[arg-type]
    assert model.get_buffer("1.running_mean").tolist() == [7.0] * 4
    gradients.scatter(None)
    assert all(parameter.grad is None for parameter in model.parameters())


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_state_that_is_made_at_once_steps_as_torchs_own(kind: Any, options: dict[str, Any]) -> None:
    models, optimizers = [normed(), normed()], []
    for number, model in enumerate(models):
        optimizers.append(kind(model.parameters(), lr=0.1, **options))
        if number:
            flat = FlatModel(model, optimizers[1])
            flat.share_states(OptimizerState(optimizers[1], flat.pieces).tensors)
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    ours, theirs = (model.state_dict() for model in models)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    values = values_of(flat)
    assert values[flat.total - flat.states :].any() == bool(flat.states)
    newcomer = normed(1)
    other = kind(newcomer.parameters(), lr=0.1, **options)
    fresh = FlatModel(newcomer, other)
    fresh.share_states(OptimizerState(other, fresh.pieces).tensors)
    assert fresh.signature == flat.signature
    fresh.replace(values)
    for model, optimizer in ((models[1], optimizers[1]), (newcomer, other)):
        backward(model, 9)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(models[1].parameters(), newcomer.parameters(), strict=True))


def test_a_schedule_of_the_takers_own_goes_on_from_its_own_rate() -> None:
    """LinearLR multiplies what it finds: at the swarm's full rate it would make a hundred times that of it."""
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=20)
    state = OptimizerState(optimizer, FlatModel(model, optimizer).pieces)
    used = []
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    for step in range(30):
        backward(model, step)
        if step in (3, 5):
            state.tensors()["optimizer.lr"][0] = torch.tensor([0.5, 0.0, 0.0])
            state.take_rates()
        if step != 5:  # a scaler leaves it out
            optimizer.step()
        state.give_back()
        warm_up.step()
    assert [rate for rate in used if rate > 0.021] == [0.5]
    assert used[-1] == pytest.approx(0.02)


def test_a_rate_in_float32_is_given_back_whatever_digits_the_swarms_has() -> None:
    """One script keeps its rate in a tensor, as a CUDA graph needs, and others' are floats: 0.1 is none of float32."""
    model = normed()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25))
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    state = OptimizerState(optimizer, FlatModel(model, optimizer).pieces)
    state.tensors()["optimizer.lr"][0] = torch.tensor([0.1, 0.1 - float(torch.tensor(0.1)), 0.0])
    state.take_rates()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    backward(model, 0)
    optimizer.step()
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


def test_a_group_without_a_schedule_keeps_the_rate_and_one_that_was_loaded_anew_is_found() -> None:
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    state = OptimizerState(optimizer, FlatModel(model, optimizer).pieces)
    optimizer.load_state_dict(optimizer.state_dict())  # which makes other groups
    optimizer.param_groups[0]["lr"] = 0.25
    assert state.tensors()["optimizer.lr"].sum() == 0.25
    state.tensors()["optimizer.lr"][0, 0] = 0.5
    state.take_rates()
    optimizer.step()
    state.give_back()
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.param_groups[0]["lr"] = float("inf")
    assert torch.isfinite(state.tensors()["optimizer.lr"]).all()


def test_groups_that_come_or_go_later_stop_nobody() -> None:
    model = normed()
    groups: list[dict[str, Any]] = [{"params": list(layer.parameters())} for layer in model]
    optimizer = torch.optim.SGD(groups[:2], lr=0.02)
    optimizer.add_param_group({**groups[2], "lr": 0.25})
    state = OptimizerState(optimizer, FlatModel(model, optimizer).pieces)
    shape = state.tensors()["optimizer.lr"].shape
    gone = [optimizer.param_groups.pop()]
    assert state.tensors()["optimizer.lr"].shape == shape
    state.take_rates()
    assert optimizer.param_groups[0]["lr"] == 0.02
    optimizer.param_groups += [*gone, {**gone[0], "lr": 0.5}]
    assert state.tensors()["optimizer.lr"].shape == shape


def test_what_came_into_the_optimizer_or_left_it_since_is_told() -> None:
    model = normed()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    flat = FlatModel(model, optimizer)
    flat.share_states(OptimizerState(optimizer, flat.pieces).tensors)
    flat.look_again()
    assert flat.unshared() == []
    optimizer.add_param_group({"params": [model[2].bias]})
    optimizer.param_groups[0]["params"] = [model[0].weight]
    flat.look_again()
    assert flat.unshared() == [
        "not shared: optimizer.0.bias.momentum_buffer left the model, or changed shape or type, after peerd.attach",
        "not shared: optimizer.2.bias.momentum_buffer came into the optimizer after peerd.attach",
    ]


@given(rates=st.lists(st.floats(1e-12, 1e12), min_size=2, max_size=2), is_tensor=st.booleans())
@settings(deadline=None)
def test_who_takes_over_a_model_steps_by_its_learning_rates_to_the_bit(rates: list[float], is_tensor: bool) -> None:
    def made(at: list[float]) -> tuple[torch.optim.Optimizer, FlatModel, OptimizerState]:
        model = normed()
        given = [torch.tensor(rate, dtype=torch.float64) if is_tensor else rate for rate in at]
        groups: list[dict[str, Any]] = [
            {"params": list(model[0].parameters()), "lr": given[0]},
            {"params": list(model[2].parameters())},
        ]
        optimizer = torch.optim.Adam(groups, lr=given[1])
        flat = FlatModel(model, optimizer)
        state = OptimizerState(optimizer, flat.pieces)
        flat.share_states(state.tensors)
        return optimizer, flat, state

    (giver, given, _), (taker, taken, state) = made([1.0, 2.0]), made([3.0, 4.0])
    for group, rate in zip(giver.param_groups, rates, strict=True):  # as a schedule does
        group["lr"] = torch.tensor(rate, dtype=torch.float64) if is_tensor else rate
    values = values_of(given).numpy()
    taken.load(values)
    assert [float(group["lr"]) for group in taker.param_groups] == [3.0, 4.0], "a model alone is no reason"
    taken.load(values)
    state.take_rates()
    assert [float(group["lr"]) for group in taker.param_groups] == rates
    assert isinstance(taker.param_groups[0]["lr"], torch.Tensor) == is_tensor
    assert (values_of(taken).numpy() == values).all()


def test_other_optimizers_are_refused_in_one_line() -> None:
    model = normed()
    flat = FlatModel(model)
    for optimizer, words in (
        (torch.optim.RMSprop(model.parameters()), "torch's SGD, Adam or AdamW, not with RMSprop"),
        (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5), "SGD's dampening"),
    ):
        with pytest.raises(ValueError, match=words):
            OptimizerState(optimizer, flat.pieces)
