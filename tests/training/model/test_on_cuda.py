"""A model on a device that is as late as CUDA may be is, and gives, to the bit what it does in host memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from flat_values import values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from late_cuda import CUDA, OTHER, Late, Stream, late_cuda, moved
from on_device import Array, Node, Passes, made
from torch import nn

from peerd.trainer.optimizers import forget
from peerd.training.model import flat as flat_module
from peerd.training.model import gradient_parts
from peerd.training.model.flat import FlatModel
from peerd.training.model.gradient_parts import GradientParts
from peerd.training.model.gradients import FlatGradients
from peerd.training.model.quasi_global import QuasiGlobalMomentum
from peerd.training.model.transfers import pin

SEEDS = st.integers(0, 2**32 - 1)
EAGERNESS = st.sampled_from([0.0, 0.3, 0.9])


@given(
    seed=SEEDS,
    eagerness=EAGERNESS,
    kind=st.sampled_from(["float32", "bfloat16", "motley"]),
    course=st.lists(st.sampled_from(["step", "step", "publish", "add", "restore", "load"]), max_size=12),
)
@settings(max_examples=60)
def test_whatever_is_done_to_it(seed: int, eagerness: float, kind: str, course: list[str]) -> None:
    near = Node(made(kind))
    for number, what in enumerate(course):
        near.do(what, number)
    with late_cuda(seed, eagerness):
        far = Node(moved(made(kind)))
        assert far.pinned
        for number, what in enumerate(course):
            far.do(what, number)
        for own, other in zip(near.seen(), far.seen(), strict=True):
            torch.testing.assert_close(other, own, rtol=0, atol=0, equal_nan=True)


@given(
    seed=SEEDS,
    eagerness=EAGERNESS,
    kind=st.sampled_from(["float32", "bfloat16", "motley"]),
    count=st.integers(0, 40),
    where=st.sampled_from([CUDA, torch.device("cpu")]),
)
@settings(max_examples=60)
def test_it_is_passed_on_in_parts(seed: int, eagerness: float, kind: str, count: int, where: torch.device) -> None:
    near = FlatModel(made(kind))
    before = values_of(near)
    near.load((2 * before).numpy())
    with pytest.MonkeyPatch.context() as patch, late_cuda(seed, eagerness):
        patch.setattr(flat_module, "PART_ON_GPU", count)
        far = FlatModel(moved(made(kind)))
        parts: list[int] = []

        def act(values: torch.Tensor) -> None:
            assert values.device == where
            parts.append(len(values))
            values.mul_(2)

        far.pass_on(act, where)
        assert sum(parts) == far.total
        assert torch.equal(values_of(far), values_of(near))
        assert all(length <= count or length in [piece.stop - piece.start for piece in far.pieces] for length in parts)


@given(seed=SEEDS, eagerness=EAGERNESS)
@settings(max_examples=20)
def test_a_copy_outlives_what_it_is_of(seed: int, eagerness: float) -> None:
    with late_cuda(seed, eagerness) as gpu:
        node = Node(moved(made("bfloat16")))
        node.do("add", 1)  # so that there are carries
        expected = values_of(node.flat)
        node.do("publish", 0)
        del node.flat, node.model
        gpu.default.synchronize()  # whose memory was theirs
        node.publication.wait()
        assert torch.equal(node.copy, expected)


def test_a_gpu_that_the_model_is_not_on_gets_no_context() -> None:
    """A script that says `cuda:1` for its model, and nothing else, has `cuda:0` as its current device."""
    with late_cuda(0) as gpu, torch.cuda.device(OTHER):
        node = Node(moved(made("float32")))
        for what in ("publish", "add", "publish", "load"):
            node.do(what, 1)
        assert gpu.contexts == {CUDA}


@pytest.mark.parametrize("layers", [1, 30])
def test_a_correction_is_waited_for_once(layers: int) -> None:
    with late_cuda(0) as gpu:
        node = Node(moved(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))))
        assert gpu.waits_of(node.do, "add", 1) == 1


def with_quasi_global_momentum(model: nn.Module, corrections: list[float]) -> list[torch.Tensor]:
    """Weights after a step for each correction, which follows it, and a rollback."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    QuasiGlobalMomentum(optimizer)
    for number, correction in enumerate(corrections):
        for parameter in model.parameters():
            parameter.grad = torch.full(parameter.shape, 1.0 + number, device=parameter.device)
        optimizer.step()
        if correction < 0:
            forget(optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(correction)
    return [parameter.detach().cpu() for parameter in model.parameters()]


@given(seed=SEEDS, eagerness=EAGERNESS, corrections=st.lists(st.sampled_from([0.0, 0.25, -0.5]), max_size=5))
@settings(max_examples=20)
def test_quasi_global_momentum(seed: int, eagerness: float, corrections: list[float]) -> None:
    near = with_quasi_global_momentum(made("float32"), corrections)
    with late_cuda(seed, eagerness):
        far = with_quasi_global_momentum(moved(made("float32")), corrections)
    assert all(torch.equal(one, other) for one, other in zip(near, far, strict=True))


def test_quasi_global_momentum_waits_once_for_a_rate_that_is_a_tensor() -> None:
    with late_cuda(0) as gpu:
        model = moved(made("float32"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        momentum = QuasiGlobalMomentum(optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.full(parameter.shape, 1.0, device=parameter.device)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = Late(torch.tensor(0.1))
        hooks = momentum._before_step, momentum._after_step
        assert sum(gpu.waits_of(hook, optimizer, None, None) for hook in hooks) == 1


def test_quasi_global_momentum_goes_into_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_cuda(0):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="this step goes into a CUDA graph"):
            with_quasi_global_momentum(moved(made("float32")), [0.0])


# ------------------------------------------------------------------------------------------------------ gradients


def test_gradients_are_waited_for_where_they_are() -> None:
    """Masters may be in the host's memory, where the optimizer steps them."""
    with late_cuda(0, 0.0):
        model = moved(nn.Linear(2, 1))
        flat = FlatModel(model)
        flat.pieces[:] = [replace(piece, master=torch.zeros(piece.held.shape)) for piece in flat.pieces]
        gradients = FlatGradients(flat)
        memory: Array = np.zeros(gradients.total, np.float32)
        assert pin(memory, CUDA)
        for piece in flat.pieces:
            piece.held.grad = torch.full_like(piece.held, 3.0)
        gradients.gather(torch.from_numpy(memory))
        assert memory.tolist() == [3.0, 3.0, 3.0, 1.0, 1.0]


@given(seed=SEEDS, eagerness=EAGERNESS, bucket=st.integers(1, 40))
@settings(max_examples=20)
def test_gradients_are_there_when_they_are_told_of(seed: int, eagerness: float, bucket: int) -> None:
    near = Passes(made("motley"), bucket)
    expected = [near.backward(number) for number in range(3)]
    with late_cuda(seed, eagerness) as gpu:
        far = Passes(moved(made("motley")), bucket)
        assert far.pinned
        for number, gradient in enumerate(expected):
            np.testing.assert_array_equal(far.backward(number), gradient)
            for first, part in far.told:
                np.testing.assert_array_equal(part, gradient[first : far.flat.parameters])
        mean = torch.from_numpy(expected[0].copy())
        assert gpu.waits_of(far.gradients.scatter, mean) == 1
        mean.fill_(torch.nan)  # the memory is the next gradient's
        near.gradients.scatter(torch.from_numpy(expected[0]))
        for own, other in zip(near.model.parameters(), far.model.parameters(), strict=True):
            assert own.grad is not None
            assert other.grad is not None
            assert torch.equal(own.grad, other.grad.cpu())


def test_a_bucket_of_gradients_from_several_streams_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd goes back through each layer in the stream that went forward through it."""
    monkeypatch.setattr(gradient_parts, "BUCKET_VALUES", 8)  # of two layers
    with late_cuda(0, 0.0) as gpu:
        model = moved(nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3))))
        flat = FlatModel(model)
        gradients = FlatGradients(flat)
        memory: Array = np.full(gradients.total, np.nan, np.float32)
        assert pin(memory, CUDA)
        parts = GradientParts(flat, gradients, torch.from_numpy(memory))
        branch = Stream()
        for number in (1.0, 2.0):  # the first pass shows which parameters have gradients
            parts.begin()
            for parameter, stream in zip(
                reversed(list(model.parameters())), [branch, gpu.default, branch], strict=True
            ):
                with torch.cuda.stream(stream):  # type: ignore[arg-type]
                    parameter.grad = torch.full(parameter.shape, number, device=CUDA)
                    parts.came(parameter)
            told = list(parts.rest())
            gpu.default.wait_stream(branch)  # as autograd does at the end of a pass
            assert parts.complete() == (number == 1.0)
        assert told == [4]
        assert memory.tolist() == [2.0] * 12 + [1.0] * 3
