"""What of the figures that a script gives with a step is a number? None may end a training."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from peerd.training.model.shards import is_sharded

SAMPLES_MAX = 2**53  # in one step; whole numbers beyond it are no exact floats


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known of one step."""

    loss: float | None  # NaN and infinities stay: the model behind such a loss is to be looked at
    samples: int  # 0 ... SAMPLES_MAX
    metrics: dict[str, float]
    left_out: dict[str, str] = field(default_factory=dict)  # by name, why


def clean(loss: Any, samples: Any, metrics: Mapping[str, Any]) -> Figures:
    """Take what is one number: int, float, numpy's scalars, a tensor or an array of one value, whatever has __float__.

    Never raises. A loss of None was not given, a metric of None is no number.
    """
    left_out: dict[str, str] = {}
    found: dict[str, float] = {}
    for name, value in metrics.items():
        number = one_number(value)
        if number is None:
            left_out[f"metric {name!r}"] = _no_number(value)
        else:  # half a character pair, which UTF-8 does not know, would not go out
            found[name.encode(errors="replace").decode()] = number
    taken = one_number(loss)
    if taken is None and loss is not None:
        left_out["loss"] = _no_number(loss)
    count = 0 if samples is None else one_number(samples)
    if count is None or not 0 <= count <= SAMPLES_MAX:
        left_out["samples"] = _no_number(samples) if count is None else f"it is {count:g}, and should count samples"
        count = 0
    return Figures(taken, int(count), found, left_out)


class FromGpus:
    """Figures that are tensors on a GPU, read when they have come: who reads one at once waits for all that it does."""

    def __init__(self) -> None:
        self._coming: deque[tuple[dict[str, torch.Tensor], list[torch.cuda.Event]]] = deque()

    def exchange(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What a step gives; in place of all that is on a GPU, what has come of steps before. Never waits."""
        late = {name: value.detach() for name, value in given.items() if _is_on_gpu(value)}
        if not late and not self._coming:  # each step of who has no GPU
            return dict(given)
        come: dict[str, Any] = {}
        while self._coming and all(mark.query() for mark in self._coming[0][1]):  # type: ignore[no-untyped-call]
            come |= self._coming.popleft()[0]
        if late:  # torch pins the memory of what is to be there later
            copies = {name: value.to("cpu", non_blocking=True) for name, value in late.items()}
            self._coming.append((copies, [_mark(device) for device in {value.device for value in late.values()}]))
        return come | {name: value for name, value in given.items() if name not in late}

    def rest(self) -> dict[str, Any]:
        """What has not been seen yet; waits for it."""
        for _, marks in self._coming:
            for mark in marks:
                mark.synchronize()
        return self.exchange({})


def _mark(device: torch.device) -> torch.cuda.Event:
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record(torch.cuda.current_stream(device))
    return mark


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda and value.numel() == 1 and not is_sharded(value)


def one_number(value: Any) -> float | None:
    """The one number that it holds, else None. Never raises."""
    if type(value) is float or type(value) is int:  # nearly always
        try:
            return float(value)
        except OverflowError:
            return None
    try:
        if hasattr(value, "detach"):  # a tensor that has a gradient warns of losing it
            value = value.detach()
        if hasattr(value, "item"):  # tensors and arrays: one value of any shape
            value = value.item()
        return float(value) if hasattr(type(value), "__float__") or hasattr(type(value), "__index__") else None
    except Exception:  # any object of the user's may come here
        return None


def _no_number(value: Any) -> str:
    """What it is in place of one."""
    size = getattr(value, "shape", None)
    shaped = f" and has the shape {tuple(size)}" if isinstance(size, tuple) and math.prod(size) != 1 else ""
    return f"it should be one number, but is of type {type(value).__name__}{shaped}"
