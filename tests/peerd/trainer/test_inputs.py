"""Do two scripts draw the same batches? Told where they do, missed at worst, and never made up; no model is changed."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.hooks import RemovableHandle

from peerd.protocol.trainer import DRAWS_BYTES
from peerd.trainer.inputs import KEPT, STEPS, STEPS_MAX, TENSORS_MAX, Inputs, _kept
from peerd.training.model.together import one_model

FEW = settings(max_examples=25, deadline=None)


class TwoParts(nn.Module):
    """As Lightning's: a step calls what it needs of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def told(model: nn.Module, step: Callable[[int], object], steps: int = STEPS) -> bytes | None:
    """What comes of so many steps, which comes once, and leaves no hook."""
    inputs = Inputs(one_model(model))
    found = []
    for number in range(steps):
        step(number)
        found.append(inputs.after_step())
    inputs.remove()
    assert hooks_of(model) == 0
    assert found[:-1] == [None] * (steps - 1)
    return found[-1]


def drawn(seed: int, width: int = 4, batch: int = 8) -> Callable[[int], torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return lambda _: torch.randn(batch, width, generator=random)


def model_of(seed: int) -> TwoParts:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TwoParts()


def trained(model: nn.Module, batch: Callable[[int], torch.Tensor], lr: float = 0.1) -> Callable[[int], None]:
    """Steps that leave each model another one."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def step(number: int) -> None:
        model(batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@FEW
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_the_same_is_told_of_the_same_batches_alone(seed: int, other: int, one_model: int, other_model: int) -> None:
    """Whatever the models are: nodes start at different times, and the later one with what the earlier has learnt."""
    a, b = model_of(one_model), model_of(other_model)
    here, there = told(a, trained(a, drawn(seed))), told(b, trained(b, drawn(other), lr=0.0))
    assert here is not None
    assert len(here) == DRAWS_BYTES
    assert (here == there) == (seed == other)


@FEW
@given(st.integers(0, STEPS - 1), st.integers(2, 4 * KEPT), st.data())
def test_one_other_batch_is_enough(at: int, width: int, data: st.DataObject) -> None:
    """Of a large batch it is another one in all of its values, of a small one in one of them."""
    where = slice(None) if width > KEPT else data.draw(st.integers(0, width - 1))
    model, batches = nn.Sequential(nn.Identity()), [drawn(number, width, 1)(0) for number in range(STEPS)]
    before = told(model, lambda number: model(batches[number]))
    assert before == told(model, lambda number: model(batches[number].clone()))
    batches[at][:, where] += 1
    assert before != told(model, lambda number: model(batches[number]))


def test_no_length_of_a_row_hides_what_differs() -> None:
    """Of pictures with a black border, whose places are a multiple of their width apart."""
    model = nn.Identity()
    width = 512

    def pictures(value: float) -> Callable[[int], object]:
        batch = torch.zeros(64, width, width)
        batch[:, :, 8:-8] = value
        return lambda number: model(batch + batch * number)

    assert told(model, pictures(1.0)) != told(model, pictures(2.0))


def test_what_is_the_same_at_each_step_tells_nothing() -> None:
    """All data at once, or fixed coordinates: all nodes rightly have the same."""
    model = TwoParts()
    assert told(model, lambda _: model(torch.ones(8, 4))) is None
    batches = drawn(0)
    few = [batches(number) for number in range(STEPS - 1)]
    assert told(model, lambda number: model(few[number % len(few)])) is None, "another epoch has begun"


def test_what_is_no_training_tells_nothing() -> None:
    model, batch, validation = TwoParts(), drawn(0), drawn(1)

    def step(number: int) -> None:
        with torch.no_grad():
            model(validation(number))
        model(batch(number))

    same = drawn(0)
    assert told(model, step) == told(model, lambda number: model(same(number)))


def test_a_model_that_is_called_in_parts_is_told_of_by_them() -> None:
    model, first, second, other = TwoParts(), drawn(0), drawn(0), drawn(1)
    in_parts = told(model, lambda number: model.head(model.body(first(number))))
    assert in_parts is not None
    assert in_parts == told(model, lambda number: model.head(model.body(second(number))))
    assert in_parts != told(model, lambda number: model.head(model.body(other(number))))


def test_of_several_models_each_counts() -> None:
    """A GAN's generator gets the same noise on all nodes of one seed, and its discriminator the data."""
    g, d = nn.Linear(4, 4), nn.Linear(4, 1)
    both = one_model([g, d])

    def steps(seed: int) -> Callable[[int], None]:
        noise, data = drawn(0), drawn(seed)

        def step(number: int) -> None:
            d(g(noise(number)))
            d(data(number))

        return step

    assert told(both, steps(1)) == told(both, steps(1)) != told(both, steps(2))


def test_of_several_models_in_parts_each_counts() -> None:
    g, d = TwoParts(), TwoParts()

    def steps(seed: int) -> Callable[[int], None]:
        noise, data = drawn(0), drawn(seed)

        def step(number: int) -> None:
            g.body(noise(number))
            d.body(data(number))

        return step

    both = one_model([g, d])
    first = told(both, steps(1))
    assert first is not None
    assert first == told(both, steps(1)) != told(both, steps(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("how", "whole"),
    [
        ("scripted", True), ("scripted", False), ("in parts", True), ("compiled within a step", True),
        ("compiled within a step", False),
    ],
)  # fmt: skip
def test_of_several_models_one_that_is_not_heard_has_all_tell_nothing(how: str, whole: bool) -> None:
    """The other's inputs may be noise of one seed, be it called as a `whole` or in parts."""
    g = TwoParts()
    d: Any = torch.jit.script(TwoParts()) if how == "scripted" else TwoParts()
    run = d
    if how == "in parts":
        run = lambda batch: d.head(d.body(batch))  # noqa: E731
    elif how == "compiled within a step":
        run = torch.compile(lambda batch: d(batch), backend="eager")  # type: ignore[misc]
    noise, data = drawn(0), drawn(1)

    def step(number: int) -> None:
        run(data(number))
        if whole:
            g(noise(number))
        else:
            g.head(g.body(noise(number)))

    assert told(one_model([g, d]), step) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_part_that_is_not_heard_has_a_model_in_parts_tell_nothing() -> None:
    model: Any = TwoParts()
    noise, data = drawn(0), drawn(1)
    model.head = torch.jit.script(model.head)

    def step(number: int) -> None:
        model.body(noise(number))
        model.head(data(number))

    assert told(model, step) is None
    assert told(model, lambda number: model(data(number))) is not None


def test_a_model_that_is_a_part_of_another_counts_by_itself() -> None:
    g, d = nn.Linear(4, 4), nn.Linear(4, 1)
    whole = nn.Sequential(g, d)
    both = one_model([whole, d])

    def steps(seed: int) -> Callable[[int], None]:
        noise, data = drawn(0), drawn(seed)

        def step(number: int) -> None:
            whole(noise(number))
            d(data(number))

        return step

    assert told(both, steps(1)) == told(both, steps(1)) != told(both, steps(2))


def test_a_list_of_very_many_is_not_walked_through() -> None:
    class Texts(list[str]):
        seen = 0

        def __iter__(self) -> Iterator[str]:
            for text in super().__iter__():
                Texts.seen += 1
                yield text

    model = nn.Identity()
    told(model, lambda _: model(Texts(["text"] * 10_000)), STEPS)
    assert 0 < Texts.seen <= STEPS * TENSORS_MAX


def test_inputs_may_be_named_and_in_lists() -> None:
    class Named(nn.Module):
        def forward(self, *, batch: dict[str, Any]) -> torch.Tensor:
            return torch.as_tensor(batch["ids"][0]).float().sum()

    model = Named()

    def steps(seed: int) -> Callable[[int], object]:
        ids = drawn(seed)
        return lambda number: model(batch={"ids": [ids(number), "text"], "none": None})

    assert told(model, steps(0)) == told(model, steps(0)) != told(model, steps(1))


def test_what_is_not_called_or_gets_no_tensor_is_given_up() -> None:
    model = TwoParts()
    assert told(model, lambda _: None, STEPS_MAX) is None
    inputs = Inputs(model)
    for _ in range(STEPS_MAX):
        assert inputs.after_step() is None
    assert hooks_of(model) == 0, "it is heard no more"


def test_many_that_accumulate_take_bounded_memory() -> None:
    model = nn.Identity()
    inputs = Inputs(model)
    for _ in range(3 * TENSORS_MAX):
        model(torch.randn(4 * KEPT))
    assert sum(len(tensor) for tensor in inputs._now) == TENSORS_MAX * KEPT * 4


@pytest.mark.parametrize("kind", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
def test_inputs_of_any_type(kind: torch.dtype) -> None:
    model = nn.Identity()

    def steps(seed: int) -> Callable[[int], object]:
        batch = drawn(seed)
        return lambda number: model((8 * batch(number)).long().remainder(2).to(kind))

    assert told(model, steps(0)) == told(model, steps(0)) != told(model, steps(1))


def test_odd_inputs_do_no_harm() -> None:
    model = nn.Identity()
    sparse, empty, number = torch.eye(4).to_sparse(), torch.empty(0, 4), torch.tensor(1.0)
    meta = torch.empty(4, device="meta")
    for odd in (
        sparse,
        empty,
        number,
        meta,
        number.expand(5, 5),
        torch.eye(4).t(),
        nn.Parameter(torch.eye(4)),
        object(),
    ):
        told(model, lambda _, odd=odd: model(odd), STEPS)  # type: ignore[misc]
    mapped: Callable[[torch.Tensor], torch.Tensor] = torch.func.vmap(lambda row: model(row) + 1)
    told(model, lambda _: mapped(torch.eye(4)))


@pytest.mark.parametrize("odd", [torch.eye(4).to_sparse(), np.eye(4), object(), [[[[[[1]]]]]]])
def test_noise_beside_what_may_be_a_batch_tells_nothing(odd: object) -> None:
    """With one seed for the noise it is the same on all nodes, whatever their data is."""

    class Noisy(nn.Module):
        def forward(self, noise: torch.Tensor, data: object) -> torch.Tensor:
            return noise

    model, noise, same = Noisy(), drawn(0), drawn(0)
    assert told(model, lambda number: model(noise(number), odd)) is None
    assert told(model, lambda number: model(same(number), data=[3, 0.5, "text", None, True])) is not None


def test_the_scripts_randomness_is_as_without() -> None:
    model, batch = nn.Identity(), torch.randn(3 * KEPT)
    before = torch.get_rng_state()
    told(model, lambda number: model(batch + number))
    assert torch.equal(before, torch.get_rng_state())


def test_who_hears_no_more_lets_go_of_nothing() -> None:
    """A forked child ends so what its parent has begun, and may free nothing that is on a GPU."""
    model = nn.Identity()
    inputs = Inputs(model)
    model(torch.ones(4))
    inputs.remove()
    assert [len(tensor) for tensor in inputs._now] == [16]


def test_a_copy_of_the_model_is_not_heard() -> None:
    model, batch, same, noise = nn.Sequential(nn.Identity()), drawn(0), drawn(0), drawn(9)
    inputs = Inputs(model)
    averaged, shallow, packed = copy.deepcopy(model), copy.copy(model), pickle.dumps(model)
    assert b"peerd" not in packed, "who loads it need not have it"
    for number in range(STEPS):
        averaged(noise(number))
        model(batch(number))
        found = inputs.after_step()
    assert found == told(model, lambda number: model(same(number)))
    assert found is not None
    for one in (model, averaged):
        assert type(one._forward_pre_hooks) is OrderedDict
        assert not one._forward_pre_hooks
    shallow(batch(0))
    assert not inputs._now, "it has the model's own dicts, and is heard no more"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_whoever_takes_no_module_with_hooks_takes_the_model() -> None:
    """TorchScript takes none but those in its own language, CUDA's graphs none, a Transformer's fast path none."""
    model = TwoParts()
    Inputs(model)
    for one in (model, copy.deepcopy(model)):
        torch.jit.script(one)
    for part in model.modules():
        assert len(part._forward_pre_hooks) == len(part._forward_pre_hooks_with_kwargs) == 0
        assert [*part._forward_pre_hooks.values()] == []
    layer, batch = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval(), torch.randn(2, 4, 8)
    Inputs(layer)
    with torch.no_grad(), torch.profiler.profile() as profile:
        layer(batch)
    assert "aten::_transformer_encoder_layer_fwd" in {event.name for event in profile.events() or []}


def test_what_a_script_hooks_on_is_called_and_goes_by_its_handle() -> None:
    """Added before, during and after; the model that has some is not heard."""
    model, called = nn.Identity(), list[str]()

    def add(name: str, **options: Any) -> RemovableHandle:
        return model.register_forward_pre_hook(lambda *_: called.append(name), **options)

    before = add("before")
    inputs = Inputs(model)
    model(torch.ones(4))
    assert not inputs._now
    before.remove()
    inputs.remove()
    model(torch.ones(4))
    assert called == ["before"]

    inputs = Inputs(model)
    model(torch.ones(4))
    during, with_names = add("during"), add("with names", with_kwargs=True)
    model(torch.ones(4))
    assert len(inputs._now) == 1
    assert called == ["before", "during", "with names"]
    inputs.remove()
    during.remove()
    model(torch.ones(4))
    assert called == ["before", "during", "with names", "with names"]
    with_names.remove()
    model(torch.ones(4))
    assert len(called) == 4


def test_a_call_in_another_thread_goes_on_while_it_is_no_more_heard() -> None:
    """Torch asks first which hooks there are, then which of them take what is named."""
    model = nn.Identity()
    inputs = Inputs(model)
    ((key, hook),) = model._forward_pre_hooks.items()
    inputs.remove()
    assert key not in model._forward_pre_hooks_with_kwargs
    hook(model, (torch.ones(4),))


def test_who_records_operations_sees_the_models_alone() -> None:
    """Selective checkpoints count them, by which they find again what they kept."""
    model = TwoParts()
    before = len([*make_fx(model)(torch.randn(8, 4)).graph.nodes])
    inputs = Inputs(model)
    assert len([*make_fx(model)(torch.randn(8, 4)).graph.nodes]) == before
    inputs.remove()


def test_the_number_of_a_step_tells_nothing() -> None:
    """Beside coordinates that are the same at each one, it is the same on all nodes."""
    coordinates = torch.ones(8, 2)

    class Timed(nn.Module):
        def forward(self, where: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
            return where * when

    model = Timed()
    assert told(model, lambda number: model(coordinates, torch.tensor(number))) is None
    assert told(model, lambda number: model(coordinates, torch.tensor([number]))) is None


def test_pictures_in_channels_last_are_not_copied_whole() -> None:
    pictures = torch.randn(4, 3, 64, 64).to(memory_format=torch.channels_last)
    with torch.profiler.profile(profile_memory=True) as profile:
        assert len(_kept(pictures)) == 4 * KEPT
    assert max(event.cpu_memory_usage for event in profile.events() or []) < pictures.nbytes


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("how", ["around", "in place", "before", "in a step"])
def test_a_compiled_model_is_compiled_once_without_it(how: str, whole: bool) -> None:
    """And is heard as another one is, but where it is a part of what is compiled."""
    model, batch, same = TwoParts(), drawn(0), drawn(0)
    torch._dynamo.reset()
    counter: Any = CompileCounter()
    options: dict[str, Any] = {"backend": counter, "fullgraph": whole}
    run: Any = torch.compile(model, **options) if how == "before" else model
    inputs = Inputs(run)
    if how == "around":
        run = torch.compile(model, **options)
    elif how == "in place":
        model.compile(**options)
    elif how == "in a step":
        run = torch.compile(lambda batch: model(batch), **options)  # type: ignore[misc]
    found = []
    for number in range(STEPS):
        run(batch(number))
        found.append(inputs.after_step())
    inputs.remove()
    run(batch(0))
    assert counter.frame_count == 1
    assert counter.op_count == 2, "two layers"
    plain = TwoParts()
    assert found[-1] == (None if how == "in a step" else told(plain, lambda number: plain(same(number))))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_traced_model_has_no_trace_of_it() -> None:
    model = TwoParts()
    inputs = Inputs(model)
    torch.jit.trace(model, torch.randn(8, 4))  # type: ignore[no-untyped-call]
    assert not inputs._now
    inputs.remove()
