"""A model on a device that is as late as CUDA may be is, and gives, to the bit what it does in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flat_values import values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from late_cuda import CUDA, OTHER, Stream, late_cuda, moved
from torch import nn

from peerd.trainer.publication import Publication
from peerd.training.model import flat as flat_module
from peerd.training.model import gradient_parts
from peerd.training.model.flat import FlatModel
from peerd.training.model.gradient_parts import GradientParts
from peerd.training.model.gradients import FlatGradients
from peerd.training.model.transfers import pin

SEEDS = st.integers(0, 2**32 - 1)
EAGERNESS = st.sampled_from([0.0, 0.3, 0.9])
Array = npt.NDArray[np.float32]


class Motley(nn.Module):
    """Of several types, with buffers, and a convolution's weight that lies channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 2)
        self.first.weight.data = self.first.weight.data.contiguous(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.low = nn.Linear(3, 4, dtype=torch.bfloat16)
        self.low.register_buffer("mean", torch.zeros(3, dtype=torch.bfloat16))
        self.high = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low: torch.Tensor = self.low(self.norm(self.first(x)).mean((2, 3)).bfloat16())
        high: torch.Tensor = self.high(low.double())
        return high


def made(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "motley":
        return Motley()
    one = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return one.bfloat16() if kind == "bfloat16" else one


class Node:
    """What a trainer does with its model between steps, and the memory that a daemon reads."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.flat = FlatModel(model)
        self.memory: Array = np.full((2, self.flat.total), np.nan, np.float32)
        self.copy, self.correction = torch.from_numpy(self.memory[0]), self.memory[1]
        self.publication = Publication()
        if self.flat.device == CUDA:
            assert pin(self.memory, CUDA)

    @torch.no_grad()
    def do(self, what: str, seed: int) -> None:
        if what == "step":
            for parameter in self.model.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)).to(
                        parameter.device, parameter.dtype
                    )
                )
        elif what == "publish":
            self.publication.wait()
            self.publication.begin(self.flat.snapshot(), self.copy, self.flat.device)
        elif what == "add":
            self.publication.wait()
            self.correction[:] = np.random.default_rng(seed).standard_normal(self.flat.total) / 50
            self.flat.add(self.correction)
            self.correction[:] = np.nan  # it is the daemon's again
        elif what == "load":
            self.publication.wait()
            self.flat.load(np.random.default_rng(seed).random(self.flat.total).astype(np.float32))
        elif what == "restore":
            self.flat.restore()

    def seen(self) -> Iterator[torch.Tensor]:
        self.publication.wait()
        yield self.copy.clone()
        yield self.flat.change().cpu()
        yield values_of(self.flat)
        yield from (value.detach().cpu() for value in [*self.model.parameters(), *self.model.buffers()])


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


class Passes:
    """Backward passes of a model whose gradients come to `out` in parts, as its hooks say."""

    def __init__(self, model: nn.Module, bucket: int) -> None:
        self.model, self.bucket = model, bucket
        self.flat = FlatModel(model)
        self.gradients = FlatGradients(self.flat)
        self.memory: Array = np.full(self.gradients.total, np.nan, np.float32)
        self.out = torch.from_numpy(self.memory)
        if self.flat.device == CUDA:
            assert pin(self.memory, CUDA)
        self.parts = GradientParts(self.flat, self.gradients, self.out)
        self.told: list[tuple[int, Array]] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._came)  # type: ignore[no-untyped-call]

    def _came(self, parameter: torch.Tensor) -> None:
        if (first := self.parts.came(parameter)) is not None:
            self._hear(first)

    def _hear(self, first: int) -> None:
        self.told.append((first, self.memory[first : self.flat.parameters].copy()))

    def backward(self, seed: int) -> Array:
        self.told.clear()
        self.model.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_parts, "BUCKET_VALUES", self.bucket)
            x = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(seed)).to(self.flat.device)
            self.parts.begin()
            self.model(x).square().mean().backward()
            for first in self.parts.rest():
                self._hear(first)
            self.parts.complete()
        return self.memory.copy()


@given(seed=SEEDS, eagerness=EAGERNESS, bucket=st.integers(1, 40))
@settings(max_examples=20)
def test_gradients_are_there_when_they_are_told_of(seed: int, eagerness: float, bucket: int) -> None:
    near = Passes(made("motley"), bucket)
    expected = [near.backward(number) for number in range(3)]
    with late_cuda(seed, eagerness) as gpu:
        far = Passes(moved(made("motley")), bucket)
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
