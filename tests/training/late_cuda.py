"""A CUDA device that is late: what a GPU may do at its latest, or at any time before, it does here, in host memory.

Kernels and copies wait in their stream's queue until somebody has to have what they make: who reads too early reads
what was there before. Memory that is let go is the next tensor's, so it is filled with NaN, in the order of the stream
that it came from. `waits` counts how often the host had to stand still for the device.

One device, as CUDA's documents describe streams, events, copies from and to pinned and other memory, and as torch
describes its allocator. What it says of a program is about the order of things, and nothing about time.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import backend_registration as backends
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)  # what programs see
OTHER = torch.device("cuda", 1)  # on which nothing is: it may be a thread's current one
_TYPE = "late"  # what torch's own dispatcher sees: it is built without CUDA
aten = torch.ops.aten
_FOR_THE_DEVICE_TO_SAY = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_ready = False

if not hasattr(backends, "_setup_privateuseone_for_python_backend"):
    pytest.skip(f"torch {torch.__version__} has no devices that are written in Python", allow_module_level=True)


class Stream:
    """Work in order."""

    def __init__(self, device: object = None) -> None:
        self.gpu = _gpu()
        self.work: deque[tuple[Callable[[], object], tuple[tuple[Stream, int], ...]]] = deque()
        self.issued = self.done = 0
        self.gpu.streams.append(self)

    def push(self, task: Callable[[], object], *after: tuple[Stream, int]) -> None:
        self.work.append((task, after))
        self.issued += 1

    def run_to(self, count: int) -> None:
        while self.done < count:
            task, after = self.work.popleft()
            for stream, mark in after:
                stream.run_to(mark)
            with torch.no_grad():
                task()
            self.done += 1

    def wait_stream(self, other: Stream) -> None:
        self.push(lambda: None, (other, other.issued))

    def synchronize(self) -> None:
        with self.gpu.lock:
            self.gpu.waits += 1
            self.run_to(self.issued)


class Event:
    """A mark in one."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.mark: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or _gpu().current
        self.mark = stream, stream.issued

    def query(self) -> bool:
        if self.mark is None:
            return True
        stream, count = self.mark
        with stream.gpu.lock:
            if stream.done < count and stream.gpu.chance.random() < 0.5:
                stream.run_to(stream.done + 1)  # time goes on
            return stream.done >= count

    def synchronize(self) -> None:
        if self.mark is not None:
            stream, count = self.mark
            with stream.gpu.lock:
                stream.gpu.waits += 1
                stream.run_to(count)

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query(), "CUDA raises: there is no time yet"
        return 1.0


class Gpu:
    """Streams, of each thread the one that it is in, and what was pinned."""

    def __init__(self, seed: int, eagerness: float) -> None:
        self.chance = random.Random(seed)
        self.eagerness = eagerness  # how often something is done that nobody waits for
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.pinned: list[tuple[int, int]] = []
        self.pinned_by_torch: list[tuple[int, int]] = []
        self.waits = 0
        self.error = ""  # that the runtime has kept: the next call has it
        self.local = threading.local()
        self.contexts: set[torch.device] = set()  # each takes hundreds of MB of its device
        self.default: Stream

    @property
    def device(self) -> torch.device:
        return getattr(self.local, "device", CUDA)

    @property
    def current(self) -> Stream:
        return getattr(self.local, "stream", self.default)

    def waits_of(self, function: Callable[..., object], *args: object) -> int:
        """How often the host stands still for the device while it calls this."""
        before = self.waits
        function(*args)
        return self.waits - before

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(start <= at < stop for start, stop in [*self.pinned, *self.pinned_by_torch])

    def pin(self, tensor: torch.Tensor) -> None:
        """For as long as it is there."""
        memory = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        self.pinned_by_torch.append(memory)
        weakref.finalize(tensor, self.pinned_by_torch.remove, memory).atexit = False

    def some_time(self) -> None:
        while self.chance.random() < self.eagerness:
            stream = self.chance.choice(self.streams)
            stream.run_to(min(stream.done + 1, stream.issued))


_now: list[Gpu] = []


def _gpu() -> Gpu:
    return _now[-1]


class Memory:
    """Of one storage: given away when no tensor has it any more."""

    def __init__(self, held: torch.Tensor) -> None:
        self.stream, self.readers = _gpu().current, set[Stream]()
        weakref.finalize(self, _give_away, held.untyped_storage(), self.stream, self.readers).atexit = False


def _give_away(storage: torch.UntypedStorage, stream: Stream, readers: set[Stream]) -> None:
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    with stream.gpu.lock:
        stream.push(lambda: memory.fill_(255), *((reader, reader.issued) for reader in readers))


class Late(torch.Tensor):
    """A tensor of the device; `held` has its values, once they are made."""

    held: torch.Tensor
    memory: Memory
    device = property(lambda self: CUDA)
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor, memory: Memory | None = None) -> Late:
        made: Late = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device(_TYPE, 0),
        )  # fmt: skip
        made.held, made.memory = held, memory or Memory(held)
        return made

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.memory.readers.add(stream)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        gpu = _gpu()
        if gpu.error:
            error, gpu.error = gpu.error, ""
            raise RuntimeError(error)
        with gpu.lock:
            gpu.some_time()
            return _run(gpu, func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Late({tuple(self.shape)}, {self.dtype})"


def _own_name(value: Any) -> Any:
    return torch.device(_TYPE, 0) if isinstance(value, torch.device) and value.type == "cuda" else value


def _held(value: Any) -> Any:
    """What a kernel is given: the device's memory, and what the host says with the call, as it is now."""
    if isinstance(value, Late):
        return value.held
    return value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value


def _blank(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def _late(made: Any, memory: Memory | None = None) -> Any:
    return tree_map(lambda one: Late(one, memory) if isinstance(one, torch.Tensor) else one, made)


def _run(gpu: Gpu, func: Any, args: Any, kwargs: Any) -> Any:
    stream, to = gpu.current, kwargs.get("device")
    if func is aten.copy_.default:
        return _copy(gpu, *args, **kwargs)
    if func is aten._to_copy.default and (not isinstance(args[0], Late) or (to is not None and to.type == "cpu")):
        source = args[0]
        options = {"dtype": kwargs.get("dtype") or source.dtype, "memory_format": kwargs.get("memory_format")}
        like = torch.empty_like(source.held if isinstance(source, Late) else source, **options)
        if not isinstance(source, Late):
            return _copy(gpu, Late(like), source, kwargs.get("non_blocking", False))
        if kwargs.get("non_blocking", False):  # torch pins what it makes for that
            gpu.pin(like)
        return _copy(gpu, like, source, kwargs.get("non_blocking", False))
    own_args, own = tree_map(_held, (args, kwargs))
    if to is not None and to.type == _TYPE:
        own["device"] = torch.device("cpu")
    if func.is_view:
        return _late(func(*own_args, **own), args[0].memory)
    name = func._schema.name.split("::")[1]
    if (name.endswith("_") and not name.endswith("__")) or "out" in kwargs:
        stream.push(lambda: func(*own_args, **own))
        return kwargs.get("out", args[0]) if func._schema.returns else None  # of foreach there is none
    if _FOR_THE_DEVICE_TO_SAY & {*func.tags}:
        stream.synchronize()
        return _late(func(*own_args, **own))
    with torch.no_grad():  # of which shapes and types it is
        made = func(*tree_map(_blank, own_args), **tree_map(_blank, own))
    outs = [torch.empty_like(one) for one in tree_leaves(made) if isinstance(one, torch.Tensor)]

    def task() -> None:
        values = [one for one in tree_leaves(func(*own_args, **own)) if isinstance(one, torch.Tensor)]
        for out, value in zip(outs, values, strict=True):
            out.copy_(value)

    stream.push(task)
    left = iter(outs)
    return tree_map(lambda one: Late(next(left)) if isinstance(one, torch.Tensor) else one, made)


def _copy(gpu: Gpu, target: Any, source: Any, non_blocking: bool = False) -> Any:
    """The host waits where it does with CUDA: for what is not said to be non-blocking, and for memory not pinned."""
    if isinstance(target, Late):
        to, given = target.held, _held(source) if isinstance(source, Late) or gpu.is_pinned(source) else source.clone()
        gpu.current.push(lambda: to.copy_(given))
        if not isinstance(source, Late) and not (non_blocking and target.dtype == source.dtype):
            gpu.current.synchronize()
    else:
        given = source.held
        gpu.current.push(lambda: target.copy_(given))
        like = (target.stride(), target.dtype) == (source.stride(), source.dtype)  # else it goes by pageable memory
        if not (non_blocking and gpu.is_pinned(target) and like):
            gpu.current.synchronize()
    return target


class _Factories(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is made on the device of nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(kwargs.get("device"), "type", None) == _TYPE or any(
            isinstance(one, Late) for one in tree_leaves((args, kwargs))
        ):
            return Late.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **kwargs)


class _Module(backends._DummyBackendModule):
    def is_available(self) -> bool:
        return bool(_now)


class _Hook(backends._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return bool(_now)


def _by_own_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where a program says cuda, torch without CUDA is told its own name for it."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_own_name, args), **{key: _own_name(value) for key, value in kwargs.items()})

    return called


class _Runtime:
    @staticmethod
    def cudaHostRegister(start: int, size: int, flags: int) -> int:  # noqa: N802
        _gpu().contexts.add(_gpu().device)
        _gpu().pinned.append((start, start + size))
        return 0

    @staticmethod
    def cudaHostUnregister(start: int) -> int:  # noqa: N802
        gpu = _gpu()
        assert all(stream.done == stream.issued for stream in gpu.streams if stream is not gpu.default), "in use"
        gpu.pinned = [memory for memory in gpu.pinned if memory[0] != start]
        return 0


@contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    gpu = _gpu()
    before, gpu.local.stream = gpu.current, stream
    device, gpu.local.device = gpu.device, CUDA
    try:
        yield
    finally:
        gpu.local.stream, gpu.local.device = before, device
        gpu.contexts.add(device)  # by cudaSetDevice, as torch sets the stream that it was in


@contextmanager
def _device(device: torch.device) -> Iterator[None]:
    """At its end torch does not go back by cudaSetDevice to a device that has no context."""
    gpu = _gpu()
    before, gpu.local.device = gpu.device, device
    try:
        yield
    finally:
        gpu.local.device = before


@contextmanager
def late_cuda(seed: int, eagerness: float = 0.5) -> Iterator[Gpu]:
    """`torch.cuda` is such a device. `eagerness` in [0, 1): 0 does all at the latest moment."""
    global _ready
    if not _ready:
        backends._setup_privateuseone_for_python_backend(_TYPE, _Module(), _Hook())
        _ready = True
    gpu = Gpu(seed, eagerness)
    _now.append(gpu)
    gpu.default = Stream()
    put: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "Stream": Stream,
            "Event": Event,
            "stream": _stream,
            "current_stream": lambda device=None: gpu.current,
            "is_current_stream_capturing": lambda: False,
            "device": _device,
            "cudart": _Runtime,
        },
        torch: {name: _by_own_name(getattr(torch, name)) for name in ("arange", "empty", "zeros", "full", "tensor")},
        torch.Tensor: {"to": _by_own_name(torch.Tensor.to)},
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for owner, names in put.items():
                for name, value in names.items():
                    patch.setattr(owner, name, value)
            factories = _Factories()  # type: ignore[no-untyped-call]
            with factories, torch.autograd.set_multithreading_enabled(False):
                yield gpu
    finally:
        _now.remove(gpu)


def moved(model: nn.Module) -> nn.Module:
    """As `model.cuda()`: with its parameters and buffers on the device."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                held = parameter.detach().clone()
                module._parameters[name] = nn.Parameter(Late(held), requires_grad=parameter.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = Late(buffer.clone())
    return model
