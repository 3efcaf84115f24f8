"""What of the figures that a script gives with a step is a number? None may end a training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
