"""Which batches does a script draw? A digest of what its model is given in its first steps, or none.

Two nodes of one digest were given the same inputs, to the bit, in each of their first STEPS steps, no two of which were
alike: they draw the same batches in the same order. It is of what goes in, not of what the model becomes, so it holds
for nodes that started at different times, whose models differ, for any optimizer and any mode. Adam's first step is
little more than the signs of a gradient: of a small model other batches may well make the same one.

Nothing is told of a model whose inputs are the same at each step, as those of all data at once or of fixed coordinates
are, nor of one that is not called, that is compiled as a part of something else, that has pre-hooks of its own or gets
no tensors: that two nodes draw the same may be missed, never made up. Of several ranks it is what the first one draws.

Of a large tensor KEPT values count, spread so that no length of a row has them all in one column. They stay where they
are until the last step, the only one in which a GPU is waited for. Inputs that went through other arithmetic (a GPU's
preprocessing beside a CPU's) differ, so such nodes are missed, too.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from peerd.protocol.trainer import DRAWS_BYTES
from peerd.training.model.names import wraps_as
from peerd.training.model.together import Together

STEPS = 8
"""With inputs. As no two are alike, two nodes that draw on their own have one chance in 8!, 40,320, or less."""
STEPS_MAX = 64  # in which they have to come
KEPT = 1 << 12  # values of a tensor
TENSORS_MAX = 32  # of a step, of the many that may accumulate
DEPTH_MAX = 4  # of lists in lists
_KEY = -1  # of a hook; torch counts its own from 0
_SPREAD = 40503  # 2^16 over the golden ratio, odd


class Inputs:
    """What one model is given, until it is known, or will not be."""

    def __init__(self, model: nn.Module) -> None:
        self._steps: list[list[torch.Tensor]] = []  # bytes of tensors
        self._now: list[torch.Tensor] = []
        self._count = 0
        self._root_called = False
        self._heard: list[tuple[nn.Module, dict[str, Any]]] = []  # each with its own dicts of hooks
        self._failed = False
        self._roots = [*model.children()] if isinstance(model, Together) else [model]
        self._unheard = set(self._roots)  # of a generator alone the inputs may be noise, the same on all nodes
        self._hears_parts = True
        for root in self._roots:  # before parts, of which one may be a model, too
            self._hook(root, root)
        for root in self._roots:
            if wraps_as(root) is None:  # else what is inside is called by it alone
                for child in root.children():  # Lightning's modules are often called in parts
                    self._hears_parts &= self._hook(child, root)

    def after_step(self) -> bytes | None:
        """The digest, once; the hooks are gone then, or as soon as there will be none."""
        if not self._heard:
            return None
        self._count += 1
        if self._now:
            self._steps.append(self._now)
            self._now = []
        done = len(self._steps) == STEPS
        if not done and not self._failed and self._count < STEPS_MAX:
            return None
        self.remove()
        steps, self._steps, self._now = self._steps, [], []
        hears_all = not self._unheard and (self._root_called or self._hears_parts)
        return _digest_of(steps) if done and hears_all and not self._failed else None

    def remove(self) -> None:
        """Hear no more. What was kept stays: a forked child, which has no CUDA, must not let go of it."""
        for module, own in self._heard:
            if not any(len(module.__dict__[name]) for name in own):  # else the script knows them by these dicts
                module.__dict__.update(own)
        self._heard = []

    def _hook(self, module: nn.Module, root: nn.Module) -> bool:
        """Hear a model, or a part of it; returns whether that can be."""
        if isinstance(module, torch.jit.ScriptModule):
            return False
        own = {name: module.__dict__[name] for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")}
        if any(own.values()):
            return False  # who added them takes them out of these dicts

        # `named` is missing where another thread calls the model while this is being taken away
        def hook(_: nn.Module, arguments: object, named: object = None) -> None:
            self._called(root, (arguments, named), is_root=module is root)

        # else it would be compiled beside the model, and hear what a compiler calls
        hidden = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        module.__dict__.update({name: _Hidden(hidden) for name in own})
        self._heard.append((module, own))
        return True

    def _called(self, root: nn.Module, given: object, *, is_root: bool) -> None:
        """The model, or where it is called in parts a part, is about to be given this."""
        if self._failed or not self._heard or not torch.is_grad_enabled():
            return
        if is_root and not self._root_called:  # what was heard of parts was not all of it
            self._root_called = True
            self._steps, self._now, self._unheard = [], [], set(self._roots)
        if is_root != self._root_called:
            return
        self._unheard.discard(root)
        try:
            if torch._C._get_tracing_state() or torch._C._len_torch_dispatch_stack():
                return  # who records or counts operations wants the model's alone
            for tensor in _tensors(given):
                if len(self._now) == TENSORS_MAX:
                    return
                if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                    self._failed = True  # replays call nothing
                    return
                self._now.append(_kept(tensor))
        except Exception:  # also torch's own, of odd tensors: the script must not hear of it
            self._failed = True


class _Hidden(OrderedDict[int, Any]):
    """An empty dict of hooks, but for a module's own call: what that asks (bool, `items`, `in`) tells of one hook.

    TorchScript, CUDA's graphs and a Transformer's fast path, which ask for its length or values, refuse a module that
    has hooks. Copies, also those in files, would keep them. A hook that the script adds takes the place of this one.
    """

    def __init__(self, hook: Callable[..., None] | None = None) -> None:
        super().__init__()
        self._hook = hook

    def __setitem__(self, key: int, hook: Any) -> None:
        self._hook = None
        super().__setitem__(key, hook)

    def __bool__(self) -> bool:
        return self._hook is not None or len(self) > 0

    def __contains__(self, key: object) -> bool:
        return (key == _KEY and self._hook is not None) or super().__contains__(key)

    def items(self) -> Any:
        return super().items() if self._hook is None else [(_KEY, self._hook)]

    def __reduce__(self) -> Any:
        return OrderedDict(self).__reduce__()


def _tensors(given: object, depth: int = 0) -> Iterator[torch.Tensor]:
    """Raises TypeError for what may hold a batch in a way of its own: beside it the rest may well be the same for all.

    So does a tensor of several ranks together, at which all would have to look.
    """
    if type(given) is torch.Tensor and given.layout is torch.strided:
        if given.numel() > 1:  # else it may be the number of the step
            yield given
    elif depth <= DEPTH_MAX and isinstance(given, Mapping | list | tuple):
        # a list of many texts is not for each step to walk through
        for value in islice(given.values() if isinstance(given, Mapping) else given, TENSORS_MAX):
            yield from _tensors(value, depth + 1)
    elif not isinstance(given, int | float | str | None):
        raise TypeError(type(given))


@torch.no_grad()
def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, or those of some of its values, shape (count,), in memory of their own, where it is."""
    # in the order of memory, as pictures in channels_last would be copied whole
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    values = tensor.detach().permute(order).reshape(-1)
    if len(values) > KEPT:
        block = len(values) // KEPT
        runs = torch.arange(KEPT, device=values.device)
        # in brackets they might be a mask, whose result's length a GPU has to say first
        values = values.index_select(0, runs * block + runs * _SPREAD % block)
    else:
        values = values.clone()
    return values.view(torch.uint8)


def _digest_of(steps: list[list[torch.Tensor]]) -> bytes | None:
    """None where two of them are alike."""
    try:
        # no torch.cat: on a busy host an operation of all of torch's threads may take .4 s
        all_bytes = [b"".join(tensor.cpu().numpy().tobytes() for tensor in step) for step in steps]
        of_steps = [hashlib.sha256(step).digest() for step in all_bytes]
    except Exception:  # of a GPU that has failed, or of tensors that were never values
        return None
    alike = len(set(of_steps)) < len(of_steps)
    return None if alike else hashlib.sha256(b"".join(of_steps)).digest()[:DRAWS_BYTES]
