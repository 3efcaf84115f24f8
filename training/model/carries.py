"""What does a weight of lower precision lack of its float32 value? Its carry, what corrections could not yet move.

Of bfloat16, which is the upper half of a float32, it is the lower half: sixteen bits, to add to or take from those of
the weight, which is rounded. So both together are the float32 value to the bit, in four bytes. A step of the
optimizer's moves the weight alone, and the carry stays so many of 2^16 parts of its last digit: where the size of that
or the sign becomes another, so does what is carried, by no more than a last digit of the larger weight. Of other types
it is a float32.

On a processor all is one pass by a kernel; on a GPU, and where there is no compiler, by torch's operations.
"""

from __future__ import annotations

import ctypes

import torch

from peerd.training.kernels import library
from peerd.training.model.masters import EXACT

_LOWER_BITS = 16
_ROUNDING = 1 << 15
_MAGNITUDE, _INFINITY = 0x7FFF, 0x7F80  # of a bfloat16's bits


def carry_type(dtype: torch.dtype) -> torch.dtype | None:
    """Of the carries of such weights, shape (count,) as theirs; None: they need none."""
    if dtype in EXACT:
        return None
    return torch.int16 if dtype == torch.bfloat16 else torch.float32


def joined(values: torch.Tensor, carry: torch.Tensor) -> torch.Tensor:
    """The float32 values of these weights, shape (count,)."""
    if values.dtype != torch.bfloat16:
        return values.float() + carry
    if (kernels := _kernels(values, carry)) is not None:
        exact = torch.empty(len(values), dtype=torch.float32, device="cpu")
        kernels.peerd_carry_join(values.data_ptr(), carry.data_ptr(), len(values), exact.data_ptr())
        return exact
    upper = values.view(torch.int16).int()
    lower = carry.int()
    lower = torch.where(upper & _MAGNITUDE == 0, lower.clamp(min=0), lower)  # a weight set to zero: less is none
    lower = torch.where(upper & _INFINITY == _INFINITY, 0, lower)
    return ((upper << _LOWER_BITS) + lower).view(torch.float32)


def split(exact: torch.Tensor, values: torch.Tensor, carry: torch.Tensor) -> None:
    """Make float32 values, shape (count,), weights and their carry: finite ones, none beyond the largest bfloat16.

    What is beyond another type is the largest of that, and the rest is carried.
    """
    if values.dtype != torch.bfloat16:
        values.copy_(_within(exact, values.dtype))
        carry.copy_(exact - values.float())
        return
    if (kernels := _kernels(exact, values, carry)) is not None:
        kernels.peerd_carry_part(exact.data_ptr(), len(exact), values.data_ptr(), carry.data_ptr())
        return
    upper = _rounded(exact)
    values.view(torch.int16).copy_(upper)
    carry.copy_(exact.view(torch.int32) - (upper << _LOWER_BITS))


def add(delta: torch.Tensor, values: torch.Tensor, carry: torch.Tensor, were: torch.Tensor) -> None:
    """Add float32 values, shape (count,), to weights and their carry; what they `were`, too, moves as far as they do.

    A weight that is not finite stays so: what it was, which it will become again, and its carry are corrected instead.
    """
    if values.dtype == torch.bfloat16 and (kernels := _kernels(delta, values, carry, were)) is not None:
        addresses = (delta.data_ptr(), values.data_ptr(), carry.data_ptr(), were.data_ptr())
        kernels.peerd_carry_add(*addresses, len(delta))
        return
    before = values.float()  # of lower precision, so a copy
    exact = joined(values, carry).add_(delta)
    broken = ~exact.isfinite()
    after = torch.empty_like(values)
    split(torch.where(broken, joined(were, carry).add_(delta), exact), after, carry)
    moved = were.float() + (after.float() - before)
    if were.dtype == torch.bfloat16:
        moved = (_rounded(moved) << _LOWER_BITS).view(torch.float32)
    else:
        moved = _within(moved, were.dtype)
    were.copy_(torch.where(broken, after.float(), moved))
    values.copy_(torch.where(broken, values, after))


def _rounded(exact: torch.Tensor) -> torch.Tensor:
    """The upper halves of float32 values, as whole numbers; a tie goes away from zero."""
    return (exact.view(torch.int32) + _ROUNDING) >> _LOWER_BITS


def _within(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An infinity of float16, which ends at 65504, would stay one: nothing that is added to it makes it a number."""
    largest = torch.finfo(dtype).max
    return exact.clamp(-largest, largest)


def _kernels(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """Those that can take these."""
    able = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
    return library.LIBRARY if able else None
