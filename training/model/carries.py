"""What does a weight of lower precision lack of its float32 value? Its carry, what corrections could not yet move.

Of bfloat16, which is the upper half of a float32, it is the lower half: sixteen bits, to add to or take from those of
the weight, which is rounded. So both together are the float32 value to the bit, in four bytes. A step of the
optimizer's moves the weight alone, and the carry stays so many of 2^16 parts of its last digit: where that becomes
another, so does what is carried, by less than the step was rounded. Of other types it is a float32.

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
        exact = torch.empty(len(values))
        kernels.peerd_carry_join(values.data_ptr(), carry.data_ptr(), len(values), exact.data_ptr())
        return exact
    upper = values.view(torch.int16).int()
    lower = carry.int()
    lower = torch.where(upper & _MAGNITUDE == 0, lower.clamp(min=0), lower)  # a weight set to zero: less is none
    lower = torch.where(upper & _INFINITY == _INFINITY, 0, lower)
    return ((upper << _LOWER_BITS) + lower).view(torch.float32)


def part(exact: torch.Tensor, values: torch.Tensor, carry: torch.Tensor) -> None:
    """Make float32 values, shape (count,), weights and their carry."""
    if values.dtype != torch.bfloat16:
        values.copy_(exact)
        carry.copy_(exact - values.float())
        return
    if (kernels := _kernels(exact, values, carry)) is not None:
        kernels.peerd_carry_part(exact.data_ptr(), len(exact), values.data_ptr(), carry.data_ptr())
        return
    upper = _rounded(exact)
    values.view(torch.int16).copy_(upper)
    carry.copy_(exact.view(torch.int32) - (upper << _LOWER_BITS))


def add(delta: torch.Tensor, values: torch.Tensor, carry: torch.Tensor, base: torch.Tensor) -> None:
    """Add float32 values, shape (count,), to weights and their carry; `base`, of their type, moves as far as they do.

    Of a weight that is not finite, and so will become its base again, the base and the carry get them.
    """
    if values.dtype == torch.bfloat16 and (kernels := _kernels(delta, values, carry, base)) is not None:
        addresses = (delta.data_ptr(), values.data_ptr(), carry.data_ptr(), base.data_ptr())
        kernels.peerd_carry_add(*addresses, len(delta))
        return
    before = values.float()  # of lower precision, so a copy
    exact = joined(values, carry).add_(delta)
    broken = ~exact.isfinite()
    after = torch.empty_like(values)
    part(torch.where(broken, joined(base, carry).add_(delta), exact), after, carry)
    moved = base.float() + (after.float() - before)
    if base.dtype == torch.bfloat16:
        moved = (_rounded(moved) << _LOWER_BITS).view(torch.float32)
    base.copy_(torch.where(broken, after.float(), moved))
    values.copy_(torch.where(broken, values, after))


def _rounded(exact: torch.Tensor) -> torch.Tensor:
    """The upper halves of float32 values, as whole numbers; a tie goes away from zero."""
    return (exact.view(torch.int32) + _ROUNDING) >> _LOWER_BITS


def _kernels(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """Those that can take these."""
    able = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
    return library.LIBRARY if able else None
